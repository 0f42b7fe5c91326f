"""Files that others may have made, opened and read: only regular ones, and no more of them than they can need.

A name may lead to a pipe that nobody fills, to a device without an end, or to a file of any size; a few bytes may say
that they stand for gigabytes. So every file whose content is held at once has a limit, and all of them stand here.

| limit | of | reason |
|---|---|---|
| `RECORD` | `run.json`, `plan.json`, settings of a run | a plan for 70 billion weights takes 110 MB |
| `HEADER` | the JSON before tensors | the limit of safetensors itself |
| `INDICES` | units that a plan names, in all | those of 70 billion weights are 40 million |
| `EXAMPLE` | numbers of recorded example inputs | a batch of 800 pictures for ImageNet |
| `OPTIONS` | a file of options | they are typed by hand |
| `IMAGE` | one image file, or a table of labels | ImageNet's table has 40 MB, its largest picture 15 MB |
| `PIXELS` | one picture | Pillow's own: more it calls a bomb |
| `CIFAR` | one file of CIFAR's authors, and all of them | CIFAR-100's largest has 155 MB, all have 186 MB |
| `ARRAYS` | an array in an `.npz` that is far smaller on the disk | as large as CIFAR's |
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = [
    "ARRAYS",
    "CIFAR",
    "EXAMPLE",
    "HEADER",
    "IMAGE",
    "INDICES",
    "OPTIONS",
    "PIXELS",
    "RECORD",
    "UnfitFileError",
    "check_length",
    "open_file",
    "read_file",
    "read_rest",
]

RECORD = 2**28
HEADER = 10**8
INDICES = 2**26
EXAMPLE = 2**27
OPTIONS = 2**20
IMAGE = 2**26
PIXELS = 2**28 // 3
CIFAR = 2**28
ARRAYS = 2**28


class UnfitFileError(OSError):
    """A file that is not read: it is no regular file, or larger than it can need to be."""


def open_file(path: Path) -> BufferedReader:
    """A regular file, open for reading; links are followed.

    Raises:
        IsADirectoryError: it is a folder.
        UnfitFileError: it is a pipe, a device, a socket.
    """
    # Without waiting: a pipe would else be waited for until somebody writes to it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, os.strerror(21), str(path))
        if not stat.S_ISREG(mode):
            raise UnfitFileError(f"{path} is {_kind(mode)}, and a plain file is read here")
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        UnfitFileError: it is larger, or no regular file.
    """  # noqa: DOC502 - by the functions that are called
    with open_file(path) as stream:
        return read_rest(stream, path, most)


def read_rest(stream: BufferedReader, path: Path, most: int) -> bytes:
    """What is left of an open file of at most so many bytes.

    Raises:
        UnfitFileError: it is larger.
    """  # noqa: DOC502 - by `check_length`
    size = os.fstat(stream.fileno()).st_size
    check_length(path, size, most)
    return stream.read(size)  # and not what it may have grown by


def check_length(what: object, num_bytes: int, most: int) -> None:
    """Refuse what is longer than a limit.

    Raises:
        UnfitFileError: it is.
    """
    if num_bytes > most:
        raise UnfitFileError(f"{what} has {num_bytes:,} bytes, and at most {most:,} are read")


def _kind(mode: int) -> str:
    kinds = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISBLK: "a device"}
    return next((name for test, name in kinds.items() if test(mode)), "a device")
