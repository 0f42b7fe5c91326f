"""Which images a network may be judged on: those that were kept from it when it was made.

Data sets are split by a seed. A checkpoint says by which its network was made; with the same data it is always that
split, whatever --seed says: by another, most of the images to judge on would be ones that the network has learnt.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apoptosis.checkpoint import read_run
from apoptosis.cli.origins import is_checkpoint
from apoptosis.cli.subject_options import DataOptions, SubjectOptions
from apoptosis.data import is_data_set_name
from apoptosis.errors import DataError

__all__ = ["check_one_split", "split_seed"]


def split_seed(options: DataOptions) -> int:
    """That of the checkpoint that the network or its weights come from, if it knows these data; else --seed."""
    places = [options.weights, options.model if isinstance(options, SubjectOptions) else None]
    found = [own for place in places if place is not None for own in _noted(place, options.data)]
    return found[0] if found else options.seed


def check_one_split(models: Iterable[str], options: DataOptions) -> int:
    """The seed of the split that all these networks were made with; --seed where none of them says.

    Raises:
        DataError: they were made with several, so that no image is new to all.
    """
    seeds = {model: seed for model in models for seed in _noted(model, options.data)}
    if len(set(seeds.values())) > 1:
        told = ", ".join(f"{model} by seed {seed}" for model, seed in seeds.items())
        raise DataError(
            f"These networks were made with different splits of {options.data}: {told}. What is held out for one is "
            "what another has learnt. Evaluate them one by one."
        )
    return next(iter(seeds.values()), split_seed(options))


def _noted(place: str | Path, data: str) -> list[int]:
    """The seed that a checkpoint has for these data, if it is one."""
    if not is_data_set_name(data) or not is_checkpoint(place):
        return []
    subject: Any = read_run(Path(place).expanduser()).settings.get("subject")
    if not isinstance(subject, dict) or subject.get("data") != data:
        return []
    seed = subject.get("split_seed", subject.get("seed"))
    return [seed] if isinstance(seed, int) else []
