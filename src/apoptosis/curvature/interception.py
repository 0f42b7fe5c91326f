"""Seeing every torch operation of an unmodified model, once, in one form.

`Interceptor` is a `TorchFunctionMode`. It names each call (`calls`), enters functions written in Python, turns
writing operations into returning ones, finds the record of every argument (`duals`), and hands the rest to `operate`,
which subclasses define. The caller's tensors stay as they are: a write to one goes to a private copy (`originals`).

What leaves Python is invisible here: a custom `autograd.Function`, `vmap`, a scripted module. Their outputs require
grad but have no record; meeting one is an error (`LostTangentError`), because going on would drop its derivative
silently.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from apoptosis.curvature.calls import Call, body_of, by_position, functional_of, identify
from apoptosis.curvature.duals import Dual, Ledger, Record, lift
from apoptosis.curvature.lost import hides, lost_tangent
from apoptosis.curvature.recurrent import RECURRENT, is_packed
from apoptosis.errors import ModelError

__all__ = ["Interceptor"]

_VIEW_GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_BUFFER_WRITERS = frozenset({"batch_norm", "instance_norm"})
_STATISTICS = (3, 4)  # where they take the buffers they write to
_ALIASING = frozenset({"detach", "numpy", "__array__", "untyped_storage", "data_ptr"})
_RESHAPING = frozenset({"squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims"})
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
        if call.name == "register_hook":
            raise lost_tangent(call.name, args[0])
        if call.is_getter:
            return self._get(call, func, args)
        if call.is_python and self._enters(func):
            return self._enter(func, args, kwargs)
        self._calls += 1
        args, kwargs = by_position(call, args, kwargs)
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
            tensor = self.ledger.current(args[0])[0]
            self.ledger.note_alias(tensor)
            return func(tensor)
        if call.name == "__set__" and func.__self__ is Tensor.data:  # pyright: ignore
            return self._set_data(func, *args)
        return func(*args)

    def _set_data(self, func: Callable[..., Any], tensor: Tensor, value: Tensor) -> None:
        value = self.ledger.current(value)[0]
        if self.ledger.original_of(self.ledger.current(tensor)[0]) is None:
            return func(self.ledger.current(tensor)[0], value)
        if tensor.shape != value.shape:
            raise ModelError(
                f"The model replaces a tensor of shape {tuple(tensor.shape)} by one of shape {tuple(value.shape)} in "
                "its forward. Run it once, then score it, in a mode in which it leaves its tensors as they are."
            )
        self.ledger.writable(tensor).detach().copy_(value)
        return None

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
        if call.name in _ALIASING:
            self.ledger.note_alias(self.ledger.current(args[0])[0])
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
        """An operation without duals, or without gradient; only what it writes to needs protection."""
        written = (0,) if call.in_place else _STATISTICS if call.name in _BUFFER_WRITERS else ()
        args = tuple(
            self._writable(value) if place in written else self._current(value)
            for place, value in enumerate(args)
        )
        kwargs = {
            name: self._writable(value) if name == "out" else self._current(value)
            for name, value in kwargs.items()
        }
        result = func(*args, **kwargs)
        self._note_aliases(call, args, result)
        return result

    def _writable(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ledger.writable(value)
        if type(value) in (tuple, list):
            return type(value)(self._writable(item) for item in value)
        return value

    def _note_aliases(self, call: Call, args: tuple[Any, ...], result: Any) -> None:
        """Views made without gradient see the memory of a value, and so do its detached aliases."""
        if isinstance(result, (tuple, list)):
            for part in result:
                self._note_aliases(call, args, part)
        elif isinstance(result, Tensor) and result._base is not None:
            self.ledger.note_alias(result._base)
        elif call.name in _ALIASING:
            self.ledger.note_alias(args[0])

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
        functional = functional_of(call.name)
        if (
            functional is None and call.name not in _OVERWRITES
        ):  # as requires_grad_: no value changes
            tensor = self.ledger.current(target)[0]
            return getattr(tensor, call.name + "_")(*self._current(args[1:]), **kwargs)
        tensor, record = self._open(target)
        if call.name == "__setitem__":
            self._set_item(tensor, args[1], lift(args[2]))
            return None
        if call.name in _OVERWRITES:
            result = _OVERWRITES[call.name](tensor, *args[1:], **kwargs)
        elif call.name in _RESHAPING and _is_aliased(tensor, record):
            return self._reshape(call, tensor, args[1:], kwargs)
        else:
            first = args[0]
            if _is_aliased(tensor, record):
                # What the rule saves must not be overwritten by the copy below.
                first = _cloned(first)
            assert functional is not None, "checked above"
            result = lift(self.operate(call, functional, (first, *args[1:]), kwargs))
        return self._assign(tensor, result, weight=weight)

    def _open(self, target: Tensor) -> tuple[Tensor, Record | None]:
        """What to write to instead of `target`, and its record."""
        original = self.ledger.original_of(self.ledger.current(target)[0])
        if original is not None and original.requires_grad:
            raise ModelError(
                f"The model writes in place to its own parameter of shape {tuple(original.shape)} while gradients are "
                "recorded, which torch refuses as well. Write under torch.no_grad(), or to a copy."
            )
        return self.ledger.current(self.ledger.writable(target))

    def _reshape(
        self, call: Call, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """`squeeze_` and its like on a tensor that others see: only its own shape changes."""
        record = self.ledger.current(tensor)[1]
        tangent = None if record is None else record.tangent
        if tangent is not None:
            tangent = getattr(tangent, call.name)(*args, **kwargs)
        getattr(tensor, call.name + "_")(*args, **kwargs)
        weight = record is not None and record.weight
        self.ledger.write(tensor, Record(tangent, weight, has_views=True))
        return tensor

    def _assign(self, target: Tensor, result: Dual, *, weight: bool) -> Tensor:
        """Let `target` stand for `result` from now on."""
        tensor, record = self._open(target)
        if result.value.dtype != tensor.dtype:
            tangent = None if result.tangent is None else result.tangent.to(tensor.dtype)
            result = Dual(result.value.to(tensor.dtype), tangent)
        if not _is_aliased(tensor, record):
            self.ledger.write(tensor, Record(None, moved=result.value))
            return self._hand_out(result, weight=weight)
        tangent = self._tangent_to_write(tensor, needed=result.tangent is not None)
        tensor.copy_(result.value)
        if tangent is not None:
            tangent.zero_() if result.tangent is None else tangent.copy_(result.tangent)
        self._rewrite(tensor, tangent)
        return tensor

    def _set_item(self, tensor: Tensor, index: Any, source: Dual) -> None:
        index = _plain(index)
        tangent = self._tangent_to_write(tensor, needed=source.tangent is not None)
        tensor[index] = source.value
        if tangent is not None:
            tangent[index] = 0 if source.tangent is None else source.tangent
        self._rewrite(tensor, tangent)

    def _rewrite(self, tensor: Tensor, tangent: Tensor | None) -> None:
        """The record of a tensor that was really written to: it may have had views before, and still has them."""
        self.ledger.write(tensor, Record(tangent, has_views=True))
        base = tensor._base
        if base is not None and self.ledger.current(base)[1] is None:
            self.ledger.write(base, Record(None, has_views=True))

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
        if record is not None and hides(tensor):
            raise lost_tangent(self.call.name, tensor)
        if record is not None and (record.tangent is not None or tensor.requires_grad):
            self.any_dual = True
            self.all_weight &= record.weight
            return Dual(tensor, record.tangent, record.weight)
        if tensor.requires_grad:
            raise lost_tangent(self.call.name, tensor)
        self.all_weight &= tensor.dim() == 0 or ledger.owns(tensor)
        return tensor


@cache
def is_handwritten_norm(kind: type[nn.Module]) -> bool:
    """Whether a module is a norm by name (`LlamaRMSNorm`, `T5LayerNorm`, `LayerNorm2d`) and none of torch's own."""
    return not kind.__module__.startswith("torch.") and bool(_NORM_NAME.search(kind.__name__))


def _is_aliased(tensor: Tensor, record: Record | None) -> bool:
    """Whether others may see the memory of `tensor`: then it must really be written to."""
    return tensor._base is not None or record is None or record.has_views


def _cloned(value: Any) -> Any:
    if isinstance(value, Dual):
        tangent = None if value.tangent is None else value.tangent.clone()
        return Dual(value.value.clone(), tangent, value.weight)
    return value.clone() if isinstance(value, Tensor) else value


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
