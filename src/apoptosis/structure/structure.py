"""What is known of a network's structure, and everything that can be asked of it without running it again."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apoptosis.errors import ConfigError, PlanMismatchError
from apoptosis.structure.axes import Axis, Indices, kept_indices, size_of
from apoptosis.structure.basis import Basis, basis_of
from apoptosis.structure.costs import Costs
from apoptosis.structure.delivery import deliver
from apoptosis.structure.groups import Group, PinnedAxis, Tie
from apoptosis.structure.kinds import KINDS, RANK
from apoptosis.structure.multihead import AttentionShape, attention_shapes
from apoptosis.structure.network import Network
from apoptosis.structure.plan import Plan, TensorCut, fingerprint_of
from apoptosis.structure.polynomials import Polynomial
from apoptosis.structure.recording import Example
from apoptosis.structure.replay import replay_of
from apoptosis.structure.rewriting import CutProgram, write_program
from apoptosis.structure.surgery import cut_module

__all__ = ["Structure"]


@dataclass(frozen=True, eq=False)
class Structure:
    """What belongs together in a model, what it costs, and what a cut makes of it."""

    groups: tuple[Group, ...]
    """What can shrink, in the order of the model's tensors."""
    ties: tuple[Tie, ...] = field(repr=False)
    """Groups that must keep equally many units for the model's own code to run."""
    pinned: tuple[PinnedAxis, ...] = field(repr=False)
    """What stays whole, and why."""
    without_rule: tuple[tuple[str, str], ...] = field(repr=False)
    """Operations that no rule knows, and their lines: what they touch is pinned, what they cost is not counted."""
    unused: tuple[str, ...] = field(repr=False)
    """Parameters that no run touched: nothing is known of them, and nothing of them is cut."""
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """Of every parameter and buffer."""
    _network: Network = field(repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Names a network of these tensors and shapes."""
        return fingerprint_of(self.shapes)

    def __getitem__(self, name: str) -> Group:
        """The group of that name."""
        if name not in self._by_name:
            raise PlanMismatchError(
                f"There is no group {name!r}. {_did_you_mean(name, self._by_name)}"
            )
        return self._by_name[name]

    def choose(
        self,
        *,
        kinds: Iterable[str] | None = None,
        names: Iterable[str] = ("*",),
        inexact: bool | None = None,
    ) -> list[Group]:
        """Groups by kind and by patterns of their names (`layer1.*`, `!*.downsample*` to leave out).

        Inexact groups and ranks of adapters are left out unless `inexact` is true, or `kinds` names their kind.

        Raises:
            ConfigError: an unknown kind, a pattern that fits no group, or nothing is chosen.
        """
        kinds, names = _texts(kinds, "kinds"), _texts(names, "names") or []
        unknown = [kind for kind in kinds or () if kind not in KINDS]
        if unknown:
            raise ConfigError(f"There is no kind {unknown[0]!r}. The kinds are {', '.join(KINDS)}.")
        wanted = [pattern for pattern in names if not pattern.startswith("!")] or ["*"]
        unwanted = [pattern[1:] for pattern in names if pattern.startswith("!")]
        for pattern in (*wanted, *unwanted):
            if pattern != "*" and not any(
                fnmatchcase(group.name, pattern) for group in self.groups
            ):
                raise ConfigError(self._fits_nothing(pattern))
        found: list[Group] = []
        for group in self.groups:
            listed = kinds is None or group.kind in kinds
            asked_for = kinds is not None if inexact is None else inexact
            exact_enough = asked_for or (group.exact and group.kind != RANK)
            named = any(fnmatchcase(group.name, p) for p in wanted)
            left_out = any(fnmatchcase(group.name, p) for p in unwanted)
            if listed and exact_enough and named and not left_out:
                found.append(group)
        if not found:
            raise ConfigError(
                f"No group is chosen by kinds={kinds}, names={names}. {self._what_there_is()}"
            )
        return found

    @property
    def looks_at_values(self) -> bool:
        """True if sizes or branches of the traced run may have followed from values of the inputs.

        So may its costs: of other inputs they can be others.
        """
        return bool(self.unused) or self._network.run.analysis.looks_at_values()

    def macs(self, plan: Plan | Mapping[str, int] | None = None) -> int:
        """Multiply-accumulates of one forward pass over the example inputs.

        After `plan`, if given; or with so many units per group, without resolving a plan.
        """
        return self._costs.total_macs(self._sizes_after(plan))

    def macs_by_module(self, plan: Plan | Mapping[str, int] | None = None) -> dict[str, int]:
        """The same by the module that computes them, in the order of the forward pass; `plan` as for `macs`.

        A product stands under the innermost module whose code asks for it; the model's own stand under "".

        >>> from torch import nn, zeros
        >>> from apoptosis.structure import trace
        >>> trace(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 3)), zeros(1, 2)).macs_by_module({"0": 4})
        {'0': 8, '1': 12}
        """
        return self._costs.macs_by_module(self._sizes_after(plan))

    def params(self, plan: Plan | Mapping[str, int] | None = None) -> int:
        """Number of parameters, tied ones once; `plan` as for `macs`."""
        return self._costs.total_params(self._sizes_after(plan))

    def unit_cost(self, name: str) -> tuple[int, int]:
        """MACs and parameters that removing one unit of a group saves, everything else as it is."""
        return self._costs.saved(self[name].axis, self._network.sizes)

    def polynomials(self, names: Sequence[str]) -> tuple[Polynomial, Polynomial]:
        """MACs and parameters as functions of the numbers of units of these groups, the others as they are."""
        axes = [self[name].axis for name in names]
        return (
            Polynomial.of(self._costs.macs, axes, self._network.sizes),
            Polynomial.of(self._costs.params, axes, self._network.sizes),
        )

    def step(self, name: str) -> dict[str, int]:
        """The smallest removal from a group that respects its ties: how many units, of it and of those tied to it.

        >>> from torch import nn, zeros
        >>> from apoptosis.structure import trace
        >>> trace(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)), zeros(1, 2)).step("0")
        {'0': 1}
        """
        weights, pending = {self[name].name: Fraction(1)}, [name]
        while pending:
            current = pending.pop()
            for tie in self.ties:
                own = dict(tie.members)
                for other in own.keys() & self._by_name.keys() if current in own else ():
                    if other not in weights:
                        weights[other] = weights[current] * Fraction(own[other], own[current])
                        pending.append(other)
        common = lcm(*(weight.denominator for weight in weights.values()))
        wholes = {other: int(weight * common) for other, weight in weights.items()}
        together = lcm(*wholes.values())
        return {other: together // whole for other, whole in wholes.items()}

    def plan(self, kept: Mapping[str, Iterable[int]]) -> Plan:
        """Resolve which units stay into what to slice and what to set; groups that are not named stay whole.

        Units are given by their indices, or by a mask: one boolean per unit of the group, true for those that stay.

        The model's own code is tried at the new sizes. If it cannot run them, the plan is delivered as a program, and
        says why.

        Raises:
            ConfigError: nothing would be removed, or `kept` is no mapping from names.
            PlanMismatchError: unknown groups or units, a group that would empty, or a cut that cannot be delivered.
        """
        units = {name: self._checked(name, own) for name, own in _by_group(kept).items()}
        units = {name: own for name, own in units.items() if len(own) < self[name].size}
        if not units:
            raise ConfigError(f"The plan removes nothing. {self._what_there_is()}")
        axes = {self[name].axis: own for name, own in units.items()}
        after = self._network.sizes | {axis: len(own) for axis, own in axes.items()}
        tensors = self._cut_tensors(axes)
        plan = Plan(
            kept=units,
            sizes={group.name: group.size for group in self.groups},
            tensors=tensors,
            attributes=(),
            scalings=(),
            attentions=self._attentions(units, tensors),
            delivery="module",
            delivery_because="",
            fingerprint=self.fingerprint,
            fingerprint_after=fingerprint_of(_shapes_after(self.shapes, tensors)),
            source=self,
        )
        exact = all(self[name].exact for name in units)
        delivered = deliver(plan, self._network, after, exact=exact)
        return replace(delivered, basis=self._basis())

    def identity(self) -> Plan:
        """The plan that keeps everything."""
        sizes = {group.name: group.size for group in self.groups}
        made_of = (self.fingerprint, self.fingerprint)
        delivery = "module" if self._network.skeleton is not None else "program"
        because = "" if delivery == "module" else "an earlier cut was delivered so"
        return Plan({}, sizes, (), (), (), (), delivery, because, *made_of, self._basis(), self)

    def _basis(self) -> Basis | None:
        """Of the model that plans are for; of what was cut from it, plans before tell."""
        network = self._network
        return basis_of(network.turned or network.run.model) if network.applied is None else None

    def for_turned(self, model: nn.Module) -> "Structure":
        """The same for the traced model in other coordinates: plans are for that one (`Plan.basis`)."""
        return replace(self, _network=replace(self._network, turned=model))

    def after(self, plan: Plan) -> "Structure":
        """The structure of the cut network: sizes shrink, indices are numbered anew; nothing is traced again."""
        sizes, network = self._sizes_after(plan), self._network
        skeleton = network.skeleton if plan.delivery == "module" else None
        counts = plan.counts()
        return replace(
            self,
            groups=tuple(
                replace(g, size=counts[g.name][0] if g.name in counts else g.size, sizes=sizes)
                for g in self.groups
            ),
            shapes=_shapes_after(self.shapes, plan.tensors),
            _network=Network(
                network.run,
                sizes,
                network.attributes | {change.attribute: change.new for change in plan.attributes},
                None if skeleton is None else cut_module(skeleton, plan),
                network.whole(plan),
            ),
        )

    @property
    def example(self) -> Example:
        """What the model was traced with."""
        return self._network.run.example

    def program(self, model: nn.Module, plan: Plan) -> CutProgram:
        """The rewritten program of a plan, whatever the plan says about delivery; `cut` calls this."""
        program = write_program(self._network.run, self._sizes_after(plan), model, plan)
        traced = self._network.run if not self._network.run.is_meta else None
        replay = replay_of(self._network.run, model if traced is None else traced.model)
        if replay.because:
            raise PlanMismatchError(
                f"The plan is one for a program, and that cannot be: {replay.because}."
            )
        program.limits, program.checks.harmless = replay.limits, replay.harmless
        if replay.eval_only:
            program.keep_in_eval_mode_(f"{replay.eval_only}; {plan.delivery_because}")
        return program

    def _attentions(
        self, units: dict[str, Indices], tensors: tuple[TensorCut, ...]
    ) -> tuple[AttentionShape, ...]:
        if self._network.skeleton is None:
            return ()
        counts = {name: len(own) for name, own in units.items()}
        touched = {name for cut in tensors for name in cut.names}
        return attention_shapes(self._network.skeleton, self.groups, counts, touched)

    @cached_property
    def _by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def _costs(self) -> Costs:
        parameters = {
            name for name, _ in self._network.run.model.named_parameters(remove_duplicate=False)
        }
        return Costs.of(self._network.run.analysis, parameters)

    def _sizes_after(self, plan: Plan | Mapping[str, int] | None) -> dict[Axis, int]:
        if plan is None:
            return self._network.sizes
        if not isinstance(plan, Plan):
            nums = {name: _as_count(name, num) for name, num in _by_group(plan).items()}
            return self._network.sizes | {self._axis(name, num): num for name, num in nums.items()}
        if plan.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                f"The plan was made for another network (fingerprint {plan.fingerprint}, this one is "
                f"{self.fingerprint}). After a cut, use `structure.after(plan)`; for another model, trace it."
            )
        return self._network.sizes | {self[name].axis: len(own) for name, own in plan.kept.items()}

    def _cut_tensors(self, axes: Mapping[Axis, Indices]) -> tuple[TensorCut, ...]:
        analysis = self._network.run.analysis
        cuts: list[TensorCut] = []
        spared = analysis.spared()
        for value in analysis.tensors():
            exprs = analysis.axes[value]
            touched = [d for d, e in enumerate(exprs) if any(axis in axes for axis in e.axes())]
            if touched:
                kept = {dim: kept_indices(exprs[dim], axes, self._network.sizes) for dim in touched}
                shape = tuple(size_of(expr, self._network.sizes) for expr in exprs)
                left = tuple(dim for dim in touched if (value, dim) in spared)
                cuts.append(TensorCut(value.names, shape, kept, left))
        return tuple(cuts)

    def _axis(self, name: str, num: int) -> Axis:
        group = self[name]
        if not 1 <= num <= group.size:
            raise PlanMismatchError(
                f"Group {name!r} cannot keep {num} units; it has {group.size}, and 1 at least must stay."
            )
        return group.axis

    def _checked(self, name: str, kept: Iterable[int]) -> Indices:
        group = self[name]
        units = _as_indices(group, kept)
        if len(units) and (units.min() < 0 or units.max() >= group.size):
            wrong = int(units[(units < 0) | (units >= group.size)][0])
            raise PlanMismatchError(
                f"Group {name!r} has units 0 … {group.size - 1}; {wrong} is none of them."
            )
        found = np.unique(units)
        if len(found) < len(units):
            raise PlanMismatchError(
                f"Kept units of group {name!r} are named twice. Name each once."
            )
        if len(found) < group.smallest:
            needs_two = ": `squeeze()` would drop the axis, or a norm have one number to work on"
            because = "" if group.smallest == 1 else needs_two
            raise PlanMismatchError(
                f"Group {name!r} would keep {len(found)} of {group.size} units; at least {group.smallest} must "
                f"stay{because}. An empty layer passes nothing on: to remove it, take the block that contains it "
                "out of the model."
            )
        if len(found) % group.multiple:
            low = len(found) // group.multiple * group.multiple
            near = " or ".join(str(num) for num in (low, low + group.multiple) if num)
            raise PlanMismatchError(
                f"Group {name!r} would keep {len(found)} of {group.size} units, and only multiples of {group.multiple} "
                f"can run: {group.multiple_because}. Keep {near}."
            )
        return found

    def _fits_nothing(self, pattern: str) -> str:
        """What may have been meant: people think of layers, and a layer may belong to a group of another name."""
        owners = {
            tensor: group.name
            for group in self.groups
            for tensor, *_ in group.places
            if fnmatchcase(tensor, pattern) or fnmatchcase(tensor.rpartition(".")[0], pattern)
        }
        if owners:
            tensor, owner = next(iter(owners.items()))
            names = ", ".join(dict.fromkeys(repr(name) for name in owners.values()))
            return (
                f"The pattern {pattern!r} fits no group. {tensor} belongs to {owner!r}: name the groups that hold what "
                f"you mean: {names}."
            )
        return f"The pattern {pattern!r} fits no group. {_did_you_mean(pattern, self._by_name)}"

    def _what_there_is(self) -> str:
        if self.groups:
            some = ", ".join(f"{g.name} ({g.kind}, {g.size})" for g in self.groups[:4])
            return f"There are {len(self.groups)} groups: {some}{', …' if len(self.groups) > 4 else ''}."
        reasons = list(dict.fromkeys(f"{pin.tensor}: {pin.reason}" for pin in self.pinned))[:4]
        return f"Nothing in this model can shrink. {'; '.join(reasons) or 'It has no parameters'}."


def _texts(given: Iterable[str] | None, option: str) -> list[str] | None:
    if isinstance(given, str):
        raise ConfigError(f"{option}={given!r} is one text; a list is meant: {option}=[{given!r}].")
    return None if given is None else list(given)


def _by_group(given: Any) -> Mapping[str, Any]:
    """What is said of each group, if it is said by name."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{str(given)[:60]!r} ({type(given).__name__}) is no mapping. Give a dictionary from names of groups, as "
            "`structure.groups` lists them, to what is kept of each."
        )
    for name in given:
        if not isinstance(name, str):
            raise PlanMismatchError(
                f"Groups are named by texts; {name!r} is {type(name).__name__}. `structure.groups` lists them."
            )
    return given


def _as_count(name: str, num: Any) -> int:
    try:
        if isinstance(num, bool):
            raise TypeError("a boolean is no count")
        return operator.index(num)
    except TypeError as error:
        raise PlanMismatchError(
            f"Group {name!r} cannot keep {num!r} units ({type(num).__name__}); a count is a whole number."
        ) from error


def _as_indices(group: Group, kept: Any) -> Indices:
    """Whole numbers or a mask in any form; fractions read as indices would keep what nobody asked for."""
    found = _as_array(kept)
    if found is None or found.ndim != 1 or found.dtype.kind not in "iub":
        raise PlanMismatchError(
            f"Group {group.name!r} is given {str(kept)[:60]!r} ({type(kept).__name__}). Give the indices of the units "
            "to keep: a list, array or tensor of whole numbers in one dimension, or a mask of as many booleans as it "
            f"has units ({group.size})."
        )
    if found.dtype.kind != "b":
        return found.astype(np.int64)
    if len(found) != group.size:
        raise PlanMismatchError(
            f"Group {group.name!r} has {group.size} units; the mask given for it has {len(found)} entries. A mask "
            "says of each unit whether it stays."
        )
    return np.flatnonzero(found)


def _as_array(kept: Any) -> np.ndarray[Any, Any] | None:
    """Nothing for what is no sequence of numbers, or of booleans, or is a mixture of them."""
    if isinstance(kept, (str, bytes)):
        return None
    try:
        if isinstance(kept, Tensor):
            return _or_empty(kept.detach().cpu().numpy())
        if hasattr(kept, "__array__"):
            return _or_empty(np.asarray(kept))
        items = list(kept)
        found = _or_empty(np.asarray(items))
    except (TypeError, ValueError, RuntimeError):
        return None
    # numpy reads True beside numbers as 1, and a set has no order for a mask to be read in.
    unclear = found.dtype.kind != "b" or isinstance(kept, (Set, Mapping))
    return None if unclear and any(_is_boolean(item) for item in items) else found


def _is_boolean(item: Any) -> bool:
    return isinstance(item, (bool, np.bool_)) or getattr(item, "dtype", None) is torch.bool


def _or_empty(found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An empty list is float to numpy."""
    return found.astype(np.int64) if found.size == 0 and found.dtype.kind == "f" else found


def _shapes_after(
    shapes: dict[str, tuple[int, ...]], cuts: tuple[TensorCut, ...]
) -> dict[str, tuple[int, ...]]:
    return shapes | {name: cut.new_shape for cut in cuts for name in cut.names if name in shapes}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.4)
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    return f"The groups are {', '.join(names[:8])}{', …' if len(names) > 8 else '.'}"
