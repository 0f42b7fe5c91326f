"""The diagonal of a curvature matrix by Hutchinson's estimate: E[v ⊙ Hv] = diag H for v with independent entries ±1.

The product is exact, so the only error is the estimate's own: off-diagonal entries leak in with mean 0 and a variance
of Σ_{r≠q} H_qr² per probe. Over all 2^p sign vectors it vanishes (that is a test). Fresh signs are drawn for every
batch, so data average it out as well.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from apoptosis.curvature.containment import contained
from apoptosis.curvature.problem import Curvature, Pass, Problem, mean_over, pose
from apoptosis.curvature.product import one_pass
from apoptosis.curvature.switches import find_kind
from apoptosis.errors import ConfigError
from apoptosis.task import Batch, Task

__all__ = ["curvature_diagonal"]


def curvature_diagonal(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    kind: str = "hessian",
    probes: int = 8,
    seed: int = 0,
) -> Curvature:
    """An unbiased estimate of diag H of any kind, as `product`.

    Args:
        model: as for `curvature_product`.
        batches: the data.
        task: how to run a batch and what its loss is.
        kind: of curvature.
        probes: sign vectors per batch; the cost is proportional, the standard error falls with its root.
        seed: for the signs.

    Raises:
        ConfigError: for fewer than one probe.
    """
    if probes < 1:
        raise ConfigError(f"probes={probes} was asked for; at least one sign vector is needed.")
    task, problem = task or Task.classification(), pose(model, None, find_kind(kind))
    generator = torch.Generator().manual_seed(seed)

    def estimate(batch: Batch) -> Pass:
        results = [_probe(problem, task, batch, generator) for _ in range(probes)]
        product: dict[str, Tensor | None] = {
            name: torch.stack([r.product[name] for r in results]).mean(0)  # pyright: ignore
            for name, first in results[0].product.items()
            if first is not None
        }
        return Pass(results[0].loss, product, fallbacks=results[0].fallbacks)

    with contained(problem.model):
        return mean_over(problem, batches, task, estimate)


def _probe(problem: Problem, task: Task, batch: Batch, generator: torch.Generator) -> Pass:
    signs = {
        name: (torch.randint(0, 2, p.shape, generator=generator) * 2 - 1).to(p.device, p.dtype)
        for name, p in problem.parameters.items()
    }
    found = one_pass(replace(problem, direction={**signs}), task, batch)
    return replace(
        found,
        product={
            name: None if value is None else value * signs[name]
            for name, value in found.product.items()
        },
    )
