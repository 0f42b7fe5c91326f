"""Whether a recorded run can stand for the model: the program, uncut, against the model on other inputs.

A recording keeps what Python did for one example. What it did with sizes and numbers is known for the most part, and
the program checks it (`guards`); tensors that came from where torch does not see, and sizes that went there, are not.
So before a program is delivered, it is run beside a copy of the model, at full size: on other numbers, twice (a model
may remember), and at other sizes of the inputs: one more, twice, half, several at once. It must give the same.
A size stays free only if another one was seen to agree and none to differ; one that went where it cannot be followed
(`int(n)`) stays between those that were seen to agree. Where train mode calls other operations, the program has none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from apoptosis.modes import in_eval_mode
from apoptosis.structure.axes import Axis
from apoptosis.structure.comparison import difference
from apoptosis.structure.guards import GuardError, SizeLimit, Trip
from apoptosis.structure.network import Run
from apoptosis.structure.program import SizeOf, sizes_of
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example, record
from apoptosis.structure.rewriting import CutProgram, write_program
from apoptosis.structure.steering import steerings
from apoptosis.structure.surgery import copy_with
from apoptosis.structure.twins import distance, redrawn

__all__ = ["Replay", "replay_of", "why_not_a_program"]

TOLERANCES = {
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}  # the same operations in the same order: rounding, if that
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Replay:
    """Why a run cannot be replayed, empty if it can; and what the program is bound to."""

    because: str = ""
    limits: tuple[SizeLimit, ...] = ()
    harmless: frozenset[Trip] = frozenset()
    eval_only: str = ""
    """Why the program does not do in train mode what the model does; empty if it does."""


_KNOWN: WeakKeyDictionary[Run, Replay] = WeakKeyDictionary()


def why_not_a_program(run: Run) -> str:
    """Why the run cannot be replayed with other inputs; empty if it can, or if there are no numbers to try."""
    for steering in steerings(run.analysis.program, run.analysis.axes):
        return (
            f"Python looks at a value that depends on the inputs ({steering.how}, {steering.line})"
        )
    for _, how, line, _ in run.analysis.program.escapes:
        return f"numbers leave torch by {how} ({line})"
    if run.analysis.program.draws_outside:
        return "Python draws random numbers outside torch"
    return "" if run.is_meta else replay_of(run, run.model).because


def replay_of(run: Run, model: nn.Module) -> Replay:
    """Try; the answer for the traced model itself is remembered."""
    if any(p.is_meta for p in model.parameters()):
        return Replay()
    if model is run.model and run in _KNOWN:
        return _KNOWN[run]
    replay = _tried(run, model)
    if model is run.model:
        _KNOWN[run] = replay
    return replay


def _tried(run: Run, model: nn.Module) -> Replay:
    generator = torch.Generator().manual_seed(0)
    example = redrawn(_on_device_of(model, run.example), generator)
    again = redrawn(example, generator)
    with random_state_put_back(model), torch.no_grad():
        try:
            pair = _Pair(run, model)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program cannot stand for the model
            return Replay(_fails(error))
        for answer in (pair.answer(example), pair.answer(again)):
            if answer != AGREES:
                return Replay(answer)
        replay = _limits(run, _Trials(pair, example))
        return replace(replay, eval_only=_why_eval_only(run, model, example))


AGREES = "agrees"
BATCH_OF_ONE = "the model makes numbers of the size of the batch, which was 1"
UNTRIED = "run again on other inputs, the model or a check of the program stops"


class _Pair:
    """A copy of the model and its program, at full size."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._own = copy_with(model, {})
        self._program: CutProgram = write_program(run, {}, model)
        self.checks = self._program.checks

    def answer(self, example: Example) -> str:
        """The reason why they differ; empty if both give the same."""
        with in_eval_mode(self._own), in_eval_mode(self._program):
            torch.manual_seed(0)  # for dropout that is never off
            try:
                expected = example.map(Tensor.clone).run(self._own)
            except Exception:  # noqa: BLE001 - a model need not run at every size
                return UNTRIED
            torch.manual_seed(0)
            try:
                found = example.map(Tensor.clone).run(self._program)
            except GuardError:
                return UNTRIED
            except Exception as error:  # noqa: BLE001 - as it may
                return _fails(error)
        if type(found) is not type(expected):
            return f"a result of type {type(expected).__name__} cannot be rebuilt"
        dtypes = [t.dtype for t in example.tensors() if t.is_floating_point()]
        allowed = max((TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes), default=TOLERANCE)
        if not distance(found, expected) <= allowed:
            return "run again on other inputs, the recorded operations give something else than the model"
        return AGREES


def _why_eval_only(run: Run, model: nn.Module, example: Example) -> str:
    """What the model does otherwise in train mode than the program would; empty if nothing."""
    try:
        found = record(copy_with(model, {}), example, training=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing is known of its train mode
        lines = str(error).strip().splitlines()
        return f"on the example inputs it stops: {lines[0] if lines else type(error).__name__}"
    if found.draws_outside:
        return "it draws random numbers outside torch"
    differs = difference(run.analysis, {}, found, training=True)
    return "" if differs is None else differs.because


def _fails(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"the recorded operations do not run on other inputs ({lines[0] if lines else type(error).__name__})"


class _Trials:
    """Answers at other sizes of the inputs, each found once."""

    def __init__(self, pair: _Pair, example: Example) -> None:
        self._pair = pair
        self._example = example
        self._known: dict[tuple[tuple[int, int, int], ...], str] = {}

        self.tripped: dict[tuple[tuple[int, int, int], ...], list[Trip]] = {}
        """Guards that came out otherwise where both gave the same all the same."""

    def __call__(self, sizes: dict[tuple[int, int], int]) -> str:
        """With those sizes of inputs along dimensions."""
        key = tuple((*place, size) for place, size in sorted(sizes.items()))
        if key not in self._known:
            checks = self._pair.checks
            checks.tripped = []
            answer = self._pair.answer(_sized(self._example, sizes))
            if checks.tripped and answer == AGREES:
                self.tripped[key] = checks.tripped
            self._known[key] = UNTRIED if checks.tripped and answer != AGREES else answer
        return self._known[key]

    def at_one(self, places: Iterable[tuple[int, int]]) -> list[Trip]:
        """Guards that came out otherwise at size 1 there."""
        return self.tripped.get(tuple((*place, 1) for place in sorted(places)), [])

    def harmless(self, free: Iterable[tuple[int, int]]) -> frozenset[Trip]:
        """The same, where both give the same also with other dimensions one longer."""
        found: set[Trip] = set()
        for key, trips in list(self.tripped.items()):
            sizes = {(number, dim): size for number, dim, size in key}
            longer = {
                (n, dim): self._example.tensors()[n].shape[dim] + 1
                for n, dim in free
                if (n, dim) not in sizes
            }
            if not longer or self(sizes | longer) == AGREES:
                found.update(trips)
        return frozenset(found)


def _limits(run: Run, trials: _Trials) -> Replay:
    """Try other sizes along each axis of the inputs, then along several at once."""
    limits: list[SizeLimit] = []
    free: dict[Axis, list[tuple[int, int]]] = {}
    read, unseen = _sizes_read(run)
    pending = list(_input_axes(run).items())
    while pending:
        axis, places = pending.pop(0)
        if axis is run.batch and trials(dict.fromkeys(places, 1)) != AGREES:
            return Replay(BATCH_OF_ONE)
        least, most = _agreed(axis, places, trials, read=axis in read, unseen=axis in unseen)
        if least == most and axis.size == 1 and len(places) > 1:
            pending += [(Axis(1), [place]) for place in places]  # no batch that all of them share
        elif least == most or axis in unseen:
            limits += [SizeLimit(*place, least, most) for place in places]
        else:
            free[axis] = places
    harmless = trials.harmless([place for places in free.values() for place in places])
    if run.batch in free and any(trip not in harmless for trip in trials.at_one(free[run.batch])):
        return Replay(BATCH_OF_ONE)
    together = {
        place: 2 * axis.size for axis, places in free.items() if axis in read for place in places
    }
    if len(together) > 1 and trials(together) not in (AGREES, UNTRIED):
        limits += [SizeLimit(n, dim, size // 2, size // 2) for (n, dim), size in together.items()]
    return Replay("", tuple(limits), harmless)


def _agreed(
    axis: Axis, places: list[tuple[int, int]], trials: _Trials, *, read: bool, unseen: bool
) -> tuple[int, int]:
    """The least and the greatest size that agreed; that of the run alone where another one differed."""
    size = axis.size
    others = [size + 1]
    if read or size == 1:
        others += [2 * size, size // 2, size + 2]
    if unseen:
        others += [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    agreed = [size]
    for other in dict.fromkeys(n for n in others if n not in (0, size)):
        answer = trials(dict.fromkeys(places, other))
        if answer == AGREES:
            agreed.append(other)
        elif answer != UNTRIED:
            return size, size
    return min(agreed), max(agreed)


def _sizes_read(run: Run) -> tuple[set[Axis], set[Axis]]:
    """Axes of the inputs whose sizes Python may have read, and those whose sizes went where nobody sees them."""
    analysis = run.analysis
    of_inputs = {expr.axis for value in analysis.program.inputs for expr in analysis.axes[value]}

    def axes_of(sizes: Iterable[SizeOf]) -> set[Axis | None]:
        return {analysis.axes[size.value][size.dim].axis for size in sizes}

    read = axes_of(analysis.program.read)
    unseen = axes_of(
        size
        for reading in analysis.program.readings
        if reading.unseen
        for size in sizes_of(reading.left)
    )
    if (
        not read <= of_inputs
    ):  # sizes inside follow from those of the inputs, and not in ways that are known
        read = of_inputs
    return {a for a in read if a is not None}, {
        a for a in unseen if a in of_inputs and a is not None
    }


def _input_axes(run: Run) -> dict[Axis, list[tuple[int, int]]]:
    """Where each axis of the inputs stands; of those of size 1, which cannot be followed, the first may be a batch."""
    found: dict[Axis, list[tuple[int, int]]] = {}
    batch = Axis(1)
    for number, value in enumerate(run.analysis.program.inputs):
        for dim, expr in enumerate(run.analysis.axes[value]):
            axis = expr.axis or (
                batch if dim == 0 and value.shape[0] == 1 else Axis(value.shape[dim])
            )
            found.setdefault(axis, []).append((number, dim))
    return found


def _sized(example: Example, sizes: dict[tuple[int, int], int]) -> Example:
    """The example, shorter along some dimensions, or longer by its own entries from the first on."""
    numbers = iter(range(len(example.tensors())))

    def sized(tensor: Tensor) -> Tensor:
        number = next(numbers)
        for (own, dim), size in sizes.items():
            if own == number:
                places = torch.arange(size, device=tensor.device) % tensor.shape[dim]
                tensor = tensor.index_select(dim, places)
        return tensor

    return example.map(sized)


def _on_device_of(model: nn.Module, example: Example) -> Example:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def moved(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor

    return example.map(moved)
