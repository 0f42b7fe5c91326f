"""Seeing every torch operation of an unmodified model, once, in one form.

`Interceptor` is a `TorchFunctionMode`. It names each call (`calls`), enters functions written in Python, turns
writing operations into returning ones, finds the record of every argument (`duals`), and hands the rest to `operate`,
which subclasses define. The model's parameters, buffers and flags stay as they are: a write to a buffer goes to a
private copy.

What leaves Python is invisible here: a custom `autograd.Function`, `vmap`, a scripted module. Their outputs require
grad but have no record; meeting one is an error (`LostTangentError`), because going on would drop its derivative
silently.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from apoptosis.curvature.calls import Call, body_of, functional_of, identify
from apoptosis.curvature.duals import Dual, Ledger, Record, lift
from apoptosis.curvature.recurrent import RECURRENT, is_packed
from apoptosis.errors import LostTangentError

__all__ = ["Interceptor", "contained"]

_VIEW_GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_BUFFER_WRITERS = frozenset({"batch_norm", "instance_norm"})
_NORM_NAME = re.compile(r"norm(alization)?(\d?d)?$", re.IGNORECASE)


class Interceptor(TorchFunctionMode):
    """Hands every operation on duals to `operate`, functional, with `Dual`s in place of tensors that depend on θ."""

    def __init__(self, ledger: Ledger) -> None:
        """Intercept with the parameters, buffers and tangents of `ledger`."""
        super().__init__()
        self.ledger = ledger
        self.norm_depth = 0
        self._calls = 0
        self._entered: list[tuple[Callable[..., Any], int]] = []

    def operate(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Value and tangent of one functional operation; at least one argument is a `Dual`."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ARG002 - torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function while the mode is on; the mode is off inside."""
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            return func(*args)
        call = identify(func)
        if call.is_getter:
            return self._get(call, func, args)
        if call.is_python and self._enters(func):
            return self._enter(func, args, kwargs)
        self._calls += 1
        if call.name in RECURRENT and torch.is_grad_enabled() and not is_packed(call.name, args):
            with self:
                return RECURRENT[call.name](*args, **kwargs)
        return self._dispatch(call, func, args, kwargs)

    # -- functions written in Python, attributes ------------------------------------------------------------------

    def _enters(self, func: Callable[..., Any]) -> bool:
        """Whether to look inside; a function that comes straight back without any call in between is an operation."""
        return not self._entered or self._entered[-1] != (func, self._calls)

    def _enter(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._knows_any((args, kwargs)):
            return func(*args, **kwargs)
        self._entered.append((func, self._calls))
        try:
            with self:
                return body_of(func)(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        finally:
            self._entered.pop()

    def _get(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if call.name in _VIEW_GETTERS and torch.is_grad_enabled():
            return self._dispatch(call, func, args, {})
        if call.name == "data":
            return func(self.ledger.current(args[0])[0])
        return func(*args)

    def _knows_any(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.requires_grad or self.ledger.current(value)[1] is not None
        if isinstance(value, Mapping):
            return any(self._knows_any(item) for item in value.values())
        return isinstance(value, (tuple, list)) and any(self._knows_any(item) for item in value)

    # -- operations ----------------------------------------------------------------------------------------------

    def _dispatch(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return self._run_plain(call, func, args, kwargs)
        found = _Arguments(self, call)
        lifted, lifted_kwargs = found.lift(args), found.lift(kwargs)
        if not found.any_dual and call.name not in _BUFFER_WRITERS:
            return self._run_plain(call, func, args, kwargs)
        if call.in_place:
            return self._write_call(call, args[0], lifted, lifted_kwargs, weight=found.all_weight)
        if kwargs.get("out") is not None:
            out = kwargs["out"]
            lifted_kwargs = {k: v for k, v in lifted_kwargs.items() if k != "out"}
            result = self.operate(call, func, lifted, lifted_kwargs)
            return self._assign(out, lift(result), weight=found.all_weight)
        result = self.operate(call, func, lifted, lifted_kwargs)
        return self._hand_out(result, weight=found.all_weight)

    def _run_plain(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operation without duals; only the model's buffers need protection."""
        args, kwargs = self._current(args), self._current(kwargs)
        if call.in_place and args and isinstance(args[0], Tensor) and self.ledger.owns(args[0]):
            copy = args[0].detach().clone()
            self.ledger.write(args[0], Record(None, moved=copy))
            args = (copy, *args[1:])
        return func(*args, **kwargs)

    def _current(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ledger.current(value)[0]
        if isinstance(value, dict):
            return {key: self._current(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._current(item) for item in value)
        return value

    def _hand_out(self, result: Any, *, weight: bool) -> Any:
        """Give the model plain tensors, with what is known of them recorded."""
        if isinstance(result, Dual):
            self.ledger.write(result.value, Record(result.tangent, weight or result.weight))
            self.ledger.note_view(result.value)
            return result.value
        if isinstance(result, (tuple, list)):
            parts = [self._hand_out(part, weight=weight) for part in result]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        return result

    # -- operations that write -----------------------------------------------------------------------------------

    def _write_call(
        self,
        call: Call,
        target: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        weight: bool,
    ) -> Any:
        tensor, record = self.ledger.current(target)
        if call.name == "__setitem__":
            self._set_item(tensor, args[1], lift(args[2]))
            return None
        if call.name in _OVERWRITES:
            result = _OVERWRITES[call.name](tensor, *args[1:], **kwargs)
        else:
            functional = functional_of(call.name)
            if functional is None:  # requires_grad_ and its like change no value
                return getattr(tensor, call.name + "_")(*self._current(args[1:]), **kwargs)
            first = args[0]
            if isinstance(first, Dual) and self._is_aliased(target, tensor, record):
                # What the rule saves must not be overwritten by the copy below.
                tangent = None if first.tangent is None else first.tangent.clone()
                first = Dual(first.value.clone(), tangent, first.weight)
            result = lift(self.operate(call, functional, (first, *args[1:]), kwargs))
        return self._assign(target, result, weight=weight)

    def _assign(self, target: Tensor, result: Dual, *, weight: bool) -> Tensor:
        """Let `target` stand for `result` from now on."""
        tensor, record = self.ledger.current(target)
        if result.value.dtype != tensor.dtype:
            tangent = None if result.tangent is None else result.tangent.to(tensor.dtype)
            result = Dual(result.value.to(tensor.dtype), tangent)
        if not self._is_aliased(target, tensor, record):
            self.ledger.write(tensor, Record(None, moved=result.value))
            return self._hand_out(result, weight=weight)
        tangent = self._tangent_to_write(tensor, needed=result.tangent is not None)
        tensor.copy_(result.value)
        if tangent is not None:
            tangent.zero_() if result.tangent is None else tangent.copy_(result.tangent)
        self.ledger.write(tensor, Record(tangent))
        return tensor

    def _set_item(self, tensor: Tensor, index: Any, source: Dual) -> None:
        index = _plain(index)
        tangent = self._tangent_to_write(tensor, needed=source.tangent is not None)
        tensor[index] = source.value
        if tangent is not None:
            tangent[index] = 0 if source.tangent is None else source.tangent
        self.ledger.write(tensor, Record(tangent))

    def _is_aliased(self, target: Tensor, tensor: Tensor, record: Record | None) -> bool:
        """Whether others may see the memory of `tensor`: then it must really be written to."""
        if self.ledger.owns(target):
            return False
        return tensor._base is not None or record is None or record.has_views

    def _tangent_to_write(self, tensor: Tensor, *, needed: bool) -> Tensor | None:
        """The tangent of `tensor`, made of zeros where it is missing and `needed`; views share their base's."""
        tensor, record = self.ledger.current(tensor)
        if (record is not None and record.tangent is not None) or not needed:
            return record.tangent if record is not None else None
        owner = tensor if tensor._base is None else tensor._base
        owner_record = self.ledger.current(owner)[1]
        tangent = torch.empty_strided(
            owner.shape, owner.stride(), dtype=owner.dtype, device=owner.device
        ).zero_()
        has_views = owner_record is not None and owner_record.has_views
        self.ledger.write(owner, Record(tangent, has_views=has_views or tensor is not owner))
        if tensor is owner:
            return tangent
        offset = tensor.storage_offset() - owner.storage_offset()
        return tangent.as_strided(tensor.shape, tensor.stride(), offset)

    # -- hand-written norms ---------------------------------------------------------------------------------------

    @contextmanager
    def watching_norms(self) -> Iterator[None]:
        """Count how deep inside hand-written norm modules the forward is, by global hooks, none on the model."""

        def enter(module: nn.Module, _args: object) -> None:
            self.norm_depth += is_handwritten_norm(type(module))

        def leave(module: nn.Module, _args: object, _output: object) -> None:
            self.norm_depth -= is_handwritten_norm(type(module))

        before = module_hooks.register_module_forward_pre_hook(enter)
        after = module_hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()


class _Arguments:
    """Lifts the arguments of one call and remembers what it met."""

    def __init__(self, mode: Interceptor, call: Call) -> None:
        self.mode, self.call = mode, call
        self.any_dual = False
        self.all_weight = True

    def lift(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._lift_tensor(value)
        if type(value) in (tuple, list):
            return type(value)([self.lift(item) for item in value])
        if type(value) is dict:
            return {key: self.lift(item) for key, item in value.items()}
        return value

    def _lift_tensor(self, tensor: Tensor) -> Tensor | Dual:
        ledger = self.mode.ledger
        tensor, record = ledger.current(tensor)
        if record is not None and (record.tangent is not None or tensor.requires_grad):
            self.any_dual = True
            self.all_weight &= record.weight
            return Dual(tensor, record.tangent, record.weight)
        if tensor.requires_grad:
            raise lost_tangent(self.call.name, tensor)
        self.all_weight &= tensor.dim() == 0 or ledger.owns(tensor)
        return tensor


def lost_tangent(where: str, tensor: Tensor) -> LostTangentError:
    """The error for a tensor whose derivative went where it cannot be followed."""
    origin = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "a leaf tensor"
    return LostTangentError(
        f"At {where!r}: a tensor of shape {tuple(tensor.shape)} made by {origin} depends on parameters, but how it "
        "does could not be followed. Custom autograd.Function, vmap and other torch.func transforms, scripted modules, "
        "and tensors that require grad without being parameters of the model hide their derivative. Write that part "
        "with ordinary torch operations, register the tensor as a parameter, or use reference_product with a kind "
        "other than connectivity: it differentiates twice what torch recorded."
    )


@cache
def is_handwritten_norm(kind: type[nn.Module]) -> bool:
    """Whether a module is a norm by name (`LlamaRMSNorm`, `T5LayerNorm`, `LayerNorm2d`) and none of torch's own."""
    return not kind.__module__.startswith("torch.") and bool(_NORM_NAME.search(kind.__name__))


@contextmanager
def contained(devices: Iterable[torch.device], *, checkpoints: bool = True) -> Iterator[None]:
    """Whatever happens inside leaves RNG states alone, runs eagerly, and checkpoints as modes can follow, or not."""
    cuda = sorted(device.index or 0 for device in devices if device.type == "cuda")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_checkpoints(followed=checkpoints))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


class _FollowableCheckpoint:
    """Stands in for torch's reentrant checkpoint, whose forward runs where no derivative is recorded."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class _NoCheckpoint:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001, ARG004
        return function(*args)


def _no_frame(*_: Any, **__: Any) -> Iterator[None]:
    yield


@contextmanager
def _checkpoints(*, followed: bool) -> Iterator[None]:
    """While inside: checkpoints that run again with the mode on, or none at all."""
    owner: Any = torch.utils.checkpoint
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    original = [getattr(owner, name) for name in names]
    owner.CheckpointFunction = _FollowableCheckpoint if followed else _NoCheckpoint
    if not followed:
        owner._checkpoint_without_reentrant_generator = _no_frame
    try:
        yield
    finally:
        for name, value in zip(names, original, strict=True):
            setattr(owner, name, value)


def _plain(value: Any) -> Any:
    if isinstance(value, Dual):
        return value.value
    if type(value) in (tuple, list):
        return type(value)([_plain(item) for item in value])
    return value


def _copy(tensor: Tensor, source: Any, *_: object, **__: object) -> Dual:
    source = lift(source)
    tangent = None if source.tangent is None else source.tangent.expand_as(tensor).clone()
    return Dual(source.value.expand_as(tensor).clone(), tangent)


def _fill(tensor: Tensor, value: Any) -> Dual:
    if isinstance(value, Dual):
        return _copy(tensor, value)
    return Dual(torch.full_like(tensor.detach(), value))


_OVERWRITES: dict[str, Callable[..., Dual]] = {
    "copy": _copy,
    "fill": _fill,
    "zero": lambda tensor: _fill(tensor, 0),
}
