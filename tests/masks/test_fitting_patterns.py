"""`Mask.fits` is what counting weight by weight finds, along every dimension of every shape."""

from itertools import product

import pytest
import torch
from torch import Tensor

from apoptosis.masks import Mask, Pattern

SHAPES = [(8,), (4, 8), (8, 4), (4, 8, 4), (4, 4, 8), (8, 4, 4, 4), (4, 12, 1, 3)]


def counted(kept: Tensor, pattern: Pattern, dim: int) -> bool:
    """At most N of every M in a row, by loops."""
    if kept.shape[dim] % pattern.m:
        return False
    others = [range(n) if d != dim else range(0, n, pattern.m) for d, n in enumerate(kept.shape)]
    for place in product(*others):
        row = [
            bool(kept[(*place[:dim], place[dim] + step, *place[dim + 1 :])])
            for step in range(pattern.m)
        ]
        if sum(row) > pattern.n:
            return False
    return True


def regular(shape: tuple[int, ...], pattern: Pattern, dim: int) -> Tensor:
    """The first N of every M along one dimension."""
    steps = torch.arange(shape[dim]) % pattern.m < pattern.n
    return steps.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape).clone()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nm", [(2, 4), (1, 4), (3, 4), (1, 2)], ids=str)
def test_a_mask_fits_where_counting_says_so(shape: tuple[int, ...], nm: tuple[int, int]) -> None:
    pattern = Pattern(*nm)
    for made_along in range(len(shape)):
        kept = regular(shape, pattern, made_along)
        one_more = kept.clone()
        one_more.view(-1)[(~kept).view(-1).nonzero()[-1:, 0]] = True
        for table in (kept, one_more):
            mask = Mask.of(("weight",), table)
            for dim in range(len(shape)):
                assert mask.fits(pattern, dim) == counted(table, pattern, dim), (made_along, dim)
        assert Mask.of(("weight",), kept).fits(pattern, made_along) == (
            shape[made_along] % pattern.m == 0
        )
