"""Halves of the samples, by which penalties are chosen: no sample is in both, however a layer gets to see them."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.repair import Refit, lockstep
from apoptosis.repair.fits import FEWEST_PLACES, samples_of_rows
from apoptosis.repair.normal_equations import NormalEquations
from apoptosis.structure import cut, trace
from oracles.building import Net, built

SEEN = {
    "as it is": lambda x: x,
    "tokens first": lambda x: x.transpose(0, 1),
    "in one": lambda x: x.flatten(0, 1),
    "one more dimension": lambda x: x.transpose(0, 1)[:, None],
}


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def refitted(name: str, x: Tensor, *sizes: int) -> Any:
    """Half of the hidden units have gone, and the layer that reads them is fitted to what the dense network has."""
    see = SEEN[name]
    model = built(
        lambda: Net(
            lambda m, x: m.second(see(torch.tanh(m.first(x)))).sum(),
            first=nn.Linear(6, 24),
            second=nn.Linear(24, 3),
        )
    )
    plan = trace(model, x[:2]).plan({"first": range(12)})
    batches = [(part, None) for part in x.split(sizes or (len(x),))]
    return Refit(scope="consumers")(model, cut(model, plan), plan, batches)


def tokens(num: int, each: int) -> Tensor:
    """Of a sample all much the same: who has seen one knows the others by heart."""
    return normal(num, 1, 6, seed=1) + 0.02 * normal(num, each, 6, seed=2)


@pytest.fixture(params=["in step", "by stages"])
def way(request, monkeypatch) -> str:
    if request.param == "by stages":
        monkeypatch.setattr(lockstep, "MOST_BATCHES", 0)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("enough", [10**6, 1], ids=["all rows", "some rows"])
@pytest.mark.parametrize("sizes", [(18,), (8, 10)], ids=["one batch", "two batches"])
@pytest.mark.parametrize("name", SEEN)
def test_layers_that_see_samples_otherwise_are_fitted_alike(name, sizes, enough, monkeypatch):
    monkeypatch.setattr("apoptosis.repair.fits.ENOUGH", enough)
    monkeypatch.setattr("apoptosis.repair.fits.FEWEST_PLACES", 3)
    x = tokens(18, 7)
    found, want = refitted(name, x, *sizes), refitted("as it is", x, *sizes)
    torch.testing.assert_close(found.second.weight, want.second.weight, rtol=1e-6, atol=1e-8)


def test_halves_of_tokens_would_be_fitted_otherwise(monkeypatch):
    """What the test above would not notice if the penalty were the same, whoever is in which half."""
    x = tokens(18, 7)
    want = refitted("tokens first", x)
    monkeypatch.setattr(
        "apoptosis.repair.fits.samples_of_rows",
        lambda leading, *_: torch.arange(prod(leading)) // prod(leading[1:]),
    )
    found = refitted("tokens first", x)
    assert (found.second.weight - want.second.weight).norm() > 0.01 * want.second.weight.norm()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", SEEN)
def test_where_samples_and_tokens_are_as_many_whole_batches_are_halves(name):
    x = tokens(36, 6)
    found = refitted(name, x, *[6] * 6)
    if name == "in one":  # flattened, they can be told apart
        want = refitted("as it is", x)
    else:  # the same halves as of samples that come so that every second one is of every second batch
        order = torch.arange(36).view(3, 2, 6).transpose(1, 2).flatten()
        want = refitted("as it is", x[order])
    torch.testing.assert_close(found.second.weight, want.second.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("way")
def test_of_one_batch_alone_the_first_dimension_is_taken_for_the_samples():
    """Where samples and tokens are as many, and no other batch could be the other half."""
    x = tokens(6, 6)
    found, want = refitted("as it is", x, 6), refitted("as it is", x, 2, 4)
    torch.testing.assert_close(found.second.weight, want.second.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", SEEN)
def test_where_samples_are_in_one_batch_they_are_in_the_others(name):
    x = tokens(36, 6)
    found, want = refitted(name, x, 9, 6, 15, 6), refitted("as it is", x, 36)
    torch.testing.assert_close(found.second.weight, want.second.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("num_frames", [1, 4])
def test_frames_of_a_sample_share_its_places(num_frames, monkeypatch):
    """Flattened into the batch: so many places of each sample are enough, however many rows it is."""
    monkeypatch.setattr("apoptosis.repair.fits.ENOUGH", 1)
    added = []
    monkeypatch.setattr(
        NormalEquations,
        "add",
        lambda sums, inputs, missing, half, add=NormalEquations.add: (
            added.append(inputs.shape[2]),
            add(sums, inputs, missing, half),
        ),
    )
    model = built(
        lambda: Net(
            lambda m, x: m.second(torch.tanh(m.first(x.flatten(0, 1)))).sum(),
            first=nn.Conv2d(2, 4, 1),
            second=nn.Conv2d(4, 3, 1),
        )
    )
    x = normal(6, num_frames, 2, 5, 5, seed=3)
    plan = trace(model, x[:2]).plan({"first": range(2)})
    Refit(scope="consumers", rounds=0)(model, cut(model, plan), plan, [(x, None)])
    assert sum(added) == 6 * FEWEST_PLACES


@pytest.mark.parametrize(
    ("leading", "samples", "want"),
    [
        ((3,), 3, [0, 1, 2]),
        ((3, 2), 3, [0, 0, 1, 1, 2, 2]),
        ((2, 3), 3, [0, 1, 2, 0, 1, 2]),
        ((2, 3, 2), 3, [0, 0, 1, 1, 2, 2] * 2),
        ((6,), 3, [0, 0, 1, 1, 2, 2]),
        ((6, 2), 3, [0] * 4 + [1] * 4 + [2] * 4),
        ((6, 3), 3, [0, 1, 2] * 6),
        ((5,), 1, [0] * 5),
        ((1, 5), 1, [0] * 5),
        ((), 1, [0]),
    ],
)
def test_rows_belong_to_samples(leading, samples, want):
    found = samples_of_rows(leading, samples)
    assert found is not None
    assert found.tolist() == want


@pytest.mark.parametrize(
    ("leading", "samples"), [((3, 3), 3), ((5,), 3), ((2, 6), 3), ((), 3), ((4,), None), ((4,), 0)]
)
def test_rows_that_could_be_of_any_sample_are_not_told_apart(leading, samples):
    assert samples_of_rows(leading, samples) is None


@pytest.mark.parametrize(
    ("dim", "want"), [(1, [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2), (2, [0, 1, 2] * 6), (0, None)]
)
def test_of_dimensions_that_could_be_of_samples_the_known_one_is(dim, want):
    found = samples_of_rows((2, 3, 3), 3, dim)
    assert (found if found is None else found.tolist()) == want
