"""From signed scores to a ranking of single weights.

    rank of weight q of tensor t  =  |s_q| / scale(t)  +  c · |θ_q|

`scale` brings tensors onto a common footing (1, or the largest, the norm or the mean of |s| over the weights of the
tensor that are still there). The second term is the paper's: where a gradient has vanished, s is zero and the weight
itself decides. With the largest for a scale and c = 1 this is what the paper does (there |θ| is not normalised either).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from apoptosis.criteria.scores import Scores, trainable
from apoptosis.errors import ConfigError, PlanMismatchError
from apoptosis.masks import Layer, MaskPlan

__all__ = ["SALIENCIES", "Saliency", "find_saliency", "saliencies"]

SCALES: Mapping[str, Callable[[Tensor, int], Tensor | float]] = MappingProxyType(
    {
        "none": lambda _values, _num: 1.0,
        "max": lambda values, _num: values.max(),
        "l2": lambda values, _num: values.double().norm().to(values.dtype),
        "mean": lambda values, num: values.double().sum().to(values.dtype) / num,
    }
)


@dataclass(frozen=True)
class Saliency:
    """How signed scores rank single weights; the module's docstring has the formula.

    Attributes:
        normalise: `none`, `max`, `l2` or `mean`, of each tensor.
        magnitude: how much of |θ| is added, c.
    """

    normalise: str = "none"
    magnitude: float = 0.0

    def __post_init__(self) -> None:
        if self.normalise not in SCALES:
            raise ConfigError(
                f"normalise={self.normalise!r} was asked for; there are {', '.join(SCALES)}."
            )
        number = isinstance(self.magnitude, (int, float)) and not isinstance(self.magnitude, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not number or not 0 <= self.magnitude < float("inf"):
            raise ConfigError(
                f"magnitude={self.magnitude!r} was asked for; it says how much of |θ| is added, from 0 on."
            )


SALIENCIES = MappingProxyType(
    {
        "plain": Saliency(),
        "normalised": Saliency("max"),
        "paper": Saliency("max", 1.0),
        "balanced": Saliency("l2", 1.0),
    }
)
"""By name. `plain`: |s|, in units of the loss. `normalised`: divided by the tensor's largest; `paper` adds |θ| to that.
`balanced`: divided by the tensor's norm, |θ| added, so that |θ| weighs more; best of the four for OBA and Taylor."""


def find_saliency(asked: "Saliency | str") -> Saliency:
    """The saliency itself, or the one of that name."""
    if isinstance(asked, Saliency):
        return asked
    if not isinstance(asked, str) or asked not in SALIENCIES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"The saliency {asked!r} was asked for; there are {', '.join(SALIENCIES)}, or a `Saliency`."
        )
    return SALIENCIES[asked]


def saliencies(
    scores: Scores,
    model: nn.Module,
    how: Saliency,
    layers: Mapping[str, Layer],
    alive: MaskPlan | None = None,
) -> dict[str, Tensor]:
    """What ranks the weights of these layers; weights that are gone (not `alive`) have 0 and do not count in a scale.

    Raises:
        PlanMismatchError: there are no scores of a layer, or they have another shape.
    """
    weights, found = trainable(model), dict[str, Tensor]()
    for name, layer in layers.items():
        score = scores.values.get(name)
        if score is None or tuple(score.shape) != layer.shape:
            has = "has none" if score is None else f"has shape {tuple(score.shape)}"
            raise PlanMismatchError(
                f"Scores by {scores.criterion} were to rank {name!r} of shape {layer.shape}, and what it gave {has}. "
                "They are of another network: score this one."
            )
        values, num = score.abs(), score.numel()
        if alive is not None and name in alive.masks:
            mask = alive.masks[name]
            values, num = values.mul_(mask.kept().to(values.device)), mask.num_kept
        scale = SCALES[how.normalise](values, max(1, num)) if values.numel() else 1.0
        if scale > 0:
            values /= scale
        if how.magnitude:
            values.add_(weights[name].abs().to(values.dtype), alpha=how.magnitude)
        found[name] = values
    return found
