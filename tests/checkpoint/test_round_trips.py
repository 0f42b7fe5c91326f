"""What is saved comes back: number types, memory order, ties, flags, buffers, extra state, records."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.checkpoint import load, load_outcome, read_run, save
from apoptosis.errors import CheckpointError
from apoptosis.records import Outcome
from apoptosis.structure import CutProgram, Plan, Structure, cut, trace
from oracles.checkpoints import assert_same_network
from oracles.small_networks import Convolutions, Counting, InCode, Tied, pruned, step
from oracles.untouched import Snapshot

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 8).view(2, 4)
WORDS = torch.tensor([[0, 1, 2], [6, 5, 4]])


class Recurrent(nn.Module):
    """Weights that torch keeps in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 6, num_layers=2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0])


@pytest.mark.parametrize(
    ("make", "inputs", "delivery"),
    [
        (Convolutions, IMAGES, "module"),
        (InCode, ROWS, "program"),
        (Tied, WORDS, "module"),
        (Recurrent, ROWS.view(1, 2, 4), "module"),
        (
            lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
            torch.ones(2, 3, 8),
            "module",
        ),
    ],
    ids=["module", "program", "tied", "recurrent", "attention"],
)
def test_a_network_comes_back_as_it_was(tmp_path, make, inputs, delivery):
    outcome = pruned(make, inputs)
    before = Snapshot(outcome.model)
    path = ap.save(tmp_path / "run", outcome)
    before.assert_unchanged()
    state = torch.get_rng_state()
    found = ap.load(path, dense=make)
    assert torch.equal(torch.get_rng_state(), state)
    assert outcome.plan.delivery == delivery == read_run(path).delivery
    assert_same_network(found, outcome.model, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [Convolutions, InCode], ids=["module", "program"])
def test_number_types_are_those_of_the_saved_network(tmp_path, make, dtype):
    inputs = (IMAGES if make is Convolutions else ROWS).to(dtype)
    outcome = pruned(make, inputs, dtype=dtype)
    found = load(save(tmp_path / "run", outcome), dense=make)  # which makes float32
    assert next(found.parameters()).dtype == dtype
    assert_same_network(found, outcome.model, inputs)


@pytest.mark.parametrize("make", [Convolutions, InCode], ids=["module", "program"])
def test_a_network_may_change_its_number_type_after_the_cut(tmp_path, make):
    inputs = IMAGES if make is Convolutions else ROWS
    outcome = pruned(make, inputs)
    outcome = replace(outcome, model=outcome.model.bfloat16())
    found = load(save(tmp_path / "run", outcome), dense=make)
    assert_same_network(found, outcome.model, inputs.bfloat16())


@pytest.mark.parametrize("dense_too", [False, True])
def test_memory_order_comes_back(tmp_path, dense_too):
    def make():
        return Convolutions().to(memory_format=torch.channels_last)

    outcome = pruned(make, IMAGES)
    assert not outcome.model.a.weight.is_contiguous()
    found = load(save(tmp_path / "run", outcome), dense=make if dense_too else Convolutions)
    assert_same_network(found, outcome.model, IMAGES, IMAGES.to(memory_format=torch.channels_last))


def test_transposed_expanded_and_empty_tensors(tmp_path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(5, 3).t())
            self.register_buffer("wide", torch.ones(3, 1).expand(3, 4))
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("flag", torch.tensor(True))
            self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
            self.head = nn.Linear(5, 8)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            return self.last(self.head(x @ self.turned))

    outcome = pruned(Odd, torch.ones(2, 3))
    found = load(save(tmp_path / "run", outcome), dense=Odd)
    outcome.model.wide = (
        outcome.model.wide.contiguous()
    )  # what shares memory with itself is written out
    assert_same_network(found, outcome.model, torch.ones(2, 3))


def test_ties_come_back_even_where_the_dense_network_has_none(tmp_path):
    def untied():
        made = Tied()
        made.again = copy.deepcopy(made.inner)
        return made

    outcome = pruned(Tied, WORDS, plan=Structure.identity)
    path = save(tmp_path / "run", outcome)
    assert read_run(path).tied == (
        ("table.weight", "out.weight"),
        ("inner.weight", "again.weight"),
        ("inner.bias", "again.bias"),
    )
    found = load(path, dense=untied)
    assert found.again.weight is found.inner.weight
    assert_same_network(found, outcome.model, WORDS)


def test_two_tensors_are_not_put_in_the_place_of_one(tmp_path):
    def untied():
        made = Tied()
        made.again = nn.Linear(8, 8)
        return made

    path = save(tmp_path / "run", pruned(untied, WORDS, plan=Structure.identity))
    with pytest.raises(CheckpointError, match="was one of its own when it was saved"):
        load(path, dense=Tied)


def test_frozen_parameters_stay_frozen(tmp_path):
    outcome = pruned(Convolutions, IMAGES)
    outcome.model.a.weight.requires_grad_(False)
    found = load(save(tmp_path / "run", outcome), dense=Convolutions)
    assert [n for n, p in found.named_parameters() if not p.requires_grad] == ["a.weight"]


def test_an_empty_plan(tmp_path):
    outcome = pruned(Convolutions, IMAGES, plan=Structure.identity)
    found = load(save(tmp_path / "run", outcome), dense=Convolutions)
    assert_same_network(found, outcome.model, IMAGES)


@pytest.mark.parametrize("make", [Convolutions, InCode], ids=["module", "program"])
def test_several_cuts_as_one_plan(tmp_path, make):
    inputs = IMAGES if make is Convolutions else ROWS
    torch.manual_seed(0)
    model = make().eval()
    structure = trace(model, inputs)
    whole, small = None, model
    for _ in range(3):
        kept = {g.name: range(max(g.size - 1, g.smallest)) for g in structure.groups}
        plan = structure.plan(kept)
        small, structure = cut(small, plan), structure.after(plan)
        whole = plan if whole is None else whole.then(plan)
    path = save(tmp_path / "run", Outcome(small, whole, example_inputs=inputs))
    assert_same_network(load(path, dense=make), small, inputs)


def test_extra_state_comes_back(tmp_path):
    extra = {"seen": [1, 2.5, None, True], "name": "ü"}
    outcome = pruned(lambda: Counting(extra), ROWS)
    found = load(save(tmp_path / "run", outcome), dense=Counting)
    assert found.extra == extra
    assert_same_network(found, outcome.model, ROWS)


@pytest.mark.parametrize(
    "extra",
    [(1, 2), {1: 2}, {1}, float("nan"), torch.ones(2), object()],
    ids=lambda extra: type(extra).__name__,
)
def test_extra_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path, extra):
    outcome = pruned(lambda: Counting("fine"), ROWS)
    outcome.model.extra = extra
    with pytest.raises(CheckpointError, match="_extra_state.*Nothing was written"):
        save(tmp_path / "run", outcome)
    assert list(tmp_path.iterdir()) == []


def test_extra_state_needs_a_module_that_takes_it(tmp_path):
    path = save(tmp_path / "run", pruned(lambda: Counting("x"), ROWS))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    with pytest.raises(CheckpointError, match="extra state for module '', and Plain takes none"):
        load(path, dense=Plain)


def test_the_record_comes_back(tmp_path):
    odd = replace(step(), loss=math.inf, seconds=math.nan)
    outcome = replace(
        pruned(Convolutions, IMAGES), history=(step(), odd, replace(step(), loss=None))
    )
    run = read_run(save(tmp_path / "run", outcome))
    assert run.history[0] == outcome.history[0]
    assert run.history[1].loss == math.inf
    assert math.isnan(run.history[1].seconds)
    assert run.history[2].loss is None
    assert run.spent == outcome.spent
    assert run.settings == {"seed": 3}
    assert run.shapes["a.weight"] == (4, 3, 3, 3)
    assert run.dtypes["norm.num_batches_tracked"] == "int64"
    assert run.versions["apoptosis"] == ap.__version__
    assert run.format == 1


def test_settings_that_are_no_json_are_refused_before_anything_is_written(tmp_path):
    outcome = replace(pruned(Convolutions, IMAGES), settings={"fine": 1, "criterion": object()})
    with pytest.raises(CheckpointError, match=r"(?s)Setting 'criterion' is .*Nothing was written"):
        save(tmp_path / "run", outcome)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_the_plan_does_not_lead_to_is_refused(tmp_path):
    outcome = replace(pruned(Convolutions, IMAGES), model=Convolutions())
    with pytest.raises(
        CheckpointError, match=r"The plan makes 'a.weight' \(4, 3, 3, 3\), but .* \(8, 3, 3, 3\)"
    ):
        save(tmp_path / "run", outcome)


def test_a_wrapper_around_the_network_is_refused(tmp_path):
    outcome = pruned(Convolutions, IMAGES, plan=Structure.identity)
    with pytest.raises(
        CheckpointError, match=r"Sequential has 11 tensors.*not a wrapper around it"
    ):
        save(tmp_path / "run", replace(outcome, model=nn.Sequential(outcome.model)))


def test_a_plan_for_a_program_with_a_module(tmp_path):
    outcome = pruned(InCode, ROWS)
    stand_in = nn.Module()
    for name in ("a", "b", "head"):
        stand_in.add_module(name, outcome.model.get_submodule(name))
    with pytest.raises(CheckpointError, match="delivered as a program, and Module is none"):
        save(tmp_path / "run", replace(outcome, model=stand_in))


def test_a_network_that_was_loaded_can_be_pruned_and_saved_again(tmp_path):
    first = save(tmp_path / "first", pruned(Convolutions, IMAGES))

    def small():
        return load(first, dense=Convolutions)

    outcome = pruned(small, IMAGES, plan=lambda s: s.plan({"a": [0], "b": [1, 2]}))
    second = save(tmp_path / "second", outcome)
    assert_same_network(load(second, dense=small), outcome.model, IMAGES)


def test_a_program_that_was_loaded_is_cut_further_by_the_structure_of_the_dense_network(tmp_path):
    path = save(tmp_path / "first", pruned(InCode, ROWS))
    found, first = load(path, dense=InCode), Plan.from_json((path / "plan.json").read_text())
    later = trace(InCode(), ROWS).after(first).plan({"b": [1]})
    outcome = Outcome(cut(found, later), first.then(later), example_inputs=ROWS)
    assert_same_network(load(save(path, outcome), dense=InCode), outcome.model, ROWS)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=["complex128", "sparse", "meta"],
)
def test_tensors_that_cannot_be_written_are_refused(tmp_path, tensor):
    outcome = pruned(Convolutions, IMAGES)
    outcome.model.register_buffer("odd", tensor)
    with pytest.raises(CheckpointError, match="'odd' .* cannot be saved"):
        save(tmp_path / "run", outcome)


def test_state_that_is_no_tensor_of_the_network_is_refused(tmp_path):
    outcome = pruned(Convolutions, IMAGES)
    outcome.model._register_state_dict_hook(
        lambda _module, state, *_: state.update(strange=torch.ones(1))
    )
    with pytest.raises(CheckpointError, match="an entry 'strange'"):
        save(tmp_path / "run", outcome)


class Nested(nn.Module):
    """Takes arguments of every form; a size in its code makes it a program."""

    def __init__(self) -> None:
        super().__init__()
        self.body = InCode()

    def forward(self, pair, more, factor=1.0, flag=None):
        x = pair[0] + more["x"][0] + pair[1]
        return {"y": self.body(x) * factor, "flag": flag}


def nested():
    return {
        "pair": (ROWS, ROWS.double().float()),
        "more": {"x": [ROWS], "n": 3},
        "factor": 2.0,
        "flag": "on",
    }


def test_inputs_of_any_arrangement_are_made_again(tmp_path):
    outcome = pruned(Nested, nested())
    assert isinstance(outcome.model, CutProgram)
    found = load(save(tmp_path / "run", outcome), dense=Nested)
    assert_same_network(found, outcome.model, nested())


def test_an_input_that_cannot_be_described_must_be_passed_again(tmp_path):
    outcome = replace(pruned(InCode, ROWS), example_inputs=(ROWS, object()))
    path = save(tmp_path / "run", outcome)
    with pytest.raises(CheckpointError, match=r"hold a builtins\.object.*Pass `example_inputs`"):
        load(path, dense=InCode)
    assert_same_network(load(path, dense=InCode, example_inputs=ROWS), outcome.model, ROWS)


def test_a_program_without_example_inputs_needs_them(tmp_path):
    outcome = replace(pruned(InCode, ROWS), example_inputs=None)
    path = save(tmp_path / "run", outcome)
    with pytest.raises(CheckpointError, match="saved without example inputs"):
        load(path, dense=InCode)
    assert_same_network(load(path, dense=InCode, example_inputs=ROWS), outcome.model, ROWS)


def test_a_program_that_does_something_else_when_traced_again_is_refused(tmp_path):
    class Choosy(InCode):
        gate = 1.0

        def forward(self, x):
            return super().forward(x) if self.gate > 0 else super().forward(x).tanh()

    outcome = pruned(Choosy, ROWS)
    path = save(tmp_path / "run", outcome)
    assert_same_network(load(path, dense=Choosy), outcome.model, ROWS)
    other = Choosy()
    other.gate = -1.0
    with pytest.raises(CheckpointError, match="traced again on zeros it does other operations"):
        load(path, dense=other)


@pytest.mark.parametrize(
    ("make", "inputs"), [(Tied, WORDS), (InCode, ROWS)], ids=["module", "program"]
)
def test_the_dense_network_may_be_on_the_meta_device(tmp_path, make, inputs):
    def on_meta():
        with torch.device("meta"):
            return make()

    outcome = pruned(make, inputs)
    path = save(tmp_path / "run", outcome)
    assert_same_network(load(path, dense=on_meta), outcome.model, inputs)
    with torch.device("meta"):
        found = load(path, dense=make)
    assert_same_network(found, outcome.model, inputs)


def test_buffers_that_are_not_saved_cannot_come_from_the_meta_device(tmp_path):
    path = save(tmp_path / "run", pruned(Convolutions, IMAGES))
    with torch.device("meta"):
        dense = Convolutions()
    with pytest.raises(CheckpointError, match="'scale' is not saved with the network.*on the CPU"):
        load(path, dense=dense)


def test_the_numbers_are_a_plain_safetensors_file(tmp_path):
    from safetensors.torch import load_file

    outcome = pruned(Tied, WORDS)
    found = load_file(save(tmp_path / "run", outcome) / "model.safetensors")
    for name, tensor in found.items():
        assert torch.equal(tensor, outcome.model.state_dict()[name])
    assert set(found) == {"table.weight", "inner.weight", "inner.bias"}


def test_a_loaded_network_can_be_traced_and_trained(tmp_path):
    outcome = pruned(Convolutions, IMAGES)
    found = load(save(tmp_path / "run", outcome), dense=Convolutions)
    assert trace(found, IMAGES).fingerprint == outcome.plan.fingerprint_after
    found.train()(IMAGES).sum().backward()
    assert found.a.weight.grad is not None


def test_the_oracle_sees_a_difference(tmp_path):
    outcome = pruned(Convolutions, IMAGES)
    found = load(save(tmp_path / "run", outcome), dense=Convolutions)
    with torch.no_grad():
        found.norm.running_mean[1] += 1e-7
    with pytest.raises(AssertionError, match="norm.running_mean has other numbers"):
        assert_same_network(found, outcome.model, IMAGES)


@pytest.mark.parametrize("make", [Convolutions, InCode], ids=["module", "program"])
def test_a_loaded_outcome_can_be_trained_on_and_saved_again(tmp_path, make):
    inputs = IMAGES if make is Convolutions else ROWS
    outcome = replace(pruned(make, inputs), history=(step(),), settings={"criterion": "none"})
    again = load_outcome(save(tmp_path / "first", outcome), dense=make)
    assert_same_network(again.model, outcome.model, inputs)
    assert (again.history, again.spent, again.settings) == (
        outcome.history,
        outcome.spent,
        outcome.settings,
    )
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.mul_(1.5)
    found = load(save(tmp_path / "second", again), dense=make)
    assert_same_network(found, again.model, inputs)


def test_a_bare_network_is_refused_with_what_to_give_instead(tmp_path):
    with pytest.raises(CheckpointError, match="the plan that leads to the network"):
        save(tmp_path / "run", Convolutions())
    assert not (tmp_path / "run").exists()
