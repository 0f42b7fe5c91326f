"""One run tells everything, and leaves nothing behind."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import TraceError
from oracles.building import Net, built
from oracles.shrinking import SMALL_CASES, SmallCase, small_case
from oracles.untouched import Snapshot

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}
every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def attributes(model: nn.Module) -> list[tuple[Any, ...]]:
    """Every plain attribute with its type, and the types within sequences."""
    return [
        (path, name, type(v), v, [type(i) for i in v] if isinstance(v, (tuple, list)) else [])
        for path, module in model.named_modules()
        for name, v in vars(module).items()
        if isinstance(v, (bool, int, float, str, tuple, list))
    ]


def exact_cut(model: nn.Module, inputs: Any, kept: dict[str, list[int]] | None = None) -> ap.Plan:
    """Cut some group (the first exact one unless told) and compare with the twin."""
    structure = ap.trace(model, inputs)
    if kept is None:
        group = next(g for g in structure.groups if g.exact and g.size > 1)
        kept = {group.name: [*range(1, group.size)]}
    assert all(structure[name].exact for name in kept)
    plan = structure.plan(kept)
    call = (lambda m: m(**inputs)) if isinstance(inputs, dict) else (lambda m: m(*inputs))
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    with torch.no_grad():
        torch.testing.assert_close(
            call(ap.cut(model, plan).eval()), call(ap.zero(model, plan).eval()), **TOLERANCE
        )
    return plan


@every_case
@pytest.mark.parametrize("train", [True, False])
def test_nothing_of_the_model_or_the_world_changes(case: SmallCase, train: bool) -> None:
    model, x = case.model().train(train), case.inputs(3)
    model(x).sum().backward()
    next(model.children()).eval()  # modes may be mixed
    first = next(model.parameters())
    first.requires_grad_(False)
    first.note = "mine"
    model.register_forward_hook(lambda *_: None)
    random.seed(1)
    before, sizes, inputs = Snapshot(model), attributes(model), x.clone()
    structure = ap.trace(model, x)
    before.assert_unchanged()
    group = next(g for g in structure.groups if g.exact and g.size > 1)
    plan = structure.plan({group.name: [0]})
    before.assert_unchanged()
    ap.cut(model, plan)
    ap.zero(model, plan)
    structure.after(plan).macs()
    before.assert_unchanged()
    assert attributes(model) == sizes
    assert torch.equal(x, inputs)


def test_nothing_changes_when_forward_fails_half_way() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        net.calls += 1
        net.count.add_(1)
        y = net.norm(net.a(x))
        torch.rand(3)
        return y.view(7, 7)

    model = built(
        lambda: Net(forward, a=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), count=torch.zeros(2))
    )
    model.calls = 0
    before, sizes = Snapshot(model), attributes(model)
    for _ in range(2):
        with pytest.raises(
            TraceError, match=r"'\[7, 7\]' is invalid.*test_tracing.py:\d+ in forward"
        ):
            ap.trace(model, numbers(2, 4))
    before.assert_unchanged()
    assert attributes(model) == sizes


def test_a_model_in_train_mode_is_traced_in_eval_mode() -> None:
    case = small_case("residual")
    structure = ap.trace(case.model().train(), case.inputs())
    assert [g.name for g in structure.groups] == [
        g.name for g in ap.trace(case.model().eval(), case.inputs()).groups
    ]
    assert all(g.exact for g in structure.groups), "statistics are the remembered ones"


@every_case
def test_a_meta_model_has_the_structure_of_the_real_one(case: SmallCase) -> None:
    with torch.device("meta"):
        ghost = case.make().double()
    found = ap.trace(ghost, case.inputs().to("meta"))
    real = ap.trace(case.model(), case.inputs())
    facts = [[(g.name, g.kind, g.size, g.exact) for g in s.groups] for s in (found, real)]
    assert facts[0] == facts[1]
    assert (found.macs(), found.params()) == (real.macs(), real.params())
    assert found.fingerprint == real.fingerprint


def pair(net: Net, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    z = torch.relu(net.a(x))
    return net.b(z if y is None else z + torch.tanh(net.c(y))) * scale


def pair_model() -> nn.Module:
    return built(lambda: Net(pair, a=nn.Linear(4, 6), b=nn.Linear(6, 3), c=nn.Linear(5, 6)))


@pytest.mark.parametrize(
    "inputs",
    [
        numbers(2, 4),
        (numbers(2, 4),),
        (numbers(2, 4), numbers(2, 5)),
        {"x": numbers(2, 4)},
        {"y": numbers(2, 5), "x": numbers(2, 4), "scale": 2.0},
    ],
    ids=["tensor", "tuple", "two", "keyword", "keywords out of order"],
)
def test_inputs_may_be_a_tensor_a_tuple_or_keywords(inputs: Any) -> None:
    plan = exact_cut(pair_model(), inputs)
    assert plan.delivery == "module"


@pytest.mark.parametrize("kind", [list, dict])
def test_tensors_within_an_argument_are_found(kind: type) -> None:
    def forward(net: Net, parts: Any) -> Tensor:
        first, second = parts.values() if isinstance(parts, dict) else parts
        return net.b(torch.relu(net.a(first)) + net.c(second))

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3), c=nn.Linear(5, 6)))
    first, second = numbers(2, 4), numbers(2, 5)
    argument = [first, second] if kind is list else {"one": first, "two": second}
    plan = exact_cut(model, (argument,))
    small, program = ap.cut(model, plan), ap.trace(model, (argument,)).program(model, plan)
    torch.testing.assert_close(program(argument), small(argument), **TOLERANCE)


def test_a_model_without_inputs_can_be_traced() -> None:
    model = built(
        lambda: Net(
            lambda m: m.b(torch.relu(m.a(m.x))),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 3),
            x=numbers(2, 4),
        )
    )
    structure = ap.trace(model, ())
    assert [(g.name, g.size) for g in structure.groups if g.name == "a"] == [("a", 6)]
    plan = structure.plan({"a": [0, 2]})
    torch.testing.assert_close(ap.cut(model, plan)(), ap.zero(model, plan)(), **TOLERANCE)


def test_a_batch_of_one_is_traced_as_any_other() -> None:
    for case in SMALL_CASES:
        model = case.model()
        one, two = ap.trace(model, case.inputs(1)), ap.trace(model, case.inputs(2))
        facts = [[(g.name, g.kind, g.size, g.exact) for g in s.groups] for s in (one, two)]
        assert facts[0] == facts[1], case.id
        assert one.macs() * 2 == two.macs(), case.id


def test_a_model_that_takes_one_sample_only_is_traced_with_one() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        assert len(x) == 1, "one at a time"
        return net.b(torch.relu(net.a(x)))

    exact_cut(built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3))), numbers(1, 4))


def test_python_that_looks_at_values_takes_the_branch_it_takes() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        if bool((x > 0).all()):
            return net.b(y)
        return net.c(y)

    def model() -> nn.Module:
        parts = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 3), "c": nn.Linear(6, 3)}
        return built(lambda: Net(forward, **parts))

    for x, other in ((numbers(2, 4).abs(), "c"), (-numbers(2, 4).abs(), "b")):
        structure = ap.trace(model(), x)
        assert structure.unused == (f"{other}.bias", f"{other}.weight")
        assert not structure.groups  # the other way reads what this one does


def test_numbers_that_leave_torch_pin_what_they_came_from() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        z = torch.relu(net.b(y))
        order = np.argsort(z.detach().numpy().sum(0))
        return net.c(z[:, torch.from_numpy(order.copy())])

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 5), c=nn.Linear(5, 3)))
    structure = ap.trace(model, numbers(2, 4))
    assert [g.name for g in structure.groups] == ["a"]
    pins = [p for p in structure.pinned if p.tensor == "b.weight" and p.dim == 0]
    assert pins
    assert any("test_tracing.py" in p.line for p in pins)
    exact_cut(model, numbers(2, 4), {"a": [0, 3]})


def test_data_of_a_parameter_is_the_parameter() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(F.linear(x, net.a.weight.data, net.a.bias.detach()).relu())

    plan = exact_cut(
        built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3))), numbers(2, 4)
    )
    assert {c.names[0] for c in plan.tensors} == {"a.weight", "a.bias", "b.weight"}


def in_place(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    y += 1
    y.relu_().mul_(2)
    return net.b(y)


def writes_a_view(net: Net, x: Tensor) -> Tensor:
    y = torch.relu(net.a(x))
    first = y[0]
    first.mul_(3)
    return net.b(y)


def writes_the_base_of_a_view(net: Net, x: Tensor) -> Tensor:
    y = torch.relu(net.a(x))
    view = y.t()
    y.add_(net.shift).tanh_()
    return net.b(view.t())


def fills_a_buffer(net: Net, x: Tensor) -> Tensor:
    y = torch.relu(net.a(x))
    out = torch.zeros_like(y)
    out.copy_(y)
    out[:1].mul_(2)
    return net.b(out)


@pytest.mark.parametrize(
    "forward", [in_place, writes_a_view, writes_the_base_of_a_view, fills_a_buffer]
)
@pytest.mark.parametrize("as_program", [True, False])
def test_operations_in_place_are_followed(forward: Any, as_program: bool) -> None:
    model = built(
        lambda: Net(
            forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3), shift=nn.Parameter(torch.rand(6))
        )
    )
    x = numbers(3, 4)
    structure = ap.trace(model, x)
    group = structure.groups[0]
    plan = structure.plan({group.name: [0, 2, 5]})
    small = structure.program(model, plan) if as_program else ap.cut(model, plan)
    twin = ap.zero(model, plan)
    assert group.exact
    for inputs in (x, numbers(3, 4, seed=1)):
        torch.testing.assert_close(small(inputs), twin(inputs), **TOLERANCE)


def test_a_buffer_that_forward_changes_is_changed_in_the_copy_alone() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        net.seen.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return net.b(y - net.seen)

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3), seen=torch.zeros(6)))
    before = Snapshot(model)
    x = numbers(2, 4)
    plan = ap.trace(model, x).plan({"a": [0, 2, 5]})
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    before.assert_unchanged()
    for _ in range(2):
        torch.testing.assert_close(small(x), twin(x), **TOLERANCE)
    assert small.seen.shape == (3,)
    torch.testing.assert_close(small.seen, twin.seen[[0, 2, 5]], **TOLERANCE)


def test_a_parameter_that_is_not_used_stays_as_it_is() -> None:
    model = built(
        lambda: Net(
            lambda m, x: m.b(torch.relu(m.a(x))),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 3),
            spare=nn.Linear(6, 6),
        )
    )
    structure = ap.trace(model, numbers(2, 4))
    assert structure.params() == sum(p.numel() for p in model.parameters())
    plan = exact_cut(model, numbers(2, 4))
    assert ap.cut(model, plan).spare.weight.shape == (6, 6)


def test_a_module_used_twice_is_cut_once_for_both() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        y = torch.relu(net.shared(y))
        return net.b(torch.tanh(net.shared(y)))

    model = built(
        lambda: Net(forward, a=nn.Linear(4, 6), shared=nn.Linear(6, 6), b=nn.Linear(6, 3))
    )
    structure = ap.trace(model, numbers(2, 4))
    assert [(g.name, g.size) for g in structure.groups] == [("a", 6)]
    calls = [(s.call, s.side) for s in structure["a"].sites if s.module == "shared"]
    assert calls == [(0, "input"), (0, "output"), (1, "input"), (1, "output")]
    exact_cut(model, numbers(2, 4))


def test_the_random_state_goes_on_as_if_nothing_had_happened() -> None:
    model = built(
        lambda: Net(lambda m, x: m.b(m.a(x) + torch.rand(6)), a=nn.Linear(4, 6), b=nn.Linear(6, 3))
    )
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    ap.trace(model, numbers(2, 4))
    assert torch.equal(torch.rand(4), expected)


def test_a_traced_model_that_is_trained_on_is_cut_with_its_new_weights() -> None:
    case = small_case("mlp")
    model, x = case.model(), case.inputs()
    plan = ap.trace(model, x).plan({"0": [0, 2]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    assert torch.equal(ap.cut(model, plan)[0].weight, model[0].weight[[0, 2]])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_any_grad_mode_outside_will_do(mode: Any) -> None:
    case = small_case("residual")
    model, x = case.model(), case.inputs()
    with mode():
        plan = ap.trace(model, x).plan({"stem.0": [0, 2]})
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_autocast_outside_is_followed() -> None:
    case = small_case("residual")
    model, x = case.model().float(), case.inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        structure = ap.trace(model, x)
    assert [g.name for g in structure.groups] == ["stem.0", "blocks.0.conv1", "blocks.1.conv1"]
