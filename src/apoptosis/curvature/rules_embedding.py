"""Looking up rows of a table, which is a weight: linear in it, and a product where bags weigh their samples.

ŷ = Ŵ[indices]: the tangent looks up the same rows of the table's tangent. Indices do not move.
"""

from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.duals import Dual, add_tangents, lift
from apoptosis.curvature.rules import inputs, keep, sample, tangent_rule
from apoptosis.curvature.switches import Switches

__all__: list[str] = []

_BAG_MODES = ("sum", "mean", "max")
_BAGS = torch.tensor([0, 3])


@tangent_rule(
    "embedding",
    family="linear",
    samples=lambda: [
        sample(inputs((5, 3))[0], torch.tensor([[0, 4], [1, 1]])),
        sample(inputs((5, 3))[0], torch.tensor([[0, 4], [1, 1]]), 1),
    ],
)
def embedding(_kept: Switches, weight: Any, indices: Tensor, *options: Any, **named: Any) -> Dual:
    """Looking up rows is linear in the table."""
    # A padding row is looked up like any other; only its gradient is dropped, by convention, for value and tangent
    # alike.
    weight = lift(weight)
    rows = torch.embedding(weight.value, indices, *options, **named)
    looked_up = (
        None
        if weight.tangent is None
        else torch.embedding(weight.tangent, indices, *options, **named)
    )
    return Dual(rows, looked_up)


@tangent_rule(
    "embedding_bag",
    family="linear",
    samples=lambda: [
        sample(inputs((5, 3))[0], torch.tensor([0, 4, 1, 1, 2]), _BAGS, False, 0, False),
        sample(inputs((5, 3))[0], torch.tensor([0, 4, 1, 1, 2]), _BAGS, False, 1, False),
        sample(inputs((5, 3))[0], torch.tensor([0, 4, 1, 1, 2]), _BAGS, False, 2, False),
        sample(
            inputs((5, 3))[0],
            torch.tensor([0, 4, 1, 1, 2]),
            _BAGS,
            False,
            0,
            False,
            inputs((5,))[0],
        ),
    ],
)
def embedding_bag(kept: Switches, weight: Any, indices: Tensor, offsets: Tensor, *rest: Any) -> Any:
    """Sums and means of looked-up rows are linear in the table, and bilinear with weights per sample."""
    weight = lift(weight)
    options: list[Any] = [False, 0, False, None, False, None]
    options[: len(rest)] = rest
    by_sample = None if options[3] is None else lift(options[3])

    def bags(table: Tensor, sample_weights: Tensor | None) -> Any:
        given: list[Any] = [*options[:3], sample_weights, *options[4:]]
        return torch.embedding_bag(table, indices, offsets, *given)

    value, *others = bags(weight.value, None if by_sample is None else by_sample.value)
    tangent = extra = None
    if weight.tangent is not None and _BAG_MODES[options[1]] == "max":
        tangent = weight.tangent.gather(0, others[-1])
    elif weight.tangent is not None:
        flows = kept.product(
            of_weight=weight.weight, by_weight=by_sample is not None and by_sample.weight
        )
        samples = None if by_sample is None else keep(by_sample.value, flows)
        tangent = bags(weight.tangent, samples)[0]
    if by_sample is not None and by_sample.tangent is not None:
        flows = kept.product(of_weight=by_sample.weight, by_weight=weight.weight)
        extra = bags(keep(weight.value, flows), by_sample.tangent)[0]
    return (Dual(value, add_tangents(tangent, extra)), *others)
