"""Gates to second order: what the loss becomes when a factor γ_u on a unit goes from 1 to 0.

With g the gradient and G the Gauss-Newton matrix by all gates (`curvature.gates`), a unit's score is

    s_u = −w g_u + ½ G_uu,

and G also says what units are worth together: ΔL(S) ≈ Σ_{u∈S} s_u + Σ_{u<v∈S} G_uv. Selection can use both. Gates stand
where `taylor-gate` has them.

The weight w of the gradient is 0 unless asked for. At the end of training g is nearly zero on the training data as a
whole, and on a sample of them mostly that sample's noise: with w = 1 scores rank units far better by the loss change on
the very same images, and worse by that on others (experiments/LOG.md). Without g no labels are needed. For a network
that is far from a minimum of the loss on the data at hand, use w = 1.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace

from torch import nn

from apoptosis.criteria.aggregation import UnitScores
from apoptosis.criteria.taylor import gate_factor, gate_sites
from apoptosis.curvature import Gate, GateOptions, Place, gate_curvature
from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.modes import in_eval_mode
from apoptosis.structure import Group, Structure
from apoptosis.task import Batch, Task

__all__ = ["find_gates", "fullest_form", "gates"]

LARGEST_BYTES = 2**30
"""What interactions may take before fewer of them are kept."""


def gates(  # noqa: PLR0913 - what every criterion takes, and a word on each of its own choices
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    weight: float = 0.0,
    seed: int | None = None,
    options: GateOptions | None = None,
) -> UnitScores:
    """−w g + ½ diag G of whole units, and the interactions between them, in eval mode.

    Args:
        model: the one that `structure` describes, as modules; nothing of it changes.
        structure: its groups and their sites.
        batches: data to score on; labels are needed only for a weight above 0.
        task: what a batch is and what its loss is; classification unless said.
        weight: of the gradient, from 0 to 1.
        seed: for drawing labels where classes are many; that of the options unless given.
        options: form, sampling and memory; unless given, the fullest form whose interactions fit in 1 GiB.

    Returns:
        Scores and interactions of every group that has sites to put all of its gates on; the others are `missing`.

    Raises:
        ConfigError: the weight is not from 0 to 1.
        DataError: a weight above 0, and data without labels.
        ModelError: no group has such sites.

    >>> import torch
    >>> from apoptosis.structure import trace
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    >>> units = gates(net, trace(net, torch.zeros(1, 2)), [torch.randn(8, 2)])
    >>> units.values["0"].shape, units.interactions["0",].shape
    (torch.Size([3]), torch.Size([3, 3]))
    """
    if not (isinstance(weight, (int, float)) and 0 <= weight <= 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"weight={weight!r} was asked for; the gradient counts from 0 (not at all) to 1."
        )
    standing = [gate for group in structure.groups for gate in find_gates(model, group)]
    if not standing:
        raise ModelError(
            "No group has modules that show its units wherever they are read, so there is no place for a gate. A "
            "network delivered as a program has no modules; score it by a criterion of parameters, such as `oba`."
        )
    options = options or GateOptions(form=fullest_form(standing))
    options = options if seed is None else replace(options, seed=seed)
    task = task or Task.classification()
    with in_eval_mode(model):
        found = gate_curvature(model, batches, task, standing, options)
    if weight and found.gradient is None:
        raise DataError(
            f"weight={weight} was asked for, and some batches have no labels, without which the loss has no gradient. "
            "Give labels, or weight=0."
        )
    values = {name: own / 2 for name, own in found.diagonal.items()}
    for name, slope in (found.gradient or {}).items():
        values[name] -= weight * slope
    return UnitScores(
        values,
        "gates",
        {"weight": weight, **asdict(options)},
        found.count,
        tuple(group.name for group in structure.groups if group.name not in values),
        found.loss,
        found.blocks,
    )


def find_gates(model: nn.Module, group: Group) -> list[Gate]:
    """Those of a group; none where some could not stand."""
    return [
        Gate(group.name, Place(s.module, s.call, s.side), s.dim, s.indices, gate_factor(group))
        for s in gate_sites(model, group)
    ]


def fullest_form(gates: Iterable[Gate]) -> str:
    """The form with the most interactions that takes at most `LARGEST_BYTES`."""
    sizes = {gate.group: len(gate.indices) for gate in gates}
    squares = {"dense": sum(sizes.values()) ** 2, "block": sum(n**2 for n in sizes.values())}
    return next((form for form, num in squares.items() if 8 * num <= LARGEST_BYTES), "diagonal")
