"""Recurrent layers, taken apart into the products and activations they are made of.

torch runs them as one operation, on CUDA as one kernel that has no second derivative and, in eval mode, no first.
Step by step they are linear layers, sigmoids, tanhs and products like any other, and `connectivity` means the same in
them as elsewhere. Packed sequences are left to torch's own operation.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["RECURRENT"]

State: TypeAlias = tuple[Tensor, ...]
Cell: TypeAlias = Callable[[Tensor, State, list[Tensor]], State]


def lstm_cell(
    x: Tensor,
    hx: State,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> State:
    """One step of an LSTM: (hidden, cell)."""
    return _lstm_step(F.linear(x, w_ih, b_ih), hx, [w_hh] if b_hh is None else [w_hh, b_hh])


def gru_cell(
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """One step of a GRU."""
    return _gru_step(F.linear(x, w_ih, b_ih), (hx,), [w_hh] if b_hh is None else [w_hh, b_hh])[0]


def _lstm_step(fed: Tensor, state: State, recurrent: list[Tensor]) -> State:
    hidden, cell = state
    gates = fed + F.linear(hidden, *recurrent[:2])
    enter, forget, candidate, leave = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def _gru_step(fed: Tensor, state: State, recurrent: list[Tensor]) -> State:
    (hidden,) = state
    reset_x, update_x, new_x = fed.chunk(3, -1)
    reset_h, update_h, new_h = F.linear(hidden, *recurrent[:2]).chunk(3, -1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (new + update * (hidden - new),)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(fed: Tensor, state: State, recurrent: list[Tensor]) -> State:
        return (activation(fed + F.linear(state[0], *recurrent[:2])),)

    return step


def _layers(step: Cell, num_states: int) -> Callable[..., Any]:
    """A stack of layers in torch's own signature, from one step."""

    def run(  # noqa: PLR0913, PLR0917 - torch's signature
        x: Tensor,
        hx: Any,
        params: list[Tensor],
        has_biases: bool,  # noqa: FBT001 - torch's signature
        num_layers: int,
        dropout: float,
        train: bool,  # noqa: FBT001
        bidirectional: bool,  # noqa: FBT001
        batch_first: bool,  # noqa: FBT001
    ) -> tuple[Tensor, ...]:
        x = x.transpose(0, 1) if batch_first else x
        states = hx if num_states == 2 else (hx,)
        directions = 2 if bidirectional else 1
        each = len(params) // (num_layers * directions)
        finals: list[State] = []
        for layer in range(num_layers):
            outputs: list[Tensor] = []
            for direction in range(directions):
                index = layer * directions + direction
                weights = list(params[index * each : (index + 1) * each])
                start = tuple(state[index] for state in states)
                out, final = _sweep(step, x, start, weights, has_biases, direction == 1)
                outputs.append(out)
                finals.append(final)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, train)
        x = x.transpose(0, 1) if batch_first else x
        return x, *(torch.stack([final[i] for final in finals]) for i in range(num_states))

    return run


def _sweep(
    step: Cell,
    x: Tensor,
    state: State,
    weights: list[Tensor],
    has_biases: bool,  # noqa: FBT001
    backwards: bool,  # noqa: FBT001
) -> tuple[Tensor, State]:
    """One layer in one direction over (time, samples, features)."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh, *projection = rest if has_biases else (None, None, *rest)
    recurrent = [w_hh] if b_hh is None else [w_hh, b_hh]
    fed = F.linear(x, w_ih, b_ih)
    outputs: list[Tensor] = []
    for row in reversed(fed.unbind(0)) if backwards else fed.unbind(0):
        state = step(row, state, recurrent)
        if projection:
            state = (F.linear(state[0], projection[0]), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm": _layers(_lstm_step, 2),
    "gru": _layers(_gru_step, 1),
    "rnn_tanh": _layers(_plain_step(torch.tanh), 1),
    "rnn_relu": _layers(_plain_step(torch.relu), 1),
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
}


def is_packed(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call is the form for packed sequences, whose second argument are batch sizes."""
    return (
        not name.endswith("cell")
        and isinstance(args[1], Tensor)
        and not args[1].is_floating_point()
    )
