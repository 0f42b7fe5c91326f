"""Learning-rate schedules: the part of the top rate to use after a part `t` in [0, 1] of all steps.

- constant: the top all the time;
- step: the top, and a tenth of what it was at each of some milestones, as in the tables of pruning papers;
- cosine: ½ (1 + cos πt), from the top down to zero;
- one-cycle: linearly up to the top during the first `WARM_UP` of the steps, then the cosine down. A new network bears a
  higher rate this way, which is what makes short training short.
"""

import math
from collections.abc import Callable, Mapping, Sequence

__all__ = ["SCHEDULES", "constant", "cosine", "one_cycle", "stepwise"]

WARM_UP = 0.3
START = 0.04  # the first step's part of the top rate; zero would waste it


def constant(t: float) -> float:  # noqa: ARG001 - a schedule takes the time
    """Always 1."""
    return 1.0


def stepwise(milestones: Sequence[float]) -> Callable[[float], float]:
    """A tenth at each milestone.

    >>> [round(stepwise([0.5, 0.75])(t), 3) for t in (0, 0.49, 0.5, 0.75, 1)]
    [1.0, 1.0, 0.1, 0.01, 0.01]
    """
    return lambda t: 0.1 ** sum(t >= milestone for milestone in milestones)


def cosine(t: float) -> float:
    """Half a cosine from 1 to 0.

    >>> [round(cosine(t), 3) for t in (0, 0.5, 1)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * t))


def one_cycle(t: float) -> float:
    """Up, then down.

    >>> [round(one_cycle(t), 3) for t in (0, 0.3, 1)]
    [0.04, 1.0, 0.0]
    """
    if t < WARM_UP:
        return START + (1 - START) * t / WARM_UP
    return cosine((t - WARM_UP) / (1 - WARM_UP))


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": constant,
    "step": stepwise((0.5, 0.75)),
    "cosine": cosine,
    "one-cycle": one_cycle,
}
