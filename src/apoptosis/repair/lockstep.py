"""Both networks over all batches at once, in step: every run waits at a layer until all have come there.

Fitting a layer needs all batches at its inputs, and the layers after it need the fitted layer. Run anew for every
layer, L layers take about L/2 forwards of everything. Here every batch has a run of its own in each network, a thread
that stops inside the layer's call; only one of them runs at a time. When all have come, the layer is fitted, and they
go on with what it gives now. Modules that are to change as a whole are waited for `ahead` of their calls. Together that
is one forward, for the memory of what is alive at a layer, of all batches.

Where maps are large not all batches set out: as many as memory has room for. That is enough there, for large maps have
many places. The others follow where maps are smaller, and pass the layers that are fitted by then without a stop.

How much room there is the device says (`memory`). Where it was too much after all, half of the batches go on.

Runs that take different ways, networks that remember things between calls of their modules, more batches or larger
activations than are bearable: all end in `OutOfStepError`, and the caller goes the slow way. What comes out at the end
is compared with a plain run, so that nothing that threads could disturb passes unseen.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.repair.memory import is_full, room_on
from apoptosis.repair.reaching import Passed, Station, first_of, noting, num_samples_of
from apoptosis.task import Batch, Task, tensors_in
from apoptosis.turns import acting_for, holder

__all__ = ["March", "OutOfStepError", "Stop", "march", "num_bytes"]

MOST_BATCHES = 128
FEWEST_SAMPLES = 64
"""With room for fewer a layer is better fitted on all data, one batch after the other."""
LOOKING_BACK = 4
"""Stops: what a run holds it has shown at one of the last layers; a stream is there while its branch is fitted."""


T = TypeVar("T")


class OutOfStepError(Exception):
    """The runs cannot be kept in step."""


@dataclass(frozen=True)
class Stop:
    """All runs at one station: what passes there in the small network and in the dense one, by batch."""

    station: Station
    batches: list[tuple[Passed, Passed]]


class March:
    """Runs of both networks. `stops` leads from layer to layer; call `renew` when the layer was changed."""

    def __init__(
        self,
        set_out: "Callable[[Batch], tuple[_Run, _Run]]",
        batches: Sequence[Batch],
        stations: Sequence[Station],
        room: int,
    ) -> None:
        """`set_out` begins a run of either network; `room` is for bytes that pass a layer in both."""
        self._set_out, self._batches = set_out, batches
        self._stations = {own.path: own for own in stations}
        self._under_way: list[tuple[_Run, _Run]] = []
        self._bytes: deque[int] = deque(maxlen=LOOKING_BACK)
        self._most_bytes, self._most_runs = room, len(batches)

    def stops(self) -> Iterator[Stop]:
        """Every station, in the order of the calls.

        Raises:
            OutOfStepError: the runs part, or there is no room for enough of them.
        """
        self._under_way.append(self._set_out(self._batches[0]))
        for _ in range(len(self._stations)):
            yield self._next_stop()
        for number, both in enumerate(self._under_way):
            for run in both:
                if run.advance() is not None:
                    raise OutOfStepError("a module is called again")
                if (
                    number
                ):  # logits of all batches are more than what passes layers; `ends` needs the first
                    run.output = None

    def with_room(self, stop: Stop, fit: Callable[[Stop], T]) -> T:
        """What a function makes of a stop, of half of its batches again and again while memory is full.

        Raises:
            OutOfStepError: there is no room for enough of them.
        """
        while True:
            try:
                return fit(stop)
            except Exception as error:
                if not is_full(error):
                    raise
            self._go_on_with(len(stop.batches) // 2)
            del stop.batches[len(self._under_way) :]

    def renew(self) -> None:
        """The layer that was stopped at has other weights now: go on with what it gives."""
        for ours, _ in self._under_way:
            ours.is_renewed = True

    def ends(self) -> tuple[Batch, Any, Any]:
        """The first batch, and what the small and the dense network gave for it, once all stops are over."""
        ours, theirs = self._under_way[0]
        return ours.batch, ours.output, theirs.output

    def stop(self) -> None:
        """Leave no run waiting."""
        for run in self._under_way:
            _stop(run)

    def _next_stop(self) -> Stop:
        """Where all come to next. Nothing here holds what passes there: whoever fits may have to let go of some."""
        seen = self._advanced()
        station = self._station_of(seen)
        passed = [self._at(station, both) for both in seen]
        room = self._room(passed[0])
        for run in self._under_way[room:]:
            _stop(run)
        del passed[room:], self._under_way[room:]
        for batch in self._batches[len(passed) : room]:
            runs = self._set_out(batch)
            try:
                both = runs[0].advance(station.path), runs[1].advance(station.target)
            except Exception as error:
                _stop(runs)
                if not is_full(error):
                    raise
                self._go_on_with(max(1, len(passed) // 2))
                del passed[len(self._under_way) :]
                break
            self._under_way.append(runs)
            passed.append(self._at(station, both))
        return Stop(station, passed)

    def _advanced(self) -> "list[tuple[_At | None, _At | None]]":
        """What each run shows next; where memory is full before all are there, half of those that are go on."""
        seen: list[tuple[_At | None, _At | None]] = []
        for ours, theirs in self._under_way:
            try:
                seen.append((ours.advance(), theirs.advance()))
            except Exception as error:
                if not is_full(error) or len(self._under_way) == 1:
                    raise
                break
        else:
            return seen
        self._go_on_with(len(seen) // 2 or len(seen))
        return seen[: len(self._under_way)]

    def _go_on_with(self, num: int) -> None:
        """Let the other runs go, and remember how many there was room for.

        Raises:
            OutOfStepError: that is too few.
        """
        for run in self._under_way[num:]:
            _stop(run)
        self._most_runs = num
        if num * self._under_way[0][0].num_samples < FEWEST_SAMPLES:
            raise OutOfStepError("memory is full")
        del self._under_way[num:]

    def _station_of(self, seen: "list[tuple[_At | None, _At | None]]") -> Station:
        paths = {None if ours is None else ours.path for ours, _ in seen}
        path = paths.pop()
        station = None if path is None or paths else self._stations.get(path)
        if station is None:
            raise OutOfStepError("batches take different ways")
        return station

    def _at(self, here: Station, both: "tuple[_At | None, _At | None]") -> tuple[Passed, Passed]:
        ours, theirs = both
        if ours is None or theirs is None or (ours.path, theirs.path) != (here.path, here.target):
            raise OutOfStepError("batches take different ways")
        return ours.passed, theirs.passed

    def _room(self, first: tuple[Passed, Passed]) -> int:
        """How many batches can be under way here, by what the first of them shows."""
        self._bytes.append(sum(num_bytes(own) for own in first))
        each, here = max(1, *self._bytes), len(self._under_way)
        if here * each > self._most_bytes:
            room = self._most_bytes // each
        else:  # half stays free: the next layers may show more, and to begin again costs much
            room = max(here, self._most_bytes // 2 // each)
        room = min(room, self._most_runs)
        if room >= len(self._batches):
            return room
        if room * self._under_way[0][0].num_samples < FEWEST_SAMPLES:
            raise OutOfStepError("activations are too large")
        return room


@contextmanager
def march(
    dense: nn.Module,
    small: nn.Module,
    stations: Sequence[Station],
    batches: Iterable[Batch],
    task: Task,
) -> Iterator[March]:
    """Get ready; whatever happens, no run is left waiting.

    Raises:
        OutOfStepError: there are too many batches, or none.
    """
    held = list(islice(iter(batches), MOST_BATCHES + 1))
    if not 0 < len(held) <= MOST_BATCHES:
        raise OutOfStepError("there are many batches, or none")
    with ExitStack() as stack:
        stack.enter_context(_watched(small, {own.path: own for own in stations}))
        stack.enter_context(_watched(dense, {own.target: own for own in stations}))
        device = next((own.device for own in small.parameters()), torch.device("cpu"))
        going = March(
            lambda batch: (_Run(small, batch, task), _Run(dense, batch, task)),
            held,
            stations,
            room_on(device),
        )
        stack.callback(going.stop)
        yield going


def _stop(runs: "tuple[_Run, _Run]") -> None:
    for run in runs:
        run.stop()


@dataclass(frozen=True)
class _At:
    path: str
    passed: Passed


class _Run:
    """One batch on its way through a network, in a thread that runs only while somebody waits for it."""

    def __init__(self, model: nn.Module, batch: Batch, task: Task) -> None:
        self.batch, self.num_samples = batch, num_samples_of(batch, task)
        self.output: Any = None
        self.is_renewed = False
        self.others: dict[str, Any] = {}
        """What outputs of a layer will be added to, from when it is seen until the layer runs."""
        self._destination: str | None = None
        self._passed: _At | None = None
        self._error: BaseException | None = None
        self._is_done = self._is_stopped = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._holder = holder()
        self._thread = threading.Thread(target=self._run, args=(model, batch, task), daemon=True)
        self._thread.start()

    def advance(self, to: str | None = None) -> _At | None:
        """Let it run to a layer, the next that is watched unless given, and see what passes; None at its end."""
        self._passed, self._destination = None, to
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

    def arrive(self, path: str, given: Any, made: Any = None) -> None:
        """Called within the thread: wait here, unless it is on its way further."""
        passed = Passed(given, made, self.others.pop(path, None), self.num_samples)
        if self._destination not in (None, path):
            return
        self._passed, self.is_renewed = _At(path, passed), False
        self._back.release()
        self._go.acquire()
        if self._is_stopped:
            raise _StoppedError

    def _run(self, model: nn.Module, batch: Batch, task: Task) -> None:
        _own.run = self
        self._go.acquire()
        try:
            if not self._is_stopped:
                # Each thread has a mode of its own, and this one works for the one that waits for it.
                with torch.no_grad(), acting_for(self._holder):
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
def _watched(model: nn.Module, stations: Mapping[str, Station]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, station in stations.items():
            own = station.watched(model, path)
            if own.spot is not None:
                stack.enter_context(noting(*own.spot, partial(_note, path)))
            if station.ahead:
                hook = own.module.register_forward_pre_hook(_ahead(path), with_kwargs=True)
            else:
                hook = own.module.register_forward_hook(_behind(path), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _note(path: str, other: Any) -> None:
    if (run := _own_run()) is not None:
        run.others[path] = other


def _behind(path: str) -> Callable[..., Any]:
    def stop(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if (run := _own_run()) is None:
            return None
        run.is_renewed = False
        run.arrive(path, first_of(args, kwargs), output)
        return module.forward(*args, **kwargs) if run.is_renewed else None

    return stop


def _ahead(path: str) -> Callable[..., None]:
    def stop(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (run := _own_run()) is not None:
            run.arrive(path, (args, kwargs))

    return stop


def _own_run() -> _Run | None:
    """The run whose thread this is; None in a thread that is not one of ours."""
    return getattr(_own, "run", None)


def num_bytes(passed: Passed) -> int:
    """Of the tensors that passed."""
    tensors = tensors_in((passed.given, passed.made, passed.other))
    return sum(own.numel() * own.element_size() for own in tensors)
