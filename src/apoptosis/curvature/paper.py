"""The paper's own terms: upper series, lower series and parallel connectivity, and X̂ of every layer (JVPF).

For a layer y = W∗x + b the connectivity product of W has three parts:

- *upper series* (Theorem 1, first sum): the layers above, moved by δ, act on this layer's output;
- *lower series* (Theorem 1, second sum): X̂, this layer's input moved by the layers below, enters the weight's
  gradient: B∗X̂;
- *parallel* (Theorem 2): through products of activations, q·k and S·v of attention, gates.

Each is the connectivity product with the other two switched off; they add up to it exactly.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apoptosis.curvature.containment import contained
from apoptosis.curvature.duals import Dual
from apoptosis.curvature.problem import Problem, pose
from apoptosis.curvature.product import forward, ledger_of, run
from apoptosis.curvature.switches import KINDS, TERMS
from apoptosis.curvature.tangents import TangentMode
from apoptosis.task import Batch, Task

__all__ = ["PaperTerms", "layer_tangents", "paper_terms"]


@dataclass(frozen=True)
class PaperTerms:
    """The three parts of the connectivity product, by parameter name."""

    upper: dict[str, Tensor]
    lower: dict[str, Tensor]
    parallel: dict[str, Tensor]


def paper_terms(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    direction: Mapping[str, Tensor] | None = None,
    micro_batch: int | None = None,
) -> PaperTerms:
    """Upper series, lower series and parallel term of the connectivity product; three runs over the data."""
    task, batches = task or Task.classification(), list(batches)
    terms = {
        name: run(pose(model, direction, kind), batches, task, micro_batch).product
        for name, kind in TERMS.items()
    }
    return PaperTerms(**terms)


@torch.no_grad()
def layer_tangents(
    model: nn.Module,
    batch: Batch,
    task: Task | None = None,
    *,
    direction: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """X̂ of every linear layer and convolution: how its input moves along δ, by the name of its weight.

    A layer called more than once has an entry per call: `name`, `name@1`, `name@2`, ...
    """
    problem = pose(model, direction, KINDS["connectivity"])
    found: dict[str, Tensor] = {}
    names = {id(p): name for name, p in problem.parameters.items()}

    def note(weight: Tensor, x: Dual) -> None:
        if (name := names.get(id(weight))) is None:
            return
        calls = sum(1 for key in found if key == name or key.startswith(f"{name}@"))
        moved = torch.zeros_like(x.value) if x.tangent is None else x.tangent.clone()
        found[f"{name}@{calls}" if calls else name] = moved.detach()

    _run_forward(problem, note, task or Task.classification(), batch)
    return found


def _run_forward(
    problem: Problem, note: Callable[[Tensor, Dual], None], task: Task, batch: Batch
) -> None:
    ledger = ledger_of(problem, problem.direction, batch)
    with contained(problem.model), closing(ledger):
        forward(problem, TangentMode(ledger, problem.kind.kept, note), task, batch)
