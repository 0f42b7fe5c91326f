"""Runs that were interrupted see what an unbroken run sees, bit for bit."""

import pytest
import torch

from apoptosis.data import Augmentation, Split
from apoptosis.data.passes import generator_at
from apoptosis.errors import ConfigError

IMAGES = torch.randint(0, 256, (23, 3, 6, 6), generator=torch.Generator().manual_seed(0))
SPLIT = Split(IMAGES.to(torch.uint8), torch.arange(23), (0.4, 0.5, 0.6), (0.2, 0.3, 0.1))


def batches(seed=5, **options):
    options = {"augmentation": Augmentation(pad=2, cutout=2), **options}
    return SPLIT.batches(4, shuffle_seed=seed, **options)


def read(batches) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


UNBROKEN = batches()
PASSES = [read(UNBROKEN) for _ in range(5)]


def test_passes_differ_in_order_and_in_augmentation():
    (x, y), (other_x, other_y) = PASSES[:2]
    assert not torch.equal(y, other_y)
    assert not torch.equal(x[y.argsort()], other_x[other_y.argsort()])
    plain = batches(augmentation=None)
    (x, y), (other_x, other_y) = read(plain), read(plain)
    assert torch.equal(x[y.argsort()], other_x[other_y.argsort()])


@pytest.mark.parametrize("start", range(5))
def test_new_batches_start_where_told(start):
    resumed = batches()
    resumed.start_at(start)
    for number in range(start, 5):
        assert same(read(resumed), PASSES[number])


@pytest.mark.parametrize("number", [4, 2, 0, 3, 1])
def test_batches_go_back_and_forth(number):
    UNBROKEN.start_at(number)
    assert same(read(UNBROKEN), PASSES[number])


def test_a_pass_that_was_not_finished_counts_as_one():
    broken = batches()
    for place, _ in enumerate(broken):
        if place == 2:
            break
    assert same(read(broken), PASSES[1])
    broken.start_at(0)
    assert same(read(broken), PASSES[0])


def test_two_loops_at_once_are_two_passes():
    both = batches()
    one, other = zip(*zip(both, both, strict=True), strict=True)
    assert same(read(one), PASSES[0])
    assert same(read(other), PASSES[1])


def test_the_order_is_that_of_the_nth_permutation():
    generator = torch.Generator().manual_seed(5)
    for _, labels in PASSES:
        assert torch.equal(labels, torch.randperm(23, generator=generator))


def test_global_random_numbers_are_neither_read_nor_moved():
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert same(read(batches()), PASSES[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(read(batches(seed=6)), PASSES[0])


def test_without_a_seed_passes_are_counted_and_all_the_same():
    plain = SPLIT.batches(4)
    plain.start_at(3)
    assert same(read(plain), read(plain))


def test_a_negative_pass_is_refused():
    with pytest.raises(ConfigError, match="counted from 0; pass -1"):
        batches().start_at(-1)


def test_places_have_numbers_of_their_own():
    places = [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (-1, 0, 0),
        (0, 0),
        (2**63, 0, 0),
        (2**32, 0, 0),
    ]
    drawn = {torch.randint(2**62, (1,), generator=generator_at(*place)).item() for place in places}
    assert len(drawn) == len(places)


def test_numbers_of_a_place_stay_what_they_were():
    """Runs are taken up by later versions too."""
    assert torch.randint(1000, (3,), generator=generator_at(1, 2, 3)).tolist() == [691, 588, 472]
