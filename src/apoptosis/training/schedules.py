"""Learning-rate schedules: the part of the top rate to use after a part `t` in [0, 1] of all steps.

- cosine: ½ (1 + cos πt), from the top down to zero;
- one-cycle: linearly up to the top during the first `WARM_UP` of the steps, then the cosine down. A new network bears a
  higher rate this way, which is what makes short training short.
"""

import math
from collections.abc import Callable, Mapping

__all__ = ["SCHEDULES", "cosine", "one_cycle"]

WARM_UP = 0.3
START = 0.04  # the first step's part of the top rate; zero would waste it


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


SCHEDULES: Mapping[str, Callable[[float], float]] = {"cosine": cosine, "one-cycle": one_cycle}
