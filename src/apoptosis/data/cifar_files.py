"""The files that CIFAR comes in: one `.npz`, or the authors' folder of pickles, unpacked or as a tar file.

Whatever the layout, the result is the same four arrays: x_train and x_test, bytes `(n, 32, 32, 3)`, y_train and y_test.
"""

import gzip
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

__all__ = ["LAYOUTS", "Layout", "read_npz", "read_python"]

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
MOST_BYTES = 2**29
"""Of one file in a tar file; CIFAR-100's largest has 155 MB."""


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
            f"of the folder {self.folder}, or of an .npz with {', '.join(ARRAYS)}."
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


def read_npz(path: Path, names: Sequence[str] = ARRAYS) -> dict[str, NDArray[Any]]:
    """Arrays of an `.npz`, all four unless said.

    Raises:
        DataError: it is damaged, lacks one, or holds one that only a pickle can hold.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            missing = [name for name in names if name not in held]
            if not missing:
                return {name: held[name] for name in names}
            found = ", ".join(held.files) or "nothing"
    except (
        Exception
    ) as error:  # a damaged header makes numpy raise whatever its parser stumbles over
        raise DataError(
            f"{path} cannot be read as an .npz with {', '.join(ARRAYS)} ({type(error).__name__}: {error}). It is "
            "damaged, or another file; write it again with np.savez, arrays of numbers only."
        ) from error
    raise DataError(
        f"{path} has no {', '.join(missing)}; found {found}. Write an .npz with {', '.join(ARRAYS)}."
    )


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
        return {name: (root / name).read_bytes() for name in wanted if (root / name).is_file()}
    except OSError as error:
        raise DataError(f"A file of {root} cannot be read: {error}.") from error


def _from_tar(path: Path, folder: str, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """Read in memory: the names inside lead nowhere on disk."""
    names = {f"{folder}/{name}": name for name in wanted}
    contents: dict[str, bytes] = {}
    try:
        with _unzipped(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as held:
                for member in held:
                    name = names.get(member.name.removeprefix("./"))
                    if name is not None and member.isfile():
                        contents[name] = _content(held, member, path)
            while stream.read(2**20):  # gzip's sum stands at the end and is compared there
                pass
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read as a tar file ({type(error).__name__}: {error}). It was cut off, or is no tar "
            "file; get it again."
        ) from error
    return contents


def _unzipped(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
    # tarfile could unzip by itself, and would not compare sums.
    return cast(BinaryIO, gzip.open(path)) if is_zipped else path.open("rb")


def _content(held: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    if member.size > MOST_BYTES:
        raise DataError(
            f"{path}: {member.name} has {member.size} bytes; CIFAR's files are smaller. Get it again."
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
