"""Which single weights stay, by writing every entry down and sorting: nothing is selected, counted or packed cleverly.

An entry is (value, tensor, flat index). Larger values stay; of equals the one of the earlier tensor, then of the lower
index. Tensors come in the order of the dictionary, masks are dictionaries of numpy bools. Values become Python floats,
which hold every number of every format up to float64 exactly, and to which −0.0 and 0.0 are one number.
"""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from apoptosis.masks import Mask, MaskPlan, identity_masks, maskable

__all__ = [
    "CannotBeMetError",
    "assert_kept",
    "count_of",
    "emptied",
    "global_masks",
    "kept_of",
    "layer_masks",
    "nth_largest",
    "pattern_masks",
    "plan_of",
    "random_plan",
    "saliency",
    "stage_keeps",
    "stage_patterns",
]

Kept = dict[str, np.ndarray]


class CannotBeMetError(Exception):
    """Fixed shares leave the other tensors less than nothing, or more than they have."""


def count_of(keep: float, total: int) -> int:
    """How many of so many entries a share is; a product that is whole but for rounding counts as whole."""
    return math.floor(keep * total + 1e-9)


def global_masks(
    values: Mapping[str, Tensor],
    keep: float,
    *,
    start: Mapping[str, np.ndarray] | None = None,
    shares: Mapping[str, float] | None = None,
) -> Kept:
    """The largest of all tensors together; tensors with a share of their own are settled first."""
    total = sum(tensor.numel() for tensor in values.values())
    target = max(1, count_of(keep, total))
    fixed = {name: share for name in values if (share := share_of(name, shares)) is not None}
    stays: set[tuple[int, int]] = set()
    for place, name in enumerate(values):
        if name in fixed:
            own = ranked({place: name}, values, start)
            stays |= set(own[: count_of(fixed[name], values[name].numel())])
    free = {place: name for place, name in enumerate(values) if name not in fixed}
    left = target - len(stays)
    if left < 0 or left > sum(values[name].numel() for name in free.values()):
        raise CannotBeMetError(f"{left} entries for {list(free.values())}")
    stays |= set(ranked(free, values, start)[:left])
    return as_masks(stays, values)


def layer_masks(
    values: Mapping[str, Tensor],
    keep: float,
    *,
    start: Mapping[str, np.ndarray] | None = None,
    shares: Mapping[str, float] | None = None,
) -> Kept:
    """The largest of each tensor by itself."""
    stays: set[tuple[int, int]] = set()
    for place, name in enumerate(values):
        share = share_of(name, shares)
        count = count_of(keep if share is None else share, values[name].numel())
        stays |= set(ranked({place: name}, values, start)[:count])
    return as_masks(stays, values)


def pattern_masks(
    values: Mapping[str, Tensor],
    n: int,
    m: int,
    dims: Mapping[str, int],
    *,
    start: Mapping[str, np.ndarray] | None = None,
) -> Kept:
    """Of each m entries in a row along a tensor's dimension the n largest."""
    found: Kept = {}
    for name, tensor in values.items():
        shape, dim = tuple(tensor.shape), dims[name]
        kept = np.zeros(shape, dtype=bool)
        others = [range(size) for d, size in enumerate(shape) if d != dim]
        for rest in product(*others):
            for first in range(0, shape[dim], m):
                places = [(*rest[:dim], i, *rest[dim:]) for i in range(first, first + m)]
                if start is not None:
                    places = [place for place in places if start[name][place]]
                places.sort(key=lambda place: (-float(tensor[place]), place[dim]))
                for place in places[:n]:
                    kept[place] = True
        found[name] = kept
    return found


def ranked(
    places: Mapping[int, str],
    values: Mapping[str, Tensor],
    start: Mapping[str, np.ndarray] | None,
) -> list[tuple[int, int]]:
    """(tensor, flat index) of every entry that may stay, the first to stay first."""
    entries = []
    for place, name in places.items():
        may = None if start is None else start[name].reshape(-1)
        for index, value in enumerate(values[name].double().reshape(-1).tolist()):
            if may is None or may[index]:
                entries.append((-value, place, index))
    return [(place, index) for _, place, index in sorted(entries)]


def as_masks(stays: set[tuple[int, int]], values: Mapping[str, Tensor]) -> Kept:
    """The chosen entries as one array of bools per tensor."""
    found: Kept = {}
    for place, (name, tensor) in enumerate(values.items()):
        flat = [(place, index) in stays for index in range(tensor.numel())]
        found[name] = np.array(flat, dtype=bool).reshape(tuple(tensor.shape))
    return found


def share_of(name: str, shares: Mapping[str, float] | None) -> float | None:
    """The share of the last pattern that fits, as `Selection` has it."""
    found = [share for pattern, share in (shares or {}).items() if fnmatchcase(name, pattern)]
    return found[-1] if found else None


def emptied(kept: Mapping[str, np.ndarray]) -> list[str]:
    """Tensors of which nothing is left."""
    return [name for name, own in kept.items() if not own.any()]


def nth_largest(values: Iterable[Tensor], rank: int) -> tuple[float, int]:
    """The value that comes so-manyth from above, and how many of those equal to it are among the first so many."""
    flat = [value for tensor in values for value in tensor.double().reshape(-1).tolist()]
    flat.sort(reverse=True)
    value = flat[rank - 1]
    return value, sum(1 for other in flat[:rank] if other == value)


def saliency(score: Tensor, weight: Tensor, normalise: str, magnitude: float) -> Tensor:
    """|s| / norm(|s|) + magnitude·|w| entry by entry, in Python floats; a tensor without a norm is left at 0."""
    s = [abs(value) for value in score.double().reshape(-1).tolist()]
    w = [abs(value) for value in weight.double().reshape(-1).tolist()]
    scale = {
        "none": lambda: 1.0,
        "max": lambda: max(s),
        "l2": lambda: math.hypot(*s),
        "mean": lambda: math.fsum(s) / len(s),
    }[normalise]()
    found = [a / scale if scale > 0 else 0.0 for a in s]
    total = [a + magnitude * b for a, b in zip(found, w, strict=True)]
    return torch.tensor(total, dtype=torch.float64).view(score.shape)


def stage_keeps(keep: float, stages: int) -> list[float]:
    """What is left after each stage: every stage keeps the same share of what the one before left."""
    return [keep ** (t / stages) for t in range(1, stages + 1)]


def stage_patterns(n: int, m: int, stages: int) -> list[int]:
    """How many of each m are left after each stage, rounded up."""
    return [math.ceil(m * (n / m) ** (t / stages) - 1e-9) for t in range(1, stages + 1)]


# --------------------------------------------------------------------------------- plans of masks, made by hand


def plan_of(model: nn.Module, kept: Mapping[str, Tensor]) -> MaskPlan:
    """The masks as a plan for the model."""
    layers = maskable(model, tuple(kept))
    masks = {name: Mask.of(layers[name].names, own) for name, own in kept.items()}
    return MaskPlan(masks, identity_masks(model).fingerprint)


def random_plan(
    model: nn.Module, seed: int, share: float = 0.5, names: tuple[str, ...] = ("*",)
) -> MaskPlan:
    """Coins for every maskable weight; each tensor keeps its first entry and loses its last."""
    generator = torch.Generator().manual_seed(seed)
    kept: dict[str, Tensor] = {}
    for name, layer in maskable(model, names).items():
        flat = torch.rand(math.prod(layer.shape), generator=generator) < share
        flat[0], flat[-1] = True, False
        kept[name] = flat.view(layer.shape)
    return plan_of(model, kept)


def kept_of(plan: MaskPlan) -> Kept:
    """What a plan keeps, as numpy bools."""
    return {name: plan.kept(name).numpy() for name in plan.masks}


def assert_kept(plan: MaskPlan, expected: Mapping[str, np.ndarray]) -> None:
    """Raise unless the plan keeps exactly these entries of exactly these tensors, in this order, and says so."""
    assert list(plan.masks) == list(expected)
    for name, own in expected.items():
        found = plan.kept(name)
        assert found.dtype == torch.bool
        assert tuple(found.shape) == own.shape
        wrong = np.argwhere(found.numpy() != own)
        assert not len(wrong), f"{name} differs at {wrong[:5].tolist()} and {len(wrong)} in all"
    counts = {name: (int(own.sum()), own.size) for name, own in expected.items()}
    assert plan.counts() == counts
    assert plan.num_kept == sum(kept for kept, _ in counts.values())
    assert plan.num_weights == sum(size for _, size in counts.values())
