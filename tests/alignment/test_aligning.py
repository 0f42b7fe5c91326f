"""Turned heads: the network computes the same, and dropped dimensions lose what the best low rank would."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import log10
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.alignment import align_heads, aligning, trials
from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError, PlanMismatchError
from apoptosis.masks import mask, masks_of
from apoptosis.models import ViTOptions, vit
from apoptosis.structure import Structure, trace
from apoptosis.task import Task
from oracles.building import built
from oracles.library import timm_model, transformers_model
from oracles.masked_networks import random_masks
from oracles.shrinking import FusedAttention, SeparateAttention, Transformer, small_case
from oracles.untouched import Snapshot


def case(id: str, num: int = 6) -> tuple[nn.Module, Tensor, Structure]:
    own = small_case(id)
    model, x = own.model(), own.inputs(num)
    return model, x, trace(model, x[:2])


def tokens(num: int = 6) -> Tensor:
    return torch.randn(num, 4, 5, generator=torch.Generator().manual_seed(0)).double()


def same_outputs(one: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> None:
    """To what code leaves that casts to float32 on its way, of what differs from sample to sample."""
    task = Task.classification()
    with torch.no_grad():
        want, found = (task.outputs(m.eval()(*args, **kwargs)) for m in (one, other))
    assert float((found - want).abs().max()) < 1e-5 * float(want.std(0).mean())


def redrawn(model: nn.Module) -> nn.Module:
    """In float64, with weights at which attention matters: libraries start with so small ones that it hardly does."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.3 * noise)
    return model


def passing(model: nn.Module, path: str, x: Tensor, *, side: str) -> Tensor:
    """What a module reads or makes, (positions, entries)."""
    seen: list[Tensor] = []
    module = model.get_submodule(path)
    if side == "input":
        hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    else:
        hook = module.register_forward_hook(lambda *own: seen.append(own[2]))
    with torch.no_grad():
        model(x)
    hook.remove()
    return seen[0].flatten(0, -2)


def heads(lines: Tensor, width: int) -> list[Tensor]:
    return list(lines.split(width, -1))


def tail(left: Tensor, right: Tensor, kept: int) -> float:
    """What the best product of rank `kept` misses of all sums of one side's rows with the other's."""
    return float(torch.linalg.svdvals(left @ right.T)[kept:].square().sum())


def missed(left: Tensor, right: Tensor, kept: int) -> float:
    """What the last dimensions add to the same sums."""
    return float((left[:, kept:] @ right[:, kept:].T).square().sum())


@pytest.mark.parametrize(
    ("id", "turned"),
    [
        ("separate", {"parts.0.q:qk_dim", "parts.0.v:v_dim"}),
        ("gqa", {"parts.0.q:qk_dim", "parts.0.v:v_dim"}),
        ("fused", {"parts.0.qkv:head_dim"}),
    ],
)
def test_all_kinds_of_dimensions_are_turned_and_the_network_is_the_same(id: str, turned: set[str]):
    model, x, structure = case(id)
    before = Snapshot(model)
    found = align_heads(model, structure, [x])
    before.assert_unchanged()
    assert set(found.energies) == turned
    assert found.left_alone == {}
    with torch.no_grad():
        torch.testing.assert_close(found.model(x), model(x), rtol=1e-9, atol=1e-12)
    own, theirs = found.model.state_dict(), model.state_dict()
    changed = {name for name in own if not torch.equal(own[name], theirs[name])}
    assert changed == {
        slice.tensor for name in turned for slice in structure[name].slices
    }  # and nothing else
    for name, shares in found.energies.items():
        assert shares.shape == (structure[name].size,)
        assert float(shares.sum()) == pytest.approx(1)


@pytest.mark.parametrize("id", ["separate", "gqa"])
def test_dropped_value_dimensions_miss_what_the_best_low_rank_misses(id: str):
    """Of what one head of values hands on: its mixtures, by the columns that read them."""
    model, x, structure = case(id, num=8)
    turned = align_heads(model, structure, [x]).model
    num = {"separate": 1, "gqa": 2}[id]  # queries' heads for each head of values
    width = structure["parts.0.v:v_dim"].size
    sides: list[list[list[Tensor]]] = []
    for net in (model, turned):
        mixed = heads(passing(net, "parts.0.o", x, side="input"), width)
        columns = heads(net.get_submodule("parts.0.o").weight.detach(), width)
        sides.append(
            [
                [torch.cat(own[start : start + num]) for start in range(0, len(own), num)]
                for own in (mixed, columns)
            ]
        )
    before, after = (list(zip(*own, strict=True)) for own in sides)
    for kept in range(1, width):
        for old, new in zip(before, after, strict=True):
            assert missed(*new, kept) == pytest.approx(tail(*old, kept), rel=1e-5)


@pytest.mark.parametrize("id", ["separate", "gqa"])
def test_dropped_query_dimensions_miss_what_the_best_low_rank_misses(id: str):
    """Of the scores of all queries with all keys."""
    model, x, structure = case(id, num=8)
    turned = align_heads(model, structure, [x]).model
    num = {"separate": 1, "gqa": 2}[id]
    width = structure["parts.0.q:qk_dim"].size
    sides: list[list[tuple[Tensor, Tensor]]] = []
    for net in (model, turned):
        queries = heads(passing(net, "parts.0.q", x, side="output"), width)
        keys = heads(passing(net, "parts.0.k", x, side="output"), width)
        groups = [torch.cat(queries[n : n + num]) for n in range(0, len(queries), num)]
        sides.append(list(zip(groups, keys, strict=True)))
    for kept in range(1, width):
        for old, new in zip(*sides, strict=True):
            assert missed(*new, kept) == pytest.approx(tail(*old, kept), rel=1e-5)


def test_energies_are_the_shares_of_what_dimensions_carry():
    """Of the scores of all heads together; falling."""
    model, x, structure = case("separate", num=8)
    found = align_heads(model, structure, [x])
    queries, keys = (heads(passing(found.model, f"parts.0.{n}", x, side="output"), 4) for n in "qk")
    carried = sum(q.square().sum(0) * k.square().sum(0) for q, k in zip(queries, keys, strict=True))
    wanted = carried / carried.sum()
    shares = found.energies["parts.0.q:qk_dim"]
    torch.testing.assert_close(shares, wanted, rtol=1e-6, atol=1e-9)
    assert shares.tolist() == sorted(shares.tolist(), reverse=True)


def test_one_big_batch_or_many_small_ones_give_the_same():
    model, x, structure = case("fused")
    one = align_heads(model, structure, [x])
    many = align_heads(model, structure, (part for part in (x[:4], x[4:])))
    for name, shares in one.energies.items():
        torch.testing.assert_close(many.energies[name], shares, rtol=1e-8, atol=1e-12)


class Ordered(FusedAttention):
    """Queries, keys and values in another order."""

    order = "qkv"

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        made = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        parts = dict(zip(self.order, made.permute(2, 0, 3, 1, 4).unbind(0), strict=True))
        mixed = F.scaled_dot_product_attention(parts["q"], parts["k"], parts["v"])
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("order", ["qkv", "vqk", "qvk", "kvq"])
def test_which_part_is_the_values_is_found_out(order: str):
    model = built(lambda: Transformer(Ordered(8, 2)))
    model.parts[0].order = order
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert found.left_alone == {}
    with torch.no_grad():
        torch.testing.assert_close(found.model(tokens()), model(tokens()), rtol=1e-9, atol=1e-12)
    width, where = 8, order.index("v")
    values = passing(found.model, "parts.0.qkv", tokens(), side="output")
    old = passing(model, "parts.0.qkv", tokens(), side="output")
    assert not torch.allclose(values, old)
    own = slice(where * width, (where + 1) * width)
    made = found.model.parts[0]
    torch.testing.assert_close(  # values and their readers by each other's turn, so queries and keys too
        made.proj.weight @ made.qkv.weight[own],
        model.parts[0].proj.weight @ model.parts[0].qkv.weight[own],
        rtol=1e-9,
        atol=1e-12,
    )


class OnSingleDimensions(SeparateAttention):
    """Something without parameters acts on each dimension by itself."""

    def __init__(self, act: Callable[[Tensor], Tensor], *, on: str) -> None:
        super().__init__(8, 2, 2)
        self.act, self.on = act, on

    def forward(self, x: Tensor) -> Tensor:
        made = {name: self.split(getattr(self, name)(x)) for name in "qkv"}
        made[self.on] = self.act(made[self.on])
        weights = torch.softmax(made["q"] @ made["k"].transpose(-2, -1) * self.scale, -1)
        return self.o((weights @ made["v"]).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("on", "name"), [("q", "parts.0.q:qk_dim"), ("v", "parts.0.v:v_dim")])
def test_a_turn_that_changes_the_network_is_taken_back(on: str, name: str):
    model = built(lambda: Transformer(OnSingleDimensions(torch.tanh, on=on)))
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert found.left_alone == {name: "its coordinates mean something to the network"}
    assert len(found.energies) == 1  # the other one
    with torch.no_grad():
        torch.testing.assert_close(found.model(tokens()), model(tokens()), rtol=1e-9, atol=1e-12)
    for tensor in ("weight", "bias"):
        before, after = (getattr(getattr(net.parts[0], on), tensor) for net in (model, found.model))
        assert torch.equal(before, after)


def test_a_network_of_which_all_is_taken_back_is_the_one_given():
    both = OnSingleDimensions(torch.tanh, on="q")
    model = built(lambda: Transformer(both))
    structure = trace(model, tokens(2))
    found = align_heads(model, structure, [tokens()], groups=[structure["parts.0.q:qk_dim"]])
    assert found.model is model


class NormedKeys(SeparateAttention):
    def __init__(self) -> None:
        super().__init__(8, 2, 2)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.norm(self.split(own(x))) for own in (self.q, self.k))
        mixed = F.scaled_dot_product_attention(q, k, self.split(self.v(x)))
        return self.o(mixed.transpose(1, 2).flatten(2))


def test_what_acts_on_single_dimensions_by_parameters_says_so():
    model = built(lambda: Transformer(NormedKeys()))
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert set(found.energies) == {"parts.0.v:v_dim"}
    (why,) = found.left_alone.values()
    assert why == "parts.0.norm.weight acts on single dimensions"


def test_torchs_own_attention_is_left_alone():
    model, x, structure = case("encoder")
    found = align_heads(model, structure, never())
    assert found.model is model
    assert len(found.left_alone) == 2
    assert all("no module shows" in why for why in found.left_alone.values())


def never() -> Iterator[Tensor]:
    pytest.fail("data were read")
    yield torch.empty(0)


def test_without_heads_nothing_is_read():
    model, _, structure = case("residual")
    found = align_heads(model, structure, never())
    assert (found.model, found.energies, found.left_alone) == (model, {}, {})


def test_only_the_groups_that_were_named_are_turned():
    model, x, structure = case("separate")
    found = align_heads(model, structure, [x], groups=[structure["parts.0.v:v_dim"]])
    assert set(found.energies) == {"parts.0.v:v_dim"}
    assert torch.equal(found.model.parts[0].q.weight, model.parts[0].q.weight)


def test_numbers_of_16_bits_are_not_rounded_again():
    model, x, structure = case("fused")
    small = model.to(torch.bfloat16)
    found = align_heads(small, structure, never())
    assert found.model is small
    assert "convert to float32" in found.left_alone["parts.0.qkv:head_dim"]


def test_zeros_of_masks_are_not_filled():
    model, x, structure = case("separate")
    sparse = mask(model, random_masks(model, 0.5, ("parts.0.v.weight",)))
    found = align_heads(sparse, structure, [x])
    assert "parts.0.v.weight is masked" in found.left_alone["parts.0.v:v_dim"]
    assert set(found.energies) == {"parts.0.q:qk_dim"}
    assert masks_of(found.model) is not None


@pytest.mark.parametrize("batches", [[], [torch.empty(0, 4, 5).double()]], ids=["none", "empty"])
def test_no_samples_are_a_clear_error(batches: list[Tensor]):
    model, _, structure = case("fused")
    before = Snapshot(model)
    with pytest.raises(DataError, match="saw no samples"):
        align_heads(model, structure, batches)
    before.assert_unchanged()


def test_an_empty_batch_among_others_does_no_harm():
    model, x, structure = case("fused")
    found = align_heads(model, structure, [x[:0], x])
    assert set(found.energies) == {"parts.0.qkv:head_dim"}


def test_bad_values_name_the_layer():
    model, x, structure = case("separate")
    x[1, 2, 3] = torch.nan
    before = Snapshot(model)
    with pytest.raises(NonFiniteError, match=r"parts\.0\.[qko]"):
        align_heads(model, structure, [x])
    before.assert_unchanged()


def test_a_head_that_says_nothing_stays_as_it_is():
    model, x, structure = case("separate")
    with torch.no_grad():
        model.parts[0].o.weight[:, :4] = 0  # the first head's values are not read
        model.parts[0].k.weight[4:] = 0  # and the second one's keys are all alike
        model.parts[0].k.bias[4:] = 0
    found = align_heads(model, structure, [x])
    assert set(found.energies) == {"parts.0.q:qk_dim", "parts.0.v:v_dim"}
    with torch.no_grad():
        torch.testing.assert_close(found.model(x), model(x), rtol=1e-9, atol=1e-12)
    assert torch.equal(found.model.parts[0].v.weight[:4], model.parts[0].v.weight[:4])
    assert torch.equal(found.model.parts[0].q.weight[4:], model.parts[0].q.weight[4:])


def test_a_vision_transformer_of_our_own():
    options = ViTOptions(image_size=8, patch_size=4, width=12, depth=2, num_heads=2, num_classes=3)
    model, images = redrawn(vit(options)), torch.randn(8, 3, 8, 8).double()
    found = align_heads(model, trace(model, images[:1]), [(images, torch.zeros(8).long())])
    assert len(found.energies) == 4
    assert found.left_alone == {}
    same_outputs(model, found.model, torch.randn(8, 3, 8, 8).double())


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_transformers_of_timm(name: str):
    sizes = {"embed_dim": 16, "img_size": 32, "patch_size": 4, "num_heads": 2, "depth": 2}
    if name.startswith("swin"):
        sizes |= {"depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
        del sizes["depth"]
    torch.manual_seed(0)
    model, images = redrawn(timm_model(name, **sizes)), torch.randn(4, 3, 32, 32).double()
    found = align_heads(model, trace(model, images[:1]), [images])
    assert len(found.energies) == 2
    assert found.left_alone == {}
    same_outputs(model, found.model, torch.randn(4, 3, 32, 32).double())


TEXT = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LANGUAGE: dict[str, tuple[tuple[str, str], dict[str, Any], int]] = {
    "bert": (
        ("BertForSequenceClassification", "BertConfig"),
        {**TEXT, "intermediate_size": 24, "max_position_embeddings": 12},
        2,
    ),
    "gpt2": (
        ("GPT2LMHeadModel", "GPT2Config"),
        {"vocab_size": 17, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12}
        | {"bos_token_id": None, "eos_token_id": None},
        2,
    ),
    "llama": (
        ("LlamaForCausalLM", "LlamaConfig"),
        {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24},
        1,
    ),
}
"""Class and configuration, sizes, and how many groups are turned: positions are turned into a Llama's queries and keys
dimension by dimension."""


def language(name: str) -> tuple[nn.Module, Structure, list[Any], Task]:
    (kind, config), sizes, _ = LANGUAGE[name]
    torch.manual_seed(0)
    model = redrawn(transformers_model(kind, config, **sizes))
    ids = torch.randint(17, (6, 8))
    task = Task.hugging_face() if name == "bert" else Task.language_model()
    return model, trace(model, {"input_ids": ids[:2]}), [{"input_ids": ids}], task


@pytest.mark.parametrize("name", LANGUAGE)
def test_transformers_that_read_text(name: str):
    """Other words than heads were aligned on, and another number of them."""
    model, structure, batches, task = language(name)
    found = align_heads(model, structure, batches, task)
    assert len(found.energies) == LANGUAGE[name][2]
    same_outputs(model, found.model, input_ids=torch.randint(17, (6, 11)))


def left_alone(held: dict[str, Tensor], bond: Any, turn: Tensor) -> None:
    """A wrong turn: keys stay as they were while queries are turned, and so with mixtures and their readers."""
    trials.turn_slot_(held, bond.left, turn)


@pytest.mark.parametrize("name", LANGUAGE)
def test_wrong_turns_of_what_reads_text_would_be_seen(name: str, monkeypatch):
    """By the comparison above, and by the trial itself."""
    model, structure, batches, task = language(name)
    for group in structure.groups:
        if not group.kind.endswith("_dim"):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(aligning, "turn_", left_alone)
            found = align_heads(model, structure, batches, task, groups=[group])
            for ids in (
                (batches[0]["input_ids"], torch.randint(17, (6, 11))) if found.energies else ()
            ):
                with pytest.raises(AssertionError):
                    same_outputs(model, found.model, input_ids=ids)
            patch.setattr(trials, "turn_", left_alone)
            assert align_heads(model, structure, batches, task, groups=[group]).model is model


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Transformer(FusedAttention(8, 2)), Transformer(FusedAttention(8, 2))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.one(x) if y is None else self.one(x) + self.other(y)


def test_layers_that_do_not_run_on_the_data_are_left_alone():
    model = built(TwoWays)
    found = align_heads(model, trace(model, {"x": tokens(2), "y": tokens(2)}), [tokens()])
    assert set(found.energies) == {"one.parts.0.qkv:head_dim"}
    assert found.left_alone == {"other.parts.0.qkv:head_dim": "its layers do not run on these data"}
    with torch.no_grad():
        want, same = (net(tokens(), tokens(3).repeat(2, 1, 1)) for net in (model, found.model))
    torch.testing.assert_close(same, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize(("num", "length"), [(1, 3), (2, 12), (32, 12)])
def test_rounding_of_float32_stays_small(condition: float, num: int, length: int):
    """On other data, whatever the condition of what passes, and with fewer positions than dimensions."""
    torch.manual_seed(0)
    width = 32
    part = SeparateAttention(width, 2, 2)
    with torch.no_grad():
        for layer in (part.q, part.k, part.v):
            left, right = torch.linalg.qr(torch.randn(2, width, width)).Q
            layer.weight.copy_(4 * left * torch.logspace(0, -log10(condition), width) @ right)
            layer.bias.zero_()
    model = Transformer(part, width=width).eval()
    found = align_heads(model, trace(model, torch.randn(2, 4, 5)), [torch.randn(num, length, 5)])
    assert len(found.energies) == 2
    other = torch.randn(32, 30, 5)
    with torch.no_grad():
        want, same = (net(other).double() for net in (model, found.model))
    assert float((same - want).abs().max()) <= 1e-5 * float(want.std())


# ------------------------------------------------------------------------------------------ arguments of another kind


@dataclass(frozen=True)
class Refusal:
    id: str
    error: type[Exception]
    match: str
    given: Callable[[nn.Module, Tensor, Structure], dict[str, Any]]
    """What is passed in the place of the right arguments."""


def wide() -> tuple[nn.Module, Structure]:
    model = built(lambda: Transformer(SeparateAttention(16, 2, 2), width=16))
    return model, trace(model, tokens(2))


VALUES = "parts.0.v:v_dim"
REFUSALS = [
    Refusal("another", PlanMismatchError, "of another network", lambda *_: {"structure": case("fused")[2]}),
    Refusal("wider", PlanMismatchError, r"has it in shape \(16, 16\)", lambda *_: {"model": wide()[0]}),
    Refusal("its group", PlanMismatchError, "no group", lambda *_: {"groups": case("fused")[2].choose()}),
    Refusal("wider group", PlanMismatchError, "8 units, .* 4", lambda *_: {"groups": [wide()[1][VALUES]]}),
    Refusal("names", ConfigError, r"structure\[name\]", lambda *_: {"groups": [VALUES]}),
    Refusal("one name", ConfigError, "list of groups", lambda *_: {"groups": VALUES}),
    Refusal("one group", ConfigError, "list of groups", lambda _m, _x, own: {"groups": own[VALUES]}),
    Refusal("no structure", ConfigError, "should be a Structure", lambda *_: {"structure": None}),
    Refusal("no model", ConfigError, "should be a Module", lambda *_: {"model": None}),
    Refusal("no numbers", ModelError, "on the meta device", lambda own, *_: {"model": deepcopy(own).to("meta")}),
    Refusal("task's name", ConfigError, "should be a Task", lambda *_: {"task": "classification"}),
    Refusal("one tensor", DataError, r"tensor of shape \(6, 4, 5\)", lambda _m, x, _s: {"batches": x}),
    Refusal("one dict", DataError, "a dict.*a list of one", lambda _m, x, _s: {"batches": {"x": x}}),
    Refusal("none", DataError, "a NoneType", lambda *_: {"batches": None}),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda own: own.id)
def test_arguments_of_another_kind_are_refused(refusal: Refusal):
    model, x, structure = case("separate")
    right = {"model": model, "structure": structure, "batches": [x]}
    with pytest.raises(refusal.error, match=refusal.match):
        align_heads(**{**right, **refusal.given(model, x, structure)})
