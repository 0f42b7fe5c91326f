"""Coordinates that a plan counts on: tensors that were turned before it was made, and a digest of their numbers.

Where the dimensions of attention heads were mixed (`alignment`), dimension 3 of the turned network is no dimension of
the one before. A plan for the one fits the other by its shapes and is wrong for it. So a turned network says which of
its tensors were turned, a plan made for it has a digest of them, and it is carried out on a network with those numbers
alone.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apoptosis.structure.recording import model_tensors

__all__ = [
    "Basis",
    "basis_of",
    "digest_of",
    "mark_turned_",
    "network_digest",
    "sha256_of",
    "turned_digest",
]

TURNED = "_turned_tensors"
"""An attribute of a module: names of its tensors. Copies have it too, state dicts do not."""


@dataclass(frozen=True)
class Basis:
    """Names of turned tensors, and a digest of their numbers as float32."""

    names: tuple[str, ...]
    digest: str


def mark_turned_(model: nn.Module, names: Iterable[str]) -> None:
    """Let a network say that these of its tensors were turned, besides those that it says already."""
    vars(model)[TURNED] = tuple(sorted({*vars(model).get(TURNED, ()), *names}))


def basis_of(model: nn.Module) -> Basis | None:
    """What plans for a network count on; None where nothing was turned, or it has no numbers."""
    marked = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in vars(module).get(TURNED, ())
    }
    held = model_tensors(model) if marked else {}
    names = tuple(sorted(marked & held.keys()))
    if not names or any(held[name].is_meta for name in names):
        return None
    return Basis(names, turned_digest({name: held[name] for name in names}))


def turned_digest(tensors: Mapping[str, Tensor]) -> str:
    """The same for a network in float64 that was one in float32."""
    return digest_of({name: own.detach().float() for name, own in tensors.items()})


def network_digest(model: nn.Module) -> str:
    """Sixteen letters that tell a network from others of its shapes: by parameters and persistent buffers."""
    held = model.state_dict(keep_vars=True)
    return digest_of({n: own for n, own in held.items() if isinstance(own, Tensor)})


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Sixteen letters that tell these numbers from others."""
    return sha256_of(tensors)[:16]


def sha256_of(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Of a text, and of names, types, shapes and numbers of tensors; one at a time comes to the CPU."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        own = tensors[name].detach()
        digest.update(f"{name} {own.dtype} {tuple(own.shape)}".encode())
        if own.numel() and not own.is_meta:
            own = own if own.layout == torch.strided else own.to_dense()
            flat = own.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
