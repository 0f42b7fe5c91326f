"""Images that stay in their files and are decoded batch by batch, by several threads, while the last batch is used.

`ImageFiles` is a part of a data set as `Split` is: the same batches, the same counting of passes. What is drawn for an
image depends on the seed, the number of the pass and the place of the image in its part, not on the batch it comes in,
nor on which thread is first. Decoded bytes go to the device and are normalised there.
"""

import zipfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apoptosis.data.batches import Normalisation, check_can_be_random
from apoptosis.data.image_views import CentreCrop, ResizedCrop, as_bytes, decode
from apoptosis.data.passes import Passes, generator_at
from apoptosis.errors import ConfigError, DataError
from apoptosis.reading import IMAGE, UnfitFileError, check_length, open_file, read_file

__all__ = ["Folder", "ImageBatches", "ImageFiles", "Zip"]


class Source(Protocol):
    """Where files lie. Inside the block, `read(name)` gives the content of one, from any thread."""

    def opened(self) -> AbstractContextManager[Callable[[str], bytes]]:
        """The block."""
        ...

    def place(self, name: str) -> str:
        """Where a file lies, for messages."""
        ...


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Files with their labels; see the module docstring.

    Args:
        source: what they are read from.
        names: of the files, as the source knows them.
        labels: class of each, `(n,)`, int64.
        view: what is cut out where there is no augmentation; its size is that of all images.
        num_workers: threads that decode; 0 for none beside the caller's.
        normalisation: of the bytes.
    """

    source: Source
    names: tuple[str, ...]
    labels: Tensor
    view: CentreCrop = CentreCrop()
    num_workers: int = 4
    normalisation: Normalisation = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what batches hold."""
        return 3, self.view.size, self.view.size

    def take(self, rows: Tensor) -> "ImageFiles":
        """Those files alone, in that order."""
        names = tuple(self.names[row] for row in rows.tolist())
        return replace(self, names=names, labels=self.labels[rows])

    def first(self, num: int | None) -> "ImageFiles":
        """The first files, all where num is None."""
        return replace(self, names=self.names[:num], labels=self.labels[:num])

    def batches(
        self,
        size: int,
        *,
        shuffle_seed: int | None = None,
        device: torch.device | str | None = None,
        augmentation: ResizedCrop | None = None,
    ) -> "ImageBatches":
        """`(images, labels)` batches, normalised; order and passes as those of `Batches`."""
        return ImageBatches(
            self, size, shuffle_seed=shuffle_seed, device=device, augmentation=augmentation
        )


class ImageBatches:
    """Batches of decoded images, `size` at a time."""

    def __init__(
        self,
        files: ImageFiles,
        size: int,
        *,
        shuffle_seed: int | None = None,
        device: torch.device | str | None = None,
        augmentation: ResizedCrop | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"A batch needs at least one image; size={size} was asked for.")
        if not len(files):
            raise DataError("Batches were asked for of a part without images. Give it some.")
        check_can_be_random(augmentation, ResizedCrop, shuffle_seed)
        self.files, self.size = files, size
        self._device, self._augmentation = device, augmentation
        self._passes = Passes(len(files), shuffle_seed)

    @property
    def num_samples(self) -> int:
        """Images in one pass."""
        return len(self.files)

    def __len__(self) -> int:
        return -(-self.num_samples // self.size)

    def start_at(self, number: int) -> None:
        """Let the next pass be that one, counted from 0, whatever was read before; later ones count on."""
        self._passes.start_at(number)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        number, order = self._passes.next()
        rows = torch.arange(self.num_samples) if order is None else order
        with self.files.source.opened() as read:

            def image(row: int) -> NDArray[np.uint8]:
                return self._image(read, row, number)

            batches = _decoded(image, rows.split(self.size), self.files.num_workers)
            with closing(batches):  # threads end before the files are closed
                for taken, images in batches:
                    pixels = torch.from_numpy(np.stack(images)).to(self._device)
                    labels = self.files.labels[taken].to(self._device)
                    yield self.files.normalisation.apply(pixels), labels

    def _image(self, read: Callable[[str], bytes], row: int, number: int) -> NDArray[np.uint8]:
        name, view = self.files.names[row], self.files.view
        picture = decode(read(name), self.files.source.place(name))
        seed = self._passes.shuffle_seed
        if self._augmentation is None or seed is None:
            return as_bytes(view.apply(picture))
        generator = generator_at(seed, number, row)
        return as_bytes(self._augmentation.apply(picture, view.size, generator))


def _decoded(
    image: Callable[[int], NDArray[np.uint8]], batches: tuple[Tensor, ...], num_workers: int
) -> Generator[tuple[Tensor, list[NDArray[np.uint8]]], None, None]:
    """Rows and images of each batch; one batch is being decoded while the one before is used."""
    if num_workers < 1:
        for rows in batches:
            yield rows, [image(row) for row in rows.tolist()]
        return
    workers = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")

    def begun(place: int) -> list[Future[NDArray[np.uint8]]]:
        rows = batches[place].tolist() if place < len(batches) else []
        return [workers.submit(image, row) for row in rows]

    try:
        ahead = begun(0)
        for place, rows in enumerate(batches):
            current, ahead = ahead, begun(place + 1)
            yield rows, [future.result() for future in current]
    finally:  # also where the loop was left, or an image is damaged
        workers.shutdown(cancel_futures=True)


# -- where files lie --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """Files below a folder; names are paths."""

    root: Path

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], bytes]]:
        """Nothing is held open."""
        yield self._read

    def place(self, name: str) -> str:
        """Its whole path."""
        return str(self.root / name)

    def _read(self, name: str) -> bytes:
        try:
            return read_file(self.root / name, IMAGE)
        except UnfitFileError as error:
            raise DataError(f"{error}. Take it out of the data.") from error
        except OSError as error:
            raise DataError(
                f"{self.root / name} cannot be read: {error}. It was there when the folder was listed; list it again."
            ) from error


@dataclass(frozen=True)
class Zip:
    """Members of a zip file. Names are looked up in its table and never become paths: nothing is unpacked to disk."""

    path: Path

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], bytes]]:
        """The file is open inside the block; zipfile lets threads read one after the other."""
        with self.open() as held:
            yield lambda name: self.read(held, name)

    def place(self, name: str) -> str:
        """The zip file, and its name in it."""
        return f"{self.path}: {name}"

    def open(self) -> zipfile.ZipFile:
        """The zip file.

        Raises:
            DataError: there is none, it is another file, or damaged.
        """
        try:
            with closing(open_file(self.path)):  # no pipe is waited for
                return zipfile.ZipFile(self.path)
        except UnfitFileError as error:
            raise DataError(f"{error}. Give a zip file.") from error
        except FileNotFoundError as error:
            raise DataError(
                f"The zip file {self.path} does not exist. Look whether path and name are right."
            ) from error
        except Exception as error:  # zipfile raises many kinds on damaged tables
            raise DataError(
                f"{self.path} cannot be read as a zip file ({type(error).__name__}: {error}). It was cut off, or is "
                "no zip file; get it again."
            ) from error

    def read(self, held: zipfile.ZipFile, name: str) -> bytes:
        """The content of a member.

        Raises:
            DataError: it is damaged, encrypted, or too large for an image.
        """
        try:
            check_length(self.place(name), held.getinfo(name).file_size, IMAGE)
            return held.read(name)
        except UnfitFileError as error:
            raise DataError(f"{error}. Take it out.") from error
        except Exception as error:
            raise DataError(
                f"{self.place(name)} cannot be read ({type(error).__name__}: {error}). The zip file is damaged or "
                "encrypted; get it again."
            ) from error
