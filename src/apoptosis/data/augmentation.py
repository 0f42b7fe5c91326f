"""Random crops, flips and holes for a whole batch of small images at once, on the device where they lie.

Each image is moved by up to `pad` pixels each way, mirrored left to right every second time, and may lose a square.
What moves in, and what is cut out, is 0 *as the images are stored*: for bytes a black pixel, as in the usual CIFAR
recipes, where the crop comes before the normalisation. Bytes stay bytes.

Random numbers are few (four per image), drawn on the CPU and sent to the device, so they are the same everywhere.
Crop and mirror are one `gather`: 0.15 s for an epoch of 50,000 CIFAR images on one core, without a loop over images.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from apoptosis.errors import ConfigError

__all__ = ["Augmentation", "Moves"]


@dataclass(frozen=True)
class Moves:
    """What happens to each image of a batch; all `(n,)`, int64, on the CPU."""

    top: Tensor  # row of the padded image where the crop begins
    left: Tensor
    mirrored: Tensor  # 0 or 1
    hole: Tensor  # row · width + column of the middle of the hole


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images; see the module docstring.

    Args:
        pad: an image moves by −pad…pad pixels, each way.
        flip: whether half of the images are mirrored.
        cutout: side of the square that is set to 0, around a pixel drawn from the whole image; 0 for none.

    Raises:
        ConfigError: a number of pixels is negative.

    >>> images = torch.ones(2, 1, 4, 4, dtype=torch.uint8)
    >>> Augmentation(pad=1).apply(images, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 4, 4])
    """

    pad: int = 4
    flip: bool = True
    cutout: int = 0

    def __post_init__(self) -> None:
        if min(self.pad, self.cutout) < 0:
            raise ConfigError(
                f"pad={self.pad} and cutout={self.cutout} were asked for. Both are numbers of pixels; 0 is none."
            )

    def apply(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Images `(n, c, h, w)` of any type, changed; the given ones stay as they are."""
        height, width = images.shape[2:]
        moves = self.draw(len(images), height, width, generator)
        if self.pad or self.flip:
            images = self._moved(images, moves)
        return self._with_holes(images, moves) if self.cutout else images

    def draw(self, num: int, height: int, width: int, generator: torch.Generator) -> Moves:
        """The moves of `num` images. All are always drawn: those of one kind do not depend on the other options."""

        def below(bound: int) -> Tensor:
            return torch.randint(bound, (num,), generator=generator)

        return Moves(
            top=below(2 * self.pad + 1),
            left=below(2 * self.pad + 1),
            mirrored=below(2) * self.flip,
            hole=below(height * width),
        )

    def _moved(self, images: Tensor, moves: Moves) -> Tensor:
        num, channels, height, width = images.shape
        device = images.device
        padded = F.pad(images, (self.pad,) * 4)
        across = torch.arange(width)
        columns = torch.where(moves.mirrored[:, None] == 1, across.flip(0), across)
        rows = _sent(moves.top[:, None] + torch.arange(height), device)
        columns = _sent(moves.left[:, None] + columns, device)
        places = rows[:, :, None] * (width + 2 * self.pad) + columns[:, None, :]
        places = places.view(num, 1, -1).expand(-1, channels, -1)
        return padded.flatten(2).gather(2, places).view(images.shape)

    def _with_holes(self, images: Tensor, moves: Moves) -> Tensor:
        height, width = images.shape[2:]
        rows = self._near(moves.hole // width, height)
        columns = self._near(moves.hole % width, width)
        rows, columns = _sent(rows, images.device), _sent(columns, images.device)
        hole = rows[:, :, None] & columns[:, None, :]
        return images.masked_fill(hole[:, None], 0)

    def _near(self, middle: Tensor, length: int) -> Tensor:
        """`(n, length)`: which places lie in the hole; it may reach over the edge."""
        start = (middle - self.cutout // 2)[:, None]
        places = torch.arange(length)
        return (places >= start) & (places < start + self.cutout)


def _sent(drawn: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device has still to do: a small network would wait more than it computes."""
    return drawn.to(device, non_blocking=True)
