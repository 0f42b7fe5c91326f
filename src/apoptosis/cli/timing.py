"""How long something takes, found by doing a little of it: for dry runs, which promise a duration."""

import copy
import time
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from apoptosis.cli.subject import Subject
from apoptosis.training import FitOptions, fit_

__all__ = ["seconds_of", "training_step_s"]


def training_step_s(subject: Subject, fit: FitOptions, teacher: nn.Module | None = None) -> float:
    """Of one step of training, taken by a copy of the network."""
    data, model = subject.data, copy.deepcopy(subject.model)
    assert data.training is not None, "asked only where there is something to train on"
    batch, one = [next(iter(data.training))], replace(fit, epochs=1)
    return seconds_of(lambda: fit_(model, batch, data.task, one, teacher=teacher))


def seconds_of(work: Callable[[], object]) -> float:
    """Short work is done twice: what happens only the first time would be most of it."""
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        if seconds > 1:
            break
    return seconds
