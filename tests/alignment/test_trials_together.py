"""Groups are turned together first: right ones take no run each, and one wrong one is found among them."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.alignment import align_heads, trials
from apoptosis.alignment.bonds import Bond, Way, possible_bonds
from apoptosis.structure import Example, trace
from apoptosis.task import Task
from oracles.building import built
from oracles.shrinking import SeparateAttention, Transformer


def tokens(num: int = 6, length: int = 4) -> Tensor:
    return torch.randn(num, length, 5, generator=torch.Generator().manual_seed(0)).double()


class Cosine(SeparateAttention):
    """Its queries and keys have lengths that mean something."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(own(x)) for own in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
        return self.o(mixed.transpose(1, 2).flatten(2))


def parts(*kinds: type[SeparateAttention]) -> nn.Module:
    return built(lambda: Transformer(*(kind(8, 2, 2) for kind in kinds)))


def ways_of(model: nn.Module) -> dict[str, Way]:
    structure = trace(model, tokens(2))
    groups = [group for group in structure.groups if group.kind in ("qk_dim", "v_dim")]
    return {group.name: next(iter(possible_bonds(structure, group))) for group in groups}


def trial_of(model: nn.Module) -> trials.Trial:
    return trials.Trial(model, Task.classification(), Example((tokens(2),), {}))


def test_right_ones_are_found_in_one_run_for_each_size():
    model = parts(SeparateAttention, SeparateAttention, SeparateAttention)
    trial, ways, runs = trial_of(model), ways_of(model), []
    before = {key: own.clone() for key, own in trial._held.items()}
    trial._twin.register_forward_hook(lambda *_: runs.append(1))
    assert trial.right_together(ways) == set(ways)
    assert len(ways) == 6
    before_turns, each_alone = 2, len(ways)
    assert len(runs) == before_turns + each_alone + len(trials.SIZES)
    assert all(torch.equal(own, before[key]) for key, own in trial._held.items())


@pytest.mark.parametrize("wrong", range(6))
def test_one_wrong_turn_among_right_ones_is_seen(wrong, monkeypatch):
    model = parts(SeparateAttention, SeparateAttention, SeparateAttention)
    trial, ways, right = trial_of(model), ways_of(model), trials.turn_
    spoilt = list(ways.values())[wrong]

    def turn(held: dict[str, Tensor], bond: Bond, by: Tensor) -> None:
        if bond in list[Bond](spoilt):
            trials.turn_slot_(held, bond.left, by)
        else:
            right(held, bond, by)

    monkeypatch.setattr(trials, "turn_", turn)
    assert trial.right_together(ways) == frozenset()


def test_those_beside_a_wrong_one_are_turned_all_the_same():
    model = parts(SeparateAttention, Cosine, SeparateAttention)
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert set(found.left_alone) == {"parts.1.q:qk_dim"}
    assert len(found.energies) == 5
    with torch.no_grad():
        torch.testing.assert_close(found.model(tokens()), model(tokens()))


def test_a_network_that_does_not_run_has_none():
    model = parts(SeparateAttention)
    trial, ways = trial_of(model), ways_of(model)

    def broken(_: int) -> Iterator[Tensor]:
        raise trials.NoBondError("it does not run")

    trial._outputs = broken  # type: ignore[method-assign]
    assert trial.right_together(ways) == frozenset()
