"""Example inputs without their numbers: the same arrangement of zeros comes back from JSON."""

import json
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from apoptosis.checkpoint.inputs import describe, zeros_like_description
from apoptosis.errors import CheckpointError

CPU = torch.device("cpu")
TENSORS = st.builds(
    torch.ones,
    st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
INPUTS = st.recursive(
    TENSORS | VALUES,
    lambda own: (
        st.lists(own, max_size=3)
        | st.lists(own, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), own, max_size=3)
    ),
    max_leaves=8,
)


@given(INPUTS)
def test_any_arrangement_comes_back_as_zeros(inputs):
    form = json.loads(json.dumps(describe(inputs)))
    assert_alike(zeros_like_description(form, CPU), inputs)


def assert_alike(found: Any, inputs: Any) -> None:
    assert type(found) is type(inputs)
    if isinstance(inputs, Tensor):
        assert (found.shape, found.dtype) == (inputs.shape, inputs.dtype)
        assert not found.any()
    elif isinstance(inputs, (tuple, list)):
        assert len(found) == len(inputs)
        for one, other in zip(found, inputs, strict=True):
            assert_alike(one, other)
    elif isinstance(inputs, dict):
        assert list(found) == list(inputs)
        for key, item in inputs.items():
            assert_alike(found[key], item)
    else:
        assert found == inputs


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "inputs",
    [Pair(1, 2), OrderedDict(a=1.0), {1: 2}, {3}, float("nan"), 1j, torch.Size([2]), b"x"],
    ids=str,
)
def test_what_json_cannot_hold_is_named_and_not_made(inputs):
    form = describe((inputs,))
    kind = type(inputs).__qualname__
    with pytest.raises(CheckpointError, match=f"{kind}.*Pass `example_inputs`"):
        zeros_like_description(form, CPU)
