"""`MaskPlan`: which single weights of a network stay, one bit each.

A plan is data about names and shapes; it holds no numbers of the network and is applied by `keeping.mask`. Bits are
packed, eight weights to a byte, as they are in the file: a safetensors file whose tensors are the bits and whose header
carries what they mean as JSON. So anybody can read it without this library:

    bits[q // 8] >> (q % 8) & 1     is 1 where weight q of the flattened tensor stays.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apoptosis.errors import PlanMismatchError
from apoptosis.masks.layers import check_not_scripted, maskable
from apoptosis.masks.pattern import Pattern
from apoptosis.structure import Plan, fingerprint_of, model_tensors

__all__ = ["Mask", "MaskPlan", "check_fits", "fingerprint", "identity_masks", "zeros_of"]

FORMAT = 1
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
"""How many bits of a byte are set."""


@dataclass(frozen=True, eq=False)
class Mask:
    """What stays of one tensor. `names` has all of a tied one's; the first is the key."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    bits: NDArray[np.uint8] = field(repr=False)
    pattern: Pattern | None = None
    dim: int | None = None
    """Along which dimension the pattern runs."""

    @staticmethod
    def of(
        names: Iterable[str], kept: Tensor, pattern: Pattern | None = None, dim: int | None = None
    ) -> "Mask":
        """Of a tensor that is true where a weight stays."""
        flat = kept.detach().cpu().contiguous().reshape(-1).numpy()
        return Mask(
            tuple(names), tuple(kept.shape), np.packbits(flat, bitorder="little"), pattern, dim
        )

    def kept(self) -> Tensor:
        """True where a weight stays, on the CPU."""
        flat = np.unpackbits(self.bits, count=self.numel, bitorder="little")
        return torch.from_numpy(flat.view(np.bool_)).view(self.shape)

    def joined(self, other: "Mask") -> "Mask":
        """What stays under both; fewer weights fit both patterns, and the stricter one is told.

        Raises:
            PlanMismatchError: they have different shapes.
        """
        if self.shape != other.shape:
            raise PlanMismatchError(
                f"One mask of {self.names[0]!r} has shape {self.shape}, the other {other.shape}."
            )
        told = min((self, other), key=_strictness)
        return replace(self, bits=self.bits & other.bits, pattern=told.pattern, dim=told.dim)

    def fits(self, pattern: Pattern, dim: int) -> bool:
        """Whether at most N of every M in a row along a dimension stay, whatever `pattern` says."""
        if self.shape[dim] % pattern.m:
            return False
        rows = self.kept().movedim(dim, -1).unflatten(-1, (-1, pattern.m))
        return bool((rows.sum(-1) <= pattern.n).all())

    @property
    def numel(self) -> int:
        """Weights of the tensor."""
        return prod(self.shape)

    @property
    def num_kept(self) -> int:
        """Weights that stay."""
        return int(_ONES[self.bits].sum(dtype=np.int64))


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """Masks by the first name of their tensors; `fingerprint` names the network they are for.

    >>> masks = identity_masks(nn.Linear(4, 2))
    >>> masks
    MaskPlan(1 tensor, 8 of 8 weights)
    """

    masks: Mapping[str, Mask]
    fingerprint: str

    def __repr__(self) -> str:
        tensors = f"{len(self.masks)} tensor{'s' if len(self.masks) != 1 else ''}"
        return f"MaskPlan({tensors}, {self.num_kept:,} of {self.num_weights:,} weights)"

    @property
    def num_weights(self) -> int:
        """Weights that could have gone."""
        return sum(mask.numel for mask in self.masks.values())

    @property
    def num_kept(self) -> int:
        """Weights that stay."""
        return sum(mask.num_kept for mask in self.masks.values())

    @property
    def density(self) -> float:
        """The share of them that stays."""
        return self.num_kept / max(1, self.num_weights)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Kept and all weights of each tensor."""
        return {name: (mask.num_kept, mask.numel) for name, mask in self.masks.items()}

    def kept(self, name: str) -> Tensor:
        """True where a weight of this tensor stays, on the CPU."""
        return self.masks[name].kept()

    def then(self, later: "MaskPlan") -> "MaskPlan":
        """What stays after both; for the same network, in any order."""
        if later.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                "The second masks were made for another network than the first ones: names or shapes of its tensors "
                "differ. After a structured cut, take masks along with `masks.cut(plan)` first."
            )
        joined = dict(self.masks)
        for name, mask in later.masks.items():
            joined[name] = joined[name].joined(mask) if name in joined else mask
        return MaskPlan(joined, self.fingerprint)

    def cut(self, plan: Plan) -> "MaskPlan":
        """The masks of what a structured plan makes of the network.

        Raises:
            PlanMismatchError: the plan is for another network.
        """
        if plan.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                "The plan was made for another network than these masks: names or shapes of its tensors differ."
            )
        cuts = {name: cut for cut in plan.tensors for name in cut.names}
        made: dict[str, Mask] = {}
        for name, mask in self.masks.items():
            kept = mask.kept()
            along = cuts[name].kept if name in cuts else {}
            for dim, indices in along.items():
                kept = kept.index_select(dim, torch.as_tensor(indices))
            broken = mask.dim in along  # N:M counts neighbours, and those have changed
            pattern = None if broken else mask.pattern
            made[name] = Mask.of(mask.names, kept, pattern, mask.dim if pattern else None)
        return MaskPlan(made, plan.fingerprint_after)

    def same_as(self, other: "MaskPlan") -> bool:
        """Whether the same weights of the same network stay."""
        return (
            self.fingerprint == other.fingerprint
            and self.masks.keys() == other.masks.keys()
            and all(
                mask.shape == other.masks[name].shape
                and np.array_equal(mask.bits, other.masks[name].bits)
                for name, mask in self.masks.items()
            )
        )

    def holds(self, model: nn.Module) -> bool:
        """Whether every weight that is to be gone is exactly zero."""
        held = check_fits(model, self)
        return all(
            not held[name][~mask.kept().to(held[name].device)].any()
            for name, mask in self.masks.items()
        )

    def to_bytes(self) -> bytes:
        """A safetensors file."""
        header: dict[str, Any] = {"__metadata__": {"format": "np", "masks": self._described()}}
        end = 0
        for name, mask in self.masks.items():
            begin, end = end, end + len(mask.bits)
            header[name] = {"dtype": "U8", "shape": [len(mask.bits)], "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        bits = b"".join(mask.bits.tobytes() for mask in self.masks.values())
        return len(text).to_bytes(8, "little") + text + bits

    @staticmethod
    def from_bytes(data: bytes) -> "MaskPlan":
        """Read the file back; anything that is not one is refused with what is wrong."""
        try:
            return _read(data)
        except PlanMismatchError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PlanMismatchError(
                f"These are no masks: {type(error).__name__}: {str(error)[:200]}. Masks are a safetensors file that "
                "`save_masks` or `MaskPlan.to_bytes` has written, unchanged."
            ) from error

    def _described(self) -> str:
        described = {
            name: {
                "names": mask.names,
                "shape": mask.shape,
                "pattern": mask.pattern and str(mask.pattern),
                "dim": mask.dim,
                "sha256": hashlib.sha256(mask.bits.tobytes()).hexdigest(),
            }
            for name, mask in self.masks.items()
        }
        content = {"format": FORMAT, "fingerprint": self.fingerprint, "tensors": described}
        return json.dumps({"checksum": _checksum(content)} | content)


def identity_masks(model: nn.Module, names: Iterable[str] = ("*",)) -> MaskPlan:
    """Masks under which everything stays."""
    layers = maskable(model, names)
    made = {
        name: Mask.of(own.names, torch.ones(own.shape, dtype=torch.bool))
        for name, own in layers.items()
    }
    return MaskPlan(made, fingerprint(model))


def zeros_of(model: nn.Module, names: Iterable[str] = ("*",)) -> MaskPlan:
    """Masks of what a model has already lost: its weights that are exactly zero are gone."""
    layers, held = maskable(model, names), model_tensors(model)
    made = {name: Mask.of(own.names, held[name].detach() != 0) for name, own in layers.items()}
    return MaskPlan(made, fingerprint(model))


def fingerprint(model: nn.Module) -> str:
    """Names a network by the names and shapes of its state."""
    state = model.state_dict(keep_vars=True)
    return fingerprint_of(
        {name: tuple(item.shape) for name, item in state.items() if isinstance(item, Tensor)}
    )


def check_fits(model: nn.Module, plan: MaskPlan) -> dict[str, Tensor]:
    """The model's tensors by name, if the masks are for it.

    Raises:
        PlanMismatchError: they are for another one.
    """
    check_not_scripted(model)
    held = model_tensors(model)
    remedy = "Make masks for this one, or give the network they were made for."
    for key, mask in plan.masks.items():
        if key not in mask.names:
            raise PlanMismatchError(
                f"A mask stands under {key!r}, which is not among its own names: {', '.join(mask.names) or 'none'}."
            )
        for name in mask.names:
            if name not in held:
                raise PlanMismatchError(
                    f"The masks are for a network with {name!r}; {type(model).__name__} has none. {remedy}"
                )
            if (found := tuple(held[name].shape)) != mask.shape:
                raise PlanMismatchError(
                    f"The mask of {name!r} has shape {mask.shape}, the weight of this {type(model).__name__} {found}. "
                    f"{remedy}"
                )
        if not isinstance(held[key], nn.Parameter) or not held[key].is_floating_point():
            raise PlanMismatchError(
                f"{key!r} is no floating-point parameter, so no mask of it can be kept. {remedy}"
            )
        if len({id(held[name]) for name in mask.names}) > 1:
            raise PlanMismatchError(
                f"{' and '.join(mask.names)} were one tensor when the masks were made and are several now. Tie them "
                "again, or make new masks."
            )
    if fingerprint(model) != plan.fingerprint:
        raise PlanMismatchError(
            f"The masks are for a network whose other tensors have other names or shapes than those of this "
            f"{type(model).__name__}. {remedy}"
        )
    return held


def _strictness(mask: Mask) -> tuple[float, str]:
    return (1.0, "") if mask.pattern is None else (mask.pattern.density, str(mask.pattern))


def _checksum(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(data: bytes) -> MaskPlan:
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or start > len(data):
        raise ValueError("the file is cut short")
    header = json.loads(data[8:start])
    content = json.loads(header.pop("__metadata__")["masks"])
    if content["format"] != FORMAT:
        raise PlanMismatchError(
            f"The masks have format {str(content['format'])[:20]}; this version reads format {FORMAT}. Use the "
            "version that wrote them."
        )
    if content.pop("checksum") != _checksum(content):
        raise ValueError("the description of the masks was changed after it was written")
    if header.keys() != content["tensors"].keys():
        raise ValueError("the description names other tensors than the file holds")
    made = {
        name: _read_mask(data, start, name, header[name], own)
        for name, own in content["tensors"].items()
    }
    if sum(len(mask.bits) for mask in made.values()) != len(data) - start:
        raise ValueError("the file holds more or less than its header says")
    return MaskPlan(made, content["fingerprint"])


def _read_mask(data: bytes, start: int, name: str, entry: Any, described: Any) -> Mask:
    begin, end = entry["data_offsets"]
    names, shape = tuple(described["names"]), tuple(described["shape"])
    if name not in names or not all(isinstance(other, str) for other in names):
        raise ValueError(f"{names} are no names of {name!r}")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape} is no shape")
    if not all(type(n) is int for n in (begin, end)) or not 0 <= begin <= end <= len(data) - start:
        raise ValueError("a mask would stand behind the end of the file")
    bits = np.frombuffer(data, np.uint8, end - begin, start + begin)
    if -(-prod(shape) // 8) != len(bits) or entry["dtype"] != "U8" or entry["shape"] != [len(bits)]:
        raise ValueError(f"{len(bits)} bytes are no mask of shape {shape}")
    if hashlib.sha256(bits.tobytes()).hexdigest() != described["sha256"]:
        raise ValueError("bits were changed after they were written")
    if prod(shape) % 8 and bits[-1] >> prod(shape) % 8:
        raise ValueError("a mask has more bits than its tensor has weights")
    pattern = described["pattern"]
    return Mask(
        names,
        shape,
        bits,
        None if pattern is None else Pattern.parse(pattern),
        described["dim"],
    )
