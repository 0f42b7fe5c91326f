"""Small pictures on disk, each of its own colour, so that it is known again."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Width and height as given; brightness from the number, some texture over it."""
    width, height = size
    noise = np.random.default_rng(number).integers(0, 20, (height, width, 3))
    return Image.fromarray((noise + 10 * (number % 23)).astype(np.uint8))


def encoded(number: int, size: tuple[int, int] = (40, 30), form: str = "png") -> bytes:
    out = io.BytesIO()
    picture(number, size).save(out, form)
    return out.getvalue()


def write_classes(root: Path, classes: dict[str, int], start: int = 0) -> Path:
    """`classes` says how many images each has; they are numbered from `start` on."""
    for name, num in classes.items():
        (root / name).mkdir(parents=True)
        for place in range(num):
            (root / name / f"{start + place:03}.png").write_bytes(encoded(start + place))
        start += num
    return root


def write_zip(path: Path, num: int = 20, table: str | None = None, **extra: bytes) -> Path:
    """Images 0.png … with labels 0, 1, 2, 0, …; `table` in place of labels.csv, "" for none."""
    lines = "".join(f"{number}.png,{number % 3}\n" for number in range(num))
    table = f"file,class_index\n{lines}" if table is None else table
    with zipfile.ZipFile(path, "w") as held:
        for number in range(num):
            held.writestr(f"{number}.png", encoded(number))
        for name, content in extra.items():
            held.writestr(name, content)
        if table:
            held.writestr("labels.csv", table)
    return path
