"""`cut`: carry out a plan, however it is delivered."""

from typing import Any

from apoptosis.errors import PlanMismatchError
from apoptosis.modes import outside_inference_mode
from apoptosis.structure.plan import Plan
from apoptosis.structure.rewriting import CutProgram
from apoptosis.structure.surgery import AnyModel, check_fits, cut_module
from apoptosis.structure.tracing import trace

__all__ = ["cut"]


@outside_inference_mode
def cut(model: AnyModel, plan: Plan, *, example_inputs: Any = None) -> AnyModel | CutProgram:
    """A new, smaller model; the given one is untouched.

    A plan says how the network is delivered: as the model's own class, or as a rewritten program. A program is made
    from the trace; a plan that was read from JSON has none, and needs `example_inputs` to trace again.

    Raises:
        PlanMismatchError: the plan is for another model, or was carried out already; or it needs `example_inputs`.

    >>> from torch import nn, zeros
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> cut(net, trace(net, zeros(1, 4)).plan({"0": [0, 2, 5]}))[2]
    Linear(in_features=3, out_features=2, bias=True)
    """
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
