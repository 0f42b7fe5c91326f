"""Tiny CIFARs in every layout."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
CLASSES = {"cifar10": 10, "cifar100": 100}


def arrays(kind: str, num_train: int = 20, num_test: int = 8) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        f"{what}_{part}": random.integers(0, high, (num, *shape), np.uint8)
        for part, num in (("train", num_train), ("test", num_test))
        for what, high, shape in (("x", 256, (32, 32, 3)), ("y", CLASSES[kind], ()))
    }


def pickles(kind: str, held: dict[str, np.ndarray], protocol: int = 2) -> dict[str, bytes]:
    """File names and contents, as the authors' script writes them: keys and text are bytes."""
    key = b"labels" if kind == "cifar10" else b"fine_labels"

    def dumped(x: np.ndarray, y: np.ndarray) -> bytes:
        flat = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), 3072)
        return pickle.dumps({b"data": flat, key: y.tolist(), b"batch_label": b"fake"}, protocol)

    test = dumped(held["x_test"], held["y_test"])
    if kind == "cifar100":
        return {"train": dumped(held["x_train"], held["y_train"]), "test": test, "meta": b"none"}
    pieces = zip(np.split(held["x_train"], 5), np.split(held["y_train"], 5), strict=True)
    files = {f"data_batch_{n}": dumped(x, y) for n, (x, y) in enumerate(pieces, 1)}
    return {**files, "test_batch": test, "batches.meta": b"none"}


def write_folder(root: Path, kind: str, files: dict[str, bytes]) -> Path:
    folder = root / FOLDERS[kind]
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_tar(path: Path, kind: str, files: dict[str, bytes], prefix: str = "") -> Path:
    with tarfile.open(path, "w:gz") as held:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{prefix}{FOLDERS[kind]}/{name}")
            member.size = len(content)
            held.addfile(member, io.BytesIO(content))
    return path


def write(root: Path, kind: str, layout: str, held: dict[str, np.ndarray]) -> Path:
    """The path to give."""
    match layout:
        case "npz":
            np.savez(root / f"{kind}.npz", **held)
            return root / f"{kind}.npz"
        case "folder":
            return write_folder(root, kind, pickles(kind, held))
        case "around":
            return write_folder(root, kind, pickles(kind, held)).parent
        case "tar":
            return write_tar(root / "c.tar.gz", kind, pickles(kind, held))
        case "tar with dots":
            return write_tar(root / "c.tar.gz", kind, pickles(kind, held), "./")
    raise AssertionError(layout)
