"""The user's own module where its code can run the new sizes, with its attributes set; a program where it cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError, TraceError
from apoptosis.structure import CutProgram
from oracles.building import Net, built
from oracles.library import LIBRARY_CASES, float64_everywhere
from oracles.shrinking import small_case

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sequential(*parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*parts)


def changes(plan: ap.Plan) -> dict[str, tuple[int, int]]:
    return {f"{c.attribute.module}.{c.attribute.name}": (c.old, c.new) for c in plan.attributes}


class First(nn.Module):
    """Of a tuple."""

    def forward(self, x: Any) -> Tensor:
        return x[0]


TORCHS: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, list[int]], dict[str, Any]]
] = {
    "linear": (
        sequential(nn.Linear(4, 6), nn.Linear(6, 3)),
        (4,),
        {"0": [0, 2]},
        {"0.out_features": 2, "1.in_features": 2},
    ),
    "convolution": (
        sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1)),
        (2, 5, 5),
        {"0": [0, 2]},
        {"0.out_channels": 2, "1.num_features": 2, "2.in_channels": 2},
    ),
    "transposed convolution": (
        sequential(nn.ConvTranspose2d(2, 6, 3), nn.ConvTranspose2d(6, 3, 1)),
        (2, 5, 5),
        {"0": [0, 2]},
        {"0.out_channels": 2, "1.in_channels": 2},
    ),
    "depthwise convolution": (
        sequential(nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 3, 1)),
        (2, 5, 5),
        {"0": [0, 2, 3]},
        {"1.groups": 3, "1.in_channels": 3, "1.out_channels": 3, "2.in_channels": 3},
    ),
    "whole groups of a convolution": (
        sequential(nn.Conv2d(2, 6, 1), nn.Conv2d(6, 4, 3, groups=2), nn.Conv2d(4, 3, 1)),
        (2, 5, 5),
        {"0": [1]},
        {"1.groups": 1, "1.in_channels": 3, "1.out_channels": 2, "2.in_channels": 2},
    ),
    "group norm": (
        sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 1)),
        (2, 5, 5),
        {"0": [0, 3]},
        {"1.num_groups": 2, "1.num_channels": 4, "0.out_channels": 4},
    ),
    "layer norm": (
        sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        (4,),
        {"0": [0, 2, 3]},
        {"1.normalized_shape": (3,), "2.in_features": 3},
    ),
    "unflatten": (
        sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 4)), nn.Flatten(), nn.Linear(12, 3)),
        (4,),
        {"0#2": [0, 3]},
        {"1.unflattened_size": (3, 2), "0.out_features": 6, "3.in_features": 6},
    ),
    "bilinear": (
        sequential(nn.Bilinear(2, 2, 5), nn.Linear(5, 3)),
        (2,),
        {"0": [0, 4]},
        {"0.out_features": 2, "1.in_features": 2},
    ),
    "recurrent": (
        sequential(nn.LSTM(4, 6, batch_first=True), First(), nn.Linear(6, 3)),
        (3, 4),
        {"0.weight_ih_l0": [0, 2, 5]},
        {"0.hidden_size": 3, "2.in_features": 3},
    ),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_modules_say_their_new_sizes(name: str) -> None:
    make, shape, kept, expected = TORCHS[name]
    if name == "bilinear":
        plain = built(make)
        model: nn.Module = Net(lambda m, x: m.parts[1](m.parts[0](x, x)), parts=plain).eval()
        kept = {f"parts.{key}": own for key, own in kept.items()}
        expected = {f"parts.{key}": value for key, value in expected.items()}
    else:
        model = built(make)
    x = numbers(2, *shape)
    plan = ap.trace(model, x).plan(kept)
    small = ap.cut(model, plan)
    assert plan.delivery == "module", plan.delivery_because
    for path, value in expected.items():
        module, _, attribute = path.rpartition(".")
        found = getattr(small.get_submodule(module), attribute)
        assert found == value, path
        assert type(found) is type(value), path
    if name != "layer norm":
        torch.testing.assert_close(small(x), ap.zero(model, plan)(x), **TOLERANCE)


LIBRARYS = [
    (
        "GPT-2",
        "transformer.h.0.attn.c_attn:head",
        {"c_attn.nf": (24, 12), "attn.split_size": (8, 4)},
    ),
    (
        "GPT-2",
        "transformer.h.0.attn.c_attn:qk_dim",
        {"c_attn.nf": (24, 18), "attn.split_size": (8, 6), "attn.head_dim": (4, 3)},
    ),
    ("GPT-2", "transformer.h.0.mlp.c_fc", {"c_fc.nf": (32, 31)}),
    (
        "BERT",
        "bert.encoder.layer.0.attention.self.query:qk_dim",
        {"self.attention_head_size": (4, 3)},
    ),
    (
        "T5",
        "encoder.block.0.layer.0.SelfAttention.q:qk_dim",
        {"SelfAttention.key_value_proj_dim": (4, 3)},
    ),
]


@pytest.mark.parametrize(("model", "group", "expected"), LIBRARYS, ids=lambda x: str(x)[:20])
def test_attributes_of_other_libraries_are_found(model: str, group: str, expected: Any) -> None:
    case = next(case for case in LIBRARY_CASES if case.id == f"transformers {model}")
    net, batch = case.make_model(), case.make_batch()
    with float64_everywhere():
        structure = ap.trace(net, batch[0] if isinstance(batch, tuple) else batch)
        names = {group} | {
            n for t in structure.ties if group in dict(t.members) for n, _ in t.members
        }
        plan = structure.plan({name: range(structure[name].size - 1) for name in names})
    assert plan.delivery == "module", plan.delivery_because
    found = {key.split(".", key.count(".") - 1)[-1]: value for key, value in changes(plan).items()}
    assert found == expected


def test_llamas_head_dim_goes_along_with_the_rotation() -> None:
    case = next(case for case in LIBRARY_CASES if case.id == "transformers Llama")
    net, batch = case.make_model(), case.make_batch()
    with float64_everywhere():
        structure = ap.trace(net, batch)
        widths = [g for g in structure.groups if g.kind in ("qk_dim", "v_dim")]
        kept = {g.name: range(g.size // 2) for g in widths}
        plan = structure.plan(kept)
        small, twin = ap.cut(net, plan), ap.zero(net, plan)
        assert plan.delivery == "module", plan.delivery_because
        assert [layer.self_attn.head_dim for layer in small.model.layers] == [2, 2]
        torch.testing.assert_close(small(**batch).logits, twin(**batch).logits, **TOLERANCE)


def test_a_hard_coded_reshape_is_delivered_as_a_program_that_names_the_line() -> None:
    case = small_case("hard coded")
    model, x = case.model(), case.inputs()
    plan = ap.trace(model, x).plan({"a": [0, 2]})
    assert plan.delivery == "program"
    assert "shape '[-1, 3, 4]' is invalid" in plan.delivery_because
    assert "shrinking.py" in plan.delivery_because
    small = ap.cut(model, plan)
    assert isinstance(small, CutProgram)
    torch.testing.assert_close(small(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_a_plan_tells_files_but_not_the_folders_of_the_machine() -> None:
    case = small_case("hard coded")
    structure = ap.trace(case.model(), case.inputs(2))
    group = next(group for group in structure.groups if group.exact)
    plan = structure.plan({group.name: range(group.size - 1)})
    assert plan.delivery == "program"
    assert "shrinking.py:" in plan.delivery_because
    assert "/" not in plan.to_json()


def test_an_attribute_with_two_meanings_is_named() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        a = net.a(x).view(-1, net.width, 2).sum(2)
        b = net.b(x).view(-1, net.width, 3).sum(2)
        return net.c(torch.relu(a)) + net.d(torch.tanh(b))

    model = built(
        lambda: Net(
            forward,
            a=nn.Linear(4, 10),
            b=nn.Linear(4, 15),
            c=nn.Linear(5, 3),
            d=nn.Linear(5, 3),
            width=5,
        )
    )
    x = numbers(2, 4)
    structure = ap.trace(model, x)
    a, b = (
        next(g.name for g in structure.groups if g.name.startswith(n) and g.size == 5) for n in "ab"
    )
    assert [{name for name, _ in tie.members} for tie in structure.ties] == [{a, b}]
    alone, both = structure.plan({a: [0, 1]}), structure.plan({a: [0, 1], b: [2, 4]})
    assert (alone.delivery, both.delivery) == ("program", "module")
    assert "width would have to be" in alone.delivery_because
    assert "test_delivery.py" in alone.delivery_because
    assert changes(both) == {".width": (5, 2)}
    for plan in (alone, both):
        torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_python_that_takes_another_branch_at_the_new_size_is_found() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        return net.b(y * 2 if y.shape[1] > 4 else y)

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = numbers(2, 4)
    structure = ap.trace(model, x)
    few, many = structure.plan({"a": [0, 1]}), structure.plan({"a": [0, 1, 2, 3, 5]})
    assert (few.delivery, many.delivery) == ("program", "module")
    for plan in (few, many):
        torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_a_number_made_of_a_size_is_found() -> None:
    """1/√d in Python is no integer argument: only comparing the calls shows that it changed."""

    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        return net.b(y / y.shape[1] ** 0.5)

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = numbers(2, 4)
    plan = ap.trace(model, x).plan({"a": [0, 1]})
    assert plan.delivery == "program"
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_where_neither_delivery_can_be_the_plan_is_refused() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x).view(-1, 3, 4).sum(1)
        return net.b(y) if float(x.sum()) > 0 else net.b(-y)

    model = built(lambda: Net(forward, a=nn.Linear(4, 12), b=nn.Linear(4, 3)))
    structure = ap.trace(model, numbers(2, 4).abs())
    name = next(g.name for g in structure.groups if g.size == 4)
    match = (
        "own code cannot run this plan.*cannot be multiplied.*looks at a value.*test_delivery.py"
    )
    with pytest.raises(PlanMismatchError, match=match):
        structure.plan({name: [0, 1]})


def test_data_dependent_python_stays_python() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = F.gelu(net.a(x))
        return net.b(y) if float(x.sum()) > 0 else net.b(-y)

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = numbers(2, 4).abs()
    structure = ap.trace(model, x)
    plan = structure.plan({structure.groups[0].name: [0, 1, 5]})
    assert plan.delivery == "module"
    for sign in (1, -1):
        own = sign * x
        torch.testing.assert_close(ap.cut(model, plan)(own), ap.zero(model, plan)(own), **TOLERANCE)


def test_a_meta_model_is_planned_by_shapes_alone_and_the_plan_cuts_the_real_one() -> None:
    case = small_case("fused")
    model, x = case.model(), case.inputs()
    with torch.device("meta"):
        ghost = case.make().double().eval()
    plan = ap.trace(ghost, x.to("meta")).plan(
        {"parts.0.qkv:head": [1], "parts.0.qkv:head_dim": [0, 2]}
    )
    expected = ap.trace(model, x).plan({"parts.0.qkv:head": [1], "parts.0.qkv:head_dim": [0, 2]})
    assert plan.to_json() == expected.to_json()
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)
    assert {p.device.type for p in ap.cut(ghost, plan).parameters()} == {"meta"}


def test_a_second_cut_after_a_program_is_a_program() -> None:
    case = small_case("hard coded")
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    first = structure.plan({"a": [0, 2]})
    second = structure.after(first).plan({"a#2": [0, 3]})
    assert second.delivery == "program"
    assert "earlier cut" in second.delivery_because
    smallest = ap.cut(ap.cut(model, first), second)
    twin = ap.zero(model, first.then(second))
    torch.testing.assert_close(smallest(x), twin(x), **TOLERANCE)


def test_attention_without_key_heads_is_an_error_and_not_the_end_of_the_process() -> None:
    """torch 2.13 divides by their number; Phi-3's code gets there when it is tried at sizes it cannot run."""

    def attend(_: Net, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, :0], x[:, :1], enable_gqa=True)

    with pytest.raises(TraceError, match="attention without heads"):
        ap.trace(Net(attend), torch.zeros(2, 4, 3, 5))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_behind_a_cut_embedding_keeps_its_class(
    kind: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(0)
    net = Net(
        lambda m, ids: m.head(m.cells(m.embed(ids))[0]),
        embed=nn.Embedding(9, 6),
        cells=kind(6, 5, batch_first=True),
        head=nn.Linear(5, 2),
    ).double()
    ids = torch.randint(9, (2, 4))
    structure = ap.trace(net, ids)
    plan = structure.plan({"embed": [0, 2, 5], "cells.weight_ih_l0": [1, 2]})
    assert plan.delivery == "module", plan.delivery_because
    small = ap.cut(net, plan)
    assert (small.cells.input_size, small.cells.hidden_size) == (3, 2)
    for batch in (ids, torch.randint(9, (3, 7))):
        torch.testing.assert_close(small(batch), ap.zero(net, plan)(batch))
