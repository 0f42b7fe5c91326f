"""Both networks over all batches at once, in step: every run waits at a layer until all have come there.

Fitting a layer needs all batches at its inputs, and the layers after it need the fitted layer. Run anew for every
layer, L layers take about L/2 forwards of everything. Here every batch has a run of its own in each network, a thread
that stops inside the layer's call; only one of them runs at a time. When all have come, the layer is fitted, and they
go on with what it gives now. Together that is one forward, for the memory of what is alive at a layer, of all batches.

Runs that take different ways, networks that remember things between calls of their modules, more batches or larger
activations than are bearable: all end in `OutOfStepError`, and the caller goes the slow way. What comes out at the end
is compared with a plain run, so that nothing that threads could disturb passes unseen.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.repair.reaching import Passed, first_of, noting
from apoptosis.repair.survey import Layer
from apoptosis.task import Batch, Task

__all__ = ["March", "OutOfStepError", "Stop", "march"]

MOST_BATCHES = 32
MOST_BYTES = 2**31
"""Of what one layer reads, of all batches: as much again is alive in several other places."""


class OutOfStepError(Exception):
    """The runs cannot be kept in step."""


@dataclass(frozen=True)
class Stop:
    """All runs at one layer: what passes there in the small network and in the dense one, by batch."""

    layer: Layer
    batches: tuple[tuple[Passed, Passed], ...]


class March:
    """Runs of both networks. `stops` leads from layer to layer; call `renew` when the layer was changed."""

    def __init__(self, small: "list[_Run]", dense: "list[_Run]", layers: Sequence[Layer]) -> None:
        """`small` and `dense` are runs over the same batches."""
        self._small, self._dense = small, dense
        self._layers = {layer.path: layer for layer in layers}

    def stops(self) -> Iterator[Stop]:
        """Every layer, in the order of its call.

        Raises:
            OutOfStepError: the runs part.
        """
        for _ in range(len(self._layers)):
            ours = [run.advance() for run in self._small]
            theirs = [run.advance() for run in self._dense]
            paths = {None if own is None else own.path for own in ours}
            layer = self._layers.get(paths.pop() or "") if len(paths) == 1 else None
            if layer is None or any(own is None or own.path != layer.target for own in theirs):
                raise OutOfStepError("batches take different ways")
            here, there = (
                [own.passed for own in runs if own is not None] for runs in (ours, theirs)
            )
            if sum(_num_bytes(own.given) for own in here) > MOST_BYTES:
                raise OutOfStepError("activations are too large")
            yield Stop(layer, tuple(zip(here, there, strict=True)))
        if any(run.advance() is not None for run in (*self._small, *self._dense)):
            raise OutOfStepError("a layer is called again")

    def renew(self) -> None:
        """The layer that was stopped at has other weights now: go on with what it gives."""
        for run in self._small:
            run.is_renewed = True

    def ends(self) -> tuple[Batch, Any, Any]:
        """The first batch, and what the small and the dense network gave for it, once all stops are over."""
        return self._small[0].batch, self._small[0].output, self._dense[0].output


@contextmanager
def march(
    dense: nn.Module,
    small: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Batch],
    task: Task,
) -> Iterator[March]:
    """Set out; whatever happens, no run is left waiting.

    Raises:
        OutOfStepError: there are too many batches, or none.
    """
    held = list(islice(iter(batches), MOST_BATCHES + 1))
    if not 0 < len(held) <= MOST_BATCHES:
        raise OutOfStepError("there are many batches, or none")
    with ExitStack() as stack:
        stack.enter_context(_watched(small, {layer.path: layer for layer in layers}))
        stack.enter_context(_watched(dense, {layer.target: layer for layer in layers}))
        runs = {model: [_Run(model, batch, task) for batch in held] for model in (small, dense)}
        stack.callback(lambda: [run.stop() for own in runs.values() for run in own])
        yield March(runs[small], runs[dense], layers)


@dataclass(frozen=True)
class _At:
    path: str
    passed: Passed


class _Run:
    """One batch on its way through a network, in a thread that runs only while somebody waits for it."""

    def __init__(self, model: nn.Module, batch: Batch, task: Task) -> None:
        self.batch = batch
        self.output: Any = None
        self.is_renewed = False
        self.others: dict[str, Any] = {}
        """What outputs of a layer will be added to, from when it is seen until the layer runs."""
        self._passed: _At | None = None
        self._error: BaseException | None = None
        self._is_done = self._is_stopped = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(model, batch, task), daemon=True)
        self._thread.start()

    def advance(self) -> _At | None:
        """Let it run to the next layer that is watched, and see what passes there; None at its end."""
        self._passed = None
        if not self._is_done:
            self._go.release()
            self._back.acquire()
        if self._error is not None:
            raise self._error
        return self._passed

    def stop(self) -> None:
        """End it where it is."""
        self._is_stopped = True
        self._go.release()
        self._thread.join()

    def arrive(self, passed: _At) -> None:
        """Called within the thread: wait here."""
        self._passed, self.is_renewed = passed, False
        self._back.release()
        self._go.acquire()
        if self._is_stopped:
            raise _StoppedError

    def _run(self, model: nn.Module, batch: Batch, task: Task) -> None:
        _own.run = self
        self._go.acquire()
        try:
            if not self._is_stopped:
                with torch.no_grad():  # each thread has a mode of its own
                    args, kwargs = tree_map_only(Tensor, Tensor.clone, task.inputs(batch))
                    self.output = task.outputs(model(*args, **kwargs))
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._error = error
        self._is_done = True
        self._back.release()


class _StoppedError(BaseException):
    """Ends a run from within. No `Exception`, so that models that catch those let it pass."""


_own = threading.local()


@contextmanager
def _watched(model: nn.Module, layers: Mapping[str, Layer]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, layer in layers.items():
            if layer.outlet is not None and (spot := layer.outlet.other) is not None:
                seen_in = model.get_submodule(spot.module)
                stack.enter_context(noting(seen_in, spot.side, partial(_note, path)))
            hook = _watching(path)
            module = model.get_submodule(path)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _note(path: str, other: Any) -> None:
    if (run := _own_run()) is not None:
        run.others[path] = other


def _watching(path: str) -> Callable[..., Any]:
    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if (run := _own_run()) is None:
            return None
        run.arrive(_At(path, Passed(first_of(args, kwargs), output, run.others.pop(path, None))))
        return module.forward(*args, **kwargs) if run.is_renewed else None

    return watch


def _own_run() -> _Run | None:
    """The run whose thread this is; None in a thread that is not one of ours."""
    return getattr(_own, "run", None)


def _num_bytes(given: Any) -> int:
    return given.numel() * given.element_size() if isinstance(given, Tensor) else 0
