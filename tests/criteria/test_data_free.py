"""Magnitude and chance: right numbers, right dtype and device, no data needed."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from apoptosis.criteria import magnitude, random
from apoptosis.errors import ConfigError, ModelError
from oracles.building import built


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def never():
    raise AssertionError("data were read")
    yield


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5, 3])
def test_magnitude_is_a_power_of_the_absolute_value(power):
    model = built(mlp)
    scores = magnitude(model, never(), power=power)
    assert scores.options == {"power": power}
    assert (scores.criterion, scores.count) == ("magnitude", 0)
    for name, value in scores.values.items():
        want = [abs(entry) ** power for entry in model.get_parameter(name).flatten().tolist()]
        assert_close(value.flatten(), torch.tensor(want, dtype=torch.float64))


def test_magnitudes_are_their_own_tensors():
    model = built(mlp)
    before = model[0].weight.detach().clone()
    scores = magnitude(model)
    scores.values["0.weight"].zero_()
    assert_close(model[0].weight.detach(), before, rtol=0, atol=0)
    assert not scores.values["2.weight"].requires_grad


@pytest.mark.parametrize("power", [0.0, -1.0, float("nan")])
def test_a_power_that_does_not_grow(power):
    with pytest.raises(ConfigError, match=f"power={power}"):
        magnitude(built(mlp), power=power)


def test_random_is_uniform_and_seeded():
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30))
    first, again, other = random(model, never()), random(model), random(model, seed=1)
    assert first.options == {"seed": 0}
    for name, value in first.values.items():
        assert_close(value, again.values[name], rtol=0, atol=0)
        assert not torch.equal(value, other.values[name])
        assert 0 <= value.min() <= value.max() < 1
    entries = torch.cat([value.flatten() for value in first.values.values()]).double()
    assert abs(float(entries.mean()) - 0.5) < 5 / (12 * len(entries)) ** 0.5
    assert float(entries.var()) == pytest.approx(1 / 12, rel=0.1)


def test_random_does_not_touch_the_global_generator():
    before = torch.get_rng_state()
    random(built(mlp), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("criterion", [magnitude, random])
@pytest.mark.parametrize(
    ("weights", "scores"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_scores_have_the_precision_of_the_weights_but_at_least_float32(criterion, weights, scores):
    values = criterion(mlp().to(weights)).values.values()
    assert {value.dtype for value in values} == {scores}


@pytest.mark.parametrize("criterion", [magnitude, random])
@pytest.mark.parametrize(
    "device",
    [
        "meta",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
            ],
        ),
    ],
)
def test_scores_are_where_the_weights_are(criterion, device):
    values = criterion(mlp().to(device)).values.values()
    assert {value.device.type for value in values} == {device}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_seed_means_one_ranking_on_every_device():
    model = built(mlp)
    here = random(model, seed=4).values
    there = random(model.cuda(), seed=4).values
    for name, value in here.items():
        assert_close(there[name].cpu(), value, rtol=0, atol=0)


@pytest.mark.parametrize("criterion", [magnitude, random])
def test_only_what_requires_grad_is_scored(criterion):
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    assert set(criterion(model).values) == {"2.weight", "2.bias"}
    with pytest.raises(ModelError, match="no parameter of the model requires grad"):
        criterion(model.requires_grad_(requires_grad=False))
