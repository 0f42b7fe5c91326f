"""`trace`: run a model once, solve its axes, find its groups."""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.errors import ModelError, TraceError
from apoptosis.modes import in_eval_mode
from apoptosis.structure.analysis import Analysis, analyse
from apoptosis.structure.attributes import Attribute, leaves, read_attribute, traced_attributes
from apoptosis.structure.costs import Costs
from apoptosis.structure.groups import find_groups, find_pinned, find_ties
from apoptosis.structure.network import Network, Run
from apoptosis.structure.program import Program, values_in
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example, line_of, model_tensors, record
from apoptosis.structure.structure import Structure
from apoptosis.structure.surgery import copy_with
from apoptosis.turns import one_at_a_time

__all__ = ["trace"]


@one_at_a_time
def trace(model: nn.Module, example_inputs: Any) -> "Structure":
    """Run a model once and solve its axes.

    Args:
        model: any module; it is not changed, and runs in eval mode without gradients.
        example_inputs: what to call it with: a tensor, a tuple of positional or a dict of keyword arguments. Tensors
            may be on the meta device if the model is.

    Returns:
        The structure: groups of units that are cut together, pinned axes with reasons, costs of any plan.

    Raises:
        TraceError: the model does not run on these inputs.
        ModelError: the model is no module, a compiled one, or cannot be copied.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> structure = trace(net, torch.zeros(1, 3, 8, 8))
    >>> [(group.name, group.kind, group.size) for group in structure.groups]
    [('0', 'channel', 8)]
    >>> plan = structure.plan({"0": [0, 2, 5]})
    >>> structure.macs(), structure.macs(plan)
    (12384, 4644)
    """
    _check_model(model)
    with _without_collection():
        return _traced(model, Example.of(example_inputs))


def _traced(model: nn.Module, example: Example) -> Structure:
    example = example.map(Tensor.clone)  # one tensor passed twice is two inputs
    run = _with_open_batch(model, example) or _ran(model, example)
    analysis = run.analysis
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = [g for g in find_groups(analysis) if any(t in parameters for t, *_ in g.places)]
    sizes = {} if run.batch is None else {run.batch: 1}
    skeleton = copy_with(model, {id(t): _meta(t) for t in model_tensors(model).values()})
    return Structure(
        groups=tuple(groups),
        ties=tuple(find_ties(analysis, groups)),
        pinned=tuple(find_pinned(analysis)),
        unused=tuple(sorted(parameters - {n for value in analysis.tensors() for n in value.names})),
        without_rule=tuple(dict.fromkeys((c.name, c.line) for c in analysis.without_rule())),
        shapes={
            name: tuple(item.shape)
            for name, item in model.state_dict(keep_vars=True).items()
            if isinstance(item, Tensor)
        },
        _network=Network(run, sizes, _attribute_values(analysis, model), skeleton),
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """No collection of garbage meanwhile: a trace makes many small things that stay, and libraries have left more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"`trace` was given a {type(model).__name__}; it takes a torch.nn.Module, whose tensors have names."
        )
    for path, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":  # importing its class takes a second
            where = f"{path!r} of the model" if path else "The model"
            raise ModelError(
                f"{where} is compiled, and its sizes are frozen in its code. Take the original (`_orig_mod`): trace "
                "the model, cut it, and compile the cut one."
            )


def _ran(model: nn.Module, example: Example) -> Run:
    """Run a copy that shares the parameters; buffers, which a run may change, are its own."""
    shadow = copy_with(model, {id(p): p for p in model.parameters()})
    _empty_caches_(shadow, example)
    try:
        with traced_attributes(shadow):
            program = record(shadow, example)
            training = _recorded_in_training(shadow, example, program)
    except Exception as error:
        raise TraceError(_why_it_failed(model, example, error)) from error
    return Run(model, example, inspect.signature(model.forward), analyse(program, training))


def _empty_caches_(shadow: nn.Module, example: Example) -> None:
    """Let go of numbers that forward keeps for the size it saw last, as anchors of a detector.

    What is recorded must not depend on what the model was called with before. A cache is an attribute of a module that
    its class has a value for, and that a run at another size sets; it gets the value of the class back.
    """
    if not any(isinstance(item, Tensor) for _, _, item in _kept(shadow)):
        return
    other = copy_with(shadow, {})  # forward may write to parameters
    kept = list(_kept(other))
    parts, others = dict(shadow.named_modules()), dict(other.named_modules())
    for times in (2, 3):  # it may have seen one of them last
        try:
            with random_state_put_back(other), torch.no_grad(), in_eval_mode(other):
                example.map(lambda t: torch.cat([t] * times) if t.ndim else t.clone()).run(other)  # noqa: B023
        except Exception:  # noqa: BLE001 - a model need not take another size
            continue
        for path, name, item in kept:
            if vars(others[path]).get(name) is not item:
                vars(parts[path]).pop(name, None)


def _kept(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Attributes of modules that may be such caches: path, name and value."""
    for path, module in model.named_modules():
        for name, item in vars(module).items():
            if isinstance(item, (Tensor, tuple)) and hasattr(type(module), name):
                yield path, name, item


def _recorded_in_training(shadow: nn.Module, example: Example, program: Program) -> Program | None:
    """A run in train mode, if it uses parameters that the run in eval mode left alone."""
    parameters = {name for name, _ in shadow.named_parameters()}
    if parameters <= _used_names(program):
        return None
    try:
        training = record(shadow, example, training=True, like=program)
    except Exception:  # noqa: BLE001 - a model need not train on its example inputs; what it left alone is listed
        return None
    return training if (_used_names(training) - _used_names(program)) & parameters else None


def _used_names(program: Program) -> set[str]:
    used = {value for call in program.calls for value in values_in(call.arguments)}
    return {name for value in used for name in value.names}


def _with_open_batch(model: nn.Module, example: Example) -> Run | None:
    """Run with every input doubled of which there is one: an axis of size 1 could not be followed.

    Inputs without a batch (places of tokens, a number) stay as they are. None where the inputs have no batch of one, or
    the model does not take two.
    """
    single = [t.ndim > 0 and t.shape[0] == 1 for t in example.tensors()]
    if not any(single):
        return None
    doubled = iter(single)
    try:
        run = _ran(model, example.map(lambda t: torch.cat([t, t]) if next(doubled) else t))
    except TraceError:
        return None
    inputs = zip(run.analysis.program.inputs, single, strict=True)
    axes = {run.analysis.axes[value][0].axis for value, own in inputs if own}
    axis = axes.pop()
    if axes or axis is None:
        return None
    if (
        run.analysis.without_rule()
    ):  # behind such an operation the batch may not be told from other axes
        single, names = _ran(model, example), [name for name, _ in model.named_parameters()]
        costs = [Costs.of(own.analysis, set(names)) for own in (run, single)]
        if costs[0].macs_by_module({axis: 1}) != costs[1].macs_by_module({}):
            return single
    return replace(run, batch=axis)


def _meta(tensor: Tensor) -> Tensor:
    new = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, tensor.requires_grad)
    return new.detach()


def _attribute_values(analysis: Analysis, model: nn.Module) -> dict[Attribute, int]:
    modules = dict(model.named_modules())
    found: dict[Attribute, int] = {}
    for call in analysis.calls():
        for origin in call.taints.values():
            for where in leaves(origin):
                held = read_attribute(modules[where.module], where)
                assert held is not None, "what was traced is an integer"
                found[where] = held
    return found


def _why_it_failed(model: nn.Module, example: Example, error: Exception) -> str:
    shapes = ", ".join(str(tuple(t.shape)) for t in example.tensors()) or "no tensors"
    lines = str(error).strip().splitlines()
    where = line_of(error)
    return (
        f"{type(model).__name__} did not run on the example inputs ({shapes}): {type(error).__name__}: "
        f"{lines[0] if lines else ''}{f' At {where}.' if where else ''} Example inputs are what you would call the "
        "model with: a tensor, a tuple of arguments, or a dict of keyword arguments, on the model's device."
    )
