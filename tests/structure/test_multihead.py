"""Cut attention: the same as torch's when nothing is cut, the same as the zeroed twin when something is."""

import copy
from itertools import product
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import ModelError
from apoptosis.structure.multihead import AttentionShape, CutAttention
from oracles.building import Net, built

WIDTH, HEADS, QUERIES, KEYS, BATCH = 8, 2, 3, 4, 2
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def attention(**options: Any) -> nn.MultiheadAttention:
    return built(lambda: nn.MultiheadAttention(WIDTH, HEADS, **options))


def uncut(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """A copy that has become a cut one of the same shape."""
    same = copy.deepcopy(module)
    width = WIDTH // HEADS
    CutAttention.become_(same, AttentionShape("", HEADS, width, width, 1 / sqrt(width)))
    return same


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(module: nn.MultiheadAttention, *, batched: bool = True) -> list[Tensor]:
    shapes = [(QUERIES, module.embed_dim), (KEYS, module.kdim), (KEYS, module.vdim)]
    made = [numbers(BATCH, *shape, seed=n) for n, shape in enumerate(shapes)]
    if not batched:
        return [x[0] for x in made]
    return made if module.batch_first else [x.transpose(0, 1) for x in made]


def masks(*, batched: bool = True) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    per_head = (BATCH * HEADS if batched else HEADS, QUERIES, KEYS)
    forbidden = torch.rand(per_head, generator=generator) < 0.4
    forbidden[..., 0] = False  # every query sees one key at least
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    padding = padding if batched else padding[0]
    as_numbers = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, float("-inf"))
    return {
        "none": {},
        "bool": {"attn_mask": forbidden[0]},
        "float": {"attn_mask": numbers(QUERIES, KEYS, seed=9)},
        "bool per head": {"attn_mask": forbidden},
        "float per head": {"attn_mask": numbers(*per_head, seed=9)},
        "padding": {"key_padding_mask": padding},
        "padding as numbers": {"key_padding_mask": as_numbers},
        "both": {"attn_mask": forbidden[0], "key_padding_mask": padding},
    }


OPTIONS = [
    {"batch_first": first, "bias": bias, "add_bias_kv": extra, "add_zero_attn": zero} | dims
    for first, bias, extra, zero, dims in product(
        (True, False), (True, False), (True, False), (True, False), ({}, {"kdim": 5, "vdim": 7})
    )
]


def named(options: dict[str, Any]) -> str:
    return " ".join(str(key) for key, value in options.items() if value) or "plain"


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_uncut_it_is_torchs_own(options: dict[str, Any]) -> None:
    torchs = attention(**options)
    ours = uncut(torchs)
    for batched in (True, False):
        inputs = arguments(torchs, batched=batched)
        for name, mask in masks(batched=batched).items():
            for weights in ({}, {"average_attn_weights": False}, {"need_weights": False}):
                expected, found = (
                    torchs(*inputs, **mask, **weights),
                    ours(*inputs, **mask, **weights),
                )
                torch.testing.assert_close(found, expected, **TOLERANCE, msg=f"{name} {weights}")


@pytest.mark.parametrize("need_weights", [True, False])
def test_in_train_mode_it_drops_what_torch_drops(need_weights: bool) -> None:
    torchs = attention(dropout=0.5, batch_first=True).train()
    ours = uncut(torchs)
    found = []
    for module in (torchs, ours):
        torch.manual_seed(4)
        found.append(module(*arguments(torchs), need_weights=need_weights))
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)
    assert not torch.equal(ours(*arguments(torchs))[0], found[1][0]), "dropout is on"
    ours.eval()
    assert torch.equal(ours(*arguments(torchs))[0], ours(*arguments(torchs))[0])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_causal_attention_is_torchs(need_weights: bool, padded: bool) -> None:
    torchs = attention(batch_first=True)
    ours = uncut(torchs)
    x = numbers(BATCH, KEYS, WIDTH)
    options: dict[str, Any] = {"need_weights": need_weights, "is_causal": True}
    if padded:
        options["key_padding_mask"] = masks()["padding"]["key_padding_mask"]
    mask = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    expected = torchs(x, x, x, attn_mask=mask, **options)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, **options), expected, **TOLERANCE)
    for module in (torchs, ours):
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            module(x, x, x, **options)


def test_a_mask_for_heads_that_are_gone_is_refused() -> None:
    model = self_attention(batch_first=True)
    x = numbers(BATCH, KEYS, WIDTH)
    name = next(g.name for g in ap.trace(model, x).groups if g.kind == "head")
    small = ap.cut(model, ap.trace(model, x).plan({name: [1]})).attn
    mask = torch.zeros(BATCH * HEADS, KEYS, KEYS, dtype=torch.float64)
    with pytest.raises(
        ModelError, match="mask for 2 heads does not fit attention that was cut to 1"
    ):
        small(x, x, x, attn_mask=mask)
    assert small(x, x, x, attn_mask=mask[0])[0].shape == x.shape


def self_attention(*, need_weights: bool = False, **options: Any) -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.embed(x)
        seen = [y, net.memory(x), net.facts(x)]
        return net.head(net.attn(*seen, need_weights=need_weights)[0])

    made = nn.MultiheadAttention(WIDTH, HEADS, **options)
    return built(
        lambda: Net(
            forward,
            embed=nn.Linear(WIDTH, WIDTH),
            memory=nn.Linear(WIDTH, made.kdim),
            facts=nn.Linear(WIDTH, made.vdim),
            attn=made,
            head=nn.Linear(WIDTH, 3),
        )
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_cut_it_is_the_zeroed_twin(options: dict[str, Any], need_weights: bool) -> None:
    model = self_attention(need_weights=need_weights, **options)
    x = numbers(BATCH, KEYS, WIDTH)
    structure = ap.trace(model, x)
    inner = [g for g in structure.groups if any(t.startswith("attn.") for t, *_ in g.places)]
    assert {g.kind for g in inner} >= {"head"}
    for kept in ({g.name: [0, *range(2, g.size)]} for g in inner):
        plan = structure.plan(kept)
        small, twin = ap.cut(model, plan), ap.zero(model, plan)
        assert plan.delivery == "module"
        assert isinstance(small.attn, nn.MultiheadAttention)
        assert list(small.state_dict()) == list(model.state_dict())
        for inputs in (x, numbers(BATCH + 3, KEYS, WIDTH, seed=5)):
            torch.testing.assert_close(small(inputs), twin(inputs), **TOLERANCE)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, batch_first=True, **options)
    return built(lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_with_their_fused_path_on_equal_the_twin_without(norm_first: bool) -> None:
    model, x = encoder(norm_first=norm_first, dropout=0.1).eval(), numbers(BATCH, KEYS, WIDTH)
    structure = ap.trace(model, x)
    assert torch.backends.mha.get_fastpath_enabled()
    kinds = {"head": [1], "head_dim": [0, 2, 3], "hidden": range(1, 12)}
    plan = structure.plan({g.name: kinds[g.kind] for g in structure.groups if g.exact})
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    assert plan.delivery == "module"
    padding = masks()["padding"]["key_padding_mask"]
    with torch.no_grad():  # where torch takes the fused path
        fused = small(x), small(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            plain = twin(x), twin(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(fused[0], plain[0], **TOLERANCE)
    torch.testing.assert_close(fused[1][~padding], plain[1][~padding], **TOLERANCE)


def test_a_layer_whose_hidden_units_alone_are_cut_keeps_torchs_attention() -> None:
    model, x = encoder().eval(), numbers(BATCH, KEYS, WIDTH)
    plan = ap.trace(model, x).plan({"layers.0.linear1": [0, 5]})
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    assert {type(layer.self_attn) for layer in small.layers} == {nn.MultiheadAttention}
    with torch.no_grad():
        torch.testing.assert_close(small(x), twin(x), rtol=1e-9, atol=1e-10)
