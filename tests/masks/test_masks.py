"""Masks as data: packed and unpacked, written and read, combined, and cut along with the network."""

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.errors import ApoptosisError, ConfigError, PlanMismatchError
from apoptosis.masks import (
    Mask,
    MaskPlan,
    Pattern,
    identity_masks,
    mask,
    maskable,
    masks_of,
    zeros_of,
)
from apoptosis.planning import Sparsity, make_masks
from apoptosis.structure import cut, trace
from oracles.mask_choice import assert_kept, kept_of, plan_of, random_plan
from oracles.small_networks import Convolutions, InCode
from oracles.untouched import Snapshot

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 8).view(2, 4)

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 10**6)


def coins(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    ).eval()


def loose_plan(parts: list[tuple[int, ...]], seed: int) -> MaskPlan:
    """Masks of no network in particular."""
    masks = {f"t{i}": Mask.of((f"t{i}",), coins(shape, seed + i)) for i, shape in enumerate(parts)}
    return MaskPlan(masks, "0123456789abcdef")


# ------------------------------------------------------------------------------------------------ one mask


@given(shapes, seeds)
@settings(max_examples=80)
def test_packing_loses_nothing(shape: tuple[int, ...], seed: int) -> None:
    kept = coins(shape, seed)
    packed = Mask.of(("w",), kept)
    assert torch.equal(packed.kept(), kept)
    assert packed.kept().dtype == torch.bool
    assert packed.kept().device.type == "cpu"
    assert packed.shape == shape
    assert packed.numel == math.prod(shape)
    assert packed.num_kept == int(kept.sum())
    expected = [
        sum(
            int(kept.view(-1)[8 * byte + bit]) << bit
            for bit in range(min(8, kept.numel() - 8 * byte))
        )
        for byte in range(math.ceil(kept.numel() / 8))
    ]
    assert packed.bits.dtype == np.uint8
    assert packed.bits.tolist() == expected


def test_a_mask_is_numbered_as_the_tensor_not_as_it_lies_in_memory() -> None:
    kept = coins((5, 3), 0).t()
    assert not kept.is_contiguous()
    assert torch.equal(Mask.of(("w",), kept).kept(), kept)


def test_a_mask_is_its_own_copy() -> None:
    kept = torch.ones(3, 3, dtype=torch.bool)
    packed = Mask.of(("w",), kept)
    kept[0, 0] = False
    packed.kept()[1, 1] = False
    assert packed.kept().all()
    assert packed.num_kept == 9


def test_masks_do_not_change() -> None:
    packed = Mask.of(("w",), torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(FrozenInstanceError, match="shape"):
        packed.shape = (9,)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (4, 8), (10, 16)])
def test_patterns_are_written_as_they_are_read(n: int, m: int) -> None:
    pattern = Pattern.parse(f"{n}:{m}")
    assert (pattern.n, pattern.m) == (n, m)
    assert str(pattern) == f"{n}:{m}"
    assert pattern == Pattern(n, m)


@pytest.mark.parametrize(
    "text", ["", "2", "2/4", "5:4", "0:4", "2:4:6", "x:y", "-2:4", "2:-4", "2.0:4"]
)
def test_nonsense_is_no_pattern(text: str) -> None:
    with pytest.raises(ConfigError, match=r"2:4|N:M|n:m"):
        Pattern.parse(text)


# ------------------------------------------------------------------------------------------------ which weights


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm((3, 6))
        self.batch = nn.BatchNorm1d(6)
        self.line = nn.Linear(6, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.conv, self.up = nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 4, 3)
        self.attend = nn.MultiheadAttention(4, 2)
        self.step = nn.LSTM(4, 3)
        self.free = nn.Parameter(torch.ones(3, 3))


def test_what_can_be_masked_and_along_which_dimension() -> None:
    found = maskable(Many())
    assert {name: (own.shape, own.dim) for name, own in found.items()} == {
        "line.weight": ((4, 6), 1),
        "conv.weight": ((6, 2, 3, 3), 1),
        "up.weight": ((6, 4, 3), 0),
        "attend.in_proj_weight": ((12, 4), 1),
        "attend.out_proj.weight": ((4, 4), 1),
        "step.weight_ih_l0": ((12, 4), 1),
        "step.weight_hh_l0": ((12, 3), 1),
    }
    assert all(own.names == (name,) for name, own in found.items())


def test_names_choose_and_leave_out() -> None:
    model = Many()
    assert list(maskable(model, ("line.w*", "conv.weight"))) == ["line.weight", "conv.weight"]
    assert "conv.weight" not in maskable(model, ("*", "!conv.*"))
    assert "line.weight" in maskable(model, ("!conv.*",))
    for names in (("nowhere",), ("*", "!nowhere")):
        with pytest.raises(ConfigError, match="nowhere"):
            maskable(model, names)


def test_a_pattern_of_names_fits_weights_and_not_biases_norms_or_embeddings() -> None:
    """Only a name in full may fit more: `layer1.*` is to mean the layers of `layer1`."""
    model = Many()
    assert list(maskable(model, ("line.*", "conv*"))) == ["line.weight", "conv.weight"]
    assert list(maskable(model, ("**",))) == list(maskable(model))
    assert list(maskable(model, ("*.weight",))) == [
        name for name in maskable(model) if name.endswith(".weight")
    ]


@pytest.mark.parametrize("name", ["table.weight", "free", "line.bias", "norm.weight", "batch.bias"])
def test_what_is_named_in_full_is_masked_whatever_it_is(name: str) -> None:
    model = Many()
    assert list(maskable(model, (name,))) == [name]
    found = random_plan(model, 0, names=(name,))
    masked = mask(model, found)
    assert torch.equal(
        masked.get_parameter(name) != 0, found.kept(name) & (model.get_parameter(name) != 0)
    )


def test_everything_is_kept_at_first() -> None:
    model = Many()
    found = identity_masks(model)
    assert list(found.masks) == list(maskable(model))
    assert found.density == 1
    assert found.holds(model)
    assert list(identity_masks(model, ("line.weight",)).masks) == ["line.weight"]
    assert identity_masks(model, ("line.weight",)).fingerprint == found.fingerprint


# ------------------------------------------------------------------------------------------------ zeros of a model


@given(seeds)
@settings(max_examples=10)
def test_the_zeros_of_a_masked_model_are_its_masks(seed: int) -> None:
    model = small_network()
    plan = random_plan(model, seed)
    with torch.no_grad():
        for name in plan.masks:
            model.get_parameter(name).mul_(plan.kept(name))
    snapshot = Snapshot(model)
    assert zeros_of(model, ("*",)).same_as(plan)
    assert plan.holds(model)
    snapshot.assert_unchanged()


def test_minus_zero_is_a_zero_and_the_smallest_number_is_none() -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.0, 1e-45, 0.0, math.nan]]))
    found = zeros_of(model, ("*",))
    assert found.kept("weight").tolist() == [[False, True, False, True]]
    assert found.holds(model)


def test_one_number_too_many_and_masks_do_not_hold() -> None:
    model = small_network()
    plan = random_plan(model, 0)
    assert not plan.holds(model)
    masked = mask(model, plan)
    assert plan.holds(masked)
    gone = torch.nonzero(~plan.kept("2.weight"))[0]
    with torch.no_grad():
        masked.get_parameter("2.weight")[tuple(gone)] = 1e-45
    assert not plan.holds(masked)


# ------------------------------------------------------------------------------------------------ one after the other


@given(seeds, seeds, seeds)
@settings(max_examples=15)
def test_masks_meet_in_any_order(one: int, two: int, three: int) -> None:
    model = small_network()
    a, b, c = (random_plan(model, seed, 0.7) for seed in (one, two, three))
    assert a.then(b).then(c).same_as(a.then(b.then(c)))
    assert a.then(b).same_as(b.then(a))
    assert a.then(a).same_as(a)
    assert a.then(identity_masks(model)).same_as(a)
    both = {name: own & kept_of(b)[name] for name, own in kept_of(a).items()}
    assert_kept(a.then(b), both)
    assert a.then(b).fingerprint == a.fingerprint


def test_masks_of_some_tensors_meet_those_of_others() -> None:
    model = small_network()
    a, b = random_plan(model, 0, names=("0.weight",)), random_plan(model, 1, names=("2.weight",))
    found = a.then(b)
    assert set(found.masks) == {"0.weight", "2.weight"}
    assert torch.equal(found.kept("0.weight"), a.kept("0.weight"))
    assert torch.equal(found.kept("2.weight"), b.kept("2.weight"))


def test_masks_are_the_same_only_if_every_bit_is() -> None:
    model = small_network()
    a = random_plan(model, 0)
    other = kept_of(a)["2.weight"].copy()
    other[1, 1, 1, 1] ^= True
    kept = {name: torch.from_numpy(own) for name, own in kept_of(a).items()}
    assert a.same_as(plan_of(model, kept))
    assert not a.same_as(plan_of(model, kept | {"2.weight": torch.from_numpy(other)}))
    assert not a.same_as(plan_of(model, {"0.weight": kept["0.weight"]}))
    assert not a.same_as(MaskPlan(a.masks, "fedcba9876543210"))


@pytest.mark.parametrize(
    "other",
    [nn.Linear(3, 4), nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3))],
    ids=["names", "shapes"],
)
def test_masks_of_another_network_are_refused(other: nn.Module) -> None:
    model = small_network()
    a, b = identity_masks(model), identity_masks(other)
    with pytest.raises(PlanMismatchError, match=r"(?i)another|mask"):
        a.then(b)
    snapshot = Snapshot(model)
    with pytest.raises(PlanMismatchError, match=r"(?i)another|mask"):
        mask(model, b)
    snapshot.assert_unchanged()


def test_masks_of_another_shape_under_the_same_fingerprint_are_refused() -> None:
    one = MaskPlan({"w": Mask.of(("w",), coins((2, 6), 0))}, "0123456789abcdef")
    two = MaskPlan({"w": Mask.of(("w",), coins((3, 4), 0))}, "0123456789abcdef")
    with pytest.raises(PlanMismatchError, match="w"):
        one.then(two)


# ------------------------------------------------------------------------------------------------ files


@given(st.lists(shapes, min_size=1, max_size=4), seeds)
@settings(max_examples=40)
def test_a_file_gives_back_what_was_written(parts: list[tuple[int, ...]], seed: int) -> None:
    plan = loose_plan(parts, seed)
    found = MaskPlan.from_bytes(plan.to_bytes())
    assert found.same_as(plan)
    assert found.fingerprint == plan.fingerprint
    assert_kept(found, kept_of(plan))
    assert found.to_bytes() == plan.to_bytes()


def test_a_file_keeps_names_patterns_and_dimensions() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    kept = torch.tensor([True, True, False, False]).repeat(8, 2)
    masks = {
        "0.weight": Mask(
            ("0.weight", "2.weight"), (8, 8), Mask.of(("w",), kept).bits, Pattern(2, 4), 1
        ),
        "1.weight": Mask.of(("1.weight",), kept),
    }
    plan = MaskPlan(masks, identity_masks(model).fingerprint)
    found = MaskPlan.from_bytes(plan.to_bytes())
    assert found.masks["0.weight"].names == ("0.weight", "2.weight")
    assert found.masks["0.weight"].pattern == Pattern(2, 4)
    assert found.masks["0.weight"].dim == 1
    assert found.masks["1.weight"].pattern is None
    assert found.same_as(plan)


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    plan = random_plan(small_network(), 0)
    (tmp_path / "masks.safetensors").write_bytes(plan.to_bytes())
    with safetensors.safe_open(tmp_path / "masks.safetensors", framework="pt") as file:
        written = json.loads(file.metadata()["masks"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert written
    assert {tensor.dtype for tensor in tensors.values()} == {torch.uint8}
    packed = sorted(own.bits.tobytes() for own in plan.masks.values())
    assert sorted(t.numpy().tobytes() for t in tensors.values()) == packed
    assert len(plan.to_bytes()) < plan.num_weights / 8 + 2000


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def file_of(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def assert_clear_or_whole(data: bytes) -> bool:
    """Refused in one clear sentence, or a plan that works; whether it was refused."""
    try:
        found = MaskPlan.from_bytes(data)
    except ApoptosisError as error:
        refusal = str(error)
    else:
        refusal = None
        assert_works(found)
    assert refusal is None or 10 < len(refusal) < 1500
    return refusal is not None


def assert_works(found: MaskPlan) -> None:
    for name, own in found.masks.items():
        kept = found.kept(name)
        assert tuple(kept.shape) == own.shape
        assert int(kept.sum()) == own.num_kept <= own.numel == kept.numel()
    assert found.num_kept == sum(kept for kept, _ in found.counts().values())
    assert isinstance(found.fingerprint, str)
    assert MaskPlan.from_bytes(found.to_bytes()).same_as(found)


@given(st.data())
@settings(max_examples=250)
def test_flipped_bits_are_refused_or_harmless(data: st.DataObject) -> None:
    whole = bytearray(loose_plan([(3, 3), (2, 3, 5), (7,)], 0).to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_clear_or_whole(bytes(whole))


def test_every_cut_of_a_file_is_refused() -> None:
    whole = loose_plan([(3, 3), (2, 3, 5)], 0).to_bytes()
    for length in range(len(whole)):
        with pytest.raises(ApoptosisError, match=r"(?i)mask"):
            MaskPlan.from_bytes(whole[:length])


@given(st.binary(max_size=200))
@settings(max_examples=60)
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(ApoptosisError, match=r"(?i)mask"):
        MaskPlan.from_bytes(data)


@given(st.data())
@settings(max_examples=150)
def test_bytes_put_in_left_out_or_replaced_are_refused_or_harmless(data: st.DataObject) -> None:
    whole = loose_plan([(3, 3), (2, 3, 5)], 0).to_bytes()
    place = data.draw(st.integers(0, len(whole)))
    put, left_out = data.draw(st.binary(max_size=9)), data.draw(st.integers(0, 9))
    assert_clear_or_whole(whole[:place] + put + whole[place + left_out :])


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict | list):
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            found += leaves(own, (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    new = value.copy()
    new[path[0]] = replaced(value[path[0]], path[1:], by)
    return new


NONSENSE = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1.5, math.inf, math.nan, "", "x", "2:4"),
    *("9:1", [], {}, [[]], [1], [-3, -3], [0], ["a"], {"a": 1}, [3, 3, 3], [True, 9], "t0", ["t0"]),
)


def test_the_header_with_anything_replaced_is_refused_or_harmless() -> None:
    plan = loose_plan([(3, 3), (2, 3, 5), (0, 3)], 0)
    patterned = Mask(("p", "q"), (4, 4), Mask.of(("p",), coins((4, 4), 3)).bits, Pattern(2, 4), 1)
    plan = MaskPlan({**plan.masks, "p": patterned}, plan.fingerprint)
    header, body = header_of(plan.to_bytes())
    inner = json.loads(header["__metadata__"]["masks"])
    assert not assert_clear_or_whole(file_of(header, body))
    refused = 0
    for path in leaves(inner):
        for wrong in NONSENSE:
            text = json.dumps(replaced(inner, path, wrong))
            metadata = {**header["__metadata__"], "masks": text}
            refused += assert_clear_or_whole(file_of({**header, "__metadata__": metadata}, body))
    for path in leaves(header):
        for wrong in NONSENSE:
            refused += assert_clear_or_whole(file_of(replaced(header, path, wrong), body))
    assert refused > 100


def test_bits_beyond_the_last_entry_do_not_count() -> None:
    """A file may say anything in the padding of its last byte."""
    header, body = header_of(
        MaskPlan({"w": Mask.of(("w",), coins((3, 3), 0))}, "0" * 16).to_bytes()
    )
    assert len(body) % 8 in {0, 2}
    for byte in range(len(body)):
        for bit in range(8):
            changed = bytearray(body)
            changed[byte] ^= 1 << bit
            assert_clear_or_whole(file_of(header, bytes(changed)))


def test_safetensors_of_something_else_is_refused() -> None:
    for data in (
        safetensors.torch.save({"w": torch.ones(3)}),
        safetensors.torch.save({"w": torch.ones(3)}, {"masks": "{}"}),
        safetensors.torch.save({"w": torch.ones(3, dtype=torch.uint8)}, {"masks": "[]"}),
        safetensors.torch.save({}, {"masks": "null"}),
        safetensors.torch.save({}, {"masks": "[" * 20_000}),
    ):
        with pytest.raises(ApoptosisError, match=r"(?i)mask"):
            MaskPlan.from_bytes(data)


# ------------------------------------------------------------------------------------------------ cut


def drawn_plan(model: nn.Module, example: Tensor, seed: int) -> Any:
    rng = random.Random(seed)
    structure = trace(model, example)
    kept = {
        group.name: sorted(rng.sample(range(group.size), rng.randint(group.smallest, group.size)))
        for group in structure.groups
        if group.smallest < group.size
    }
    return structure.plan(kept)


def cut_case(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.parametrize("make", [small_network, Convolutions], ids=["chain", "norms"])
@pytest.mark.parametrize("seed", range(4))
def test_the_mask_of_what_is_cut_is_the_cut_of_the_mask(
    make: Callable[[], nn.Module], seed: int
) -> None:
    model = cut_case(make)
    masks, plan = random_plan(model, seed), drawn_plan(model, IMAGES, seed)
    plain = mask_by_hand(model, masks)
    small, small_masks = cut(plain, plan), masks.cut(plan)
    assert_kept(small_masks, kept_of(zeros_of(small, ("*",))))
    assert small_masks.fingerprint == identity_masks(small).fingerprint
    assert small_masks.holds(small)
    other = mask(cut(model, plan), small_masks)
    for name, own in small.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], own, rtol=0, atol=0)
    torch.testing.assert_close(other(IMAGES), small(IMAGES), rtol=0, atol=0)


def mask_by_hand(model: nn.Module, masks: MaskPlan) -> nn.Module:
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name in masks.masks:
            found.get_parameter(name).mul_(masks.kept(name))
    return found


def test_masks_are_cut_twice_as_plans_are() -> None:
    model = small_network()
    masks, first = random_plan(model, 0), drawn_plan(model, IMAGES, 1)
    small = cut(model, first)
    second = drawn_plan(small, IMAGES, 2)
    assert masks.cut(first).cut(second).same_as(masks.cut(first.then(second)))


def test_masks_of_a_network_with_sizes_in_its_code_are_cut() -> None:
    model = cut_case(InCode)
    structure = trace(model, ROWS)
    plan = structure.plan({g.name: range(0, g.size, 2) for g in structure.groups if g.smallest < 2})
    masks = random_plan(model, 0)
    small = cut(mask_by_hand(model, masks), plan)
    tensors = dict(small.state_dict())
    found = masks.cut(plan)
    for name in found.masks:
        assert torch.equal(tensors[name] != 0, found.kept(name))


def test_masks_are_not_cut_by_the_plan_of_another_network() -> None:
    masks, other = identity_masks(nn.Linear(3, 4)), small_network()
    with pytest.raises(PlanMismatchError, match=r"(?i)another|plan"):
        masks.cut(drawn_plan(other, IMAGES, 0))


def test_a_cut_network_keeps_the_masks_cut_or_none() -> None:
    """Never those of the network it came from, which no longer fit."""
    model = small_network()
    masks, plan = random_plan(model, 0), drawn_plan(model, IMAGES, 1)
    small = cut(mask(model, masks), plan)
    kept = masks_of(small)
    assert kept is None or kept.same_as(masks.cut(plan))
    small(IMAGES).square().sum().backward()
    torch.optim.SGD(small.parameters(), lr=0.1).step()
    torch.testing.assert_close(
        cut(mask(model, masks), plan)(IMAGES), cut(mask_by_hand(model, masks), plan)(IMAGES)
    )


def test_a_cut_along_the_inputs_leaves_no_pattern_behind_and_one_across_does() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    values = {name: p.detach() for name, p in net.named_parameters()}
    masks = make_masks(net, values, Sparsity(pattern="2:4"))
    plan = trace(net, torch.zeros(1, 8)).plan({"0": [0, 2, 5, 6]})
    cut_masks = masks.cut(plan).masks
    assert str(cut_masks["0.weight"].pattern) == "2:4"  # rows went
    assert cut_masks["2.weight"].pattern is None  # columns went, and neighbours with them


def test_joined_masks_tell_the_stricter_pattern_in_any_order() -> None:
    net = nn.Linear(8, 8)
    values = {"weight": net.weight.detach()}
    first, second, third = (
        make_masks(net, values, asked)
        for asked in (Sparsity(pattern="2:4"), Sparsity(pattern="6:8"), Sparsity(keep=0.9))
    )
    for one, other in ((first, second), (second, first), (first, third), (third, first)):
        assert str(one.then(other).masks["weight"].pattern) == "2:4"
        assert one.then(other).masks["weight"].fits(Pattern(2, 4), 1)
    assert not third.masks["weight"].fits(Pattern(2, 4), 1)


def test_a_mask_with_bits_behind_its_last_weight_is_refused() -> None:
    net = nn.Linear(3, 1)
    wrong = replace(identity_masks(net).masks["weight"], bits=np.array([0xFF], np.uint8))
    data = MaskPlan({"weight": wrong}, identity_masks(net).fingerprint).to_bytes()
    with pytest.raises(PlanMismatchError, match="more bits"):
        MaskPlan.from_bytes(data)
