from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from apoptosis.curvature import curvature_product
from apoptosis.errors import DataError
from apoptosis.task import Task, find_logits, split_batch

IGNORED = -100


def mean_over_pieces(task: Task, logits_of, batch, size: int) -> torch.Tensor:
    """Mean of the pieces' losses weighted by their counts; must not depend on the cut."""
    pieces = list(task.split(batch, size))
    losses = [task.loss(logits_of(piece), piece) * task.count(piece) for piece in pieces]
    return torch.stack(losses).sum() / sum(task.count(piece) for piece in pieces)


class TestClassification:
    task = Task.classification()

    @pytest.mark.parametrize(
        ("inputs", "args", "kwargs"),
        [
            (1, (1,), {}),
            ((1, 2), (1, 2), {}),
            ([1, 2], (1, 2), {}),
            ({"x": 1}, (), {"x": 1}),
        ],
    )
    def test_inputs_are_a_tensor_arguments_or_keywords(self, inputs, args, kwargs):
        assert self.task.inputs((inputs, torch.zeros(1))) == (args, kwargs)

    def test_a_batch_without_labels_can_still_be_run(self):
        x = torch.zeros(3, 2)
        assert self.task.inputs(x) == ((x,), {})

    def test_loss_is_the_mean_cross_entropy(self):
        logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
        expected = -logits.log_softmax(1)[range(5), labels].mean()
        assert_close(self.task.loss(logits, (None, labels)), expected)

    def test_another_loss_takes_its_place(self):
        task = Task.classification(F.mse_loss)
        assert_close(task.loss(torch.ones(4, 2), (None, torch.zeros(4, 2))), torch.tensor(1.0))

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
    def test_loss_does_not_depend_on_the_cut(self, size):
        batch = (torch.randn(7, 3), torch.arange(7) % 3)
        whole = self.task.loss(batch[0], batch)
        assert_close(mean_over_pieces(self.task, lambda b: b[0], batch, size), whole)

    def test_metrics_are_sums(self):
        logits = torch.eye(3)
        assert self.task.metrics(logits, (None, torch.tensor([0, 1, 0]))) == {"correct": 2.0}

    def test_labels_are_drawn_from_the_models_own_distribution(self):
        logits = torch.tensor([[0.7, 0.3]]).log().expand(20_000, 2)
        x = torch.zeros(20_000, 1)
        generator = torch.Generator().manual_seed(0)
        inputs, labels = self.task.sample(logits, (x, None), generator)
        assert inputs is x
        assert labels.shape == (20_000,)
        assert abs(labels.double().mean().item() - 0.3) < 0.015  # about five deviations

    def test_draws_repeat_with_the_generator(self):
        logits = torch.zeros(50, 10)
        draws = [
            self.task.sample(logits, (None, None), torch.Generator().manual_seed(seed))[1]
            for seed in (1, 1, 2)
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    @pytest.mark.parametrize("batch", [torch.zeros(3), (torch.zeros(3),), {"x": torch.zeros(3)}])
    def test_a_loss_without_labels_says_so(self, batch):
        with pytest.raises(DataError, match="needs labels"):
            self.task.loss(torch.zeros(3, 2), batch)


class TestLanguageModel:
    task = Task.language_model()

    def test_loss_is_the_mean_over_next_tokens(self):
        ids, logits = torch.tensor([[1, 2, 0]]), torch.randn(1, 3, 4)
        log_p = logits.log_softmax(-1)
        assert_close(self.task.loss(logits, ids), -(log_p[0, 0, 2] + log_p[0, 1, 0]) / 2)
        assert self.task.count(ids) == 2

    def test_masked_and_ignored_tokens_do_not_count(self):
        ids = torch.tensor([[1, 2, 3, 0]])
        assert self.task.count({"input_ids": ids, "attention_mask": ids.sign()}) == 2
        labels = torch.tensor([[1, 2, IGNORED, IGNORED]])
        assert self.task.count({"input_ids": ids, "labels": labels}) == 1

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_loss_does_not_depend_on_the_cut_with_ragged_rows(self, size):
        ids = torch.randint(1, 5, (4, 6), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(6) < torch.tensor([[6], [3], [4], [2]])).long()
        batch = {"input_ids": ids, "attention_mask": mask}
        table = torch.randn(5, 5)
        whole = self.task.loss(table[ids], batch)
        assert_close(
            mean_over_pieces(self.task, lambda b: table[b["input_ids"]], batch, size), whole
        )

    def test_labels_never_reach_the_model(self):
        ids = torch.tensor([[1, 2]])
        assert self.task.inputs({"input_ids": ids, "labels": ids}) == ((), {"input_ids": ids})
        assert self.task.inputs(ids) == ((ids,), {})
        assert self.task.inputs((ids,)) == ((ids,), {})

    def test_drawn_labels_stand_where_the_loss_reads_them(self):
        ids = torch.tensor([[3, 1, 2, 0]])
        certain = F.one_hot(torch.tensor([[2, 0, 1, 3]]), 4) * 1000.0
        batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}
        drawn = self.task.sample(certain, batch, None)
        assert drawn["labels"][0, 1:].tolist() == [2, 0, IGNORED]
        assert self.task.loss(certain, drawn).item() == 0
        assert self.task.metrics(certain, drawn) == {"correct": 2.0}


class TestHuggingFace:
    task = Task.hugging_face()

    def test_labels_go_to_the_loss_and_the_rest_to_the_model(self):
        labels = torch.tensor([1, 0])
        batch = {"pixel_values": torch.zeros(2, 3), "labels": labels}
        args, kwargs = self.task.inputs(batch)
        assert args == ()
        assert kwargs.keys() == {"pixel_values"}
        assert self.task.count(batch) == 2
        assert_close(self.task.loss(torch.zeros(2, 2), batch), torch.tensor(2.0).log())

    def test_drawn_labels_replace_the_given_ones(self):
        batch = {"x": torch.zeros(2, 3), "labels": torch.tensor([1, 1])}
        drawn = self.task.sample(torch.tensor([[1000.0, 0], [1000.0, 0]]), batch, None)
        assert drawn["labels"].tolist() == [0, 0]
        assert drawn["x"] is batch["x"]
        assert batch["labels"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: (t, None),
        lambda t: [t],
        lambda t: {"logits": t},
        lambda t: SimpleNamespace(logits=t),
    ],
    ids=["tensor", "tuple", "list", "mapping", "attribute"],
)
def test_logits_are_found(wrap):
    tensor = torch.zeros(2)
    assert find_logits(wrap(tensor)) is tensor


@pytest.mark.parametrize("raw", [None, {}, (), {"hidden": torch.zeros(1)}, SimpleNamespace()])
def test_an_output_without_logits_says_what_to_do(raw):
    with pytest.raises(DataError, match="Give the task an `outputs` function"):
        find_logits(raw)


def test_nested_batches_are_cut_alike_and_keep_their_types():
    Pair = namedtuple("Pair", ["a", "b"])
    batch = {"x": (torch.arange(5), [torch.arange(10).view(5, 2)]), "p": Pair(torch.arange(5), "s")}
    pieces = list(split_batch(batch, 3))
    assert [len(piece["x"][0]) for piece in pieces] == [3, 2]
    assert_close(torch.cat([piece["x"][1][0] for piece in pieces]), batch["x"][1][0])
    assert isinstance(pieces[0]["p"], Pair)
    assert pieces[1]["p"].a.tolist() == [3, 4]
    assert pieces[1]["p"].b == "s"


def test_what_has_no_batch_dimension_is_left_whole():
    scale, table = torch.tensor(2.0), torch.zeros(9, 2)
    pieces = list(split_batch({"x": torch.zeros(4, 1), "scale": scale, "table": table}, 2))
    assert all(piece["scale"] is scale and piece["table"] is table for piece in pieces)


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(DataError, match="no tensor with a batch dimension"):
        list(split_batch({"a": "text"}, 2))


def test_ignored_labels_do_not_count_however_the_data_are_cut() -> None:
    model = torch.nn.Linear(3, 4, dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = (x, torch.tensor([0, -100, 2, -100, -100, 3]))
    task = Task.classification()
    assert task.count(batch) == 3
    whole = curvature_product(model, [batch], task, kind="hessian").product
    for micro_batch in (1, 2, 3):
        cut = curvature_product(model, [batch], task, kind="hessian", micro_batch=micro_batch)
        for name, product in whole.items():
            torch.testing.assert_close(cut.product[name], product)
    drawn = task.sample(model(x), batch, torch.Generator().manual_seed(0))
    assert torch.equal(drawn[1] == -100, batch[1] == -100)


def test_labels_per_position_all_count() -> None:
    batch = (torch.zeros(2, 1, 3, 3), torch.zeros(2, 3, 3, dtype=torch.long))
    assert Task.classification().count(batch) == 18


def test_labels_are_drawn_for_batches_that_are_dicts():
    batch = {"pixels": torch.zeros(3, 2), "labels": torch.tensor([0, 1, -100])}
    certain = torch.tensor([[1000.0, 0], [1000.0, 0], [1000.0, 0]])
    drawn = Task.classification().sample(certain, batch, None)
    assert drawn["pixels"] is batch["pixels"]
    assert drawn["labels"].tolist() == [0, 0, -100]
