"""Pickles of CIFAR's own files, read without running anything.

A pickle is a program: it names functions and calls them. CIFAR's files, as their authors hand them out, need four
names, all of them to build numpy arrays. Here each of the four stands for a plain record of ours, so that not even
numpy is called by the pickle; any other name ends the reading. The bytes become an array only afterwards, and only if
they are unsigned bytes of the length that their shape says.
"""

import io
import math
import pickle
import pickletools
from reprlib import repr as shortly
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apoptosis.errors import DataError

__all__ = ["read_pickle"]


PLACES = ("PUT", "BINPUT", "LONG_BINPUT")
"""Operations with the number of a place; the unpickler has room for all that are before it."""


def read_pickle(content: bytes, what: str) -> dict[bytes, Any]:
    """The dict in a pickle, its keys as bytes, its arrays of bytes as numpy arrays.

    Args:
        content: the file.
        what: its name, for errors.

    Raises:
        DataError: it asks for a name that arrays do not need, is damaged, or holds no dict.
    """
    try:
        _check_asks_for_what_it_holds(content)
        reader = _Reader(io.BytesIO(content), encoding="bytes")
        reader.what = what
        return _dict(reader.load(), what)
    except DataError:
        raise
    except Exception as error:  # also what conversions of numbers and texts nobody can mean raise
        raise DataError(
            f"{what} is no whole pickle ({type(error).__name__}: {str(error)[:200]}). It was cut off or is another "
            "file; get it again."
        ) from error


def _check_asks_for_what_it_holds(content: bytes) -> None:
    """The unpickler makes room for what a length says before it looks what is there; here that is looked at first."""
    for operation, argument, _ in pickletools.genops(content):
        far = operation.name in PLACES and int(argument or 0) > len(content)
        if far or (operation.name == "FRAME" and int(argument or 0) > len(content)):
            raise ValueError(f"{operation.name} {argument} in {len(content)} bytes")


class _Record:
    """What may stand for a name. Every one takes a state, so that a pickle cannot set attributes of the class."""

    def __setstate__(self, state: Any) -> None:
        raise DataError("A pickle sets the state of something that has none.")


class _Dtype(_Record):
    """The arguments of `numpy.dtype`, as `b"u1"`; its state says only how bytes are ordered."""

    def __init__(self, code: Any = None, *_others: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass


class _Array(_Record):
    """The state of an array: version, shape, dtype, whether columns come first, and the bytes."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reconstruct(_Record):
    """An empty array, whatever it is called with: all that counts comes with the state."""

    def __new__(cls, *_args: Any) -> Any:
        return _Array()


class _Encode(_Record):
    """How Python 3 writes bytes for old readers: as text, to be encoded in latin-1."""

    def __new__(cls, text: Any = "", encoding: Any = "latin1", *_others: Any) -> Any:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise DataError(
                f"A pickle asks to encode in {shortly(encoding)}; arrays need only latin1."
            )
        return text.encode("latin1")


class _Reader(pickle.Unpickler):
    what = "the pickle"

    ALLOWED: ClassVar[dict[tuple[str, str], type[_Record]]] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,  # numpy 2
        ("_codecs", "encode"): _Encode,
    }

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in self.ALLOWED:
            raise DataError(
                f"{self.what} asks for {module}.{name}, which CIFAR's files do not need: nothing of it was run. Get "
                "the file again from where it is handed out, and look at where this one came from."
            )
        return self.ALLOWED[module, name]


def _dict(found: Any, what: str) -> dict[bytes, Any]:
    if not isinstance(found, dict):
        raise DataError(
            f"{what} holds a {type(found).__name__} where CIFAR's files hold a dict. Give the files as they are "
            "handed out."
        )
    return {
        key.encode() if isinstance(key, str) else key: (
            _array(value.state, what) if isinstance(value, _Array) else value
        )
        for key, value in found.items()
        if isinstance(key, (str, bytes))
    }


def _array(state: Any, what: str) -> NDArray[np.uint8]:
    match state:
        case (int(), tuple() as shape, _Dtype() as dtype, bool() as by_column, bytes() as content):
            pass
        case _:
            raise DataError(f"{what} holds an array without its bytes. Get the file again.")
    sizes = all(isinstance(size, int) and size >= 0 for size in shape)
    if dtype.code not in (b"u1", b"|u1", "u1", "|u1") or not sizes:
        raise DataError(
            f"{what} holds an array of type {shortly(dtype.code)} and shape {shortly(shape)}; CIFAR's are unsigned "
            "bytes. Give the files as they are handed out."
        )
    if math.prod(shape) != len(content):
        raise DataError(
            f"{what} holds {len(content)} bytes for an array of shape {shortly(shape)}. It is damaged; get it again."
        )
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_column else "C")
