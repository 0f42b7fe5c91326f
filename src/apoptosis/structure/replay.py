"""Whether a recorded run can stand for the model: the program, uncut, against the model on other inputs.

A recording keeps what Python did for one example: numbers made of sizes, branches taken by values, tensors that came
from somewhere torch does not see. So before a program is delivered, it is run beside a copy of the model, at full size:
on other numbers, twice (a model may remember), and with each input dimension one longer. It must give what the model
gives; an input dimension along which it does not is fixed to the size of the example.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from apoptosis.modes import in_eval_mode
from apoptosis.structure.axes import Axis
from apoptosis.structure.network import Run
from apoptosis.structure.program import values_in
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example
from apoptosis.structure.rewriting import NUMBERS, write_program
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
    """Why a run cannot be replayed, empty if it can; and the input sizes that must be as they were."""

    because: str = ""
    fixed_sizes: tuple[tuple[int, int, int], ...] = ()


_KNOWN: WeakKeyDictionary[Run, Replay] = WeakKeyDictionary()


def why_not_a_program(run: Run) -> str:
    """Why the run cannot be replayed with other inputs; empty if it can, or if there are no numbers to try."""
    for call in run.analysis.program.calls:
        if call.name.startswith(NUMBERS) and any(not v.fixed for v in values_in(call.arguments)):
            return f"Python looks at a value that depends on the inputs ({call.name}, {call.line})"
    for _, how, line in run.analysis.program.escapes:
        return f"numbers leave torch by {how} ({line})"
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
        if because := _differs(run, model, [example, again]):
            return Replay(because)
        fixed: list[tuple[int, int, int]] = []
        for axis, places in _input_axes(run).items():
            longer = _stretched(example, places, by=1)
            shorter = _stretched(example, places, by=-1) if axis is run.batch else None
            tries = [x for x in (longer, shorter) if x is not None]
            if _differs(run, model, tries):
                if axis is run.batch:
                    return Replay("the model makes numbers of the size of the batch, which was 1")
                fixed += [(n, dim, example.tensors()[n].shape[dim]) for n, dim in places]
    return Replay("", tuple(fixed))


def _differs(run: Run, model: nn.Module, examples: list[Example]) -> str:
    """The model and its program, one after the other on each example; why they do not agree."""
    own = copy_with(model, {})
    try:
        program = write_program(run, {}, model)
        with in_eval_mode(own), in_eval_mode(program):
            for example in examples:
                torch.manual_seed(0)  # for dropout that is never off
                expected = example.map(Tensor.clone).run(own)
                torch.manual_seed(0)
                found = example.map(Tensor.clone).run(program)
                if type(found) is not type(expected):
                    return f"a result of type {type(expected).__name__} cannot be rebuilt"
                dtypes = [t.dtype for t in example.tensors() if t.is_floating_point()]
                allowed = max(
                    (TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes), default=TOLERANCE
                )
                if not distance(found, expected) <= allowed:
                    return "run again on other inputs, the recorded operations give something else than the model"
    except Exception as error:  # noqa: BLE001 - whatever it is, the program cannot stand for the model
        lines = str(error).strip().splitlines()
        return f"the recorded operations do not run on other inputs ({lines[0] if lines else type(error).__name__})"
    return ""


def _input_axes(run: Run) -> dict[Axis, list[tuple[int, int]]]:
    """Where each axis of the inputs stands; those of size 1, which cannot be followed, stand alone."""
    found: dict[Axis, list[tuple[int, int]]] = {}
    for number, value in enumerate(run.analysis.program.inputs):
        for dim, expr in enumerate(run.analysis.axes[value]):
            axis = expr.axis or Axis(value.shape[dim])
            found.setdefault(axis, []).append((number, dim))
    return found


def _stretched(example: Example, places: list[tuple[int, int]], *, by: int) -> Example:
    """The example with some dimensions one longer or shorter."""
    numbers = iter(range(len(example.tensors())))

    def stretch(tensor: Tensor) -> Tensor:
        number = next(numbers)
        for own, dim in places:
            if own == number:
                last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
                tensor = (
                    torch.cat([tensor, last], dim)
                    if by > 0
                    else tensor.narrow(dim, 0, tensor.shape[dim] - 1)
                )
        return tensor

    return example.map(stretch)


def _on_device_of(model: nn.Module, example: Example) -> Example:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def moved(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor

    return example.map(moved)
