"""How a picture of any size becomes an image of the size that a network takes; bytes in, bytes out.

For judging: the shorter side becomes `resize`, the middle `size`×`size` is cut out; 256 and 224 are ImageNet's habit.
For training: a piece of random area and shape becomes the image, mirrored every second time (`ResizedCrop`; Szegedy et
al. 2015, "Going deeper with convolutions"). Pillow decodes and resizes (bilinear, over all source pixels); it lets
other threads run meanwhile.
"""

import io
import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from apoptosis.errors import ConfigError, DataError
from apoptosis.reading import PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CentreCrop", "ResizedCrop", "as_bytes", "check_pillow", "decode"]

TRIES = 10
MOST_LONG = 16
"""Times its shorter side, a picture is resized; of a thinner one only the middle is: the rest is cut away anyhow, and
may be more than memory holds."""
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
"""Those of the endings that are images (image_sets.py). Pillow knows others by their content, and starts programs."""


@dataclass(frozen=True)
class CentreCrop:
    """For judging: the shorter side is made `resize` long, then the middle square of `size` is taken.

    Raises:
        ConfigError: the square is larger than the resized picture, or empty.
    """

    resize: int = 256
    size: int = 224

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ConfigError(
                f"A square of {self.size} pixels was asked for from pictures whose shorter side is made {self.resize}. "
                "Ask for a size of at least 1 and at most that."
            )

    def apply(self, picture: "Image") -> "Image":
        """The middle of the picture."""
        picture = _middle(picture)
        width, height = picture.size
        shorter = min(width, height)
        width, height = (self.resize * side // shorter for side in (width, height))
        left, top = (round((side - self.size) / 2) for side in (width, height))
        resized = _resized(picture, width, height)
        return resized.crop((left, top, left + self.size, top + self.size))


@dataclass(frozen=True)
class ResizedCrop:
    """For training: a random piece, resized; see the module docstring.

    Args:
        area: least and largest share of the picture's area.
        shape: least and largest width/height of the piece.
        flip: whether half of the images are mirrored.

    Raises:
        ConfigError: the shares or shapes are none.
    """

    area: tuple[float, float] = (0.08, 1.0)
    shape: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.area[0] <= self.area[1] <= 1 and 0 < self.shape[0] <= self.shape[1]):
            raise ConfigError(
                f"area={self.area} and shape={self.shape} were asked for. Give the least first, areas as shares "
                "above 0 and at most 1, shapes above 0."
            )

    def apply(self, picture: "Image", size: int, generator: torch.Generator) -> "Image":
        """A piece of the picture, `size`×`size`."""
        from PIL.Image import Transpose

        piece = picture.crop(self.draw(*picture.size, generator))
        made = _resized(piece, size, size)
        mirrored = self.flip and bool(torch.rand(1, generator=generator) < 0.5)
        return made.transpose(Transpose.FLIP_LEFT_RIGHT) if mirrored else made

    def draw(
        self, width: int, height: int, generator: torch.Generator
    ) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the piece; the middle square if none fits in ten tries."""
        low, high = map(math.log, self.shape)
        for _ in range(TRIES):
            area, shape, across, down = torch.rand(4, generator=generator).tolist()
            pixels = width * height * (self.area[0] + area * (self.area[1] - self.area[0]))
            ratio = math.exp(low + shape * (high - low))
            w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 1 <= w <= width and 1 <= h <= height:
                left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
                return left, top, left + w, top + h
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return left, top, left + side, top + side


def decode(content: bytes, what: str) -> "Image":
    """The picture in a file, in colour.

    Raises:
        DataError: it cannot be decoded; the message names the file.
    """  # noqa: DOC501 - Pillow's is handled here
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            if math.prod(picture.size) > PIXELS:
                raise PIL.Image.DecompressionBombError
            return picture.convert("RGB")
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{what} says that it is a picture of more than {PIXELS:,} pixels, which is not decoded. Make it smaller, "
            "or take it out of the data."
        ) from error
    except (
        Exception
    ) as error:  # Pillow's readers raise whatever a damaged file makes them stumble over
        raise DataError(
            f"{what} cannot be decoded ({type(error).__name__}: {error}). It is damaged or no image; get it again, or "
            "take it out of the data."
        ) from error


def as_bytes(picture: "Image") -> NDArray[np.uint8]:
    """`(3, h, w)`."""
    return np.asarray(picture).transpose(2, 0, 1)


def check_pillow() -> None:
    """Say how to get Pillow where there is none.

    Raises:
        DataError: there is none.
    """
    if find_spec("PIL") is None:
        raise DataError(
            "Image files are decoded by Pillow, and Pillow is not installed. Install it with: pip install pillow"
        )


def _middle(picture: "Image") -> "Image":
    """The middle of a very thin picture, with as much on either side of it cut away; any other as it is."""
    width, height = picture.size
    longest = MOST_LONG * min(width, height)
    left, top = (max(0, (side - longest + 1) // 2) for side in (width, height))
    return picture.crop((left, top, width - left, height - top)) if left or top else picture


def _resized(picture: "Image", width: int, height: int) -> "Image":
    from PIL.Image import Resampling

    return picture.resize((width, height), Resampling.BILINEAR)
