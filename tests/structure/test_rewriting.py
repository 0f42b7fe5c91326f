"""The rewritten program: called as the model, at any batch and sequence length, in eval and in train mode."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import TraceError
from apoptosis.structure import CutProgram
from oracles.building import Net, built
from oracles.shrinking import SMALL_CASES, SmallCase, hard_coded, small_case

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}
every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


def as_program(model: nn.Module, inputs: Any, *, smaller: int = 1) -> tuple[CutProgram, nn.Module]:
    """The program of a plan over every exact group, whatever the plan's own delivery; and the twin."""
    structure = ap.trace(model, inputs)
    kept = {
        g.name: range(smaller, g.size) for g in structure.groups if g.exact and g.size > smaller
    }
    plan = structure.plan(kept)
    bare = copy.copy(plan)
    object.__setattr__(bare, "scalings", ())
    return structure.program(model, bare), ap.zero(model, plan)


@every_case
@pytest.mark.parametrize("num", [1, 2, 7])
def test_any_batch_size(case: SmallCase, num: int) -> None:
    program, twin = as_program(case.model(), case.inputs())
    x = case.inputs(num, seed=1)
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)


@pytest.mark.parametrize(
    "id", ["fused", "separate", "gqa", "glu", "experts", "recurrent", "encoder"]
)
@pytest.mark.parametrize("length", [1, 3, 9])
def test_any_sequence_length(id: str, length: int) -> None:
    case = small_case(id)
    program, twin = as_program(case.model(), case.inputs())
    x = torch.randn(3, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)


@pytest.mark.parametrize("id", ["fused", "residual", "encoder", "tied"])
def test_a_trace_of_one_sample_makes_a_program_for_many(id: str) -> None:
    case = small_case(id)
    program, twin = as_program(case.model(), case.inputs(1))
    for num in (1, 4):
        x = case.inputs(num, seed=1)
        torch.testing.assert_close(program(x), twin(x), **TOLERANCE)


def test_images_of_another_size() -> None:
    case = small_case("residual")
    program, twin = as_program(case.model(), case.inputs())
    x = torch.randn(3, 2, 8, 6, dtype=torch.float64)
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)


@every_case
def test_names_are_the_models(case: SmallCase) -> None:
    model = case.model()
    program, _ = as_program(model, case.inputs())
    assert list(program.state_dict()) == list(model.state_dict())
    assert [n for n, _ in program.named_parameters()] == [n for n, _ in model.named_parameters()]
    program.load_state_dict(program.state_dict())


def test_arguments_are_bound_as_the_model_binds_them() -> None:
    case = small_case("hard coded")
    model, x = hard_coded(), case.inputs()
    shift = torch.randn(2, 3, dtype=torch.float64)
    structure = ap.trace(model, {"shift": shift, "x": x})
    plan = structure.plan({"a": [0, 2]})
    program, twin = ap.cut(model, plan), ap.zero(model, plan)
    expected = twin(x, shift=shift)
    torch.testing.assert_close(program(x, shift=shift), expected, **TOLERANCE)
    torch.testing.assert_close(program(shift=shift, x=x), expected, **TOLERANCE)
    with pytest.raises(TraceError, match="made from a call with 2 tensors and got 1"):
        program(x)
    with pytest.raises(TypeError, match="missing a required argument"):
        program()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        program(x, y=shift)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("kind", ["dict", "named tuple", "nested"])
def test_results_are_arranged_as_the_models(kind: str) -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = net.a(x).view(-1, 3, 2).sum(1).relu()
        z = net.b(y)
        return {
            "dict": {"z": z, "x": x},
            "named tuple": Pair(z, x),
            "nested": [z, (x, {"again": z, "text": "t", "none": None})],
        }[kind]

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(2, 3)))
    x = torch.randn(2, 4, dtype=torch.float64)
    program, twin = as_program(model, x)
    found, expected = program(x), twin(x)
    assert type(found) is type(expected)
    torch.testing.assert_close(
        {"result": found if kind != "nested" else found[1][1]["again"]},
        {"result": expected if kind != "nested" else expected[1][1]["again"]},
        **TOLERANCE,
    )
    if kind == "nested":
        assert found[1][1]["text"] == "t"
        assert found[1][1]["none"] is None


def test_dropout_is_on_in_train_mode_alone() -> None:
    model, x = hard_coded(), small_case("hard coded").inputs(50)
    program, _ = as_program(model, x)
    assert torch.equal(program(x), program(x))
    program.train()
    torch.manual_seed(0)
    first = program(x)
    assert not torch.equal(first, program(x))
    torch.manual_seed(0)
    assert torch.equal(first, program(x))
    program.eval()
    assert torch.equal(program(x), program(x))


def test_statistics_of_the_batch_are_kept_up_in_train_mode_as_the_cut_module_does() -> None:
    case = small_case("residual")
    model, x = case.model(), case.inputs(6)
    structure = ap.trace(model, x)
    plan = structure.plan({"stem.0": [0, 2, 5]})
    module, program = ap.cut(model, plan).train(), structure.program(model, plan).train()
    for seed in range(2):
        inputs = case.inputs(6, seed=seed)
        torch.testing.assert_close(program(inputs), module(inputs), **TOLERANCE)
    for name, buffer in module.named_buffers():
        if "num_batches" not in name:
            torch.testing.assert_close(program.get_buffer(name), buffer, **TOLERANCE, msg=name)
    assert not torch.equal(
        program.stem.get_buffer("1.running_mean"), model.stem[1].running_mean[[0, 2, 5]]
    )


def test_parts_that_are_frozen_while_others_train_stay_so() -> None:
    case = small_case("residual")
    model, x = case.model().train(), case.inputs(6)
    model.blocks[0].bn1.eval()
    structure = ap.trace(model, x)
    plan = structure.plan({"blocks.0.conv1": [0, 2]})
    module, program = ap.cut(model, plan), structure.program(model, plan)
    before = module.blocks[0].bn1.running_mean.clone()
    torch.testing.assert_close(program(x), module(x), **TOLERANCE)
    assert torch.equal(program.get_buffer("blocks.0.bn1.running_mean"), before)
    torch.testing.assert_close(
        program.get_buffer("stem.1.running_mean"), module.stem[1].running_mean, **TOLERANCE
    )
    program.train()
    program(x)
    assert not torch.equal(program.get_buffer("blocks.0.bn1.running_mean"), before)


def test_statistics_that_are_never_remembered_are_those_of_the_batch_in_eval_mode() -> None:
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3)))
    x = torch.randn(5, 4, dtype=torch.float64)
    program, twin = as_program(model, x)
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)


def test_dropout_that_is_on_in_eval_mode_stays_on() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(F.dropout(net.a(x), 0.5))

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = torch.randn(5, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    program = structure.program(model, structure.plan({"a": [0, 2, 4]}))
    assert not torch.equal(program(x), program(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_on_in_train_mode_alone(kind: Any) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.head(net.cell(x)[0])

    model = built(
        lambda: Net(
            forward, cell=kind(4, 6, 2, dropout=0.5, batch_first=True), head=nn.Linear(6, 3)
        )
    )
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    program, twin = as_program(model, x)
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)
    program.train()
    assert not torch.equal(program(x), program(x))


def test_gradients_are_those_of_the_cut_module() -> None:
    case = small_case("fused")
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    plan = structure.plan({"parts.0.qkv:head": [1]})
    module, program = ap.cut(model, plan), structure.program(model, plan)
    for net in (module, program):
        net(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            program.get_parameter(name).grad, parameter.grad, **TOLERANCE, msg=name
        )


def test_buffers_that_are_not_saved_stay_unsaved() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(net.a(x).view(-1, 3, 2).sum(1) * net.table)

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(2, 3)))
    model.register_buffer("table", torch.randn(2, dtype=torch.float64), persistent=False)
    x = torch.randn(2, 4, dtype=torch.float64)
    program, twin = as_program(model, x)
    assert "table" not in program.state_dict()
    assert list(program.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)


def test_constants_of_the_run_are_written_out() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x).view(-1, 3, 2).sum(1)
        return net.b(F.relu(y) + torch.tensor(0.5, dtype=x.dtype)) * torch.tensor([1.0, 2.0, 3.0])

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(2, 3)))
    x = torch.randn(2, 4, dtype=torch.float64)
    program, twin = as_program(model, x)
    torch.testing.assert_close(program(x), twin(x), **TOLERANCE)
    assert not any("constant" in name for name in program.state_dict())


def test_a_program_moves_and_changes_its_precision() -> None:
    case = small_case("hard coded")
    program, twin = as_program(case.model(), case.inputs())
    x = case.inputs(4, seed=1)
    torch.testing.assert_close(program.float()(x.float()), twin(x).float(), rtol=1e-4, atol=1e-5)
    assert {t.device.type for t in program.to("meta").state_dict().values()} == {"meta"}


def test_a_program_of_a_cut_model_runs_after_the_model_is_gone() -> None:
    case = small_case("hard coded")
    model, x = case.model(), case.inputs()
    plan = ap.trace(model, x).plan({"a": [0, 2]})
    program, expected = ap.cut(model, plan), ap.zero(model, plan)(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(program(x), expected, **TOLERANCE)
