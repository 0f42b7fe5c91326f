"""A whole run that anybody may kill: `python interrupted_run.py KIND FOLDER [resume]` writes FOLDER/result.safetensors.

Also the runs themselves, for tests that stop them from inside.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from apoptosis.checkpoint import Journal, open_journal, write_file
from apoptosis.data import Batches, digits
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget, Sparsity
from apoptosis.training import FitOptions, fit_
from apoptosis.workflow import (
    Material,
    Pruning,
    Sparsifying,
    gradual,
    iterative,
    one_shot,
    prune,
    sparsify,
)

FIT = FitOptions(epochs=3, learning_rate=0.05, label_smoothing=0.1)
ADAM = FitOptions(epochs=3, optimizer="adamw", learning_rate=0.01, distil=0.5)
PRUNING = Pruning(criterion="oba", steps=3, repair=("batch_norm",))


class Watched:
    """Batches that call somebody before each of them is read."""

    def __init__(self, batches: Batches, seen: Callable[[], object]) -> None:
        self.batches, self.seen, self.start_at = batches, seen, batches.start_at

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for batch in self.batches:
            self.seen()
            yield batch


def material(seen: Callable[[], object] = lambda: None) -> Material:
    data = digits()
    train, validation = data.train, data.validation

    def of(num: int, size: int, seed: int | None) -> Watched:
        own = Batches(train.images[:num], train.labels[:num], size=size, shuffle_seed=seed)
        return Watched(own, seen)

    judged = Batches(validation.images[:64], validation.labels[:64], size=64)
    return Material(
        scoring=of(128, 64, None), training=of(192, 32, 0), validation=Watched(judged, seen)
    )


def trained() -> nn.Module:
    model = digits_cnn(width=6, seed=3)
    fit_(model, digits().train.batches(128, shuffle_seed=0), options=FitOptions(epochs=1))
    return model.eval()


def fit_alone(model: nn.Module, data: Material, journal: Journal | None) -> nn.Module:
    assert data.training is not None
    twin = prune(model, data.scoring, Budget(flops=0.9), criterion="magnitude", steps=1).model
    fit_(
        twin,
        data.training,
        options=ADAM,
        teacher=model,
        validation=data.validation,
        journal=journal,
    )
    return twin


RUNS: dict[str, Callable[[nn.Module, Material, Journal | None], nn.Module]] = {
    "fit": fit_alone,
    "prune": lambda model, data, journal: (
        prune(model, data.scoring, Budget(flops=0.4), steps=4, journal=journal).model
    ),
    "prune_repaired": lambda model, data, journal: (
        prune(
            model,
            data.scoring,
            Budget(flops=0.4),
            criterion="obs",
            steps=3,
            repair=["refit"],
            repair_between=True,
            journal=journal,
        ).model
    ),
    "sparsify": lambda model, data, journal: (
        sparsify(
            model,
            data.scoring,
            Sparsity(keep=0.2),
            criterion="oba",
            stages=3,
            batch_norm="re-estimate",
            journal=journal,
        ).model
    ),
    "one_shot": lambda model, data, journal: (
        one_shot(model, Budget(flops=0.5), data, pruning=PRUNING, fit=FIT, journal=journal).model
    ),
    "iterative": lambda model, data, journal: (
        iterative(
            model,
            [Budget(flops=0.7), Budget(flops=0.4)],
            data,
            pruning=PRUNING,
            fit=ADAM,
            journal=journal,
        )[-1].model
    ),
    "gradual": lambda model, data, journal: (
        gradual(
            model,
            Sparsity(keep=0.2),
            data,
            sparsifying=Sparsifying(criterion="taylor", stages=2),
            fit=FIT,
            journal=journal,
        ).model
    ),
}


def main(kind: str, folder: str, *words: str) -> None:
    place = Path(folder)
    with open_journal(place / "notes", {"kind": kind}, resume="resume" in words) as journal:
        dense = trained()
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        model = RUNS[kind](dense, material(), journal)
        tensors = {name: own.contiguous() for name, own in model.state_dict().items()}
        write_file(place / "result.safetensors", lambda file: save_file(tensors, file))
        journal.remove()


if __name__ == "__main__":
    main(*sys.argv[1:])
