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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from apoptosis.criteria.aggregation import UnitScores
from apoptosis.criteria.elimination import (
    Alone,
    Path,
    Reader,
    eliminate_alike,
    eliminated_cost,
    shape_of,
)
from apoptosis.criteria.gates import find_gates
from apoptosis.criteria.held_out import optimism
from apoptosis.criteria.taylor import gate_sites
from apoptosis.curvature import (
    Gate,
    LayerMoments,
    Moments,
    Products,
    as_matrix,
    is_bearable,
    is_linear_map,
    layer_moments,
)
from apoptosis.errors import ConfigError, ModelError
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.structure import Group, Site, Structure
from apoptosis.task import Batch, Task

__all__ = ["obs_units", "priced_groups"]

LEAST = 1e-9
"""With a smaller penalty the inverse of a sum of few products has no digits left."""
JITTER = 1e-12
"""Of a moment's mean on the diagonal."""
TOGETHER = 2**28
"""Bytes of matrices of groups that wait for others of their shape."""
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
        ConfigError: a temperature that is no number above 0, or a ridge that is none or below 0.
        ModelError: there is no such group.
    """
    if isinstance(ridge, bool) or not isinstance(ridge, (int, float)) or not 0 <= ridge < inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"`ridge` is a number that is not below 0, such as 1e-4; {ridge!r} was given."
        )
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
    there = {
        group.name: own
        for group in structure.groups
        for own in [priced[group.name]]
        if own.is_there and own.is_in(found)
    }
    paths = _paths(structure, there, prepared)
    values = {
        name: _score(own, paths.get(name), prepared, found.gates.get(name))
        for name, own in there.items()
    }
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


def _paths(
    structure: Structure, priced: Mapping[str, _Priced], prepared: "_Prepared"
) -> dict[str, Path]:
    """Of every group that layers read. Groups of one shape go together, as many as `TOGETHER` has room for."""
    found: dict[str, Path] = {}
    waiting: dict[Any, dict[str, list[Reader | Alone]]] = {}
    held = 0

    def go(alike: dict[str, list[Reader | Alone]]) -> int:
        paths = eliminate_alike(list(alike.values()), structure[next(iter(alike))].size)
        found.update(zip(alike, paths, strict=True))
        return sum(_num_bytes(own) for own in alike.values())

    for name in track([*priced, None], "refitting without units"):
        if name is not None and priced[name].readers:
            readers = [reader for site in priced[name].readers for reader in prepared.readers(site)]
            waiting.setdefault(shape_of(readers, structure[name].size), {})[name] = readers
            held += _num_bytes(readers)
        while waiting and (held > TOGETHER or name is None):
            largest = max(waiting, key=lambda shape: sum(map(_num_bytes, waiting[shape].values())))
            held -= go(waiting.pop(largest))
    return found


def _num_bytes(readers: Sequence[Reader | Alone]) -> int:
    return sum(own.num_bytes for own in readers)


def _score(own: _Priced, path: Path | None, prepared: "_Prepared", gates: Tensor | None) -> Tensor:
    """The geometric mean of what units cost after the refit and by themselves, weighed by κ."""
    met = None if gates is None else gates / 2
    if path is None:
        assert met is not None, "asked only of groups with a price"
        return met
    refitted = path.scores()
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
    """One group of channels of a layer: A, P = A⁻¹ but for the constant's column, and T."""

    moment: Products
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

    def readers(self, site: Site) -> list[Reader] | list[Alone]:
        """One for each group of channels of the layer, with those units that it reads; prices as Γ has them."""
        module: Any = self._model.get_submodule(site.module)
        kernel = prod(module.kernel_size) if isinstance(module, _ConvNd) else 1
        num_channels = _channels(module)
        owners = site.indices[:, 0] // num_channels
        if len(np.unique(owners)) == len(owners) > 1:
            return [self._alone(site, torch.from_numpy(owners))]
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
        scale = self._scale(site, said) ** 0.5
        return [replace(reader, weights=reader.weights * scale) for reader in found]

    def _scale(self, site: Site, said: float) -> float:
        """What makes prices without a refit, as the Kronecker form has them, those of Γ."""
        exact = 2 * float(self.gates(site).sum())
        return exact / said if said > 0 and exact > 0 else 1.0

    def _alone(self, site: Site, owners: Tensor) -> Alone:
        """Each unit by itself in a group of channels: all groups at once."""
        module: Any = self._model.get_submodule(site.module)
        moments, kernel = self._moments[site.module], prod(module.kernel_size)
        inputs = sum(own[owners].to(self._device) for own in moments.halves)
        assert isinstance(inputs, Tensor), "a sum of tensors"
        outputs = moments.outputs[owners].to(self._device)
        weight = as_matrix(module, module.weight.detach()).to(outputs)[owners]
        columns = torch.from_numpy(site.indices % _channels(module))
        columns = (columns[:, :, None] * kernel + torch.arange(kernel)).flatten(1)
        own = torch.arange(len(owners))[:, None, None], columns[:, :, None], columns[:, None, :]
        paid = (weight.mT @ outputs @ weight)[own]
        num = inputs.shape[1] - (module.bias is not None)
        free = inputs.diagonal(dim1=1, dim2=2)[:, :num]
        penalty = (self._ridge * free.mean(1)).clamp_min(torch.finfo(torch.float64).tiny)
        said = float((inputs[own] * paid).sum())
        free += penalty[:, None]
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(inputs))[own]
        costs = eliminated_cost(inverse, paid) * self._scale(site, said)
        return Alone(torch.arange(len(owners), device=self._device), costs)

    def _part(self, path: str, number: int) -> _Part:
        parts = self._parts[path]
        if number not in parts:
            module: Any = self._model.get_submodule(path)
            inputs = self._inputs(path, number)
            outputs = self._moments[path].outputs[number].to(self._device)
            weight = as_matrix(module, module.weight.detach())[number].to(outputs)
            if module.bias is not None:
                bias = module.bias.detach().to(outputs).reshape(-1, len(weight))[number]
                weight = torch.cat([weight, bias[:, None]], 1)
            inverse = _inverse(inputs, self._ridge, has_bias=module.bias is not None)
            parts[number] = _Part(inputs, inverse, _weighted(outputs, weight))
        return parts[number]

    def _inputs(self, path: str, number: int) -> Products:
        """A of a group of channels."""
        first, second = (own.of_group(number, self._device) for own in self._moments[path].parts)
        return first + second

    def optimism(self, path: str) -> float:
        """κ of a layer, the mean over some of its groups of channels."""
        if path not in self._optimism:
            module: Any = self._model.get_submodule(path)
            first, second = self._moments[path].parts
            has_bias = module.bias is not None
            num_groups, num_inputs = first.own.shape[:2]
            columns = torch.arange(num_inputs - has_bias, device=self._device)
            kernel = prod(module.kernel_size) if isinstance(module, _ConvNd) else 1
            numbers = range(0, num_groups, max(1, num_groups // MOST_GROUPS))
            self._optimism[path] = sum(
                optimism(
                    (first.of_group(number, self._device), second.of_group(number, self._device)),
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


def _inverse(moment: Products, ridge: float, *, has_bias: bool) -> Tensor:
    """(A + λ I)⁻¹ without a penalty on the constant; an input that is always zero gets λ alone.

    Where positions are few, that of all but the constant is (I − X_c (λ I + X_cᵀ X_c)⁻¹ X_cᵀ) / λ with X_c what the
    constant does not tell of X.
    """
    num = moment.own.shape[1] - has_bias
    size = max(ridge * float(moment.diagonal[0, :num].mean()), torch.finfo(torch.float64).tiny)
    if not moment.is_thin or ridge < LEAST:
        matrix = moment.matrix[0].clone()
        matrix.diagonal()[:num] += size
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    columns = moment.own[0, :num]
    if has_bias:
        constant = moment.own[0, -1]
        columns = columns - torch.outer(columns @ constant / constant.square().sum(), constant)
    among = columns.T @ columns
    among.diagonal().add_(size)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(among), columns.T, upper=False)
    inverse = Products(half.T[None], is_thin=True).matrix[0].neg_()
    inverse.diagonal().add_(1)
    return inverse.div_(size)


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


def _without_refit(moment: Products, weights: Tensor, columns: Tensor) -> float:
    """Σ_u tr(T_u A_uu T_uᵀ)."""
    theirs = weights[:, columns].permute(1, 0, 2)  # (u, m, k)
    if moment.is_thin:
        own = moment.own[0, columns]  # (u, k, positions)
        own = own @ own.mT
    else:
        own = moment.own[0, columns[:, :, None], columns[:, None, :]]  # (u, k, k)
    return float((own * (theirs.mT @ theirs)).sum())
