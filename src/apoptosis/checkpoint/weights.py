"""Tensors of a network as one safetensors file, and back, bit for bit.

A tensor that a network holds under several names is stored once, under the first of them. The file has numbers in plain
order; how they lay in memory (channels last, transposed) stands in the `Held` of the record, for kernels are chosen by
it and round differently. Of a masked tensor, the file has the numbers that stay, in the same order and as one row; the
mask says where they belong. Writing goes tensor by tensor, so that nothing is held twice.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from apoptosis.checkpoint.folders import sync_file
from apoptosis.checkpoint.number_types import CODES, DTYPES, dtype_name
from apoptosis.errors import CheckpointError
from apoptosis.reading import HEADER, check_length
from apoptosis.structure import model_tensors

__all__ = [
    "Held",
    "Kept",
    "held_tensors",
    "num_bytes",
    "read_weights",
    "write_weights",
]

CHUNK_BYTES = 2**22
"""Written at a time: picking kept numbers takes some more memory for as many."""


@dataclass(frozen=True)
class Held:
    """One tensor of the network: every name it has, and what a file of numbers does not tell."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    """How it lies in memory, where that is not the plain order."""
    kept: int | None = None
    """As many of its numbers are in the file, where a mask has removed some."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return self.shape if self.kept is None else (self.kept,)

    @property
    def bytes(self) -> int:
        """What its numbers take in the file."""
        return prod(self.stored_shape) * DTYPES[self.dtype].itemsize


Kept = Callable[[Held], Tensor]
"""True where a number of a tensor with `Held.kept` stays; on the CPU, in plain order, as one row."""


def held_tensors(model: nn.Module) -> dict[Held, Tensor]:
    """What of a network is saved: its parameters and persistent buffers, each once.

    Raises:
        CheckpointError: the network holds something that has no numbers, or that cannot be written.
    """
    known, names = model_tensors(model), dict[int, list[str]]()
    for name, item in model.state_dict(keep_vars=True).items():
        if not isinstance(item, Tensor) and name.rpartition(".")[2] == "_extra_state":
            continue
        _check_can_be_saved(name, item, known)
        names.setdefault(id(known[name]), []).append(name)
    found: dict[Held, Tensor] = {}
    # The widest numbers first: so each stands in the file at a multiple of its width.
    for own in sorted(names.values(), key=lambda own: -known[own[0]].dtype.itemsize):
        tensor = known[own[0]]
        held = Held(
            tuple(own),
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            tensor.requires_grad,
            _odd_strides(tensor),
        )
        found[held] = tensor.detach()
    return found


def num_bytes(tensors: Mapping[Held, Tensor]) -> int:
    """How long the file of these tensors is."""
    return len(_header(tensors)) + sum(held.bytes for held in tensors)


def write_weights(path: Path, tensors: Mapping[Held, Tensor], kept: Kept | None = None) -> str:
    """Write the file, wait for the disk, and return its sha256; `kept` is asked for what has a `Held.kept`."""
    digest = hashlib.sha256()
    with path.open("xb") as stream:
        _write(stream, digest, _header(tensors))
        for held, tensor in tensors.items():
            for numbers in _parts(tensor, _row(held, kept)):
                _write(stream, digest, numbers)
        sync_file(stream)
    return digest.hexdigest()


def read_weights(
    stream: BufferedReader, tensors: tuple[Held, ...], kept: Kept | None = None
) -> dict[str, Tensor]:
    """The numbers by the first name of each tensor, laid out as they were; zeros where a mask has removed some.

    From an open file whose checksum has been compared: opened again by its name, it might be another one by now.

    Raises:
        CheckpointError: the file holds other tensors than these.
    """
    try:
        length = os.fstat(stream.fileno()).st_size
        stream.seek(0)
        start = 8 + int.from_bytes(stream.read(8), "little")
        check_length("its header", min(start, length) - 8, HEADER)
        entries = json.loads(stream.read(min(start, length) - 8))
        entries.pop("__metadata__", None)
        _check_same_names(entries.keys(), {held.names[0] for held in tensors})
        return {
            held.names[0]: _laid_out(_read(stream, start, entries, held), held, _row(held, kept))
            for held in tensors
        }
    except (LookupError, TypeError, ValueError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"model.safetensors does not hold what run.json says: {str(error)[:300]}. The files were not written "
            "together; save the checkpoint again."
        ) from error


def _row(held: Held, kept: Kept | None) -> Tensor | None:
    if held.kept is None:
        return None
    assert kept is not None, "a tensor of which numbers are missing has a mask"
    return kept(held)


def _parts(tensor: Tensor, row: Tensor | None) -> Iterator[Any]:
    """The numbers that are written, a few at a time."""
    flat = tensor.resolve_conj().cpu().contiguous().reshape(-1)
    step = CHUNK_BYTES // flat.itemsize
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        if row is not None:
            part = part[row[start : start + step]]
        if part.numel():
            yield part.view(torch.uint8).numpy().data


def _write(stream: BinaryIO, digest: Any, part: Any) -> None:
    stream.write(part)
    digest.update(part)


def _header(tensors: Mapping[Held, Tensor]) -> bytes:
    """Length, then JSON, filled up with spaces so that numbers begin at a multiple of eight."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for held in tensors:
        begin, end = end, end + held.bytes
        code = CODES[DTYPES[held.dtype]]
        shape = held.stored_shape
        entries[held.names[0]] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_same_names(found: Set[str], expected: Set[str]) -> None:
    for name in sorted(found ^ expected):
        where = "the file of tensors" if name in found else "run.json"
        raise ValueError(f"{name!r} stands in {where} alone")


def _read(stream: BufferedReader, start: int, entries: Mapping[str, Any], held: Held) -> Tensor:
    entry = entries[held.names[0]]
    dtype, (begin, end) = DTYPES[held.dtype], entry["data_offsets"]
    expected, found = (CODES[dtype], held.stored_shape), (entry["dtype"], tuple(entry["shape"]))
    if found != expected or end - begin != held.bytes:
        raise ValueError(
            f"{held.names[0]!r} is {found} in the file of tensors, {expected} in run.json"
        )
    if not 0 <= begin <= end <= os.fstat(stream.fileno()).st_size - start:
        raise ValueError(f"{held.names[0]!r} would stand behind the end of the file")
    flat = torch.empty(prod(held.stored_shape), dtype=dtype, device="cpu")
    if flat.numel():
        stream.seek(start + begin)
        stream.readinto(flat.view(torch.uint8).numpy().data)
    return flat


def _laid_out(numbers: Tensor, held: Held, row: Tensor | None) -> Tensor:
    """A row of numbers in the shape and memory order of its tensor."""
    flat = numbers
    if row is not None:
        flat = torch.zeros(prod(held.shape), dtype=numbers.dtype, device="cpu").masked_scatter_(
            row, numbers
        )
    if held.strides is None:
        return flat.view(held.shape)
    laid = torch.empty_strided(held.shape, held.strides, dtype=flat.dtype, device="cpu")
    return laid.copy_(flat.view(held.shape))


def _odd_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides that fill memory without gaps in another order than the plain one."""
    strides, plain = tensor.stride(), torch.empty(tensor.shape, device="meta").stride()
    dense = fills_memory(tuple(tensor.shape), strides)
    return strides if dense and strides != plain else None


def fills_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether every number has a place of its own and no place is left over."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return 0 not in shape


def _check_can_be_saved(name: str, item: Any, known: Mapping[str, Tensor]) -> None:
    if name not in known or not isinstance(item, Tensor):
        raise CheckpointError(
            f"The network's state has an entry {name!r} ({type(item).__name__}) that is no parameter or buffer. Hold "
            "it as a buffer, or as extra state (`get_extra_state`) of plain JSON values. Nothing was written."
        )
    plain = type(known[name]) in (Tensor, nn.Parameter, nn.Buffer)
    if not plain or item.layout != torch.strided or item.is_meta or item.dtype not in CODES:
        what = f"{type(known[name]).__name__}, {item.dtype}, {item.layout}, {item.device}"
        raise CheckpointError(
            f"{name!r} ({what}) cannot be saved: checkpoints hold plain dense tensors with numbers, of types "
            f"{', '.join(DTYPES)}. Convert it first. Nothing was written."
        )
