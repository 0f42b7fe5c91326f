"""First-order Taylor, in three forms; g is the gradient of the mean loss over all samples.

- *Weights*: θ ⊙ g. Removing weight q changes the loss by −θ_q g_q to first order. On a chain of bias-free ReLU layers
  OBA's score is this one times the number of layers less one.
- *Gates*: |∂L/∂γ_u| for a factor γ_u = 1 on all that is read of unit u; removing the unit is γ_u → 0. With a the unit's
  activations where its consumers read them, it is |Σ a ⊙ ∂L/∂a|, over positions, samples and consumers.
- *Activations* (Molchanov et al. 2016): the mean over samples of |mean over positions of a ⊙ ∂ℓ/∂a|. Contributions of
  different samples do not cancel.

Gates stand at the inputs of the modules that read a unit, each differentiated by itself: for a linear consumer the
gate's derivative is Σ θ ⊙ g over its columns, exactly. Where no module reads the unit (queries and keys of attention
meet in a product) they stand at the outputs of the modules that make it, halved for `qk_dim`, of which both factors of
the product carry one. A `head_dim` is one dimension of queries and keys, whose product no module reads, and of values:
its gates stand at both ends, all halved, for values pass both.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from apoptosis.criteria.aggregation import UnitScores, gathered_sum
from apoptosis.criteria.scores import Scores, trainable
from apoptosis.curvature import Place, Seen, mean_gradient, visit_activations
from apoptosis.errors import ConfigError, ModelError
from apoptosis.modes import in_eval_mode
from apoptosis.soundness import check_numbers
from apoptosis.structure import Group, Site, Structure
from apoptosis.task import Batch, Task, tensors_in

__all__ = ["gate_factor", "gate_sites", "taylor", "taylor_units"]

FORMS = ("gate", "activation")
_PLAIN = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
"""Modules whose output depends on their input through their weight alone."""


def taylor(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    micro_batch: int | None = None,
) -> Scores:
    """θ ⊙ g, signed, in eval mode."""
    check_numbers(model)
    with in_eval_mode(model):
        found = mean_gradient(model, batches, task, micro_batch=micro_batch)
    parameters = trainable(model)
    values = {name: parameters[name] * gradient for name, gradient in found.product.items()}
    return Scores(values, "taylor", {}, found.count, unreached=found.unreached, loss=found.loss)


def taylor_units(
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    form: str = "gate",
    micro_batch: int | None = None,
) -> UnitScores:
    """First-order Taylor of whole units, on the activations that carry them, in eval mode.

    Args:
        model: the one that `structure` describes, as modules; nothing of it changes.
        structure: its groups and their sites.
        batches: data to score on; the first dimension of activations is the sample's in the `activation` form, or
            samples and parts of each, such as windows, in one.
        task: what a batch is and what its loss is; classification unless said.
        form: `gate` or `activation`.
        micro_batch: at most so many samples at once, to bound memory.

    Returns:
        Scores of every group that has sites to put all of its gates on; the others are `missing`.

    Raises:
        ConfigError: no such form.
        ModelError: no group has such sites; or, in the `activation` form, modules that read one group do not show the
            same samples.
    """
    if form not in FORMS:
        raise ConfigError(f"form={form!r} was asked for; there are {', '.join(FORMS)}.")
    task = task or Task.classification()
    sites = {group.name: gate_sites(model, group) for group in structure.groups}
    gated = [group for group in structure.groups if sites[group.name]]
    if not gated:
        raise ModelError(
            "No group has modules that show its units wherever they are read, so there is no place for a gate. A "
            "network delivered as a program has no modules; score it by a criterion of parameters, such as `taylor`."
        )
    sums = {group.name: torch.zeros(group.size, dtype=torch.float64) for group in gated}

    reached: set[str] = set()

    def visit(seen: Seen, piece: Batch) -> None:
        count = task.count(piece)
        num = next((len(tensor) for tensor in tensors_in(piece) if tensor.dim()), 0)
        for group in gated:
            passed = [(site, *seen[_place(site)]) for site in sites[group.name]]
            parts = [_by_sample(site, a, g, form, num) for site, a, g in passed if g is not None]
            if parts:
                _check_samples(group, parts)
                reached.add(group.name)
                each = torch.stack(parts).sum(0) * gate_factor(group) * count
                sums[group.name] += (each.abs() if form == "activation" else each).sum(0).cpu()

    places = {_place(site) for group in gated for site in sites[group.name]}
    with in_eval_mode(model):
        loss, total = visit_activations(
            model, batches, task, places, visit, micro_batch=micro_batch
        )
    return UnitScores(
        {name: value.abs() / total for name, value in sums.items() if name in reached},
        f"taylor-{form}",
        {"form": form},
        total,
        tuple(name for name in sites if name not in reached),
        loss,
    )


def gate_sites(model: nn.Module, group: Group) -> list[Site]:
    """Where gates on a group's units stand: where it is read, else where it is made; both for `head_dim`.

    Nowhere if a part of that is shown by no module, as inside recurrent cells and torch's own attention: gates on the
    rest would be worth something else.
    """
    read = _shown(model, group, group.readers, "input")
    if group.kind == "head_dim":
        made = _shown(model, group, group.makers, "output")
        return [*made, *read] if made and read else []
    return read if group.readers else _shown(model, group, group.makers, "output")


def gate_factor(group: Group) -> float:
    """What the derivative at each site counts: ½ where two of them hold one unit."""
    return 0.5 if group.kind in ("qk_dim", "head_dim") else 1.0


def _shown(model: nn.Module, group: Group, workers: frozenset[str], side: str) -> list[Site]:
    """At that side of the modules whose weights work on the units; none if one of them does not show them."""
    found = [s for s in group.sites if s.side == side and s.module in workers]
    if (
        side == "input"
    ):  # other modules may also hand the unit past their weights, to who reads it next
        modules = dict(model.named_modules())
        passed_on = {(s.module, s.call) for s in group.sites if s.side == "output"}
        found = [
            s
            for s in found
            if (s.module, s.call) not in passed_on or isinstance(modules.get(s.module), _PLAIN)
        ]
    return found if workers <= {site.module for site in found} else []


def _place(site: Site) -> Place:
    return Place(site.module, site.call, site.side)


def _check_samples(group: Group, parts: list[Tensor]) -> None:
    if len(found := {len(part) for part in parts}) > 1:
        raise ModelError(
            f"Activations are scored sample by sample, and modules that read group {group.name!r} show it in "
            f"{' and '.join(map(str, sorted(found)))} rows: samples are not their first dimension. Use `taylor-gate`, "
            "which does not tell samples apart."
        )


def _by_sample(site: Site, activation: Tensor, gradient: Tensor, form: str, num: int) -> Tensor:
    """(samples, units): the sum of a ⊙ ∂L/∂a over all entries of a unit; their mean over positions for activations."""
    flow = (activation.double() * gradient.double()).movedim(site.dim, -1)
    if form == "activation":
        if (
            num and len(flow) > num and len(flow) % num == 0
        ):  # windows: samples and parts of each in one
            flow = flow.unflatten(0, (num, -1))
        positions = flow[0, ..., 0].numel() * site.indices.shape[1]
        by_entry = flow.flatten(1, -2).sum(1) if flow.dim() > 2 else flow
        return gathered_sum(by_entry, site.indices) / positions
    return gathered_sum(flow.flatten(0, -2).sum(0), site.indices)[None]
