"""Format 2: a network whose single weights were removed. Its plan is `masks.safetensors`, `MaskPlan.to_bytes` as it is.

A masked tensor is stored without what was removed. That is zero in every network that is saved, which `save` makes
sure of, and comes back as plain zero (a -0.0 loses its sign). The masks are kept again by the network that is loaded.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from apoptosis.checkpoint.dense import in_saved_types
from apoptosis.checkpoint.programs import program_digest
from apoptosis.checkpoint.record import MASKED, SavedRun, same_versions
from apoptosis.checkpoint.weights import Held, held_tensors
from apoptosis.errors import CheckpointError
from apoptosis.masks import Mask, MaskPlan, check_fits, mask_, masks_of
from apoptosis.structure import fingerprint_of

__all__ = ["MaskPart"]


@dataclass(frozen=True)
class MaskPart:
    """Masks, as one part of a checkpoint; what the methods are for stands in `kinds.Part`."""

    plan: MaskPlan
    format: ClassVar[int] = MASKED
    file: ClassVar[str] = "masks.safetensors"

    @staticmethod
    def from_bytes(data: bytes) -> "MaskPart":
        """Read `masks.safetensors`."""
        return MaskPart(MaskPlan.from_bytes(data))

    def to_bytes(self) -> bytes:
        """What `masks.safetensors` holds."""
        return self.plan.to_bytes()

    @property
    def delivery(self) -> str:
        """The network as it is, with masks."""
        return "masks"

    def tensors_of(self, model: nn.Module) -> dict[Held, Tensor]:
        """All of them, with how many numbers stay, if these masks are the network's and removed weights are zero."""
        tensors = held_tensors(model)
        try:
            check_fits(model, self.plan)
            self._check_places(tuple(tensors))
        except ValueError as error:  # a PlanMismatchError is one
            raise CheckpointError(
                f"The masks of the outcome are not for its network. {error} Nothing was written."
            ) from error
        present = self._others(masks_of(model))
        return {_checked(held, tensor, self, present): tensor for held, tensor in tensors.items()}

    def kept(self, held: Held) -> Tensor:
        """Where its numbers stay, of a tensor that is masked: under every mask, if a tied one has several."""
        first, *others = self.own_masks(held)
        kept = first.kept()
        for own in others:
            kept &= own.kept()
        return kept.reshape(-1)

    def num_kept(self, held: Held) -> int | None:
        """None where everything stays."""
        own = self.own_masks(held)
        if not own:
            return None
        num = own[0].num_kept if len(own) == 1 else _count(self.kept(held))
        return num if num < own[0].numel else None

    def check_agrees(self, run: SavedRun) -> None:
        """The masks are for the tensors of the record, and leave as many numbers as it says."""
        if fingerprint_of(run.shapes) != self.plan.fingerprint:
            raise ValueError("The masks are for a network of other names or shapes.")
        self._check_places(run.tensors)
        for held in run.tensors:
            if (num := self.num_kept(held)) != held.kept:
                stored = "all" if held.kept is None else held.kept
                stay = "all" if num is None else num
                raise ValueError(
                    f"{stay} numbers of {held.names[0]!r} stay and {stored} are saved."
                )

    def dense_shapes(self, run: SavedRun) -> dict[str, tuple[int, ...]]:
        """Masks change no shape."""
        return run.shapes

    def carry_out(self, dense: nn.Module, run: SavedRun, example_inputs: Any) -> nn.Module:  # noqa: ARG002 - nothing is traced
        """Nothing but types of numbers: masks change no operation."""
        found = program_digest(dense)
        may_differ = found is not None and run.program is not None and not same_versions(run)
        if found != run.program and not may_differ:
            raise CheckpointError(
                f"The network that was masked and {type(dense).__name__} do not do the same operations: one of them "
                "was rewritten as a program by a structured cut, or both were, differently. Load the cut network and "
                "give it: `load(path, dense=lambda: load(cut_path, dense=make_network))`."
            )
        return in_saved_types(dense, run)

    def finish_(self, model: nn.Module) -> None:
        """Keep the masks."""
        mask_(model, self.plan)

    def own_masks(self, held: Held) -> list[Mask]:
        """The masks of a tensor; more than one only where the names of a tied tensor were masked apart."""
        found = {key: self.plan.masks[key] for name in held.names for key in self._keys[name]}
        return list(found.values())

    def _others(self, present: MaskPlan | None) -> "MaskPart | None":
        """Masks that a network keeps, where they may say something else; not those from before it got other tensors."""
        if present is None or present.fingerprint != self.plan.fingerprint:
            return None
        return None if present.same_as(self.plan) else MaskPart(present)

    @cached_property
    def _keys(self) -> defaultdict[str, list[str]]:
        """Which masks a name is of."""
        keys = defaultdict[str, list[str]](list)
        for key, own in self.plan.masks.items():
            for name in {key, *own.names}:
                keys[name].append(key)
        return keys

    def _check_places(self, tensors: tuple[Held, ...]) -> None:
        """Every mask is for one tensor that is saved."""
        by_name = {name: held for held in tensors for name in held.names}
        for key, own in self.plan.masks.items():
            for name in (key, *own.names):
                held = by_name.get(name)
                if held is None:
                    raise ValueError(f"There is a mask of {name!r}, and no such tensor is saved.")
                if held.shape != own.shape:
                    raise ValueError(
                        f"The mask of {name!r} has shape {own.shape}, the tensor {held.shape}."
                    )
                if held is not by_name[key]:
                    raise ValueError(f"{key!r} and {name!r} have one mask and are two tensors.")


def _checked(held: Held, tensor: Tensor, masks: MaskPart, present: MaskPart | None) -> Held:
    """The tensor as it is stored, if what was removed is zero, and will be kept so by whoever loads it."""
    kept = _kept(held, masks, tensor)
    if kept is not None and (wrong := _count((tensor != 0) & ~kept)):
        raise CheckpointError(
            f"{wrong:,} of the {_count(~kept):,} weights of {held.names[0]!r} that the masks remove are not zero: "
            "the network was changed without keeping them. Put them on again with `mask_(model, masks)`, and train the "
            "network that keeps them, with a new optimiser or one that was told: `mask_optimizer_(optimizer, model)`. "
            "Nothing was written."
        )
    now = None if present is None else _kept(held, present, tensor)
    if now is not None and (lost := _count(~now if kept is None else kept & ~now)):
        raise CheckpointError(
            f"The network keeps other masks than those of the outcome: it has lost {lost:,} more weights of "
            f"{held.names[0]!r}, which would be trained again once it is loaded. Save the masks it keeps: "
            "`dataclasses.replace(outcome, plan=masks_of(model))`. Nothing was written."
        )
    return replace(held, kept=masks.num_kept(held))


def _kept(held: Held, masks: MaskPart, tensor: Tensor) -> Tensor | None:
    """Where its numbers stay, in its shape and beside it; None where they all do."""
    if masks.num_kept(held) is None:
        return None
    return masks.kept(held).view(held.shape).to(tensor.device)


def _count(where: Tensor) -> int:
    """How many are true; `sum` would make whole numbers of them all, eight times their memory."""
    return int(torch.count_nonzero(where))
