"""ImageNet for the experiments on public networks: their weights, 2,000 images to judge on, 1,000 to score on.

The sets have no image in common: `judge` (validation images, two of each class) only judges, `calibrate` (one of each
class, probably training images) only scores, repairs and measures batch norms; its draws are random subsets. Images are
stored as 256 × 256 JPEG and cropped to 224 × 224; each network has its own normalisation. On the CPU, batch 50:

    python experiments/imagenet.py judge data vit_tiny

A machine that takes 64 MiB at a time gets everything in folders of at most 55 MiB, each with the checksums, sent one by
one and joined there:

    python experiments/imagenet.py pack data data/carry_imagenet
    python experiments/imagenet.py unpack data/carry_imagenet data
"""

import csv
import hashlib
import io
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from apoptosis.models import ResNet50, ViT, resnet50, vit_tiny16
from apoptosis.training import evaluate

__all__ = [
    *("DRAWS", "DRAW_SIZE", "NETWORKS", "Images", "Normalisation", "Public"),
    *("load_images", "public_resnet50", "public_vit_tiny"),
]

DRAWS = (0, 1, 2)
DRAW_SIZE = 500
CROP = 224

WEIGHTS = "imagenet_resnet50_v1.safetensors"
VIT_WEIGHTS = "carry/imagenet_vit_tiny_fp16.safetensors"
SENT = ("judge", "calibrate")
SETS = {
    "judge": "imagenet_judge_2000.zip",
    "calibrate": "imagenet_calibrate_1000.zip",
    "held_out": "imagenet_held_out_3000.zip",  # made and used by held_out.py alone
}
SUMS = "sha256.txt"
PART_BYTES = 55 * 2**20


@dataclass(frozen=True)
class Normalisation:
    """What a network takes images to have been: (x − mean) / std by channel, x from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


USUAL = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CENTRED = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Images:
    """Batches of normalised images, made from uint8 as they are asked for: a quarter of the memory."""

    pixels: Tensor  # (n, 3, 224, 224), uint8
    labels: Tensor  # (n,)
    size: int = 50
    normalisation: Normalisation = USUAL

    def __len__(self) -> int:
        return -(-len(self.labels) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.pixels.device
        how = self.normalisation
        mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (how.mean, how.std))
        for start in range(0, len(self.labels), self.size):
            rows = slice(start, start + self.size)
            yield (self.pixels[rows].float() / 255 - mean) / std, self.labels[rows]

    def draw(self, number: int, count: int = DRAW_SIZE) -> "Images":
        """A random subset; `number` is its seed."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(number))
        rows = order[:count].to(self.labels.device)
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows])


def load_images(
    which: str,
    folder: Path | str = "data",
    device: str = "cpu",
    size: int = 50,
    normalisation: Normalisation = USUAL,
) -> Images:
    """All images of `judge` or `calibrate`, decoded, on the device."""
    with zipfile.ZipFile(Path(folder) / SETS[which]) as held:
        lines = list(csv.DictReader(io.TextIOWrapper(held.open("labels.csv"), "utf-8")))
        pixels = np.stack([_cropped(held.read(line["file"])) for line in lines])
    labels = torch.tensor([int(line["class_index"]) for line in lines])
    by_channel = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).contiguous()
    return Images(by_channel, labels.to(device), size, normalisation)


def public_resnet50(folder: Path | str = "data", device: str = "cpu") -> ResNet50:
    """The public network in eval mode."""
    model = resnet50(stride_on="1x1")
    model.load_state_dict(load_file(Path(folder) / WEIGHTS))
    return model.to(device).eval()


def public_vit_tiny(folder: Path | str = "data", device: str = "cpu") -> ViT:
    """The same for ViT-tiny/16; its weights are stored in 16 bits and used in 32."""
    model = vit_tiny16()
    model.load_state_dict(load_file(Path(folder) / VIT_WEIGHTS))
    return model.to(device).eval()


@dataclass(frozen=True)
class Public:
    """A network by name: how it is loaded, and what its images are normalised by."""

    load: Callable[[Path | str, str], nn.Module]
    normalisation: Normalisation


NETWORKS = {
    "resnet50": Public(public_resnet50, USUAL),
    "vit_tiny": Public(public_vit_tiny, CENTRED),
}


def _cropped(jpeg: bytes) -> np.ndarray:
    """The centre, `(224, 224, 3)`."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    left, top = ((side - CROP) // 2 for side in image.size)
    return np.asarray(image.crop((left, top, left + CROP, top + CROP)))


# -- command line -----------------------------------------------------------------------------------------------------


def judge(folder: str, name: str = "resnet50") -> None:
    """Print what a dense network does on the judging images."""
    start, network = time.perf_counter(), NETWORKS[name]
    images = load_images("judge", folder, normalisation=network.normalisation)
    found = evaluate(network.load(folder, "cpu"), images)
    accuracy, seconds = found.metrics["correct"], time.perf_counter() - start
    print(f"{accuracy:.2%} of {found.count} images, loss {found.loss:.4f}, {seconds:.0f} s")


def pack(source: str, target: str) -> None:
    """Write part0, part1, …: files one after the other, cut wherever a folder is full."""
    contents = {
        name: (Path(source) / name).read_bytes() for name in (WEIGHTS, *map(SETS.get, SENT))
    }
    sums = "".join(f"{hashlib.sha256(own).hexdigest()}  {name}\n" for name, own in contents.items())
    parts: list[dict[str, bytes]] = [{}]
    room = PART_BYTES
    for name, own in contents.items():
        start = piece = 0
        while start < len(own):
            if room == 0:
                parts.append({})
                room = PART_BYTES
            taken = own[start : start + room]
            parts[-1][f"{name}.{piece:03}"] = taken
            start, piece, room = start + len(taken), piece + 1, room - len(taken)
    for number, part in enumerate(parts):
        folder = Path(target) / f"part{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMS).write_text(sums)
        for name, taken in part.items():
            (folder / name).write_bytes(taken)
        print(f"{folder}: {sum(map(len, part.values())) / 2**20:.1f} MiB, {', '.join(part)}")


def unpack(source: str, target: str) -> None:
    """Join what `pack` wrote; files with a wrong sum are named and not written."""
    lines = next(Path(source).glob(f"part*/{SUMS}")).read_text().splitlines()
    Path(target).mkdir(parents=True, exist_ok=True)
    for line in lines:
        asked, name = line.split("  ")
        pieces = sorted(Path(source).glob(f"part*/{name}.*"), key=lambda piece: piece.suffix)
        joined = b"".join(piece.read_bytes() for piece in pieces)
        if hashlib.sha256(joined).hexdigest() != asked:
            sys.exit(f"{name}: {len(pieces)} pieces do not make the file; a part is missing or old")
        (Path(target) / name).write_bytes(joined)
        print(f"{name}: {len(joined)} bytes, sum agrees")


if __name__ == "__main__":
    {"judge": judge, "pack": pack, "unpack": unpack}[sys.argv[1]](*sys.argv[2:])
