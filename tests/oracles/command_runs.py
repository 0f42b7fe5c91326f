"""Commands on a small network of a file of one's own, run in this process: to their end, stopped, or refused."""

from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from apoptosis import progress
from apoptosis.cli.app import app

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )

def both():
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]
    return batches, batches[:2]
"""

COMMANDS = {
    "train": (["train", "MODEL", "--epochs", "6"], "training"),
    "finetune": (["finetune", "MODEL", "--epochs", "6"], "training"),
    "prune": (["prune", "MODEL", "--keep-params", "0.5", "--steps", "6"], "pruning by"),
    "one-shot": (
        ["prune", "MODEL", "--keep-params", "0.5", "--steps", "3", "--epochs", "6"],
        "training",
    ),
    "rounds": (
        ["prune", "MODEL", "--keep-params", "0.7,0.4", "--steps", "2", "--epochs", "6"],
        "training",
    ),
    "weights": (
        [
            "prune",
            "MODEL",
            "--unstructured",
            "--keep",
            "0.5",
            "--criterion",
            "oba",
            "--stages",
            "6",
        ],
        "sparsifying by",
    ),
}


def words_of(own, name: str, *more) -> list[str]:
    words, _ = COMMANDS[name]
    words = [f"{own}:make" if word == "MODEL" else word for word in words]
    return [*words, "--data", f"{own}:both", *map(str, more)]


@contextmanager
def listening(listener):
    """In the place of the progress bars."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("train", "prune", "sparsify"):
            name = f"apoptosis.cli.{module}.progress_bars"
            patch.setattr(name, lambda _: progress.listen(listener))
        yield


def stopped(own, name: str, *more):
    """As by Ctrl-C in the fourth round of a loop."""
    _, loop = COMMANDS[name]

    def stop(event):
        if event.what.startswith(loop) and event.done == 4 and not event.finished:
            raise KeyboardInterrupt

    with listening(stop):
        result = RUN.invoke(app, words_of(own, name, *more))
    assert result.exit_code == 130, result.output
    return result


def files(folder) -> dict[str, bytes]:
    """Weights and masks; a plan may name its tensors in another order."""
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def done(words) -> str:
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(words) -> str:
    result = RUN.invoke(app, words)
    assert result.exit_code == 1, result.output
    return " ".join(result.stderr.replace("│", " ").split())
