"""Random networks, cut at random, saved and loaded: what comes back is what was saved, in every bit."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from apoptosis.checkpoint import load, save
from apoptosis.errors import PlanMismatchError
from apoptosis.records import Outcome
from apoptosis.structure import Plan, Structure, cut, trace
from oracles.checkpoints import assert_same_network
from oracles.random_choice import Pick
from oracles.random_networks import RandomNetwork, build, random_blueprint
from oracles.untouched import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")

SEEN: set[str] = set()


@settings(max_examples=40)
@given(seed=st.integers(0, 100_000))
def test_a_random_network_comes_back_as_it_was(seed: int) -> None:
    round_trip(seed)


@pytest.mark.slow
@settings(max_examples=1000)
@given(seed=st.integers(0, 10**9))
def test_a_thousand_random_networks_come_back_as_they_were(seed: int) -> None:
    round_trip(seed)


def test_both_deliveries_and_composed_plans_were_among_them() -> None:
    for seed in range(12):
        round_trip(seed)
    assert {"module", "program", "module composed", "program composed"} <= SEEN


def round_trip(seed: int) -> None:
    network = build(random_blueprint(seed, longest=2))
    pick, example = Pick(seed), network.inputs(network.batch, 0)
    structure = trace(network.model, example)
    plan = random_plan(structure, pick)
    if plan is None:
        return
    small: nn.Module = cut(network.model, plan)
    if pick.coin() and (later := random_plan(structure.after(plan), pick)):
        plan, small = plan.then(later), cut(small, later)
        SEEN.add(f"{plan.delivery} composed")
    SEEN.add(plan.delivery)
    trained(small, seed)
    before = Snapshot(small)
    inputs = [network.inputs(network.batch, 1), network.inputs(network.batch, 2)]
    with TemporaryDirectory() as folder:
        path = save(Path(folder) / "run", Outcome(small, plan, example_inputs=example))
        before.assert_unchanged()
        dense = other_weights(network)
        before_load = Snapshot(dense)
        found = load(path, dense=dense)
        before_load.assert_unchanged()
    assert_same_network(found, small, *inputs)


def random_plan(structure: Structure, pick: Pick) -> Plan | None:
    kept = {
        g.name: sorted(
            pick.random.sample(range(g.size), pick.random.randint(g.smallest, g.size - 1))
        )
        for g in structure.groups
        if g.size > g.smallest and pick.coin(0.7)
    }
    try:
        return structure.plan(kept) if kept else None
    except PlanMismatchError:
        return None


@torch.no_grad()
def trained(model: nn.Module, seed: int) -> None:
    """The small network has moved away from what a cut of the dense one gives."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise.to(parameter.dtype), alpha=0.01)


def other_weights(network: RandomNetwork) -> nn.Module:
    """The dense network as its constructor might make it: what is saved does not come from here."""
    dense = build(network.blueprint).model
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.mul_(0.7)
    return dense
