"""Names of repairs in records: the same in every process, and they say the options."""

from dataclasses import dataclass, field, fields
from functools import partial

import pytest

from apoptosis.repair import REPAIRS, Distil, Refit, RefitBlocks, batch_norm, repair_name


def mine(dense, small, plan, batches, task):
    return small


@dataclass(frozen=True)
class Own:
    names: frozenset[str] = frozenset({"a", "b", "c", "d"})
    how: object = mine
    more: dict[str, float] = field(default_factory=lambda: {"x": 0.5})


class Plain:
    pass


def test_those_of_the_table_have_its_names_and_every_option():
    for name, own in REPAIRS.items():
        assert repair_name(own).partition("(")[0] == name
    for own in (Refit(), RefitBlocks(), Distil()):
        for each in fields(own):
            assert f"{each.name}={getattr(own, each.name)!r}" in repair_name(own)
    assert repair_name(batch_norm) == "batch_norm"
    assert repair_name(Refit(rounds=2)) != repair_name(Refit())


@pytest.mark.parametrize(
    ("repair", "name"),
    [
        (mine, "mine"),
        (partial(mine, task=None), "partial(mine, task=None)"),
        (partial(Refit(), 1), "partial(refit(scope='every', ridge=None, rounds=3), 1)"),
        (Own(), "Own(names={'a', 'b', 'c', 'd'}, how=mine, more={'x': 0.5})"),
        (Plain(), "Plain"),
        (partial(mine, Plain()), "partial(mine, Plain)"),
    ],
)
def test_those_of_ones_own(repair, name):
    assert repair_name(repair) == name
    assert "0x" not in repair_name(repair)
