"""`Scores`: one signed number per parameter entry, and what made it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from apoptosis.errors import ModelError
from apoptosis.soundness import check_numbers

__all__ = ["Scores", "trainable"]


@dataclass(frozen=True)
class Scores:
    """Signed scores by parameter name; where the absolute value is taken is decided when they become unit scores.

    Attributes:
        values: a tensor of the parameter's shape, in float32 or better.
        criterion: the name of what made them.
        options: how it was asked.
        count: samples the scores are a mean over; 0 where no data were read.
        fallbacks: operations that took the engine's generic path, and how often.
        unreached: parameters that the outputs do not depend on; they score 0.
        loss: mean loss of the network over the same samples; None where no data were read.
    """

    values: dict[str, Tensor]
    criterion: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    count: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict[str, int])
    unreached: tuple[str, ...] = ()
    loss: float | None = None


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are scored, by name, without their graph.

    Raises:
        ModelError: there are none, or weights are no real numbers.
        NonFiniteError: one is NaN or infinite.
    """  # noqa: DOC502 - by `check_numbers`
    check_numbers(model)
    found = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ModelError(
            "Scores were asked for, but no parameter of the model requires grad, so there is nothing to score. "
            "Unfreeze what should be scored: parameter.requires_grad_(True)."
        )
    return found
