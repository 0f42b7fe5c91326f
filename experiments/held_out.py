"""Accuracy of what `ap.prune` gives by default, on images and networks that chose nothing.

    python experiments/held_out.py get imagenet GIT_DIR data    # 3,000 images of the repository jsyoo17/tinyvit_hls
    python experiments/held_out.py get resnet56 GIT_DIR data    # weights of akamaster/pytorch_resnet_cifar10
    python experiments/held_out.py run resnet50 --images 1000 --removed 0.2 0.35 0.42
    python experiments/held_out.py page

Methods, defaults and constants of this library were chosen by looking at some data: the first two validation images of
each ImageNet class (`judge`), the ResNet20 and ResNet32 of CIFAR-10 on its test images. A figure on those is too good,
for the best of many tries was kept. The README's figures come from here:

- ImageNet networks on the third to fifth validation image of each class. Neither a score, a repair nor a person who
  makes a choice may look at them.
- CIFAR-10's test images with the public narrow ResNet56, a network that no choice was made on.

Each run is what a user types: `ap.prune(model, batches, ap.Budget(flops=…))` on training images, nothing else. One line
a network, written when it is done: accuracy, the difference to the dense network on the same images in points with its
standard error, seconds, and the most memory that the process ever had. Draws are subsets of the scoring images by seed.
"""

import argparse
import csv
import io
import json
import math
import resource
import subprocess
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from cifar import DRAW_SIZE, load_cifar, public_network
from imagenet import NETWORKS, load_images
from narrow_lines import Row, read_lines, write_lines
from PIL import Image
from safetensors.torch import save_file
from sparse_resnet50 import environment, judged
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.data import Batches

RESULTS = Path(__file__).parent / "results"
SIDE = 256
FIRST, LAST = 2, 5  # of each class, in the order of file names; 0 and 1 are `judge`


@dataclass(frozen=True)
class Ground:
    """A dense network, batches to prune with, and batches that chose nothing."""

    model: nn.Module
    scoring: Any
    held_out: Any


def resnet56(args: argparse.Namespace, draw: int) -> Ground:
    cifar = load_cifar(args.data / "carry" / "draws.npz")
    rows = slice(DRAW_SIZE * draw, DRAW_SIZE * draw + args.images)
    scoring = Batches(*(tensor[rows] for tensor in cifar.train), size=args.batch)
    return Ground(public_network(56, args.data), scoring, Batches(*cifar.test, size=1000))


def imagenet(args: argparse.Namespace, draw: int) -> Ground:
    network = NETWORKS[args.network]
    scoring, held_out = (
        load_images(which, args.data, size=args.batch, normalisation=network.normalisation)
        for which in ("calibrate", "held_out")
    )
    return Ground(network.load(args.data, "cpu"), scoring.draw(draw, args.images), held_out)


GROUNDS = {"resnet50": imagenet, "vit_tiny": imagenet, "resnet56": resnet56}
TITLES = {
    "resnet50": "ResNet50, ImageNet",
    "vit_tiny": "ViT-tiny, ImageNet",
    "resnet56": "ResNet56, narrow, CIFAR-10",
}


def lines(args: argparse.Namespace) -> Iterator[list[Row]]:
    dense: Tensor | None = None
    for draw in args.draws:
        ground = GROUNDS[args.network](args, draw)
        if dense is None:
            dense, _ = judged(ground.model, ground.held_out)
        for removed in args.removed:
            torch.manual_seed(draw)
            start = time.perf_counter()
            outcome = ap.prune(ground.model, ground.scoring, ap.Budget(flops=1 - removed))
            seconds = time.perf_counter() - start
            if args.keep:
                ap.save(args.keep / f"{args.network}_{removed:g}_{draw}", outcome)
            right, loss = judged(outcome.model, ground.held_out)
            change = 100 * (right.double() - dense.double())
            yield [
                {
                    "network": args.network,
                    "images": args.images,
                    "draw": draw,
                    "removed": removed,
                    "judged_on": len(right),
                    "dense": float(dense.double().mean()),
                    "accuracy": float(right.double().mean()),
                    "loss": loss,
                    "difference": float(change.mean()),
                    "difference_se": float(change.std() / math.sqrt(len(change))),
                    "criterion": outcome.settings["criterion"],
                    "repair": "+".join(outcome.settings["repair"]),
                    "seconds": seconds,
                    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
                }
            ]


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.device = "cpu"
    out = RESULTS / f"held_out_{args.network}.csv"
    write_lines(out, lines(args), len(args.draws) * len(args.removed))
    out.with_suffix(".json").write_text(json.dumps(environment(args, None), indent=1) + "\n")


# -- page -------------------------------------------------------------------------------------------------------------


def page() -> Iterator[str]:
    yield "# Accuracy after `ap.prune`, on images and networks that chose nothing"
    yield ""
    yield (
        "Each line is `ap.prune(model, batches, ap.Budget(flops=…))` and nothing else: no labels, no training. "
        "Differences are in points, ± one standard error of the paired differences; of several draws the mean, their "
        "number and standard deviation. `experiments/held_out.py` says which data these are and why."
    )
    for path in sorted(RESULTS.glob("held_out_*.csv")):
        rows, about = read_lines(path), json.loads(path.with_suffix(".json").read_text())
        yield ""
        yield f"## {TITLES[rows[0]['network']]}"
        yield ""
        yield (
            f"Dense: {rows[0]['dense']:.2%} of {rows[0]['judged_on']:,.0f} images. "
            f"`{about['command']}`, commit {about['commit']}, {about['device']}, torch {about['torch']}. "
            + about.get("note", "")
        ).rstrip()
        yield ""
        yield "| MACs gone | accuracy | difference | draws | pruned with | seconds | memory |"
        yield "| ---: | ---: | ---: | ---: | --- | ---: | ---: |"
        by_share: dict[float, list[Row]] = defaultdict(list)
        for row in rows:
            by_share[row["removed"]].append(row)
        for share, own in sorted(by_share.items()):
            yield _line(share, own)


def _line(share: float, rows: Sequence[Row]) -> str:
    change = [row["difference"] for row in rows]
    draws = f"{len(rows)}, s.d. {stdev(change):.2f}" if rows[1:] else "1"
    how = f"{rows[0]['criterion']}, {rows[0]['repair']}; {rows[0]['images']:,.0f} images"
    return (
        f"| {share:.0%} | {mean(r['accuracy'] for r in rows):.1%} | "
        f"{mean(change):+.2f} ± {mean(r['difference_se'] for r in rows):.2f} | {draws} | {how} | "
        f"{mean(r['seconds'] for r in rows):,.0f} | {max(r['peak_mib'] for r in rows) / 1024:.1f} GiB |"
    )


# -- data from public repositories ------------------------------------------------------------------------------------


def get(what: str, git: str, folder: Path) -> None:
    """Write what a git directory of a public repository holds, through a temporary name."""
    folder.mkdir(parents=True, exist_ok=True)
    name, write = {
        "imagenet": ("imagenet_held_out_3000.zip", _write_images),
        "resnet56": ("cifar10_resnet56.safetensors", _write_weights),
    }[what]
    part = folder / f"part-{name}"
    write(git, part)
    part.replace(folder / name)
    print(folder / name)


def _write_images(git: str, part: Path) -> None:
    """Images with the short side scaled to 256 and cropped, as those of `judge` are."""
    listed = subprocess.run(
        ["git", f"--git-dir={git}", "ls-tree", "-r", "HEAD", "--name-only"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    by_class: dict[int, list[str]] = defaultdict(list)
    for path in sorted(path for path in listed if path.endswith(".JPEG")):
        by_class[int(Path(path).parent.name)].append(path)
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["file", "class_index"])
    with zipfile.ZipFile(part, "w") as out:
        for label, paths in sorted(by_class.items()):
            for path in paths[FIRST:LAST]:
                image = Image.open(io.BytesIO(_blob(git, path))).convert("RGB")
                scale = SIDE / min(image.size)
                image = image.resize(
                    [max(SIDE, round(n * scale)) for n in image.size], Image.Resampling.BICUBIC
                )
                left, top = ((n - SIDE) // 2 for n in image.size)
                held = io.BytesIO()
                image.crop((left, top, left + SIDE, top + SIDE)).save(held, "JPEG", quality=88)
                out.writestr(Path(path).name, held.getvalue())
                rows.writerow([Path(path).name, label])
        out.writestr("labels.csv", table.getvalue())


def _write_weights(git: str, part: Path) -> None:
    held = _blob(git, "pretrained_models/resnet56-4bfd9763.th")
    state = torch.load(io.BytesIO(held), weights_only=True, map_location="cpu")["state_dict"]
    save_file({k.removeprefix("module."): v.contiguous() for k, v in state.items()}, part)


def _blob(git: str, path: str) -> bytes:
    show = ["git", f"--git-dir={git}", "show", f"HEAD:{path}"]
    return subprocess.run(show, capture_output=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    fetch = verbs.add_parser("get")
    fetch.add_argument("what", choices=("imagenet", "resnet56"))
    fetch.add_argument("git")
    fetch.add_argument("folder", type=Path)
    prune = verbs.add_parser("run")
    prune.add_argument("network", choices=GROUNDS)
    prune.add_argument("--data", type=Path, default=Path("data"))
    prune.add_argument("--images", type=int, default=1000)
    prune.add_argument("--batch", type=int, default=25)
    prune.add_argument("--draws", type=int, nargs="+", default=[0])
    prune.add_argument("--removed", type=float, nargs="+", default=[0.2, 0.35, 0.42])
    prune.add_argument("--threads", type=int, default=2)
    prune.add_argument("--keep", type=Path, help="folder for checkpoints of the small networks")
    verbs.add_parser("page")
    args = parser.parse_args()
    if args.verb == "get":
        get(args.what, args.git, args.folder)
    elif args.verb == "run":
        run(args)
    else:
        (RESULTS / "held_out.md").write_text("\n".join(page()) + "\n")


if __name__ == "__main__":
    main()
