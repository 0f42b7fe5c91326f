"""What a network that comes back from a checkpoint must be: the one that was saved, in every bit."""

from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.structure import model_tensors
from apoptosis.structure.arrangement import tensors_in

__all__ = ["assert_same_network", "run"]


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Every tensor of the result."""
    args, kwargs = _as_arguments(inputs)
    with torch.no_grad():
        return tensors_in(model(*args, **kwargs))


def assert_same_network(found: nn.Module, saved: nn.Module, *inputs: Any) -> None:
    """Same class, names, numbers, memory order, ties and flags; same outputs on `inputs`; in eval mode."""
    assert type(found) is type(saved)
    assert not any(module.training for module in found.modules())
    own, expected = model_tensors(found), model_tensors(saved)
    assert list(found.state_dict()) == list(saved.state_dict())
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_tensor(own[name], tensor, name)
    assert tied(own) == tied(expected)
    for x in inputs:
        assert all(map(torch.equal, run(found, x), run(saved.eval(), x)))


def assert_same_tensor(found: Tensor, saved: Tensor, name: str) -> None:
    assert found is not saved, f"{name} is shared"
    facts = [
        (t.dtype, t.shape, t.stride(), t.requires_grad, isinstance(t, nn.Parameter))
        for t in (found, saved)
    ]
    assert facts[0] == facts[1], f"{name}: {facts}"
    same = torch.equal(bits(found), bits(saved))
    assert same, f"{name} has other numbers"


def bits(tensor: Tensor) -> Tensor:
    """NaN is equal to itself in these."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tied(tensors: dict[str, Tensor]) -> set[frozenset[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {frozenset(own) for own in names.values()}


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
