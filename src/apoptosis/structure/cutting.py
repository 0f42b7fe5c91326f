"""`cut`: carry out a plan, however it is delivered.

`carry_out` does that alone. `cut` then makes good what the network says of itself: its configuration where a library
saves one, and its `generate`. With example inputs at hand the network that is delivered has run once.
"""

from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.errors import PlanMismatchError
from apoptosis.modes import in_eval_mode, outside_inference_mode
from apoptosis.structure.configurations import settle_configurations_
from apoptosis.structure.generation import settle_generation_
from apoptosis.structure.plan import Plan
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example
from apoptosis.structure.rewriting import CutProgram
from apoptosis.structure.surgery import AnyModel, check_fits, copy_with, cut_module
from apoptosis.structure.tracing import trace
from apoptosis.turns import one_at_a_time

__all__ = ["carry_out", "cut", "deliver_", "why_not_run"]


@outside_inference_mode
@one_at_a_time
def cut(model: AnyModel, plan: Plan, *, example_inputs: Any = None) -> AnyModel | CutProgram:
    """A new, smaller model; the given one is untouched.

    A plan says how the network is delivered: as the model's own class, or as a rewritten program. A program is made
    from the trace; a plan that was read from JSON has none, and needs `example_inputs` to trace again.

    A network of transformers gets a configuration of its own that says the cut, if one can; else its `save_pretrained`
    refuses. That is tried on `example_inputs`, or on what the plan's structure was traced with.

    Raises:
        PlanMismatchError: the plan is for another model, or was carried out already; or it needs `example_inputs`; or
            the cut network does not run on them, and the model does.

    >>> from torch import nn, zeros
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> cut(net, trace(net, zeros(1, 4)).plan({"0": [0, 2, 5]}))[2]
    Linear(in_features=3, out_features=2, bias=True)
    """
    small = carry_out(model, plan, example_inputs=example_inputs)
    example = None if plan.source is None else plan.source.example
    if example_inputs is not None:
        example = Example.of(example_inputs)
        if because := why_not_run(small, model, example):
            raise PlanMismatchError(
                f"The cut {type(model).__name__} does not run on `example_inputs`, on which the model does: {because}. "
                "Trace the model with these inputs, and make a plan of that structure."
            )
    deliver_(small, model, example)
    return small


def carry_out(model: AnyModel, plan: Plan, *, example_inputs: Any = None) -> AnyModel | CutProgram:
    """The cut network, with all that it says of itself as it was: for those on the way to another one."""
    check_fits(model, plan)
    if plan.delivery == "module":
        return cut_module(model, plan)
    source = plan.source
    if source is None:
        if example_inputs is None:
            raise PlanMismatchError(
                "This plan is delivered as a rewritten program, and came from a file or a copy. Pass `example_inputs` "
                "to `cut`, so that the model can be traced again."
            )
        source = trace(model, example_inputs)
    return source.program(model, plan)


def deliver_(small: nn.Module, model: nn.Module, example: Example | None) -> None:
    """Let a cut network say what it is now, and refuse what it cannot do any more."""
    if not isinstance(small, CutProgram):
        settle_configurations_(small, example)
        settle_generation_(small, model, example)


def why_not_run(small: nn.Module, model: nn.Module, example: Example) -> str:
    """Why the cut network fails on an example on which the model does not; empty if it runs, or neither does."""
    if any(tensor.is_meta for tensor in (*small.parameters(), *example.tensors())):
        return ""
    because = _failure(small, example)
    return because if because and not _failure(copy_with(model, {}), example) else ""


def _failure(model: nn.Module, example: Example) -> str:
    try:
        with random_state_put_back(model), torch.no_grad(), in_eval_mode(model):
            example.map(Tensor.clone).run(model)
    except torch.OutOfMemoryError:
        return ""
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return ""
