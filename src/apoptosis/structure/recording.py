"""Run a model once and write down what it does.

The model runs as its user runs it, with real values: Python that looks at numbers takes the branch it takes. A
dispatch mode on torch's *pre-dispatch* key sees every operation before torch takes it apart, so linear layers,
attention, einsum and norms stay whole. (`torch.export` works at the same level and takes about as long; it refuses what
it cannot prove for all inputs.)

A function mode above it sees the Python call that an operation came from. There integers are still the objects that
user code passed, so those that came from attributes of modules can be told (`attributes`), and those that are sizes of
tensors (`read_sizes`).
"""

import inspect
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from os import sep
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from apoptosis.modes import in_eval_mode, in_train_mode
from apoptosis.structure.arrangement import rearranged, tensors_in
from apoptosis.structure.attributes import TracedInt
from apoptosis.structure.known_values import KnownValues
from apoptosis.structure.program import (
    Call,
    Formula,
    ModuleCall,
    Program,
    Reading,
    Value,
    sizes_of,
    values_in,
)
from apoptosis.structure.randomness import random_state_put_back, state_outside_torch
from apoptosis.structure.read_sizes import ReadSize, read_shape
from apoptosis.turns import alone

__all__ = ["Example", "line_of", "model_tensors", "record"]

OWN_FOLDERS = tuple(f"{Path(file).parent}{sep}" for file in (torch.__file__, __file__))


@dataclass(frozen=True)
class Example:
    """Arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    @staticmethod
    def of(inputs: Any) -> "Example":
        """A tuple is positional arguments, a dict is keyword arguments, anything else the only argument."""
        if isinstance(inputs, Example):
            return inputs
        if isinstance(inputs, dict):
            return Example((), inputs)
        return Example(inputs if type(inputs) is tuple else (inputs,), {})

    def map(self, function: Callable[[Tensor], Tensor]) -> "Example":
        """With `function` applied to each tensor."""
        return Example(rearranged(self.args, function), rearranged(self.kwargs or {}, function))

    def tensors(self) -> list[Tensor]:
        """Every tensor, in order."""
        return tensors_in((self.args, self.kwargs or {}))

    def run(self, model: Callable[..., Any]) -> Any:
        """Call the model."""
        return model(*self.args, **(self.kwargs or {}))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor a model holds by every name: parameters, buffers, and tensors that are plain attributes."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, item in vars(module).items():
            if isinstance(item, Tensor):
                found[f"{path}.{name}" if path else name] = item
    return found


def record(
    model: nn.Module, example: Example, *, training: bool = False, like: Program | None = None
) -> Program:
    """The program of one run without gradients, in eval mode unless `training`; the random state is put back.

    With `like`, a program of the same model, both share the values of the model's tensors.

    Raises:
        RuntimeError: called from the forward of a model that is being recorded.
    """
    if threading.get_ident() == _RECORDER_THREAD.get("ident"):
        raise RuntimeError("a model is being traced already; its forward cannot trace another")
    example = example.map(Tensor.clone)  # forward may write to its inputs
    with alone(model, _RECORDING):
        _RECORDER_THREAD["ident"] = threading.get_ident()
        try:
            return _recorded(model, example, training=training, like=like)
        finally:
            _RECORDER_THREAD.clear()


_RECORDING = object()
"""Held by the thread that records: torch has one place for a mode on the pre-dispatch key, for all threads."""
_RECORDER_THREAD: dict[str, int] = {}


def _recorded(
    model: nn.Module, example: Example, *, training: bool, like: Program | None
) -> Program:
    recorder = _Recorder(model, example, like)
    with ExitStack() as stack:
        stack.enter_context(random_state_put_back(model))
        stack.enter_context(recorder.parameters_put_back())
        stack.enter_context(in_train_mode(model) if training else in_eval_mode(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_attention_in_the_open())
        stack.enter_context(recorder.watching_modules(model))
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_Watcher(recorder))
        stack.enter_context(recorder.lengths_followed(model))
        stack.enter_context(recorder)
        before = state_outside_torch()
        outputs = example.run(model)
        recorder.program.draws_outside = state_outside_torch() != before
    if inspect.isgenerator(outputs):
        raise TypeError("forward is a generator, which runs only when somebody asks for its items")
    recorder.program.outputs = rearranged(outputs, recorder.result, (Tensor, ReadSize))
    recorder.program.results = [recorder.value(tensor) for tensor in tensors_in(outputs)]
    recorder.ended = True
    return recorder.program


class _Recorder(ProxyTorchDispatchMode):
    """Notes each operation; torch admits only modes of this class on the pre-dispatch key."""

    def __init__(self, model: nn.Module, example: Example, like: Program | None) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.program = Program()
        self.passed = _Passed([])
        self.ended = False
        self._noted_readings: set[Any] = set()
        self._known: dict[int, tuple[weakref.ref[Tensor], Value]] = {}
        self._by_storage: dict[int, list[tuple[weakref.ref[Tensor], Value]]] = {}
        self._constants: list[Tensor] = []
        self._known_values = KnownValues()
        self._stack: list[str] = [""]
        self._held: dict[int, Tensor] = {}
        self._by_name: dict[str, Tensor] = model_tensors(model)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.program.containers = [
            path for path, part in model.named_modules() if isinstance(part, _CONTAINERS)
        ]
        names: dict[int, list[str]] = {}
        for name, tensor in self._by_name.items():
            names.setdefault(id(tensor), []).append(name)
            self._held[id(tensor)] = tensor
        for number, tensor in enumerate(example.tensors()):
            self.program.inputs.append(
                self._remember(tensor, _value(tensor, "input", number=number))
            )
        for identity, own in names.items():
            tensor = self._held[identity]
            known = None if like is None else like.tensors.get(own[0])
            value = known or _value(
                tensor,
                "tensor",
                names=tuple(own),
                fixed=True,
                is_parameter=isinstance(tensor, nn.Parameter),
            )
            self.program.tensors |= dict.fromkeys(own, self._remember(tensor, value))

    def __enter__(self) -> "_Recorder":
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        TorchDispatchMode.__exit__(self, *exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        # Read before the call: an in-place operation leaves its argument under a new value.
        given = {a.name: x for a, x in zip(schema, args, strict=False)} | kwargs
        arguments = {a.name: self._noted(given.get(a.name, a.default_value)) for a in schema}
        written = [
            given[a.name] for a in schema if a.is_write and isinstance(given.get(a.name), Tensor)
        ]
        for tensor in written:
            self._save(tensor)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            _check_heads(given)
        result = self._known_values.run(func, args, kwargs)
        fixed = all(value.fixed for value in values_in(arguments)) and not _is_random(func)
        outputs: list[Value] = []
        overwrites = tuple(v for t in written for v in self._sharing(t))
        for value in overwrites if not fixed else ():
            if value.source == "call":
                value.fixed = False

        def note(tensor: Tensor) -> Value:
            outputs.append(value := _value(tensor, "call", number=len(outputs), fixed=fixed))
            return self._remember(tensor, value)

        returns = rearranged(result, note)
        call = Call(
            func, arguments, tuple(outputs), returns, self._stack[-1], _user_line(), overwrites
        )
        self.passed.align(call)
        self.program.calls.append(call)
        return result

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor; one that came from nowhere is a constant of this run."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        # `.data` of something known; what was written last is what it shows.
        for reference, value in reversed(self._by_storage.get(_storage(tensor), [])):
            other = reference()
            if other is not None and (other.shape, other.stride(), other.storage_offset()) == (
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
            ):
                return value
        self._constants.append(tensor)
        numbers = tensor.detach().clone()  # as they are now: forward may write to them
        return self._remember(tensor, _value(tensor, "constant", constant=numbers, fixed=True))

    def result(self, item: Tensor | ReadSize) -> Any:
        """What stands in the result of the model for a tensor or a size."""
        if isinstance(item, Tensor):
            return self.value(item)
        item.used()
        return int.__index__(item)

    def shape(self, tensor: Tensor) -> list[ReadSize] | None:
        """The sizes of a tensor that depends on the example, as Python shall get them."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1].source not in ("input", "call"):
            return None
        sizes = read_shape(known[1], self.note)
        self.program.read.update(*(sizes_of(size.formula) for size in sizes))
        return sizes

    @contextmanager
    def lengths_followed(self, model: nn.Module) -> Iterator[None]:
        """Let `len` of a tensor be a size as `x.shape` has them: Python makes a plain number of what a class says.

        It stands among the global names of files, and the builtin stays what it is: torch's compiler, which knows that
        by its identity, would keep the wrong one for good.
        """

        def length(item: Any) -> int:
            sizes = self.shape(item) if isinstance(item, Tensor) else None
            return sizes[0] if sizes else len(item)

        places = [names for names in _names_of_code(model) if "len" not in names]
        for names in places:
            names["len"] = length
        try:
            yield
        finally:
            for names in places:
                del names["len"]

    def note(
        self, operator: str, left: Formula, right: Formula, *, outcome: bool, unseen: bool = False
    ) -> None:
        """Take down what Python did with a size."""
        key = (operator, left, right, outcome, unseen)
        if self.ended or key in self._noted_readings:
            return
        self._noted_readings.add(key)
        self.program.readings.append(
            Reading(*key, self._stack[-1], _user_line(), len(self.program.calls))
        )

    def escape(self, tensor: Tensor, how: str) -> None:
        """Note that numbers of a tensor leave torch."""
        self.program.escapes.append((self.value(tensor), how, _user_line(), self._stack[-1]))

    @contextmanager
    def parameters_put_back(self) -> Iterator[None]:
        """Parameters are the caller's own: what forward writes to them, or puts in their place, is undone."""
        before = [(t, t.data) for t in self._held.values() if isinstance(t, nn.Parameter)]
        try:
            yield
        finally:
            for tensor, data in before:
                if tensor.data_ptr() != data.data_ptr():
                    tensor.data = data
            for tensor, numbers in self._saved.values():
                tensor.data.copy_(numbers)

    def _save(self, written: Tensor) -> None:
        """Keep the numbers of a parameter that an operation is about to write to."""
        for value in (self.value(written), *self._sharing(written)):
            for name in value.names:
                tensor = self._by_name[name]
                if isinstance(tensor, nn.Parameter) and id(tensor) not in self._saved:
                    self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    @contextmanager
    def watching_modules(self, model: nn.Module) -> Iterator[None]:
        """Note which module each operation belongs to, and what goes in and out of modules."""
        paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            paths.setdefault(module, path)
        times: Counter[str] = Counter()

        entered: list[int] = []

        def enter(module: nn.Module, _args: Any) -> None:
            if module in paths:
                self._stack.append(paths[module])
                entered.append(len(self.program.calls))

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            # keywords and output; after an exception torch gives hooks of all modules no keywords
            *keywords, output = rest
            if module not in paths:
                return
            path = self._stack.pop()
            first, last = (next(iter(tensors_in(x)), None) for x in ((args, keywords), output))
            with (
                torch._C.DisableTorchFunction()
            ):  # sizes that are read here are not read by user code
                goes_in, comes_out = (None if t is None else self.value(t) for t in (first, last))
            leaf = next(module.children(), None) is None
            when = (entered.pop(), len(self.program.calls))
            self.program.modules.append(
                ModuleCall(path, times[path], goes_in, comes_out, leaf, *when)
            )
            times[path] += 1

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                # torch forgets the hook and not that it wanted keywords
                hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)

    def _noted(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.value(argument)
        if isinstance(argument, (tuple, list)):
            return [self._noted(item) for item in argument]
        return argument

    def _remember(self, tensor: Tensor, value: Value) -> Value:
        reference = weakref.ref(tensor)
        self._known[id(tensor)] = (reference, value)
        self._by_storage.setdefault(_storage(tensor), []).append((reference, value))
        return value

    def _sharing(self, tensor: Tensor) -> list[Value]:
        """Values other than the tensor's own that live in its memory."""
        sharing = self._by_storage.get(_storage(tensor), [])
        return [
            value
            for reference, value in sharing
            if reference() is not None and reference() is not tensor
        ]


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _names_of_code(model: nn.Module) -> list[dict[str, Any]]:
    """Global names of files that a forward may run through: not Python's own, ours, or torch's but `torch.nn`."""
    left_out = {*sys.stdlib_module_names, "torch", "apoptosis"} - {"__main__"}
    found = [
        names
        for name, module in list(sys.modules.items())
        if (name.partition(".")[0] not in left_out or name.startswith("torch.nn."))
        and isinstance(names := getattr(module, "__dict__", None), dict)
    ]
    classes = {own for module in model.modules() for own in type(module).__mro__}
    forwards = [getattr(vars(own).get("forward"), "__globals__", None) for own in classes]
    found += [
        names  # of code that stands in no module
        for names in forwards
        if names and names.get("__name__", "").partition(".")[0] not in left_out
    ]
    return list({id(names): names for names in found}.values())


class _Watcher(TorchFunctionMode):
    """Tells the recorder which integers user code passed, and which tensors leave torch."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if func in _ESCAPES and args:
            recorder.escape(args[0], _ESCAPES[func])
        if func in _SIZES and args and (sizes := recorder.shape(args[0])) is not None:
            return _asked_for(func, sizes, func(*args, **kwargs), args, kwargs)
        before, recorder.passed = recorder.passed, _Passed(_ints((args, kwargs)))
        try:
            result = func(*args, **kwargs)
            recorder.passed.close()
            return result
        finally:
            recorder.passed = before


_ESCAPES: dict[Any, str] = {
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy",
    Tensor.tolist: "tolist()",
    Tensor.__dlpack__: "DLPack",
    Tensor.data_ptr: "data_ptr()",
}


_SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__}  # type: ignore[attr-defined]


def _asked_for(
    func: Any, sizes: list[ReadSize], plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The sizes that Python asked for, as integers that note what becomes of them."""
    if isinstance(plain, tuple):
        return torch.Size(sizes)
    if func is Tensor.size:
        return sizes[args[1] if len(args) > 1 else kwargs["dim"]]
    if func is Tensor.__len__:
        sizes[0].used(unseen=True)
        return plain
    return prod(sizes) if sizes else plain


def _ints(arguments: Any) -> list[int]:
    """Integers in the order of the arguments, those in slices too."""
    if isinstance(arguments, bool):
        return []
    if isinstance(arguments, int):
        return [arguments]
    if isinstance(arguments, slice):
        return _ints((arguments.start, arguments.stop, arguments.step))
    if isinstance(arguments, (tuple, list)):
        return [number for item in arguments for number in _ints(item)]
    if isinstance(arguments, dict):
        return [number for item in arguments.values() for number in _ints(item)]
    return []


class _Passed:
    """Integers that user code passed to a function of torch, and which of them arrived in operations."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._arrived: set[int] = set()
        self._any = any(isinstance(number, TracedInt) for number in numbers)

    def align(self, call: Call) -> None:
        """Say of an operation's integers where they came from: attributes, sizes.

        By place, where the two lists of integers agree; else by value.
        """
        if not self._numbers:
            return
        places = [
            ((name, place), number)
            for name, argument in call.arguments.items()
            for place, number in enumerate(_ints(argument))
        ]
        if [int.__index__(n) for n in self._numbers] == [number for _, number in places]:
            self._arrived.update(range(len(places)))
            pairs = [(at, own) for (at, _), own in zip(places, self._numbers, strict=True)]
            call.as_passed = True
        elif self._any:
            pairs = [(at, own) for at, number in places for own in self._by_value(at, number)]
        else:
            return
        traced = [(at, own) for at, own in pairs if isinstance(own, TracedInt)]
        call.taints = {at: own.origin for at, own in traced if not isinstance(own.origin, int)}
        call.measures = {at: own.formula for at, own in traced if isinstance(own, ReadSize)}

    def _by_value(self, at: tuple[str, int], number: int) -> list[int]:
        """The integer that an argument came from: one of attributes if it is the only one, the next one of sizes."""
        same = [n for n, own in enumerate(self._numbers) if int.__index__(own) == number]
        origins = {
            own.origin
            for n in same
            if isinstance(own := self._numbers[n], TracedInt) and not isinstance(own.origin, int)
        }
        if len(origins) == 1:
            found = [n for n in same if getattr(self._numbers[n], "origin", None) in origins]
        elif at[0].startswith("dim") or at[0] == "step":
            found = []
        else:
            sizes = [n for n in same if isinstance(self._numbers[n], ReadSize)]
            found = [n for n in sizes if n not in self._arrived] or sizes[-1:]
        self._arrived.update(found[:1])
        return [self._numbers[n] for n in found[:1]]

    def close(self) -> None:
        """Note which sizes arrived nowhere: they went on as plain numbers."""
        for n, number in enumerate(self._numbers):
            if n not in self._arrived and isinstance(number, ReadSize):
                number.used()


def _value(tensor: Tensor, source: str, **more: Any) -> Value:
    return Value(tuple(tensor.shape), tensor.dtype, source, **more)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (
        RuntimeError,
        NotImplementedError,
    ):  # sparse tensors and wrappers of torch.func have none
        return id(tensor)


def _check_heads(given: dict[str, Any]) -> None:
    """Refuse attention without heads: torch 2.13 divides by the number of key heads, and the process ends."""
    # A model that is tried at sizes it cannot run may come to that: Phi-3 slices its keys off a joint projection.
    shapes = [tuple(given[name].shape) for name in ("query", "key", "value")]
    if any(0 in shape[1:-2] for shape in shapes):
        raise RuntimeError(f"attention without heads: query, key and value have shapes {shapes}")


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _user_line() -> str:
    """File, line and function of the innermost frame outside torch and this room."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDERS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def line_of(error: BaseException) -> str:
    """The innermost line outside torch and this room that an error came by."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(OWN_FOLDERS)]
    return f"{outside[-1].filename}:{outside[-1].lineno} in {outside[-1].name}" if outside else ""


@contextmanager
def _attention_in_the_open() -> Iterator[None]:
    """torch's encoder layers have a fused path in eval mode, which hides their operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
