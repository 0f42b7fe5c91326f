"""The recorded program at other sizes, as a module: what is delivered where the model's own code cannot run them.

Every integer argument that measures an axis is written anew, so the program does what the model does, at the kept
indices. Axes that no parameter has stay open: batch, length and space are read from the tensors of each call, wherever
the algebra or the arithmetic of Python has followed them; where they steered Python, it is checked that they would
steer it the same way (`guards`). Tensors keep their names, so `state_dict` looks as the model's.
"""

import inspect
import operator
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from apoptosis.errors import TraceError
from apoptosis.structure.analysis import Analysis
from apoptosis.structure.arrangement import leaves_in, rearranged, tensors_in
from apoptosis.structure.axes import Axis, Expr, size_of
from apoptosis.structure.facts import Size
from apoptosis.structure.guards import (
    NUMBERS,
    REMEDY,
    Checks,
    GuardError,
    SizeLimit,
    check,
    check_number,
    check_pieces,
    guard_of,
)
from apoptosis.structure.network import Run
from apoptosis.structure.plan import Plan
from apoptosis.structure.program import (
    Call,
    Formula,
    Reading,
    SizeOf,
    Value,
    Worked,
    map_values,
    sizes_of,
)
from apoptosis.structure.read_sizes import OPERATORS
from apoptosis.structure.recording import Example, model_tensors
from apoptosis.structure.surgery import check_fits, cut_tensors, like

__all__ = ["CutProgram", "expected_arguments", "flags_of_mode", "write_program"]

_TRAINING = {
    "dropout": "train",
    "batch_norm": "training",
    "instance_norm": "use_input_stats",
    "feature_dropout": "train",
    "alpha_dropout": "train",
    "feature_alpha_dropout": "train",
    "rrelu": "training",
    "lstm": "train",
    "gru": "train",
    "rnn_tanh": "train",
    "rnn_relu": "train",
}
"""Flags that are a module's `training` in disguise, where they are off in eval mode."""

_COPIES = {torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default}


def write_program(
    run: Run, sizes: Mapping[Axis, int], model: nn.Module, plan: Plan | None = None
) -> "CutProgram":
    """The program at those sizes, with the tensors of `model`: cut by the plan, or copied where it leaves them."""
    held = model_tensors(model) if plan is None else check_fits(model, plan)
    made = {} if plan is None else cut_tensors(held, plan)
    for tensor in held.values():
        made.setdefault(id(tensor), like(tensor.detach().clone(), tensor))
    tensors = {name: made[id(tensor)] for name, tensor in held.items()}
    persistent = set(model.state_dict(keep_vars=True))
    program = CutProgram(run, run.as_run(dict(sizes)), tensors, persistent).train(model.training)
    parts = dict(program.named_modules())
    for path, module in model.named_modules(remove_duplicate=False):
        if path in parts:
            parts[path].training = module.training
    return program


def flags_of_mode(call: Call) -> list[str]:
    """Arguments that say, or follow from it, whether the call's module is in train mode.

    Dropout inside fused attention is one; a program goes on without it.
    """
    flag = _TRAINING.get(call.name.split(".")[0].removesuffix("_"))
    flags = [flag] if flag is not None and call.arguments[flag] is False else []
    return [*flags, *({"dropout_p"} & call.arguments.keys())]


class CutProgram(nn.Module):
    """A cut network as a graph of ATen operations, called as the model it was made from."""

    def __init__(
        self, run: Run, sizes: Mapping[Axis, int], tensors: dict[str, Tensor], persistent: set[str]
    ) -> None:
        """`tensors` are the cut parameters and buffers under the model's names; `persistent` ones are saved."""
        super().__init__()
        program = run.analysis.program
        self._signature = run.signature
        self._outputs = program.outputs
        self._input_order = _input_order(run.signature, run.example)
        self._num_inputs = len(program.inputs)
        self._other_arguments = _without_tensors(run.signature, run.example)
        self.limits: tuple[SizeLimit, ...] = ()
        """Sizes that inputs may have: set by `replay`, which has tried."""
        self.eval_only = ""
        """Why the program has no train mode; empty where it has one."""
        self._shapes = tuple(value.shape for value in program.inputs)
        self.checks = Checks()
        for name, tensor in tensors.items():
            self._hold(name, tensor, persistent=name in persistent)
        self._graph = _Writer(run.analysis, sizes, self).graph
        self._run = _compiled(self._graph)

    def keep_in_eval_mode_(self, because: str) -> None:
        """Refuse train mode from now on."""
        self.eval()
        self.eval_only = because

    def train(self, mode: bool = True) -> "CutProgram":  # noqa: FBT001, FBT002 - as torch has it
        """As for any module.

        Raises:
            TraceError: in train mode the model does something else than was recorded.
        """
        if mode:
            self._check_has_train_mode()
        return super().train(mode)

    def _check_has_train_mode(self) -> None:
        if self.eval_only:
            raise TraceError(
                f"This program was recorded in eval mode, and it has no train mode: there the model does something "
                f"else ({self.eval_only}). Use it in eval mode; to train the network, keep whole what its own code "
                "cannot run smaller, so that it stays a module."
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own forward; arguments other than tensors are those of the example."""
        if self.training:
            self._check_has_train_mode()
        given = _bound_tensors(self._signature, args, kwargs)
        if len(given) != self._num_inputs:
            raise TraceError(
                f"This program was made from a call with {self._num_inputs} tensors and got {len(given)}. Call it as "
                "the example inputs were passed, or trace the model with the inputs it shall get."
            )
        given = [given[i] for i in self._input_order]
        self._check_call(given, _without_tensors(self._signature, Example(args, kwargs)))
        try:
            results = iter(self._run(self, *given))
        except (RuntimeError, ValueError, IndexError) as error:
            found = tuple(tuple(tensor.shape) for tensor in given)
            if isinstance(error, (TraceError, torch.OutOfMemoryError)) or found == self._shapes:
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise GuardError(
                f"This program was recorded on inputs of shape {_listed(self._shapes)} and does not run on "
                f"{_listed(found)} ({first}). {REMEDY}"
            ) from error
        return rearranged(self._outputs, lambda _: next(results), Value)

    def _check_call(self, given: list[Tensor], others: dict[str, Any]) -> None:
        for name, value in others.items():
            if not _equal(value, self._other_arguments.get(name)):
                raise TraceError(
                    f"This program was made from a call with {name}={self._other_arguments.get(name)!r} and got "
                    f"{value!r}. Numbers and flags are part of a program: trace the model with the ones it shall get."
                )
        for tensor, shape in zip(given, self._shapes, strict=True):
            if tensor.ndim != len(shape):
                raise GuardError(
                    f"This program was recorded on inputs of shape {_listed(self._shapes)}, and one now has shape "
                    f"{tuple(tensor.shape)}. {REMEDY}"
                )
        for limit in self.limits:
            found = given[limit.number].shape
            if not limit.least <= found[limit.dim] <= limit.most:
                raise GuardError(
                    f"Input {limit.number} of this program must have {limit} along dimension {limit.dim}, as when it "
                    f"was recorded; it has shape {tuple(found)}. {REMEDY}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {key: item for key, item in super().__getstate__().items() if key != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._run = _compiled(self._graph)

    def _hold(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        *path, last = name.split(".")
        module = _holder(self, path)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor, persistent=persistent)


def _listed(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(map(str, shapes))


def _holder(module: nn.Module, path: list[str]) -> nn.Module:
    """The module below another one, made where there is none yet."""
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    return module


def _compiled(graph: fx.Graph) -> Any:
    code = graph.python_code("self", verbose=False)
    space = dict(code.globals)
    # The graph's own text, as fx.GraphModule runs it.
    exec(compile(code.src, "<cut program>", "exec"), space)
    return space["forward"]


def _input_order(signature: inspect.Signature, example: Example) -> list[int]:
    """Where each recorded input stands among the tensors of a call in the order of the signature."""
    bound = _bound_tensors(signature, example.args, example.kwargs or {})
    places = {id(tensor): place for place, tensor in enumerate(bound)}
    return [places[id(tensor)] for tensor in example.tensors()]


def _bound_tensors(signature: inspect.Signature, args: Any, kwargs: Any) -> list[Tensor]:
    return tensors_in(dict(signature.bind(*args, **kwargs).arguments))


def _without_tensors(signature: inspect.Signature, example: Example) -> dict[str, Any]:
    """Arguments of a call by name, defaults filled in, with a mark in the place of each tensor."""
    bound = signature.bind(*example.args, **(example.kwargs or {}))
    bound.apply_defaults()
    return {
        name: rearranged(value, lambda _: "a tensor") for name, value in bound.arguments.items()
    }


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError):  # arrays compare entry by entry
        return False


def _entry(arguments: dict[str, Any], at: tuple[str, int]) -> Any:
    name, place = at
    found = arguments.get(name)
    if isinstance(found, (list, tuple)):
        return found[place] if place < len(found) else None
    return found


def _put(arguments: dict[str, Any], at: tuple[str, int], number: Any) -> None:
    name, place = at
    found = arguments[name]
    if isinstance(found, (list, tuple)):
        arguments[name] = [number if i == place else x for i, x in enumerate(found)]
    else:
        arguments[name] = number


def expected_arguments(call: Call, analysis: Analysis, size: Any) -> dict[str, Any]:
    """The call's arguments at other sizes; `size` gives that of an expression."""
    arguments = dict(call.arguments)
    for (name, place), measured in analysis.facts[call].sizes.items():
        value = size(measured.expr)
        if measured.negative:
            value = (
                -value
                if isinstance(value, int)
                else value.graph.call_function(operator.neg, (value,))
            )
        if isinstance(arguments[name], list):
            arguments[name] = [value if i == place else x for i, x in enumerate(arguments[name])]
        else:
            arguments[name] = value
    return arguments


class _Writer:
    """Writes the graph."""

    def __init__(self, analysis: Analysis, sizes: Mapping[Axis, int], module: "CutProgram") -> None:
        self.graph = fx.Graph()
        self._analysis = analysis
        self._sizes = sizes
        self._module = module
        self._nodes: dict[Value, Any] = {}
        self._open: dict[Axis | SizeOf, Any] = {}
        self._modes: dict[str, Any] = {}
        self._num_constants = 0
        self._guards: Any = None
        self._guarded: set[Any] = set()
        self._of_parameters: set[Axis] = set()
        program = analysis.program
        for number, value in enumerate(program.inputs):
            self._nodes[value] = self.graph.placeholder(f"input_{number}")
        for value in program.inputs:
            self._open_axes(value)
        self._of_inputs = {axis for axis in self._open if isinstance(axis, Axis)}
        self._of_parameters = {
            axis
            for value in program.tensors.values()
            for expr in analysis.axes[value]
            for axis in expr.axes()
        } - self._of_inputs
        readings = iter([*program.readings, None])
        reading = next(readings)
        for when, call in enumerate(program.calls):
            while reading is not None and reading.when <= when:
                self._guard(reading)
                reading = next(readings)
            self._write(call)
        while reading is not None:
            self._guard(reading)
            reading = next(readings)
        self.graph.output(tuple(self._node(v) for v in leaves_in(program.outputs, Value)))

    def _open_axes(self, value: Value) -> None:
        """Axes that can be read off a tensor: those of no parameter, which change from call to call."""
        for dim, expr in enumerate(self._analysis.axes[value]):
            axis = expr.axis
            if axis is not None and axis not in self._open and axis not in self._of_parameters:
                self._open[axis] = (self._nodes[value], dim)

    def _write(self, call: Call) -> None:
        if call.name.startswith(NUMBERS):
            self._guard_number(call)
            return
        facts = self._analysis.facts[call]
        if facts.replacement is not None:
            op, arguments = facts.replacement(self._size)
        else:
            # What Python makes anew in every call is copied, for what follows may write to it.
            op = _COPIES.get(call.op, call.op)
            arguments = expected_arguments(call, self._analysis, self._size) | facts.frozen
        arguments = self._measured(call, arguments)
        flag = _TRAINING.get(call.name.split(".")[0].removesuffix("_"))
        if flag is not None and arguments.get(flag) is False:
            arguments = arguments | {flag: self._training(call.module)}
        node = self._call(op, map_values(arguments, self._node))
        if isinstance(call.returns, Value):
            self._nodes[call.returns] = node
        else:
            if isinstance(call.returns, list):  # Python goes through them one by one
                self.graph.call_function(check_pieces, (node, len(call.outputs)))
            for number, value in enumerate(call.outputs):
                self._nodes[value] = self.graph.call_function(operator.getitem, (node, number))
        for value in call.outputs:
            self._open_axes(value)

    def _measured(self, call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as Python made them, of sizes or as plain numbers, where the plan leaves them alone."""
        facts = self._analysis.facts[call]
        places = dict(call.measures)
        if call.as_passed:
            plain = {at: _entry(call.arguments, at) for at in facts.sizes if at not in places}
            places |= {at: n for at, n in plain.items() if isinstance(n, int)}
        for at, formula in places.items():
            measured = facts.sizes.get(at)
            cut = measured is not None and size_of(measured.expr, self._sizes) != size_of(
                measured.expr
            )
            moving = [size for size in sizes_of(formula) if self._moves(size)]
            if facts.replacement is not None or cut:
                if not isinstance(_entry(arguments, at), fx.Node):
                    self._guard_sizes(moving, call.line)
            elif moving or not self._follows_inputs(measured):
                _put(arguments, at, self._number(formula))
        return arguments

    def _follows_inputs(self, measured: Size | None) -> bool:
        """True if a plain number measures what the inputs bring along: the model would fail at another size."""
        return measured is not None and any(a in self._of_inputs for a in measured.expr.axes())

    def _guard(self, reading: Reading) -> None:
        """Write down that Python would decide the same again."""
        sizes = {size for side in (reading.left, reading.right) for size in sizes_of(side)}
        if not any(self._moves(size) for size in sizes):
            return
        if reading.unseen and all(self._in_inputs(size) for size in sizes if self._moves(size)):
            return  # inputs are bound to the sizes that were tried
        sides = self._number(reading.left), self._number(reading.right)
        key = (reading.operator, *sides, reading.outcome)
        if key in self._guarded or (sides[0] is sides[1]):
            return
        self._guarded.add(key)
        if self._guards is None:
            self._guards = self.graph.get_attr("checks")
        guards = self._module.checks.guards
        self.graph.call_function(check, (self._guards, len(guards), *sides))
        guards.append(guard_of(reading))

    def _guard_sizes(self, sizes: list[SizeOf], line: str) -> None:
        for size in sizes:
            number = size.value.shape[size.dim]
            self._guard(Reading("eq", size, number, True, False, "", line, 0))

    def _guard_number(self, call: Call) -> None:
        """Write down that Python would read the same number again."""
        if isinstance(call.returns, (bool, int, float)):
            node = self._call(call.op, map_values(call.arguments, self._node))
            self.graph.call_function(check_number, (call.line, call.returns, node))

    def _moves(self, size: SizeOf) -> bool:
        """True if a size may be another one in another call: nothing is known of sizes of 1, which are no axes."""
        axes = list(self._analysis.axes[size.value][size.dim].axes())
        return not axes or any(axis not in self._of_parameters for axis in axes)

    def _in_inputs(self, size: SizeOf) -> bool:
        inputs = self._analysis.program.inputs
        return size.value in inputs or any(
            self._analysis.axes[size.value][size.dim].axis is expr.axis
            for value in inputs
            for expr in self._analysis.axes[value]
            if expr.axis is not None
        )

    def _number(self, formula: Formula) -> Any:
        """What Python made of sizes: a number, or a node where they change from call to call."""
        if isinstance(formula, SizeOf):
            if not self._moves(formula):
                return formula.value.shape[formula.dim]
            expr = self._analysis.axes[formula.value][formula.dim]
            if size_of(expr, self._sizes) != size_of(expr):
                return self._size(expr, {})  # Python reckons with the numbers of the dense network
            axis = expr.axis
            if axis is not None and axis in self._open:
                return self._opened(axis)
            self._open.setdefault(formula, (self._node(formula.value), formula.dim))
            return self._opened(formula)
        if not isinstance(formula, Worked):
            return formula
        left, right = self._number(formula.left), self._number(formula.right)
        function = OPERATORS[formula.operator]
        if isinstance(left, fx.Node) or isinstance(right, fx.Node):
            return self.graph.call_function(function, (left, right))
        return function(left, right)

    def _training(self, path: str) -> Any:
        """Whether the module of that path is in train mode: a part of a network may be frozen."""
        if path not in self._modes:
            _holder(self._module, path.split(".") if path else [])
            self._modes[path] = self.graph.get_attr(f"{path}.training" if path else "training")
        return self._modes[path]

    def _call(self, op: Any, arguments: dict[str, Any]) -> Any:
        if not isinstance(op, torch._ops.OpOverload):  # a rule's own function
            return self.graph.call_function(op, (), arguments)
        schema = op._schema.arguments
        args = tuple(arguments[a.name] for a in schema if not a.kwarg_only)
        kwargs = {a.name: arguments[a.name] for a in schema if a.kwarg_only}
        return self.graph.call_function(op, args, kwargs)

    def _node(self, value: Value) -> Any:
        if value not in self._nodes:
            if value.source == "tensor":
                self._nodes[value] = self.graph.get_attr(value.names[0])
            else:
                assert value.constant is not None, "every value is made by a call before it is read"
                name = f"_constant_{self._num_constants}"
                self._num_constants += 1
                self._module.register_buffer(
                    name, value.constant.detach().clone(), persistent=False
                )
                self._nodes[value] = self.graph.get_attr(name)
        return self._nodes[value]

    def _size(self, expr: Expr, sizes: Mapping[Axis, int] | None = None) -> Any:
        """A number, or a node where the expression has axes of the inputs; at other sizes than the plan's if given."""
        sizes = self._sizes if sizes is None else sizes
        if not any(axis in self._open for axis in expr.axes()):
            return size_of(expr, sizes)
        terms: list[Any] = []
        for term in expr.terms:
            factors = [self._size_of_factor(factor, sizes) for factor in term]
            number = prod(f for f in factors if isinstance(f, int))
            nodes = [f for f in factors if not isinstance(f, int)]
            terms.append(
                self._fold(operator.mul, number if number != 1 or not nodes else None, nodes)
            )
        number = sum(t for t in terms if isinstance(t, int))
        return self._fold(
            operator.add, number or None, [t for t in terms if not isinstance(t, int)]
        )

    def _size_of_factor(self, factor: Axis | Expr, sizes: Mapping[Axis, int]) -> Any:
        if isinstance(factor, Expr):
            return self._size(factor, sizes)
        if factor not in self._open:
            return sizes.get(factor, factor.size)
        return self._opened(factor)

    def _opened(self, key: Axis | SizeOf) -> Any:
        found = self._open[key]
        if isinstance(found, tuple):
            found = self._open[key] = self.graph.call_function(torch.ops.aten.sym_size.int, found)
        return found

    def _fold(self, function: Any, number: int | None, nodes: list[Any]) -> Any:
        result = number
        for node in nodes:
            result = node if result is None else self.graph.call_function(function, (node, result))
        return 0 if result is None else result
