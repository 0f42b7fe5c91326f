"""Networks that have lost single weights at random, and what a file of their numbers must weigh."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import nn

from apoptosis.masks import Mask, MaskPlan, Pattern, identity_masks, mask
from apoptosis.records import Outcome, Spending
from oracles.small_networks import step

__all__ = ["masked", "num_model_bytes", "random_masks"]


def random_masks(model: nn.Module, keep: float, names: tuple[str, ...] = ("*",)) -> MaskPlan:
    """Each weight stays by a throw of a coin."""
    every = identity_masks(model, names)
    generator = torch.Generator().manual_seed(1)
    return MaskPlan(
        {
            key: Mask.of(own.names, torch.rand(own.shape, generator=generator) < keep)
            for key, own in every.masks.items()
        },
        every.fingerprint,
    )


def two_of_four(model: nn.Module, names: tuple[str, ...]) -> MaskPlan:
    """Every second weight along the inputs."""
    every = identity_masks(model, names)
    made: dict[str, Mask] = {}
    for key, own in every.masks.items():
        kept = torch.zeros(own.shape, dtype=torch.bool)
        kept[:, ::2] = True
        made[key] = Mask.of(own.names, kept, Pattern(2, 4), 1)
    return MaskPlan(made, every.fingerprint)


def masked(
    make: Callable[[], nn.Module],
    *,
    keep: float = 0.3,
    dtype: torch.dtype | None = None,
    masks: Callable[[nn.Module], MaskPlan] | None = None,
) -> Outcome[MaskPlan]:
    """A network that keeps random masks, with a history as `sparsify` leaves it."""
    torch.manual_seed(0)
    model = make().eval()
    if dtype is not None:
        model = model.to(dtype)
    plan = random_masks(model, keep) if masks is None else masks(model)
    return Outcome(
        mask(model, plan),
        plan,
        (replace(step(), macs=None),),
        (Spending("weights", keep, plan.density, plan.num_weights, plan.num_kept),),
        {"sparsity": {"keep": keep}},
    )


def num_model_bytes(model: nn.Module, masks: MaskPlan) -> int:
    """Of `model.safetensors`: each tensor once, dense or what stays of it, behind a header with one entry for each."""
    state, seen, entries, end = model.state_dict(keep_vars=True), set[int](), {}, 0
    for name, tensor in sorted(state.items(), key=lambda item: -item[1].dtype.itemsize):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        kept = prod(tensor.shape)
        shape = list(tensor.shape)
        if name in masks.masks and (left := int(masks.kept(name).sum())) < kept:
            kept, shape = left, [left]
        begin, end = end, end + kept * tensor.dtype.itemsize
        code = {8: "F64", 4: "F32", 2: "F16"}[tensor.dtype.itemsize]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":"))
    return 8 + -(-len(header) // 8) * 8 + end
