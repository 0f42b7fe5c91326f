"""The files that CIFAR comes in: one `.npz`, or the authors' folder of pickles, unpacked or as a tar file.

Whatever the layout, the result is the same four arrays: x_train and x_test, bytes `(n, 32, 32, 3)`, y_train and y_test.
"""

import gzip
import io
import math
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from apoptosis.data.safe_pickles import read_pickle
from apoptosis.errors import DataError
from apoptosis.reading import ARRAYS, CIFAR, UnfitFileError, check_length, open_file, read_file

__all__ = ["LAYOUTS", "Layout", "check_is_file", "read_npz", "read_python", "unpacked"]

NAMES = ("x_train", "y_train", "x_test", "y_test")
MOST_PACKED = 20
"""Times smaller than its content a member of a zip file may be where that is large; pictures are not three times."""


@dataclass(frozen=True)
class Layout:
    """What the authors' folder holds, and where it is to be had."""

    folder: str
    train: tuple[str, ...]
    test: str
    labels: bytes
    archive: str

    @property
    def remedy(self) -> str:
        """What a person can do who has no such files."""
        return (
            f"Get https://www.cs.toronto.edu/~kriz/{self.archive} and give its path (it need not be unpacked), or that "
            f"of the folder {self.folder}, or of an .npz with {', '.join(NAMES)}."
        )


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "cifar10": Layout(
            folder="cifar-10-batches-py",
            train=tuple(f"data_batch_{number}" for number in range(1, 6)),
            test="test_batch",
            labels=b"labels",
            archive="cifar-10-python.tar.gz",
        ),
        "cifar100": Layout(
            folder="cifar-100-python",
            train=("train",),
            test="test",
            labels=b"fine_labels",
            archive="cifar-100-python.tar.gz",
        ),
    }
)


def check_is_file(path: Path) -> None:
    """Refuse pipes and devices, before anybody waits for them.

    Raises:
        DataError: it is one.
    """
    try:
        open_file(path).close()
    except UnfitFileError as error:
        raise DataError(f"{error}. Give a file of data.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Give one that may be read.") from error


def read_npz(path: Path, names: Sequence[str] = NAMES) -> dict[str, NDArray[Any]]:
    """Arrays of an `.npz`, all four unless said.

    Raises:
        DataError: it is damaged, lacks one, or holds one that only a pickle can hold.
    """
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as held:
            _check_members(held, names)
            missing = [name for name in names if name not in held]
            if not missing:
                return {name: held[name] for name in names}
            found = ", ".join(held.files) or "nothing"
    except UnfitFileError as error:
        raise DataError(f"{path}: {error}. Write it again with np.savez.") from error
    except (
        Exception
    ) as error:  # a damaged header makes numpy raise whatever its parser stumbles over
        raise DataError(
            f"{path} cannot be read as an .npz with {', '.join(NAMES)} ({type(error).__name__}: {error}). It is "
            "damaged, or another file; write it again with np.savez, arrays of numbers only."
        ) from error
    raise DataError(
        f"{path} has no {', '.join(missing)}; found {found}. Write an .npz with {', '.join(NAMES)}."
    )


def _check_members(held: Any, names: Sequence[str]) -> None:
    """Arrays have as many bytes as their headers say, and are not made of next to nothing."""
    for name in names:
        if name not in held:
            continue
        about = held.zip.getinfo(f"{name}.npy")
        if about.file_size > MOST_PACKED * about.compress_size:
            check_length(name, about.file_size, ARRAYS)
        with held.zip.open(about) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0
            read = np.lib.format.read_array_header_2_0 if version == (2, 0) else read
            shape, _, dtype = read(member)
            expected = math.prod(shape) * dtype.itemsize
            found = about.file_size - member.tell()
        if expected != found and not dtype.hasobject:
            raise ValueError(f"{name} has {found:,} bytes for an array of shape {shape}, {dtype}")


def read_python(path: Path, layout: Layout) -> dict[str, NDArray[Any]]:
    """The four arrays of the authors' folder or tar file.

    Raises:
        DataError: a file is missing or damaged, or a pickle asks for more than arrays.
    """
    wanted = (*layout.train, layout.test)
    contents = (_from_folder if path.is_dir() else _from_tar)(path, layout.folder, wanted)
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)} of {layout.folder}. {layout.remedy}")
    parts = {name: _part(contents[name], f"{path}, {name}", layout) for name in wanted}
    train = [parts[name] for name in layout.train]
    return {
        "x_train": np.concatenate([images for images, _ in train]),
        "y_train": np.concatenate([labels for _, labels in train]),
        "x_test": parts[layout.test][0],
        "y_test": parts[layout.test][1],
    }


def _from_folder(path: Path, folder: str, wanted: tuple[str, ...]) -> dict[str, bytes]:
    root = path / folder if (path / folder).is_dir() else path
    try:
        return {name: read_file(root / name, CIFAR) for name in wanted if (root / name).exists()}
    except UnfitFileError as error:
        raise DataError(f"{error}. Get the files again from where they are handed out.") from error
    except OSError as error:
        raise DataError(f"A file of {root} cannot be read: {error}.") from error


def _from_tar(path: Path, folder: str, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """Read in memory: the names inside lead nowhere on disk."""
    names = {f"{folder}/{name}": name for name in wanted}
    contents: dict[str, bytes] = {}
    try:
        with unpacked(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as held:
                for member in held:
                    name = names.get(member.name.removeprefix("./"))
                    if name is not None and member.isfile():
                        contents[name] = _content(held, member, path)
            while stream.read(2**20):  # gzip's sum stands at the end and is compared there
                pass
    except UnfitFileError as error:
        raise DataError(f"{error}. Get it again from where it is handed out.") from error
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read as a tar file ({type(error).__name__}: {error}). It was cut off, or is no tar "
            "file; get it again."
        ) from error
    return contents


class _Bounded(io.BufferedIOBase):
    """A stream that ends in a refusal where it gives more than all of CIFAR."""

    def __init__(self, path: Path) -> None:
        self._path, self._given = path, 0
        self._file = open_file(path)
        self._stream: Any = self._file
        is_zipped = self._file.read(2) == b"\x1f\x8b"
        self._file.seek(0)
        if is_zipped:  # tarfile could unzip by itself, and would not compare sums
            self._stream = gzip.GzipFile(fileobj=self._file)

    def read(self, size: int | None = -1, /) -> bytes:
        """Some bytes, and never more than are left until the limit."""
        left = CIFAR - self._given + 1
        content = self._stream.read(left if size is None or size < 0 else min(size, left))
        self._given += len(content)
        if self._given > CIFAR:
            raise UnfitFileError(
                f"{self._path} unpacks to more than {CIFAR:,} bytes, and all of CIFAR has less"
            )
        return content

    def close(self) -> None:
        """The file too."""
        self._stream.close()
        self._file.close()
        super().close()


def unpacked(path: Path) -> BinaryIO:
    """The content of a tar file, unzipped where it is zipped, as long as it may be CIFAR's.

    Raises:
        UnfitFileError: it is no regular file.
    """  # noqa: DOC502 - by `open_file`
    return cast(BinaryIO, _Bounded(path))


def _content(held: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    if member.size > CIFAR:
        raise DataError(
            f"{path}: {member.name} has {member.size:,} bytes; CIFAR's files are smaller. Get it again."
        )
    file = held.extractfile(member)
    assert file is not None, "a plain file has content"
    return file.read()


def _part(content: bytes, what: str, layout: Layout) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images `(n, 32, 32, 3)` and labels `(n,)` of one pickle."""
    held = read_pickle(content, what)
    images, labels = held.get(b"data"), held.get(layout.labels)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3072:
        raise DataError(
            f"{what} has no images: `data` should be an array of bytes of shape (n, 3072). {layout.remedy}"
        )
    if not isinstance(labels, list) or not _are_labels(labels, len(images)):
        raise DataError(
            f"{what} has no labels: `{layout.labels.decode()}` should be a list of {len(images)} whole numbers. "
            f"{layout.remedy}"
        )
    by_pixel = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return by_pixel, np.array(labels, np.int64)


def _are_labels(labels: list[Any], num: int) -> bool:
    return len(labels) == num and all(type(label) is int and abs(label) < 2**31 for label in labels)
