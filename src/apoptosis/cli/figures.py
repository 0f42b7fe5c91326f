"""Numbers as people read them: counts with units, sizes of files, metrics. One place, so that all tables agree."""

import math
from collections.abc import Mapping
from typing import Any

from apoptosis.training import Evaluation

__all__ = [
    "duration",
    "evaluation_as_data",
    "file_size",
    "metric",
    "metric_name",
    "number",
    "seconds",
]


def number(value: int) -> str:
    """Three digits and a unit.

    >>> number(4_089_184_256), number(950)
    ('4.09 G', '950')
    """
    for unit, scale in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return str(value)


def file_size(num_bytes: int) -> str:
    """Kilobytes, or megabytes from a million bytes on.

    >>> file_size(2_500), file_size(3_200_000)
    ('2.5 kB', '3.2 MB')
    """
    return f"{num_bytes / 1e3:,.1f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"


def seconds(value: float) -> str:
    """As milliseconds below a second.

    >>> seconds(0.01234), seconds(3.21)
    ('12.3 ms', '3.2 s')
    """
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.1f} s"


def duration(value: float) -> str:
    """Seconds that somebody would have to wait, as minutes or hours where there are many.

    >>> duration(4.21), duration(500), duration(9000)
    ('4.2 s', '8 min', '2.5 h')
    """
    if value < 100:
        return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


def metric_name(name: str) -> str:
    """What a metric is called in tables: the share of correct answers is the accuracy."""
    return "accuracy" if name == "correct" else name


def metric(name: str, values: Mapping[str, float]) -> str:
    """A metric as text, the accuracy in per cent; a dash where there is none of that name.

    >>> metric("correct", {"correct": 0.9731}), metric("error", {})
    ('97.31%', '–')
    """
    if name not in values:
        return "–"
    value = values[name]
    return f"{value:.2%}" if name == "correct" and math.isfinite(value) else f"{value:.4g}"


def evaluation_as_data(found: Evaluation | None) -> dict[str, Any] | None:
    """Plain JSON, which has no NaN: a network that was cut too far may give one, and is shown all the same."""
    if found is None:
        return None
    metrics = {name: _finite(value) for name, value in found.metrics.items()}
    return {"loss": _finite(found.loss), "metrics": metrics, "count": found.count}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
