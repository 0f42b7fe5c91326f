"""Tensors in a file: what safetensors reads is what was written, and memory order is told apart from shape."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from apoptosis.checkpoint.number_types import CODES
from apoptosis.checkpoint.weights import (
    Held,
    fills_memory,
    held_tensors,
    num_bytes,
    read_weights,
    write_weights,
)
from apoptosis.errors import CheckpointError


def holding(*tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_buffer(f"t{number}", tensor)
    return module


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_number_type_is_read_by_safetensors_as_written(tmp_path, dtype):
    numbers = torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = numbers.view(dtype) if dtype != torch.bool else numbers.bool()
    held = held_tensors(holding(torch.ones(1, dtype=torch.int8), tensor, torch.tensor(2.5)))
    write_weights(tmp_path / "x", held)
    found = load_file(tmp_path / "x")["t1"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert (tmp_path / "x").stat().st_size == num_bytes(held)


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_any_order_of_memory_comes_back(tmp_path_factory, order, shape):
    tensor = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    path = tmp_path_factory.mktemp("weights") / "x"
    held = held_tensors(holding(tensor))
    write_weights(path, held)
    with path.open("rb") as stream:
        found = read_weights(stream, tuple(held))["t0"]
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (0, 1), False),
        ((2, 3), (6, 2), False),
        ((2, 3), (10**12, 1), False),
        ((1, 3), (77, 1), True),
        ((), (), True),
        ((0, 3), (3, 1), False),
    ],
)
def test_memory_is_filled_or_not(shape, strides, expected):
    assert fills_memory(shape, strides) == expected


def test_ties_are_one_entry():
    module = holding(torch.ones(2))
    module.register_buffer("again", module.t0)
    assert list(held_tensors(module)) == [Held(("t0", "again"), (2,), "float32", False)]


def test_offsets_behind_the_end_are_refused(tmp_path):
    (held,) = tensors = tuple(held_tensors(holding(torch.ones(4))))
    header = {"t0": {"dtype": "F32", "shape": [4], "data_offsets": [2**40, 2**40 + held.bytes]}}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with (
        (tmp_path / "x").open("rb") as stream,
        pytest.raises(CheckpointError, match="behind the end"),
    ):
        read_weights(stream, tensors)


def test_a_header_longer_than_the_file_takes_no_memory(tmp_path):
    (tmp_path / "x").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with (
        (tmp_path / "x").open("rb") as stream,
        pytest.raises(CheckpointError, match="stands in run.json"),
    ):
        read_weights(stream, tuple(held_tensors(holding(torch.ones(4)))))
