"""What is written down of a run: every operation once, whole, with its line, its module and its integers' origin."""

import builtins
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.structure.attributes import Attribute, Derived, traced_attributes
from apoptosis.structure.program import Program, Value, values_in
from apoptosis.structure.recording import Example, model_tensors, record
from oracles.building import Net
from oracles.shrinking import SMALL_CASES, SmallCase, small_case
from oracles.untouched import Snapshot


def recorded(forward: Any, *inputs: Tensor, **parts: Any) -> Program:
    return record(Net(forward, **parts), Example(inputs, {}))


def names(program: Program) -> list[str]:
    return [call.name.split(".")[0] for call in program.calls]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
def test_a_run_played_back_gives_the_models_output(case: SmallCase) -> None:
    """The oracle is a loop over the calls that knows nothing but their arguments."""
    model, x = case.model(), case.inputs()
    expected = model(x)
    program = record(copy.deepcopy(model), Example((x,), {}))
    held = {program.tensors[name]: tensor for name, tensor in model_tensors(model).items()}
    held[program.inputs[0]] = x

    def filled(argument: Any) -> Any:
        if isinstance(argument, Value):
            return argument.constant if argument.constant is not None else held[argument]
        if isinstance(argument, (tuple, list)):
            return [filled(item) for item in argument]
        return argument

    with torch.no_grad():
        for call in program.calls:
            result = call.op(**{key: filled(item) for key, item in call.arguments.items()})
            parts = [result] if isinstance(result, Tensor) else list(result or ())
            held |= dict(zip(call.outputs, parts, strict=True))
    torch.testing.assert_close(held[program.outputs], expected.detach(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
def test_values_are_made_before_they_are_read_and_have_the_shapes_they_say(case: SmallCase) -> None:
    program = record(case.model(), Example((case.inputs(),), {}))
    known = {*program.inputs, *program.tensors.values()}
    for call in program.calls:
        for value in values_in(call.arguments):
            assert value in known or value.source == "constant"
        assert not known & {*call.outputs}
        known |= {*call.outputs}
        assert [v.number for v in call.outputs] == [*range(len(call.outputs))]


def test_operations_stay_whole() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = F.layer_norm(net.a(x), (6,))
        y = torch.einsum("bld,bmd->blm", y, y)
        return F.scaled_dot_product_attention(y, y, y)

    program = recorded(forward, torch.randn(2, 4, 5), a=nn.Linear(5, 6))
    assert names(program) == ["linear", "layer_norm", "einsum", "scaled_dot_product_attention"]


def test_torchs_encoder_is_seen_in_its_parts() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    program = record(layer, Example((torch.randn(2, 4, 8),), {}))
    assert "_transformer_encoder_layer_fwd" not in names(program)
    assert names(program).count("linear") == 4
    assert torch.backends.mha.get_fastpath_enabled()


def test_calls_name_the_users_line_and_the_module() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        return y.relu()

    program = recorded(forward, torch.randn(2, 4), a=nn.Linear(4, 3))
    first = forward.__code__.co_firstlineno
    lines = [call.line for call in program.calls]
    assert lines[0].endswith(f"test_recording.py:{first + 1} in forward")
    assert lines[1].endswith(f"test_recording.py:{first + 2} in forward")
    assert [call.module for call in program.calls] == ["a", ""]
    assert [(m.path, m.index, m.leaf) for m in program.modules] == [("a", 0, True), ("", 0, False)]


def test_a_module_called_twice_is_numbered() -> None:
    program = recorded(lambda m, x: m.a(m.a(x)), torch.randn(2, 4), a=nn.Linear(4, 4))
    assert [(m.path, m.index) for m in program.modules if m.leaf] == [("a", 0), ("a", 1)]


def test_integers_of_attributes_are_followed_into_calls() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return x.view(-1, net.heads, net.width // net.heads)[:, : net.keep]

    model = Net(forward)
    model.heads, model.width, model.keep = 3, 12, 2
    with traced_attributes(model):
        program = record(model, Example((torch.randn(2, 12),), {}))
    heads, width = Attribute("", "heads"), Attribute("", "width")
    view, *slices = program.calls
    assert view.taints == {("size", 1): heads, ("size", 2): Derived("floordiv", width, heads)}
    assert [call.taints for call in slices if call.taints] == [{("end", 0): Attribute("", "keep")}]


def test_writing_in_place_makes_a_new_value_and_names_whose_memory_it_is() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x + 1
        row = y[0]
        row.mul_(2)
        return y

    program = recorded(forward, torch.randn(2, 4))
    add, select, mul = program.calls
    assert mul.arguments["self"] is select.outputs[0]
    assert mul.outputs[0] is not select.outputs[0]
    assert add.outputs[0] in mul.overwrites


def test_tied_tensors_are_one_value_with_two_names() -> None:
    case = small_case("tied")
    program = record(case.model(), Example((case.inputs(),), {}))
    value = program.tensors["words.weight"]
    assert program.tensors["head.weight"] is value
    assert value.names == ("words.weight", "head.weight")


def test_what_depends_on_no_input_is_fixed() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        table = (net.a.weight * 2).t()
        return x @ table + torch.rand(3)

    program = recorded(forward, torch.randn(2, 4), a=nn.Linear(4, 3))
    fixed = {call.name.split(".")[0]: call.outputs[0].fixed for call in program.calls}
    assert fixed == {"mul": True, "t": True, "matmul": False, "rand": False, "add": False}


@pytest.mark.parametrize(
    ("act", "how"),
    [
        (lambda y: y.detach().numpy(), "numpy()"),
        (lambda y: y.tolist(), "tolist()"),
        (lambda y: y.data_ptr(), "data_ptr()"),
    ],
    ids=["numpy", "tolist", "data_ptr"],
)
def test_numbers_that_leave_torch_are_noted(act: Any, how: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        act(y)
        return y

    program = recorded(forward, torch.randn(2, 4))
    ((_, found, line, _),) = program.escapes
    assert found == how
    assert "test_recording.py" in line


def test_modes_and_hooks_are_gone_after_an_error() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        raise RuntimeError("stop")

    model = Net(forward, a=nn.Linear(4, 3)).train()
    before, example = Snapshot(model), Example((torch.zeros(2, 4),), {})
    with pytest.raises(RuntimeError, match="stop"):
        record(model, example)
    before.assert_unchanged()


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (1, (1,), {}),
        ((1, 2), (1, 2), {}),
        ([1, 2], ([1, 2],), {}),
        ({"a": 1}, (), {"a": 1}),
        ((), (), {}),
        (None, (None,), {}),
    ],
    ids=str,
)
def test_a_tuple_is_arguments_and_a_dict_is_keywords(inputs: Any, args: Any, kwargs: Any) -> None:
    example = Example.of(inputs)
    assert (example.args, example.kwargs) == (args, kwargs)
    assert example.run(lambda *a, **k: (a, k)) == (args, kwargs)
    assert Example.of(example) is example


def test_tensors_that_are_plain_attributes_are_the_models() -> None:
    model = nn.Linear(4, 3)
    model.table = torch.zeros(5)
    assert set(model_tensors(model)) == {"weight", "bias", "table"}


def test_the_builtin_len_stays_what_it_is_while_a_model_runs() -> None:
    """torch's compiler knows builtins by their identity, and keeps what it finds when it first looks."""

    class Looks(nn.Module):
        found = None

        def forward(self, x: Tensor) -> Tensor:
            Looks.found = builtins.len
            return x * len(x)

    before = builtins.len
    record(Looks(), Example.of(torch.ones(2, 3)))
    assert Looks.found is before
    assert "len" not in globals()
