"""Fields of `Selection` of another kind than is meant are refused by their name; nothing is read letter by letter."""

from dataclasses import fields

import pytest

from apoptosis.errors import ConfigError
from apoptosis.planning import Selection

WRONG = {
    "widths": [None, 1, ["global"], {"global"}, "Global"],
    "per": [None, 0, ["cost"]],
    "interactions": [True, ["joint"]],
    "kinds": ["head", b"head", 3, ["head", 1], {"head": 1}, (k for k in ["head"])],
    "names": ["layer1.*", None, 2, [None], {"*": 1}, (n for n in ["*"])],
    "shares": ["*", [("*", 0.5)], {1: 0.5}, {"*": "half"}, {"*": True}, {"*": float("nan")}],
    "round_to": [None, 8.0, "8", True, 0],
    "floor": [None, 1.5, "1", False],
    "cap": [None, "1", True, 0, float("nan"), 2],
}


def test_every_field_is_here():
    assert WRONG.keys() == {field.name for field in fields(Selection)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, own in WRONG.items() for v in own])
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}="):
        Selection(**{name: value})


@pytest.mark.parametrize("of", [tuple, list, set, frozenset])
def test_texts_may_come_in_any_collection(of):
    chosen = Selection(kinds=of(["head", "channel"]), names=of(["*", "!a"]))
    assert set(chosen.kinds) == {"head", "channel"}
