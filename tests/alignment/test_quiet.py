"""What a run leaves behind: nothing, in the network that was given and in the one that is returned."""

import pytest
import torch
from torch import Tensor, nn

from apoptosis.alignment import align_heads
from apoptosis.structure import trace
from oracles.building import built
from oracles.shrinking import FusedAttention, SeparateAttention, Transformer
from oracles.untouched import Snapshot


def tokens(num: int = 6) -> Tensor:
    return torch.randn(num, 4, 5, generator=torch.Generator().manual_seed(0)).double()


class Noting(nn.Module):
    """Counts its runs in every way that code does, and keeps statistics of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.num, self.lengths = 0, list[int]()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.seen = self.seen + len(x)
        self.num += 1
        self.lengths.append(len(x))
        self.norm.train()  # whatever eval() says
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def test_what_a_forward_notes_is_not_in_the_network_that_is_returned():
    model = built(lambda: Transformer(Noting(), SeparateAttention(8, 2, 2)))
    structure = trace(model, tokens(2))
    before, notes = Snapshot(model), {name: own.clone() for name, own in model.named_buffers()}
    num, lengths = model.parts[0].num, list(model.parts[0].lengths)
    found = align_heads(model, structure, [tokens(), tokens()])
    before.assert_unchanged()
    assert len(found.energies) == 2
    for name, own in found.model.named_buffers():
        assert torch.equal(own, notes[name]), name
    for net in (model, found.model):
        assert (net.parts[0].num, net.parts[0].lengths) == (num, lengths)


def test_dropout_and_random_numbers_stay_out_of_it():
    model = built(lambda: Transformer(FusedAttention(8, 2), nn.Dropout(0.5)))
    structure, x = trace(model, tokens(2)), tokens()
    model.train()
    before = Snapshot(model)
    found = align_heads(model, structure, [x])
    before.assert_unchanged()
    assert set(found.energies) == {"parts.0.qkv:head_dim"}
    assert found.model.training


@pytest.mark.parametrize("switch", ["one backend", "all", "of old"])
def test_switches_of_precision_stay_as_they_are(switch: str):
    """Asking torch for one of its old switches is an error once a new one was set."""
    holder, name = {
        "one backend": (torch.backends.cuda.matmul, "fp32_precision"),
        "all": (torch.backends, "fp32_precision"),
        "of old": (torch.backends.cuda.matmul, "allow_tf32"),
    }[switch]
    model = built(lambda: Transformer(FusedAttention(8, 2)))
    before = getattr(holder, name)
    value = True if switch == "of old" else "tf32"
    try:
        setattr(holder, name, value)
        found = align_heads(model.float(), trace(model, tokens(2).float()), [tokens().float()])
        assert getattr(holder, name) == value
    finally:
        setattr(holder, name, before)
    assert set(found.energies) == {"parts.0.qkv:head_dim"}
