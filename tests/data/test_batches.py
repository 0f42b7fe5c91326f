import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from apoptosis.data import Batches
from apoptosis.errors import ConfigError, DataError


@given(st.integers(1, 40), st.integers(1, 50), st.none() | st.integers(0, 9))
def test_every_sample_comes_once_with_its_label(length, size, seed):
    batches = Batches(torch.arange(length), torch.arange(length) * 10, size=size, shuffle_seed=seed)
    seen = list(batches)
    x, y = (torch.cat(column) for column in zip(*seen, strict=True))
    assert sorted(x.tolist()) == list(range(length))
    assert_close(y, x * 10)
    assert len(batches) == len(seen)
    assert all(len(batch[0]) == size for batch in seen[:-1])


def orders(batches: Batches, passes: int) -> list[list[int]]:
    return [torch.cat([x for (x,) in batches]).tolist() for _ in range(passes)]


def test_without_a_seed_every_pass_is_in_order():
    assert orders(Batches(torch.arange(9), size=4), 2) == [list(range(9))] * 2


def test_with_a_seed_passes_differ_and_new_batches_repeat_them():
    def shuffled(seed: int) -> list[list[int]]:
        return orders(Batches(torch.arange(50), size=8, shuffle_seed=seed), 2)

    assert shuffled(0)[0] != shuffled(0)[1]
    assert shuffled(0) == shuffled(0)
    assert shuffled(0) != shuffled(1)


def test_shuffling_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    orders(Batches(torch.arange(50), size=8, shuffle_seed=0), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_come_on_the_device_asked_for():
    (x,) = next(iter(Batches(torch.zeros(3), size=2, device="meta")))
    assert x.device.type == "meta"


def test_a_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="at least one row; size=0"):
        Batches(torch.zeros(3), size=0)


@pytest.mark.parametrize("lengths", [(), (0,), (3, 4)])
def test_tensors_without_a_common_length_are_refused(lengths):
    with pytest.raises(DataError, match="one common length above zero"):
        Batches(*(torch.zeros(n) for n in lengths), size=2)
