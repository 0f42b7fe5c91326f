"""What passes a module, seen or changed for a while.

Hooks come in two kinds with different arguments, and have to go again whatever happens; here they are one thing, and
leave no trace.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["passing"]


@contextmanager
def passing(module: nn.Module, side: str, see: Callable[[Any], Any]) -> Iterator[None]:
    """Have a function called at every call of a module inside the block.

    Args:
        module: its parameters, flags and other hooks are left alone.
        side: `input` for what it is called with, `(args, kwargs)`; `output` for what it returns.
        see: what it returns goes on in the place of what it was shown; that itself does if it returns None.

    >>> double = nn.Identity()
    >>> with passing(double, "output", lambda given: 2 * given):
    ...     double(21)
    42
    >>> double(21)
    21
    """
    assert side in ("input", "output"), f"no side of a module is called {side!r}"

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return see((args, kwargs))

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return see(output)

    if side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
