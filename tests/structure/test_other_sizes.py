"""Programs at sizes other than those they were traced at: right, or refused in words that name the size."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import TraceError
from apoptosis.records import Outcome
from apoptosis.structure import CutProgram
from oracles.building import Net, built

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def image_net(code: Callable[[Tensor], Tensor], *, stride: int = 1) -> nn.Module:
    """A convolution, a view that only a program can cut, what a test adds, and a head."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.stem(x)
        h = h.view(h.shape[0], 2, 8, *h.shape[2:]).relu().flatten(1, 2)
        return net.head(code(h))

    return built(
        lambda: Net(
            forward, stem=nn.Conv2d(3, 16, 3, stride=stride, padding=1), head=nn.Linear(16, 4)
        )
    )


def images(height: int, width: int, num: int = 2, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, height, width, generator=generator, dtype=torch.float64)


def delivered(model: nn.Module, example: Any) -> tuple[CutProgram, nn.Module]:
    structure = ap.trace(model, example)
    plan = structure.plan({structure.groups[0].name: range(1, structure.groups[0].size)})
    program = ap.cut(model, plan)
    assert isinstance(program, CutProgram), plan.delivery
    return program, ap.zero(model, plan)


def right_or_refused(program: nn.Module, twin: nn.Module, x: Tensor) -> bool:
    """Whether it is right; raises where it is wrong, or fails otherwise than in its own words."""
    try:
        found = program(x)
    except TraceError as error:
        assert "trace the model" in str(error)  # noqa: PT017 - what it says is what is asked
        assert len(str(error)) < 500  # noqa: PT017
        return False
    torch.testing.assert_close(found, twin(x), **TOLERANCE)
    return True


def pooled_by_size(h: Tensor) -> Tensor:
    h = h.flatten(2)
    return h.mean(2) if h.shape[2] < 100 else h.amax(2)


def pooled_by_product(h: Tensor) -> Tensor:
    height, width = h.shape[-2:]
    return h.mean((2, 3)) if height * width < 75 else h.amax((2, 3))


def padded_to_windows(h: Tensor) -> Tensor:
    pad = (4 - h.shape[2] % 4) % 4
    if pad > 0:
        h = F.pad(h, (0, 0, 0, pad))
    return h.unflatten(2, (-1, 4)).amax(2).mean((2, 3))


def weighed_by_length(h: Tensor) -> Tensor:
    return h.sum((2, 3)) / math.sqrt(h.size(2) * h.size(3))


def taller_than_wide(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if max(h.shape[2], h.shape[3]) == h.shape[3] else h.amax((2, 3))


def looked_up(h: Tensor) -> Tensor:
    return h.mean((2, 3)) * {8: 1.0, 16: 2.0, 7: 3.0}.get(h.shape[2], 4.0)


def one_of_some(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if h.shape[2] in {5, 12, 32} else h.amax((2, 3))


def rolled_out(h: Tensor) -> Tensor:
    total = h[:, :, 0].mean(2)
    for row in range(1, h.shape[2]):
        total = total * 0.5 + h[:, :, row].mean(2)
    return total


def gone_through(h: Tensor) -> Tensor:
    total = h.new_zeros(h.shape[0], h.shape[1])
    for row in h.unbind(2):
        total = total * 0.5 + row.mean(2)
    return total


def by_numel(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if h.numel() < 3200 else h.amax((2, 3))


def by_length_of_a_row(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if len(h.transpose(0, 2)) <= 9 else h.amax((2, 3))


def by_a_plain_number(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if int(h.shape[2]) <= 9 else h.amax((2, 3))


def through_float(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if h.shape[2] / h.shape[3] < 1.2 else h.amax((2, 3))


def through_a_mask(h: Tensor) -> Tensor:
    steps = torch.arange(h.shape[2])
    return h.mean((2, 3)) if bool((steps < 12).all()) else h.amax((2, 3))


def positions(h: Tensor) -> Tensor:
    steps = torch.linspace(0, 1, h.shape[3], dtype=h.dtype)
    return (h * steps).mean((2, 3))


def merged_literally(h: Tensor) -> Tensor:
    rows = h.movedim(1, -1).reshape(h.shape[0], h.shape[2] * h.shape[3], 16)
    return (rows * torch.softmax(rows.sum(-1, keepdim=True), 1)).sum(1)


def grid(h: Tensor) -> Tensor:
    y, x = torch.meshgrid(torch.arange(h.shape[2]), torch.arange(h.shape[3]), indexing="ij")
    return (h * (x + 2 * y)).mean((2, 3)) + (h[..., : h.shape[2] // 2, :]).mean((2, 3))


CODES = [
    pooled_by_size,
    pooled_by_product,
    padded_to_windows,
    weighed_by_length,
    taller_than_wide,
    looked_up,
    one_of_some,
    rolled_out,
    gone_through,
    by_numel,
    by_length_of_a_row,
    by_a_plain_number,
    through_float,
    through_a_mask,
    positions,
    merged_literally,
    grid,
]
SIZES = [(8, 8), (12, 12), (7, 8), (8, 9), (9, 9), (16, 16), (4, 4), (5, 11), (11, 7), (32, 24)]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_no_size_is_silently_wrong(code: Callable[[Tensor], Tensor], stride: int) -> None:
    program, twin = delivered(image_net(code, stride=stride), images(8 * stride, 8 * stride))
    assert right_or_refused(program, twin, images(8 * stride, 8 * stride, seed=1))
    for height, width in SIZES:
        for num in (1, 2, 5):
            right_or_refused(
                program, twin, images(height * stride, width * stride, num, seed=height)
            )


FREE = [positions, merged_literally, grid]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("code", FREE, ids=lambda code: code.__name__)
def test_sizes_that_python_passes_on_stay_free(
    code: Callable[[Tensor], Tensor], stride: int
) -> None:
    program, twin = delivered(image_net(code, stride=stride), images(8, 8))
    for height, width in SIZES:
        for num in (1, 2, 5):
            assert right_or_refused(program, twin, images(height * 2, width * 2, num, seed=height))


def test_sizes_on_the_same_side_of_a_branch_stay_free() -> None:
    program, twin = delivered(image_net(pooled_by_size), images(8, 8))
    assert right_or_refused(program, twin, images(9, 9, 3))
    assert right_or_refused(program, twin, images(5, 19))
    assert not right_or_refused(program, twin, images(10, 10))
    with pytest.raises(TraceError, match=r"64 < 100 was True .test_other_sizes.py.*144 < 100"):
        program(images(12, 12))


def test_multiples_of_a_window_stay_free() -> None:
    program, twin = delivered(image_net(padded_to_windows), images(8, 8))
    assert right_or_refused(program, twin, images(12, 9, 3))
    assert not right_or_refused(program, twin, images(10, 8))


def test_guards_are_copied_and_saved(tmp_path: Path) -> None:
    model, example = image_net(pooled_by_size), images(8, 8)
    structure = ap.trace(model, example)
    plan = structure.plan({"stem#2": range(7)})
    program = ap.cut(model, plan)
    path = ap.save(tmp_path / "saved", Outcome(program, plan, example_inputs=example))
    loaded = ap.load(path, dense=lambda: image_net(pooled_by_size))
    for network in (program, copy.deepcopy(program), loaded):
        assert torch.equal(network(images(9, 9)), program(images(9, 9)))
        with pytest.raises(TraceError, match="< 100 was True"):
            network(images(12, 12))


def test_the_rank_of_inputs_is_that_of_the_example() -> None:
    program, _ = delivered(image_net(positions), images(8, 8))
    with pytest.raises(TraceError, match="now has shape"):
        program(images(8, 8)[0])


def expanded_where_needed(h: Tensor) -> Tensor:
    """Compares the batch, and does the same on both sides."""
    shift = torch.arange(h.shape[3], dtype=h.dtype)[None]
    if h.shape[0] != shift.shape[0]:
        shift = shift.expand(h.shape[0], -1)
    return (h + shift[:, None, None]).mean((2, 3))


def another_way_for_one(h: Tensor) -> Tensor:
    return h.mean((2, 3)) if h.shape[0] > 1 else h.amax((2, 3))


@pytest.mark.parametrize("num", [1, 2])
def test_branches_that_were_seen_to_agree_hold_nothing_back(num: int) -> None:
    program, twin = delivered(image_net(expanded_where_needed), images(8, 8, num))
    for own in (1, 2, 3, 5):
        for size in (8, 9, 12):
            assert right_or_refused(program, twin, images(size, size, own))


def test_branches_that_differ_bind_the_program_to_theirs() -> None:
    program, twin = delivered(image_net(another_way_for_one), images(8, 8, 2))
    assert right_or_refused(program, twin, images(8, 8, 3))
    assert not right_or_refused(program, twin, images(8, 8, 1))
