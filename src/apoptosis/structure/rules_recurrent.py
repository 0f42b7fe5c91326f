"""Axis rules of recurrent layers: hidden units of LSTM, GRU and plain RNN, several layers, both directions.

Rows of a weight are (gates · hidden). torch stacks the states of all layers and directions in one tensor, so their
hidden sizes stay equal: tied in number, not in indices, as long as nobody reads that tensor.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr, sum_of, times
from apoptosis.structure.flows import Nowhere
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "recurrent"

GATES = {"lstm.input": 4, "gru.input": 3, "rnn_tanh.input": 1, "rnn_relu.input": 1}
CELLS = {
    "lstm_cell.default": 4,
    "gru_cell.default": 3,
    "rnn_tanh_cell.default": 1,
    "rnn_relu_cell.default": 1,
}


def _samples(name: str) -> list[Sample]:
    """One layer, both directions, several layers; with their final states read and not read."""
    gates, x = GATES[name], tensor(2, 3, 4)

    def given(layers: int, directions: int, *, biases: bool) -> tuple[Any, ...]:
        params: list[Tensor] = []
        for layer in range(layers):
            inputs = 4 if layer == 0 else 5 * directions
            for direction in range(directions):
                shapes = [(gates * 5, inputs), (gates * 5, 5), *[(gates * 5,)] * (2 * biases)]
                params += [tensor(*s, seed=len(params) + direction) / 4 for s in shapes]
        state = tensor(layers * directions, 2, 5)
        states = [state, tensor(*state.shape, seed=9)] if gates == 4 else state
        return x, states, params, biases, layers, 0.0, False, directions == 2, True

    time_first = (x.transpose(0, 1), *given(1, 1, biases=True)[1:-1], False)
    return [
        sample(*given(1, 1, biases=True), free="4 5"),
        sample(*time_first, free="4 5"),
        sample(*given(1, 1, biases=False), free="4 5"),
        sample(*given(1, 2, biases=True), free="4"),
        sample(*given(2, 1, biases=True), free="4 5", read=1),
        sample(*given(2, 2, biases=False), free="4 5", read=1),
    ]


@axis_rule(*GATES, family=FAMILY, samples={name: partial(_samples, name) for name in GATES})
def recurrent(step: Step) -> None:
    """n t i → n t (forwards + backwards); rows of the weights are (gates · hidden)."""
    x, states, params, biases, layers, _dropout, _train, both, batch_first = step.args
    states = states if isinstance(states, list) else [states]
    directions = 2 if both else 1
    per_cell = len(params) // (layers * directions)
    if per_cell not in ((4,) if biases else (2,)):
        raise Declined("projections of hidden states are not known")
    current = step.axes(x)[-1]
    hidden: list[Expr] = []
    cells = iter(params[i : i + per_cell] for i in range(0, len(params), per_cell))
    for _ in range(layers):
        made = [_cell(step, x, next(cells), current) for _ in range(directions)]
        hidden += made
        current = sum_of(made)
    for state in states:
        _initial_state(step, state, hidden)
        if x.ndim == 3:
            step.equal(step.axes(state)[1], step.axes(x)[0 if batch_first else 1])
    step.tie(*hidden)
    if len(hidden) > 1 and not any(step.used(i) for i in range(1, len(step.call.outputs))):
        _written_out(step, hidden)
    lead = step.axes(x)[:-1]
    for expr in lead:
        step.pin(expr, "time and batch", quiet=True)
    step.out([*lead, algebra.resolve(current)], Nowhere())
    for number, value in enumerate(step.call.outputs[1:], start=1):
        _final_state(step, value, hidden, used=step.used(number))


def _cell_samples(name: str) -> list[Sample]:
    """With and without biases."""
    gates = CELLS[name]
    shapes = [(gates * 5, 4), (gates * 5, 5), (gates * 5,), (gates * 5,)]
    params = [tensor(*shape, seed=seed) / 4 for seed, shape in enumerate(shapes)]
    x, states = tensor(2, 4), [tensor(2, 5), tensor(2, 5, seed=9)]
    state = states if gates == 4 else states[0]
    return [
        sample(x, state, *params, free="4 5"),
        sample(x, state, *params[:2], free="4 5"),
    ]


@axis_rule(*CELLS, family=FAMILY, samples={name: partial(_cell_samples, name) for name in CELLS})
def cell(step: Step) -> None:
    """One step of time; rows of the weights are (gates · hidden)."""
    x, states, *rest = step.args
    params = [value for value in rest if value is not None]
    hidden = _cell(step, x, params, step.axes(x)[-1])
    lead = step.axes(x)[:-1]
    for state in states if isinstance(states, list) else [states]:
        step.equal(step.axes(state)[-1], hidden)
        for own, other in zip(step.axes(state)[:-1], lead, strict=True):
            step.equal(own, other)
    for expr in lead:
        step.pin(expr, "batch", quiet=True)
    for _ in step.call.outputs:
        step.out([*lead, algebra.resolve(hidden)], Nowhere())


def _cell(step: Step, x: Value, params: list[Value], current: Expr) -> Expr:
    """One direction of one layer; gives its hidden axis."""
    w_input, w_hidden = params[:2]
    gates = (GATES | CELLS)[step.call.name]
    gate, hidden = step.fixed([gates], "gates")[0], step.fresh(w_hidden.shape[1])
    for value in params:
        step.equal(step.axes(value)[0], times(gate, hidden))
        step.role(value, 0, "producer")
    step.equal(step.axes(w_input)[1], current)
    step.equal(step.axes(w_hidden)[1], hidden)
    step.role(w_input, 1, "consumer")
    step.role(w_hidden, 1, "consumer")
    step.kind(hidden, "hidden")
    for columns, dim in ((w_input, 1), (w_hidden, 1)):
        step.contract(step.axes(columns)[dim], (columns, dim))
        step.cost(*step.axes(x)[:-1], step.axes(columns)[0], step.axes(columns)[1])
    return algebra.resolve(hidden)


def _initial_state(step: Step, state: Any, hidden: list[Expr]) -> None:
    """Zeros need the right length alone; a state that means something is cut as every layer is."""
    for expr in step.axes(state)[:-1]:
        step.pin(expr, "layers and batch", quiet=True)
    if step.is_zeros(state) or len(hidden) == 1:
        step.equal(step.axes(state)[-1], hidden[0])
        return
    for expr in hidden:
        step.equal(step.axes(state)[-1], expr)


def _written_out(step: Step, hidden: list[Expr]) -> None:
    """In a program, cells may be of different sizes: each layer and direction is a call of its own."""

    def replacement(size: Any) -> tuple[Any, dict[str, Any]]:
        sizes = [size(algebra.resolve(expr)) for expr in hidden]
        return cell_by_cell, {"op": step.call.op, "sizes": sizes, **step.call.arguments}

    step.facts.replacement = replacement


def cell_by_cell(op: Any, sizes: list[int], *, input: Tensor, hx: Any, **given: Any) -> Any:  # noqa: A002
    """What `op` gives, one layer and direction after the other; hidden sizes may differ.

    The final states are left out: no cut that needs this is allowed where somebody reads them.
    """
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    params, directions = given["params"], 2 if given["bidirectional"] else 1
    per_cell = len(params) // len(sizes)
    time = 1 if given["batch_first"] and input.ndim == 3 else 0
    options = given | {"num_layers": 1, "dropout": 0.0, "bidirectional": False}
    for layer in range(given["num_layers"]):
        if layer and given["dropout"]:
            input = F.dropout(input, given["dropout"], given["train"])  # noqa: A001
        made: list[Tensor] = []
        for direction in range(directions):
            place = layer * directions + direction
            own = [_state(state[place : place + 1], sizes[place]) for state in states]
            options["params"] = params[place * per_cell : (place + 1) * per_cell]
            x = input.flip(time) if direction else input
            result = op(input=x, hx=own if isinstance(hx, (list, tuple)) else own[0], **options)[0]
            made.append(result.flip(time) if direction else result)
        input = torch.cat(made, -1)  # noqa: A001
    return input, *[None] * len(states)


def _state(state: Tensor, size: int) -> Tensor:
    """States that mean something are as long as their cell; others are zeros of any length."""
    return state if state.shape[-1] == size else state.new_zeros(*state.shape[:-1], size)


def _final_state(step: Step, value: Value, hidden: list[Expr], *, used: bool) -> None:
    """(layers · directions) n h: one axis for all, so if somebody reads it, all must stay whole."""
    if used and len(hidden) > 1:
        for expr in hidden:
            step.pin(expr, "the final states of several layers are read as one tensor")
    axes = step.fixed(value.shape[:-1], "states")
    step.out([*axes, algebra.resolve(hidden[0])], Nowhere())
