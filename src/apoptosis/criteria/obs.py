"""Optimal Brain Surgeon of whole units: what one costs when the layers that read it are refitted.

Of every layer that reads a group, `layer_moments` gives A, the second moment of its inputs, and S, that of its outputs'
gradients; an error E of its weights costs about ½ tr(S E A Eᵀ). Taking units away and refitting what is left of the
weights costs ½ tr(S W_Q (A⁻¹_QQ)⁻¹ W_Qᵀ), and `elimination` finds a path: who goes first, who next once the others have
taken over, and at what price. Prices of all layers are in units of the loss, so that paths can be merged: each layer's
are scaled so that without a refit, where ½ tr(S W_u A_uu W_uᵀ) is what the Kronecker form says of a unit, all units
together cost what Γ says they do. (That form alone is off by factors of 5 to 50 between layers of one ResNet, and
takes too much where errors add up over places.)

A score is a geometric mean of two prices, p^((1 − κ)/2) · q^((1 + κ)/2): p of the unit's turn, the largest so far along
the path, and q = ½ Γ_uu, what Γ says it costs without any refit. The first knows who can stand in for whom, the second
is exact for the unit by itself; each alone keeps less (experiments/LOG.md). κ is 0 where a layer's fits hold on samples
that they have not seen and 1 where they fail (`held_out`): of few samples, or many alike, p is far too low. So the
criterion is for networks that are repaired afterwards by `refit`; as they are cut, others keep more.

What changes cost is what predictions lose, before and after both taken at temperature 2 (`curvature.loss_factors`). On
the data that it was trained on a network is all but sure of itself, and its loss has curvature on few samples alone.
Two is between what is best for such networks and what is best for those that are not (experiments/LOG.md).

Queries and keys meet in a product, which no refit can make good: a `qk_dim` costs ½ Γ_uu. A `head_dim` is one of these
and a dimension of values at once, and costs both.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from apoptosis.criteria.aggregation import UnitScores
from apoptosis.criteria.elimination import Reader, eliminate
from apoptosis.criteria.gates import find_gates
from apoptosis.criteria.held_out import optimism
from apoptosis.criteria.taylor import gate_sites
from apoptosis.curvature import (
    Gate,
    LayerMoments,
    Moments,
    as_matrix,
    is_bearable,
    is_linear_map,
    layer_moments,
)
from apoptosis.errors import ModelError
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.structure import Group, Site, Structure
from apoptosis.task import Batch, Task

__all__ = ["obs_units", "priced_groups"]

JITTER = 1e-12
"""Of a moment's mean on the diagonal."""
MOST_GROUPS = 8
"""Groups of channels that tell how far a layer's fits hold."""


def obs_units(  # noqa: PLR0913 - what every criterion takes, and a word on each of its own choices
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    ridge: float = 1e-4,
    draws: int | None = None,
    temperature: float = 2.0,
    seed: int = 0,
    micro_batch: int | None = None,
) -> UnitScores:
    """What units cost along the cheapest path with refits, in eval mode. Cross-entropy needs no labels.

    Args:
        model: the one that `structure` describes, as modules; nothing of it changes.
        structure: its groups and their sites.
        batches: data to score on.
        task: what a batch is and what its loss is; classification unless said.
        ridge: added to the diagonal of A, in parts of its mean.
        draws: of labels from the network's own predictions, per sample; None is exact up to 32 numbers (classes ×
            predictions) per sample, and 8 beyond. Another loss of few outputs is exact always.
        temperature: of the predictions that changes are held against; no matter where the labels show that the loss is
            no cross-entropy.
        seed: for the draws.
        micro_batch: at most so many samples at once, to bound memory.

    Returns:
        Scores of every group that linear layers alone read, each called once, or attention's own products; the others
        are `missing`.

    Raises:
        ConfigError: a temperature that is no number above 0.
        ModelError: there is no such group.
    """
    task = task or Task.classification()
    priced = {group.name: _Priced.of(model, group) for group in structure.groups}
    uses = Counter(site.module for own in priced.values() for site in own.readers)
    gates = [gate for own in priced.values() for gate in own.gates]
    if not uses and not gates:
        raise ModelError(
            "No group is read by linear layers alone, so there is nothing that could be refitted. A network delivered "
            "as a program has no layers; score it by a criterion of parameters, such as `oba`."
        )
    with in_eval_mode(model):
        found = layer_moments(
            *(model, batches, task, sorted(uses)),
            gates=gates,
            draws=draws,
            temperature=temperature,
            seed=seed,
            micro_batch=micro_batch,
        )
    prepared = _Prepared(model, found.layers, ridge, uses)
    values: dict[str, Tensor] = {}
    for group in track(structure.groups, "refitting without units"):
        own = priced[group.name]
        if own.is_there and own.is_in(found):
            values[group.name] = _score(group, own, prepared, found.gates)
    return UnitScores(
        values,
        "obs",
        {"ridge": ridge, "draws": draws, "temperature": temperature, "seed": seed},
        found.count,
        tuple(group.name for group in structure.groups if group.name not in values),
        found.loss,
    )


def priced_groups(model: nn.Module, structure: Structure) -> list[str]:
    """Names of groups that are sure to get a price: linear layers alone read them.

    Whether samples can be told apart in what attention multiplies shows when they pass.
    """
    priced = {group.name: _Priced.of(model, group) for group in structure.groups}
    return [name for name, own in priced.items() if own.readers and not own.gates]


@dataclass(frozen=True)
class _Priced:
    """What says what units cost: layers that can be refitted without them, gates where they meet in a product."""

    readers: list[Site]
    gates: list[Gate]

    @classmethod
    def of(cls, model: nn.Module, group: Group) -> "_Priced":
        """Both are empty where something that acts on the units is neither."""
        readers = _readers(model, group)
        gates = find_gates(model, group) if group.kind in ("qk_dim", "head_dim") else []
        # Gates on queries that a layer reads as well stand there alone, and miss the product.
        is_odd = bool(gates) and bool(readers) != (group.kind == "head_dim")
        return cls([], []) if is_odd else cls(readers, gates)

    @property
    def is_there(self) -> bool:
        """Whether there is a price."""
        return bool(self.readers or self.gates)

    def is_in(self, found: LayerMoments) -> bool:
        """Whether the outputs depended on all of it."""
        return all(site.module in found.layers for site in self.readers) and all(
            gate.group in found.gates for gate in self.gates
        )


def _score(
    group: Group, own: _Priced, prepared: "_Prepared", gates: Mapping[str, Tensor]
) -> Tensor:
    """The geometric mean of what units cost after the refit and by themselves, weighed by κ."""
    met = gates[group.name] / 2 if own.gates else None
    if not own.readers:
        assert met is not None, "asked only of groups with a price"
        return met
    readers = [reader for site in own.readers for reader in prepared.readers(site)]
    refitted = eliminate(readers, group.size).scores()
    # Units that cost nothing may come out below zero, by rounding.
    each = torch.stack([prepared.gates(site).clamp_min(0) for site in own.readers])
    doubts = torch.tensor([prepared.optimism(site.module) for site in own.readers]).double()
    alone = each.sum(0)
    kappa = ((doubts @ each) / alone.clamp_min(torch.finfo(alone.dtype).tiny)).clamp(0, 1)
    if met is not None:
        refitted, alone = refitted + (met - alone).clamp_min(0), met
    return _weighed(refitted.clamp_min(0), alone, kappa)


def _weighed(price: Tensor, alone: Tensor, kappa: Tensor) -> Tensor:
    """p^((1 − κ)/2) · q^((1 + κ)/2)."""
    return price ** ((1 - kappa) / 2) * alone ** ((1 + kappa) / 2)


def _readers(model: nn.Module, group: Group) -> list[Site]:
    """Where the group is read, if only linear layers read it, each at its one call and each unit in one place."""
    found = gate_sites(model, group)
    sites = [site for site in found if site.side == "input"] if group.readers else found
    modules = dict(model.named_modules())
    are_once = len({site.module for site in sites}) == len(sites)
    fit = are_once and all(_is_reader(modules[site.module], site) for site in sites)
    return sites if fit else []


def _is_reader(module: nn.Module, site: Site) -> bool:
    if site.side != "input" or site.call or not is_linear_map(module) or not is_bearable(module):
        return False
    owners = site.indices // _channels(module)
    return bool((owners == owners[:, :1]).all())  # no unit is spread over groups of channels


def _channels(module: Any) -> int:
    """Inputs of one group of channels."""
    return module.in_channels // module.groups if isinstance(module, _ConvNd) else 2**62


@dataclass(frozen=True, eq=False)
class _Part:
    """One group of channels of a layer: A, P = A⁻¹ and T."""

    moment: Tensor
    inverse: Tensor
    weights: Tensor


class _Prepared:
    """Inverses and weighted weights of layers, made once for several groups that they read, and kept until the last.

    Moments wait on the CPU; what is at work is where the network is.
    """

    def __init__(
        self, model: nn.Module, moments: dict[str, Moments], ridge: float, uses: Counter[str]
    ) -> None:
        """`uses`: how many groups each layer reads."""
        self._model, self._moments, self._ridge = model, moments, ridge
        self._optimism: dict[str, float] = {}
        self._uses = uses.copy()
        self._parts: dict[str, dict[int, _Part]] = {path: {} for path in uses}
        self._device = next(model.parameters()).device

    def readers(self, site: Site) -> list[Reader]:
        """One for each group of channels of the layer, with those units that it reads; prices as Γ has them."""
        module: Any = self._model.get_submodule(site.module)
        kernel = prod(module.kernel_size) if isinstance(module, _ConvNd) else 1
        num_channels = _channels(module)
        owners = site.indices[:, 0] // num_channels
        found: list[Reader] = []
        said = 0.0
        for number in np.unique(owners).tolist():
            units = np.flatnonzero(owners == number)
            channels = torch.from_numpy(site.indices[units] % num_channels)
            columns = (channels[:, :, None] * kernel + torch.arange(kernel)).flatten(1)
            columns, which = (t.to(self._device) for t in (columns, torch.from_numpy(units)))
            part = self._part(site.module, number)
            said += _without_refit(part.moment, part.weights, columns)
            found.append(Reader(part.inverse, part.weights, which, columns))
        self._uses[site.module] -= 1
        if not self._uses[site.module]:
            del self._parts[site.module]
        exact = 2 * float(self.gates(site).sum())
        scale = (exact / said) ** 0.5 if said > 0 and exact > 0 else 1.0
        return [replace(reader, weights=reader.weights * scale) for reader in found]

    def _part(self, path: str, number: int) -> _Part:
        parts = self._parts[path]
        if number not in parts:
            module: Any = self._model.get_submodule(path)
            inputs = sum(half[number].to(self._device) for half in self._moments[path].halves)
            assert isinstance(inputs, Tensor), "a sum of tensors"
            outputs = self._moments[path].outputs[number].to(self._device)
            weight = as_matrix(module, module.weight.detach())[number].to(inputs)
            if module.bias is not None:
                bias = module.bias.detach().to(inputs).reshape(-1, len(weight))[number]
                weight = torch.cat([weight, bias[:, None]], 1)
            inverse = _inverse(inputs, self._ridge, has_bias=module.bias is not None)
            parts[number] = _Part(inputs, inverse, _weighted(outputs, weight))
        return parts[number]

    def optimism(self, path: str) -> float:
        """κ of a layer, the mean over some of its groups of channels."""
        if path not in self._optimism:
            module: Any = self._model.get_submodule(path)
            first, second = self._moments[path].halves
            has_bias = module.bias is not None
            columns = torch.arange(len(first[0]) - has_bias, device=self._device)
            kernel = prod(module.kernel_size) if isinstance(module, _ConvNd) else 1
            numbers = range(0, len(first), max(1, len(first) // MOST_GROUPS))
            self._optimism[path] = sum(
                optimism(
                    (first[number].to(self._device), second[number].to(self._device)),
                    columns.reshape(-1, kernel),
                    ridge=self._ridge,
                    has_bias=has_bias,
                )
                for number in numbers
            ) / len(numbers)
        return self._optimism[path]

    def gates(self, site: Site) -> Tensor:
        """½ Γ_uu of every unit, as one layer reads it: all of its channels at once."""
        places = torch.from_numpy(site.indices)
        own = self._moments[site.module].gates
        return 0.5 * own[places[:, :, None], places[:, None, :]].sum((1, 2))


def _inverse(moment: Tensor, ridge: float, *, has_bias: bool) -> Tensor:
    """(A + λ I)⁻¹ without a penalty on the constant; an input that is always zero gets λ alone."""
    moment = moment.clone()
    free = moment.diagonal()[: len(moment) - has_bias]
    free += max(ridge * float(free.mean()), torch.finfo(torch.float64).tiny)
    return torch.cholesky_inverse(torch.linalg.cholesky(moment))


def _weighted(moment: Tensor, weight: Tensor) -> Tensor:
    """T with Tᵀ T = Wᵀ S W, of no more rows than W has rows or columns: the smaller root is the cheaper one."""
    if len(weight) > weight.shape[1]:
        return _root(weight.T @ moment @ weight)
    return _root(moment) @ weight


def _root(moment: Tensor) -> Tensor:
    """R with Rᵀ R = S. Of few samples S has a null space, which takes a Cholesky factor a jitter in the last digits."""
    moment = (moment + moment.T) / 2
    jittered = moment.clone()
    jittered.diagonal().add_(JITTER * moment.diagonal().mean())
    root, failed = torch.linalg.cholesky_ex(jittered, upper=True)
    if not int(failed):
        return root
    values, vectors = torch.linalg.eigh(moment)
    return values.clamp_min(0).sqrt()[:, None] * vectors.T


def _without_refit(moment: Tensor, weights: Tensor, columns: Tensor) -> float:
    """Σ_u tr(T_u A_uu T_uᵀ)."""
    own = moment[columns[:, :, None], columns[:, None, :]]  # (u, k, k)
    theirs = weights[:, columns].permute(1, 0, 2)  # (u, m, k)
    return float(((theirs @ own) * theirs).sum())
