"""The table of axis rules: what each operation says about the axes of its tensors.

A rule is a function of a `Step` that reads the axes of the operation's tensors, equates what must be equal, pins what
must stay whole, and states the axes of the results. Besides, it states facts that later passes read:

- which integer arguments measure which axes (`size`), for rewriting calls and for finding attributes;
- multiply-accumulates (`cost`), as products of axes;
- where a sum runs over an axis (`contract`), or a statistic that depends on its length (`statistic`);
- which axes a kernel takes in multiples of its grid alone (`on_grid`);
- where the result is zero at removed units (`flow`), see `zero_flow`;
- what a parameter's axis is there for (`role`), and what kind of unit an axis is (`kind`).

There are no guesses. An operation without an entry pins every axis it touches; so does one that a rule declines. An
entry carries samples, and the tests cut every axis of every sample and compare with the operation itself; a rule
without samples cannot be registered. An in-place operation shares the entry of the plain one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, TypeAlias

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Axis, Expr
from apoptosis.structure.facts import Facts, PinReason, Size
from apoptosis.structure.flows import Everywhere, Flow, Nowhere, through
from apoptosis.structure.program import Call, Value, values_in
from apoptosis.structure.samples import Sample

__all__ = [
    "RULES",
    "Context",
    "Declined",
    "Rule",
    "Step",
    "analyse_call",
    "axis_rule",
    "find_rule",
    "register",
]


class Declined(Exception):  # noqa: N818 - an answer of a rule, never an error of the user
    """A rule does not cover these arguments; everything they touch is pinned."""


@dataclass
class Context:
    """What the rules of a whole program share."""

    axes: dict[Value, list[Expr]] = field(default_factory=dict)
    used: set[Value] = field(default_factory=set)
    zeros: set[Value] = field(default_factory=set)


class Step:
    """One call while its rule looks at it."""

    def __init__(self, call: Call, context: "Context") -> None:
        self.call = call
        self.facts = Facts()
        self._axes = context.axes
        self._context = context

    @property
    def args(self) -> tuple[Any, ...]:
        """All arguments in the order of the schema, defaults filled in."""
        return tuple(self.call.arguments.values())

    def __getitem__(self, name: str) -> Any:
        return self.call.arguments[name]

    def axes(self, value: Value) -> list[Expr]:
        """The axes of a tensor, as far as they are solved."""
        found = self._axes[value] = [algebra.resolve(expr) for expr in self._axes[value]]
        return found

    def used(self, output: int) -> bool:
        """Whether anything reads that output."""
        return self.call.outputs[output] in self._context.used

    def is_zeros(self, value: Value) -> bool:
        """Whether a tensor was made of zeros and nothing has touched it since."""
        return value in self._context.zeros

    def fresh(self, size: int, *, pin: str = "", origin: str = "") -> Expr:
        """A new axis; with `pin`, one that nobody expects to shrink."""
        reason = self._reason(pin, quiet=True) if pin else None
        return Expr.of(Axis(size, pin=reason, origin=origin))

    def fixed(self, sizes: Sequence[int], why: str = "space") -> list[Expr]:
        """New axes for space, time and the like."""
        return [self.fresh(size, pin=why) for size in sizes]

    def equal(self, a: Expr, b: Expr) -> None:
        """Index i of one is index i of the other."""
        if algebra.size_of(a) != algebra.size_of(b):
            raise Declined("its operands are broadcast in a way that the rule does not know")
        algebra.equate(a, b, self._reason("the two shapes do not divide into common factors"))

    def pin(self, expr: Expr, why: str, *, quiet: bool = False) -> None:
        """The axis must stay whole."""
        algebra.pin(expr, self._reason(why, quiet=quiet))

    def size(self, name: str, expr: Expr, place: int = 0, *, negative: bool = False) -> None:
        """The integer argument `name` (at `place`, in a list) measures `expr`."""
        self.facts.sizes[name, place] = Size(expr, negative)

    def cost(self, *factors: Expr) -> None:
        """That many multiply-accumulates."""
        self.facts.costs.append(factors)

    def contract(self, expr: Expr, *operands: tuple[Value, int]) -> None:
        """A sum over the axis, of the product of the operands along those dimensions."""
        self.facts.contractions.append((expr, operands))

    def statistic(self, expr: Expr, why: str) -> None:
        """A number that depends on how long the axis is."""
        self.facts.statistics.append((expr, why))

    def role(self, value: Value | None, dim: int, role: str, within: Expr | None = None) -> None:
        """What a parameter's dimension, or only the axes `within` it, is there for: producer, carrier or consumer."""
        if value is not None and value.fixed:
            axes = within or self.axes(value)[dim]
            self.facts.roles.append((value, dim % value.ndim, axes, role))

    def kind(self, expr: Expr, kind: str) -> None:
        """What a unit of the axis is."""
        self.facts.kinds.append((expr, kind))

    def tie(self, *exprs: Expr) -> None:
        """These must keep equally many indices, whichever they are."""
        self.facts.ties.append(exprs)

    def on_grid(self, expr: Expr, value: Value) -> None:
        """Rows of `value` run along the axis, and the kernel takes multiples of its grid alone."""
        rule = find_rule(self.call)
        num_bytes = 1 if rule is None else rule.grid_bytes
        multiple = num_bytes // gcd(num_bytes, value.dtype.itemsize)
        if multiple > 1:
            kind = str(value.dtype).removeprefix("torch.")
            why = (
                f"{self.call.name} takes rows of multiples of {num_bytes} bytes, {multiple} numbers of {kind} "
                f"({self.call.line.rpartition('/')[2]})"
            )
            self.facts.grids.append((expr, multiple, why))

    def spare(self, value: Value, dim: int) -> None:
        """Zeros along that dimension would give 0/0, and something else is zero there anyway."""
        self.facts.spared.append((value, dim))

    def out(self, axes: list[Expr], flow: Flow) -> None:
        """The axes of the next result, and where it is zero."""
        self.facts.axes.append(axes)
        self.facts.flows.append(flow)

    def same(self, value: Value, *, flow: Flow | None = None) -> None:
        """The next result has the shape of `value` and, unless said otherwise, its zeros."""
        self.out(self.axes(value), flow or through(value))

    def _reason(self, why: str, *, quiet: bool = False) -> PinReason:
        return PinReason(self.call.name, why, self.call.module, self.call.line, quiet)


Samples: TypeAlias = Callable[[], list[Sample]]


@dataclass(frozen=True)
class Rule:
    """One entry of the table."""

    name: str
    family: str
    says: str
    apply: Callable[[Step], None]
    samples: Samples
    proved_by: str = ""
    """The test that proves the rule, where no sample can be run."""
    grid_bytes: int = 1
    """The kernel takes rows of a multiple of so many bytes alone; which axes that holds for, the rule says."""


RULES: dict[str, Rule] = {}


def axis_rule(
    *names: str,
    family: str,
    samples: Samples | Mapping[str, Samples] = list,
    proved_by: str = "",
    grid_bytes: int = 1,
) -> Callable[[Callable[[Step], None]], Callable[[Step], None]]:
    """Register a rule under the names of overloads, such as `conv2d.default`, with samples for all or for each."""

    def decorate(function: Callable[[Step], None]) -> Callable[[Step], None]:
        says = (function.__doc__ or "").split("\n")[0]
        for name in names:
            own = samples[name] if isinstance(samples, Mapping) else samples
            register(Rule(name, family, says, function, own, proved_by, grid_bytes))
        return function

    return decorate


def register(rule: Rule) -> None:
    """Add a rule; the same name twice is a mistake, and so is a rule that nothing proves."""
    if rule.name in RULES:
        raise ValueError(f"The operation {rule.name!r} has a rule already.")
    if not rule.samples() and not rule.proved_by:
        raise ValueError(f"The rule for {rule.name!r} has no samples to prove it on.")
    RULES[rule.name] = rule


def find_rule(call: Call) -> Rule | None:
    """The entry of an operation, or of the plain one it is the in-place form of."""
    rule = RULES.get(call.name)
    if rule is None and call.op._schema.is_mutable:
        base, _, overload = call.name.partition(".")
        plain = f"__{base[3:]}" if base.startswith("__i") else base.removesuffix("_")
        rule = RULES.get(f"{plain}.{overload}")
    return rule


def analyse_call(call: Call, context: Context) -> Facts:
    """Apply the rule of a call; the axes of its outputs are added to the context."""
    step = Step(call, context)
    rule = find_rule(call)
    try:
        if rule is None:
            raise Declined("there is no rule for this operation")
        rule.apply(step)
        _check_shapes(call, step.facts)
    except Declined as declined:
        step = _refuse(call, context, str(declined))
    for value, own, flow in zip(call.outputs, step.facts.axes, step.facts.flows, strict=True):
        context.axes[value] = own
        if isinstance(flow, Everywhere):
            context.zeros.add(value)
    context.zeros.difference_update(call.overwrites)
    return step.facts


def _refuse(call: Call, context: Context, why: str) -> Step:
    step = Step(call, context)
    step.facts.refused = why
    for value in values_in(call.arguments):
        for expr in step.axes(value):
            step.pin(expr, why)
    for value in call.outputs:
        reason = PinReason(call.name, why, call.module, call.line)
        step.out([Expr.of(Axis(size, pin=reason)) for size in value.shape], Nowhere())
    return step


def _check_shapes(call: Call, facts: Facts) -> None:
    stated = [tuple(algebra.size_of(expr) for expr in axes) for axes in facts.axes]
    found = [value.shape for value in call.outputs]
    assert stated == found, (
        f"the rule of {call.name} states shapes {stated}, the results have {found}"
    )
