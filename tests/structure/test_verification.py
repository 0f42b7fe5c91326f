"""Verification: right structures pass, and a structure that promises too much is found out."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import ModelError
from apoptosis.progress import Progress, listen
from apoptosis.structure import Structure
from apoptosis.structure.axes import Axis, Expr


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(10, 12)
        self.heads = 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


def traced() -> Structure:
    return ap.trace(nn.Sequential(Block(), nn.Linear(12, 2)), torch.randn(2, 5, 12))


def without_one_row(structure: Structure, name: str) -> Structure:
    """A structure that forgets one of a group's tensors: its units there would be the wrong ones."""
    axes = dict(structure._network.run.analysis.axes)
    group = structure[name]
    for value, exprs in axes.items():
        if value.names and value.names[0] == group.places[0][0]:
            mirrored = Axis(group.axis.size)
            axes[value] = tuple(Expr.of(mirrored) if e.axis is group.axis else e for e in exprs)
            wrong = value
    analysis = replace(structure._network.run.analysis, axes=axes)
    network = replace(structure._network, run=replace(structure._network.run, analysis=analysis))
    assert wrong is not None
    return replace(structure, _network=network)


def test_every_exact_group_of_a_transformer_block_holds() -> None:
    structure = traced()
    checked = ap.verify(structure)
    assert checked.failed == {}
    assert set(checked.errors) == {g.name for g in structure.groups if g.exact}
    assert max(checked.errors.values()) < 1e-12
    assert checked.structure.groups == structure.groups


def test_a_structure_that_is_wrong_is_found_and_the_group_pinned() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    wrong = without_one_row(ap.trace(net, torch.zeros(2, 4)), "0")
    checked = ap.verify(wrong)
    assert set(checked.failed) == {"0"}
    assert checked.structure.groups == ()
    assert "differ by" in checked.structure.pinned[-1].reason


def test_an_inexact_group_that_claims_to_be_exact_is_found() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    structure = ap.trace(net, torch.zeros(2, 4))
    (group,) = structure.groups
    assert not group.exact
    claimed = replace(structure, groups=(replace(group, exact=True),))
    assert set(ap.verify(claimed).failed) == {"0"}


def test_the_model_is_not_changed_and_progress_is_told() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    events: list[Progress] = []
    with listen(events.append):
        ap.verify(ap.trace(net, torch.zeros(2, 4)))
    assert all(before[name].equal(tensor) for name, tensor in net.state_dict().items())
    assert net.training
    assert torch.get_rng_state().equal(state)
    assert events[0].what == "checking cuts"
    assert events[-1].finished


def test_only_the_groups_asked_for_are_checked() -> None:
    structure = traced()
    assert set(ap.verify(structure, groups=["0.up"]).errors) == {"0.up"}


def test_a_meta_model_has_nothing_to_check() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(ModelError, match="no numbers to check"):
        ap.verify(ap.trace(net, torch.zeros(2, 4, device="meta")))
