"""Data sets of image files: folders of classes, or a zip file with a table of labels.

    ROOT/train/CLASS/*.jpg, ROOT/val/CLASS/*, ROOT/test/CLASS/*      parts are given; val and test may be missing
    ROOT/CLASS/*.jpg                                                 parts are drawn by a seed
    FILE.zip with images and labels.csv (file name, class number)    parts are drawn by a seed, or all is one part

Classes of folders are numbered by their names in alphabetical order. Where parts are drawn, a tenth of the images is
for validation and a tenth for the test. Where there is `val` and no `test`, as in ImageNet, `val` is what final figures
are taken on, so it is the *test* part, and validation images, a tenth but at most 10,000, are drawn from the training
images: what models are chosen by should not be what they are judged by. Training images always stand in drawn order, so
that the first n are of all classes.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from apoptosis.data.image_files import Folder, ImageFiles, Zip
from apoptosis.data.image_views import CentreCrop, ResizedCrop, check_pillow
from apoptosis.data.splits import DataSet
from apoptosis.errors import DataError

__all__ = ["image_folder", "image_zip", "is_image_name"]

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TABLE = "labels.csv"
MOST_VALIDATION = 10_000
LARGEST_LABEL = 2**31


def image_folder(
    path: Path | str, *, seed: int = 0, view: CentreCrop | None = None, num_workers: int = 4
) -> DataSet[ImageFiles]:
    """Images in folders of classes; see the module docstring for the layouts.

    Args:
        path: ROOT.
        seed: draws the parts that are not given.
        view: what is cut out of pictures for judging, 224 pixels unless said; its size is that of all images.
        num_workers: threads that decode.

    Raises:
        DataError: there is no class, a class has no images, or a part has classes that training has not.
    """
    check_pillow()
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"Images were asked for in {root}, and there is no such folder.")

    def files(names: Sequence[str], labels: Sequence[int]) -> ImageFiles:
        numbers = torch.tensor(labels, dtype=torch.int64)
        return ImageFiles(Folder(root), tuple(names), numbers, view or CentreCrop(), num_workers)

    if not (root / "train").is_dir():
        classes = _classes(root)
        train, validation, test = _tenths(files(*_listed(root, "", classes)), seed)
    else:
        classes = _classes(root / "train")
        train = files(*_listed(root, "train", classes))
        validation, test = (
            files(*_listed(root, part, classes)) if (root / part).is_dir() else None
            for part in ("val", "test")
        )
        if validation is not None and test is not None:
            train, _ = _drawn(train, [], seed)
        else:
            test = test or validation
            train, (validation,) = _drawn(train, [min(len(train) // 10, MOST_VALIDATION)], seed)
    return DataSet(root.name, train, validation, test, len(classes), ResizedCrop())


def image_zip(
    path: Path | str,
    *,
    seed: int = 0,
    split: bool = True,
    num_classes: int | None = None,
    view: CentreCrop | None = None,
    num_workers: int = 4,
) -> DataSet[ImageFiles]:
    """Images in a zip file with `labels.csv`: two columns, file name and class number, with or without a heading.

    Args:
        path: the file.
        seed: draws the parts.
        split: False makes the whole one part, which is `train` *and* `test`: for a network that was trained on other
            images. Nothing is set aside then.
        num_classes: labels are below it; the largest label and one unless said.
        view: what is cut out of pictures for judging, 224 pixels unless said; its size is that of all images.
        num_workers: threads that decode.

    Raises:
        DataError: the zip file is damaged, has no table, or the table has wrong lines; the message has the line.
    """
    check_pillow()
    source = Zip(Path(path))
    with source.open() as held:
        members = set(held.namelist())
        if TABLE not in members:
            raise DataError(
                f"{path} has no {TABLE}. Add it: a line for each image with its name in the zip file and the number "
                "of its class."
            )
        text = source.read(held, TABLE)
    names, labels = _table(text, members, f"{path}, {TABLE}")
    files = ImageFiles(source, names, labels, view or CentreCrop(), num_workers)
    if split:
        train, validation, test = _tenths(files, seed)
    else:
        train, validation, test = _drawn(files, [], seed)[0], None, files
    num_classes = num_classes or int(labels.max()) + 1
    return DataSet(Path(path).stem, train, validation, test, num_classes, ResizedCrop())


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its ending; hidden ones are none."""
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


# -- parts ------------------------------------------------------------------------------------------------------------


def _tenths(
    files: ImageFiles, seed: int
) -> tuple[ImageFiles, ImageFiles | None, ImageFiles | None]:
    """Training, validation and test images: eight, one and one tenth."""
    num = len(files) // 10
    train, (validation, test) = _drawn(files, [num, num], seed)
    return train, validation, test


def _drawn(
    files: ImageFiles, sizes: list[int], seed: int
) -> tuple[ImageFiles, list[ImageFiles | None]]:
    """Files in drawn order: what is left, and parts of these sizes; None for an empty one."""
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))
    *parts, left = order.split([*sizes, len(files) - sum(sizes)])
    return files.take(left), [files.take(rows) if len(rows) else None for rows in parts]


# -- folders ----------------------------------------------------------------------------------------------------------


def _classes(folder: Path) -> list[str]:
    found = sorted(
        place.name for place in folder.iterdir() if place.is_dir() and place.name[0] != "."
    )
    if not found:
        raise DataError(
            f"{folder} has no classes. Make a folder for each class, with its images in it."
        )
    return found


def _listed(root: Path, part: str, classes: list[str]) -> tuple[list[str], list[int]]:
    """Names from `root` on, and labels."""
    unknown = sorted(set(_classes(root / part)) - set(classes))
    if unknown:
        raise DataError(
            f"{root / part} has classes that {root / 'train'} has not: {', '.join(unknown[:5])}. Both need the same "
            "names."
        )
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = root / part / name
        found = sorted(place.name for place in folder.iterdir()) if folder.is_dir() else []
        images = [image for image in found if is_image_name(image)]
        if folder.is_dir() and not images:
            raise DataError(
                f"Class {folder} has no images; found {', '.join(found[:3]) or 'nothing'}. Put some in, with a name "
                f"that ends in {', '.join(ENDINGS)}, or remove the folder."
            )
        names.extend((Path(part) / name / image).as_posix() for image in images)
        labels.extend([label] * len(images))
    return names, labels


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(text: bytes, members: set[str], what: str) -> tuple[tuple[str, ...], Tensor]:
    """Names and labels of all lines."""
    labels: dict[str, int] = {}
    headed = False
    for place, line in _lines(text, what):
        if not labels and len(line) > 1 and not _is_number(line[1]) and not headed:
            headed = True
            continue
        if len(line) < 2 or not _is_number(line[1]):
            raise DataError(
                f"{what}, line {place}: {','.join(line)[:80]!r} is no file name and number of a class. Classes are "
                "whole numbers from 0."
            )
        name, label = line[0], int(line[1])
        if not 0 <= label < LARGEST_LABEL:
            raise DataError(f"{what}, line {place}: label {label} is out of range. Count from 0.")
        if name not in members:
            raise DataError(f"{what}, line {place}: there is no {name!r} in the zip file. Add it.")
        if name in labels:
            raise DataError(f"{what}, line {place}: {name!r} stands there twice. Keep one line.")
        labels[name] = label
    if not labels:
        raise DataError(f"{what} names no image. Write a line for each.")
    return tuple(labels), torch.tensor(list(labels.values()))


def _lines(text: bytes, what: str) -> Iterator[tuple[int, list[str]]]:
    """Numbers of lines and their fields, of those that have any; one by one, for a table can be nothing but lines."""
    try:
        reader = csv.reader(io.StringIO(text.decode("utf-8-sig"), newline=""))
        yield from ((place, line) for place, line in enumerate(reader, 1) if line)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{what} is no table ({error}). Write it as text, in UTF-8.") from error


def _is_number(text: str) -> bool:
    text = text.strip()
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 20
