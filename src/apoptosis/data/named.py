"""Data sets by the names that people type: a word, a word with a path, or a path whose content says what it is."""

import tarfile
import zipfile
import zlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import numpy as np

from apoptosis.data.cifar import Kind, load_cifar
from apoptosis.data.cifar_files import LAYOUTS, check_is_file, read_npz, unpacked
from apoptosis.data.digits import digits
from apoptosis.data.image_sets import image_folder, image_zip
from apoptosis.data.splits import DataSet
from apoptosis.errors import DataError
from apoptosis.reading import UnfitFileError

__all__ = ["NAMES", "find_data_set", "is_data_set_name", "why_missing"]

NAMES = ("digits", "cifar10", "cifar100")
PREFIXES = ("cifar10", "cifar100", "whole")
ENDINGS = (".npz", ".zip", ".gz", ".tgz", ".tar")
PLACES = (Path(), Path("data"))


def find_data_set(name: str, seed: int = 0) -> DataSet[Any]:
    """The data set of that name.

    Args:
        name: `digits`; `cifar10` or `cifar100`, looked for here and in ./data; `cifar10:PATH`; the PATH of a folder,
            or of an .npz, .zip or .tar.gz; `whole:FILE.zip` for a zip file whose images are all judged on.
        seed: draws the parts.

    Raises:
        DataError: there are no such data, or they cannot be read.

    >>> find_data_set("digits").input_shape
    (1, 1, 8, 8)
    """
    word, _, place = name.partition(":")
    if name == "digits":
        return digits(seed=seed)
    if word == "whole" and place:
        return image_zip(place, seed=seed, split=False)
    if word in LAYOUTS:
        kind = cast(Kind, word)
        return load_cifar(kind, place or _looked_for(kind), seed=seed)
    if not _lies_there(name):
        raise DataError(
            f"There are no data {name!r}{why_missing(name)}.{_nearest(name)} Known are {', '.join(NAMES)}, "
            "cifar10:PATH, cifar100:PATH, and the path of a folder of images, of an .npz or .tar.gz of CIFAR, "
            "or of a .zip of images."
        )
    return _by_content(Path(name), seed)


def is_data_set_name(name: str) -> bool:
    """Whether `find_data_set` knows it by its form, or something lies there.

    >>> [is_data_set_name(name) for name in ("digits", "cifar10:here", "mine.py:make")]
    [True, True, False]
    """
    word, _, place = name.partition(":")
    return name in NAMES or (word in PREFIXES and bool(place)) or _lies_there(name)


def why_missing(name: str) -> str:
    """What to say of a name that is a path by its form; empty for others.

    >>> why_missing("some/gone.npz"), why_missing("digit")
    (': there is no such file or folder', '')
    """
    is_path = len(Path(name).parts) > 1 or Path(name).suffix in ENDINGS
    return ": there is no such file or folder" if is_path else ""


def _lies_there(name: str) -> bool:
    return bool(name) and Path(name).exists()  # an empty path is this folder


def _nearest(name: str) -> str:
    near = get_close_matches(name, NAMES, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _looked_for(kind: Kind) -> Path:
    layout = LAYOUTS[kind]
    names = (f"{kind}.npz", layout.folder, layout.archive)
    for path in (place / name for place in PLACES for name in names):
        if path.exists():
            return path
    raise DataError(
        f"{kind} was asked for, and there is no {', '.join(names)} here or in ./data. {layout.remedy} Say where it "
        f"lies: {kind}:PATH."
    )


def _by_content(path: Path, seed: int) -> DataSet[Any]:
    if path.is_dir():
        kind = _kind_of_folder(path)
        return load_cifar(kind, path, seed=seed) if kind else image_folder(path, seed=seed)
    check_is_file(path)
    if path.suffix == ".npz":
        return load_cifar(_kind_of_npz(path), path, seed=seed)
    if path.suffix == ".zip" or zipfile.is_zipfile(path):
        return image_zip(path, seed=seed)
    kind = _kind_of_tar(path)
    if kind is None:
        raise DataError(
            f"{path} is neither an .npz or .tar.gz of CIFAR nor a .zip of images. Give one of these, or a folder; "
            "if it was one, it is damaged: get it again."
        )
    return load_cifar(kind, path, seed=seed)


def _kind_of_folder(path: Path) -> Kind | None:
    """Which CIFAR is there: the authors' folder itself, or a folder that holds it; None for images."""
    files = {place.name for place in path.iterdir() if place.is_file()}
    kinds = [
        kind
        for kind, layout in LAYOUTS.items()
        if path.resolve().name == layout.folder
        or (path / layout.folder).is_dir()
        or {*layout.train, layout.test} <= files
    ]
    if len(kinds) > 1:
        raise DataError(f"{path} has both CIFARs. Say which: cifar10:{path} or cifar100:{path}.")
    return cast(Kind, kinds[0]) if kinds else None


def _kind_of_npz(path: Path) -> Kind:
    """By the labels: there are ten classes if none is above 9."""
    labels = read_npz(path, ("y_train", "y_test")).values()
    known = all(part.dtype.kind in "iu" for part in labels)
    largest = max(np.max(part, initial=0) for part in labels) if known else 0
    return "cifar10" if largest < 10 else "cifar100"


def _kind_of_tar(path: Path) -> Kind | None:
    """By the first file in one of the authors' folders."""
    try:
        with unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r|") as held:
            for member in held:
                for kind, layout in LAYOUTS.items():
                    if member.name.removeprefix("./").startswith(f"{layout.folder}/"):
                        return cast(Kind, kind)
    except UnfitFileError as error:
        raise DataError(f"{error}. Give a file of data.") from error
    except (tarfile.TarError, OSError, EOFError, zlib.error):
        return None
    return None
