"""What is given out has run on the user's own first batch, whole and in its number type."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import ModelError, PlanMismatchError
from apoptosis.planning import Budget, Sparsity
from apoptosis.structure import Plan, cut, trace


class Picky(nn.Module):
    """Takes a short cut for one sample; for several its own check knows but one width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        if len(x) > 2 and h.shape[1] != 16:
            raise RuntimeError("the kernel for large batches takes 16 columns")
        return self.down(h)


BATCHES = [(torch.randn(8, 5), torch.randint(0, 3, (8,))) for _ in range(2)]


@pytest.mark.parametrize("criterion", ["magnitude", "random"])
@pytest.mark.parametrize("steps", [1, 3])
def test_prune_refuses_what_fails_on_the_first_batch(criterion: str, steps: int) -> None:
    model = Picky()
    with pytest.raises(
        ModelError,
        match=r"does not run on the first of your batches.*RuntimeError: the kernel for large batches "
        r"takes 16 columns\. Nothing was delivered",
    ):
        ap.prune(model, BATCHES, Budget(params=0.6), criterion=criterion, steps=steps, repair=[])
    assert model(BATCHES[0][0]).shape == (8, 3)


def test_small_batches_are_its_own_affair() -> None:
    small = [(x[:2], y[:2]) for x, y in BATCHES]
    outcome = ap.prune(Picky(), small, Budget(params=0.6), criterion="magnitude", repair=[])
    assert outcome.model(small[0][0]).shape == (2, 3)


def test_a_batch_on_which_the_given_network_fails_says_nothing() -> None:
    """The criterion reads no data, and nobody can tell what such a batch is for."""

    class Two(Picky):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise RuntimeError("never more than two")
            return super().forward(x)

    outcome = ap.prune(Two(), BATCHES, Budget(params=0.6), criterion="magnitude", repair=[])
    assert outcome.plan.kept


def test_an_empty_first_batch_is_passed_over() -> None:
    x, y = BATCHES[0]
    with pytest.raises(ModelError, match="first of your batches"):
        ap.prune(
            Picky(), [(x[:0], y[:0]), *BATCHES], Budget(params=0.6), criterion="magnitude", steps=1
        )


def test_cut_refuses_inputs_on_which_the_cut_network_fails() -> None:
    model = Picky().eval()
    plan = trace(model, BATCHES[0][0][:2]).plan({"up": range(8)})
    assert cut(model, plan)(BATCHES[0][0][:2]).shape == (2, 3)
    for own in (plan, Plan.from_json(plan.to_json())):
        with pytest.raises(PlanMismatchError, match=r"`example_inputs`.*takes 16 columns"):
            cut(model, own, example_inputs=BATCHES[0][0])
        assert cut(model, own, example_inputs=BATCHES[0][0][:2])(BATCHES[0][0][:2]).shape == (2, 3)


def test_batches_that_can_be_read_are_read_once_more_and_no_further() -> None:
    """One batch is enough; a loader's workers are not kept busy for the others."""
    read: list[int] = []

    class Loader:
        def __iter__(self):  # noqa: ANN204
            for number, batch in enumerate(BATCHES):
                read.append(number)
                yield batch

    ap.prune(
        nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)),
        Loader(),
        Budget(params=0.6),
        criterion="magnitude",
        repair=[],
        steps=1,
    )
    assert 1 not in read


def test_sparsify_refuses_as_well() -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(5, 16)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2 and bool((self.up.weight == 0).any()):
                raise RuntimeError("zeros are divided by")
            return self.up(x)

    with pytest.raises(ModelError, match="zeros are divided by"):
        ap.sparsify(Full(), BATCHES, Sparsity(keep=0.5))
