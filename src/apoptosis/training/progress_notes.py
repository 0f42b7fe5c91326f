"""What a training run needs to go on: weights, the optimiser's state, how many steps it took, the best epoch so far."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.checkpoint import Journal
from apoptosis.errors import CheckpointError

__all__ = ["FitState", "Noted", "noted_state", "write_state"]

NAME = "epoch"


@dataclass(frozen=True)
class Noted:
    """Records of epochs, and the judgement of the network as it was given, as plain data."""

    epochs: list[dict[str, Any]]
    before: dict[str, Any] | None = None


class FitState:
    """A model in training. `keep` remembers its weights as they are, `put_back_` brings back what was remembered."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.steps = 0
        """Taken so far."""
        self.kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Remember parameters and buffers."""
        self.kept = {name: own.detach().clone() for name, own in _state(self.model).items()}

    def put_back_(self) -> None:
        """Give the model what was remembered, if anything was."""
        if self.kept:
            _fill_(self.model, self.kept)


def write_state(state: FitState, journal: Journal, done: Noted) -> None:
    """All of it in one note, so that its parts are of one moment."""
    tensors = {f"model.{name}": own for name, own in _state(state.model).items()}
    tensors |= {f"kept.{name}": own for name, own in state.kept.items()}
    own = state.optimizer.state_dict()["state"]
    numbers: dict[str, dict[str, Any]] = {}
    for index, items in own.items():
        for name, item in items.items():
            if isinstance(item, Tensor):
                tensors[f"optimizer.{index}.{name}"] = item
            else:
                numbers.setdefault(str(index), {})[name] = item
    facts = {**asdict(done), "steps": state.steps, "optimizer": numbers}
    journal.write(NAME, facts, tensors)


def noted_state(state: FitState, journal: Journal | None) -> Noted:
    """Bring the last note back into `state`, and return its epochs; none where there is none.

    Raises:
        CheckpointError: it is of another network.
    """
    note = None if journal is None else journal.read(NAME)
    if note is None:
        return Noted([])
    _fill_(state.model, _part(note.tensors, "model."))
    here = _state(state.model)
    state.kept = {n: own.to(here[n].device) for n, own in _part(note.tensors, "kept.").items()}
    own: dict[int, dict[str, Any]] = {}
    for name, tensor in _part(note.tensors, "optimizer.").items():
        index, _, item = name.partition(".")
        own.setdefault(int(index), {})[item] = tensor
    for index, numbers in note.facts["optimizer"].items():
        own.setdefault(int(index), {}).update(numbers)
    state.optimizer.load_state_dict(state.optimizer.state_dict() | {"state": own})
    state.steps = note.facts["steps"]
    return Noted(list(note.facts["epochs"]), note.facts.get("before"))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): own for n, own in tensors.items() if n.startswith(prefix)}


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those too that a state dict leaves out: a network may compute with them."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _fill_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = _state(model)
    if own.keys() != tensors.keys() or any(own[n].shape != t.shape for n, t in tensors.items()):
        odd = sorted(own.keys() ^ tensors.keys()) or [
            name for name, tensor in tensors.items() if own[name].shape != tensor.shape
        ]
        raise CheckpointError(
            f"The notes are of another network than this {type(model).__name__}: {odd[0]!r} differs. Go on with the "
            "network they are of, or remove them and begin again."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
