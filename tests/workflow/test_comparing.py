"""A comparison is fair: the same for all but who goes. Every trial is checked against the steps done by hand."""

import copy
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.comparison import Comparison
from apoptosis.criteria import CRITERIA
from apoptosis.errors import BudgetError, ConfigError, DataError
from apoptosis.training import FitOptions, evaluate, fit_
from apoptosis.workflow import (
    BASELINES,
    CompareOptions,
    Contestant,
    ContestData,
    compare,
    contestants_of,
)

OPTIONS = CompareOptions(steps=2, fit=FitOptions(epochs=2, learning_rate=0.05, schedule="cosine"))


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )


def samples(seed: int, num: int = 40) -> list:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 6, generator=generator)
    return list(zip(inputs.split(10), inputs[:, :3].argmax(1).split(10), strict=True))


class Order:
    """Batches in an order of their own at every pass; remembers which came."""

    def __init__(self, seed: int, seen: list) -> None:
        self.generator, self.seen = torch.Generator().manual_seed(seed), seen
        self.batches = samples(1)
        seen.append([])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for place in torch.randperm(len(self.batches), generator=self.generator).tolist():
            self.seen[-1].append(place)
            yield self.batches[place]


def data(**changes) -> ContestData:
    seen = changes.pop("seen", [])
    own = ContestData(
        scoring=samples(1),
        test=samples(2),
        validation=samples(3),
        training=lambda seed: Order(seed, seen),
    )
    return replace(own, **changes)


def without_seconds(found: Comparison) -> list:
    return [replace(trial, prune_s=0, tune_s=0) for trial in found.trials]


@pytest.fixture(scope="module")
def found() -> Comparison:
    options = replace(OPTIONS, seeds=(0, 1))
    return compare(network, ["oba", "taylor"], [0.25, 0.5], data(), options)


def test_every_cell_is_there_once_and_in_order(found):
    cells = [(t.seed, t.contestant, t.asked) for t in found.trials]
    names = ["oba", "taylor", *(baseline.name for baseline in BASELINES)]
    assert cells == [(s, n, b) for s in (0, 1) for n in names for b in (0.5, 0.25)]
    assert [dense.seed for dense in found.dense] == [0, 1]


def test_baselines_are_chance_and_uniform_norms_and_stand_there_once():
    entrants = contestants_of(["random", "magnitude-l2"])
    assert [(e.criterion, e.widths) for e in entrants] == [
        ("random", "global"),
        ("magnitude-l2", "global"),
        ("magnitude-l2", "uniform"),
    ]


def test_a_trial_is_what_its_steps_give_by_hand(found):
    model, seed = network(1), 1
    outcome = ap.prune(model, samples(1), ap.Budget(flops=0.5), criterion="taylor", steps=2)
    before = evaluate(outcome.model, samples(2))
    own = replace(OPTIONS.fit, seed=seed)
    fit_(outcome.model, Order(seed, []), options=own, validation=samples(3))
    after, chosen = evaluate(outcome.model, samples(2)), evaluate(outcome.model, samples(3))
    (trial,) = (t for t in found.of("taylor", 0.5) if t.seed == seed)
    assert (trial.test.loss, trial.test.accuracy) == (before.loss, before.metrics["correct"])
    assert trial.tuned_test.loss == after.loss
    assert trial.tuned_validation.loss == chosen.loss
    assert trial.got == outcome.spent[0].got <= 0.5
    assert trial.scored == 40
    assert trial.widths == {"0": outcome.model[0].out_features, "2": outcome.model[2].out_features}
    linear = {"0": outcome.model[0], "2": outcome.model[2], "4": outcome.model[4]}
    assert trial.layer_macs == {name: own.weight.numel() for name, own in linear.items()}


def test_the_dense_network_is_judged_and_left_as_it_was():
    model = network()
    before = copy.deepcopy(model.state_dict())
    found = compare(model, ["taylor"], [0.5], data(), OPTIONS)
    assert found.dense[0].test.loss == evaluate(model, samples(2)).loss
    assert found.dense[0].macs == 6 * 16 + 16 * 16 + 16 * 3
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_all_networks_of_a_seed_see_the_same_batches_in_the_same_order():
    seen: list = []
    compare(network, ["oba"], [0.5, 0.25], data(seen=seen), replace(OPTIONS, seeds=(0, 1)))
    orders = [tuple(one) for one in seen]
    assert len(orders) == 12
    assert len(set(orders[:6])) == len(set(orders[6:])) == 1
    assert orders[0] != orders[-1]


def test_batches_that_can_start_again_do():
    class Passes(Order):
        def start_at(self, number: int) -> None:
            self.generator.manual_seed(number)
            self.seen.append([])

    seen: list = []
    training = Passes(0, seen)
    options = replace(OPTIONS, seeds=(5, 6))
    compare(network(), [], [0.5], data(training=training), options)
    passes = [tuple(one) for one in seen[1:]]  # two of each network, two networks of each seed
    assert passes[0:2] == passes[2:4] != passes[4:6] == passes[6:8]


def test_a_loader_that_shuffles_gives_all_the_same_order():
    seen: list = []

    def collate(rows):
        seen.append(rows[0][0].sum().item())
        return torch.utils.data.default_collate(rows)

    inputs, labels = samples(1)[0]
    rows = torch.utils.data.TensorDataset(inputs, labels)
    loader = torch.utils.data.DataLoader(rows, batch_size=5, shuffle=True, collate_fn=collate)
    compare(network(), [], [0.5], data(training=loader), OPTIONS)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_a_trial_does_not_depend_on_who_else_takes_part(found):
    alone = compare(network, [], [0.25], data(), replace(OPTIONS, seeds=(1,)))
    among = [t for t in without_seconds(found) if t.seed == 1 and t.asked == 0.25]
    assert without_seconds(alone) == among[-2:]


def test_chance_draws_anew_for_every_seed():
    options = CompareOptions(steps=1, seeds=(0, 1, 2, 3))
    trials = compare(network(), [], [0.5], data(), options).of("random")
    assert len({trial.test.loss for trial in trials}) > 1
    taylor = compare(network(), ["taylor"], [0.5], data(), options).of("taylor")
    assert len({trial.test.loss for trial in taylor}) == 1


def test_criteria_that_draw_nothing_have_no_seed():
    model, batches = network(), samples(1)
    for name in ("random", "obd-hessian", "obd-fisher"):
        score = CRITERIA[name].score
        other = CRITERIA[name].seeded(7).score(model, batches, None).values["0.weight"]
        assert not torch.equal(score(model, batches, None).values["0.weight"], other)
        same = CRITERIA[name].seeded(0).score(model, batches, None).values["0.weight"]
        assert torch.equal(score(model, batches, None).values["0.weight"], same)


def test_uniform_widths_cut_every_group_alike():
    own = compare(network(), [Contestant("oba", "uniform")], [0.5], data(), CompareOptions(steps=1))
    (trial,) = own.of("oba-uniform")
    assert abs(trial.widths["0"] - trial.widths["2"]) <= 1
    assert not own.is_tuned
    assert trial.tuned_test is trial.tuned_validation is None


def test_the_whole_network_can_be_a_budget():
    trial = compare(network(), [], [1.0], data(), CompareOptions(steps=1)).trials[0]
    assert trial.got == 1
    assert trial.test.loss == evaluate(network(), samples(2)).loss


# --- going on --------------------------------------------------------------------------------------------------------


class Notebook:
    """As a journal: facts go through JSON."""

    def __init__(self, limit: int = 100) -> None:
        self.notes: dict[str, str] = {}
        self.limit = limit

    def read(self, name: str):
        text = self.notes.get(name)
        return None if text is None else SimpleNamespace(facts=json.loads(text))

    def write(self, name: str, facts) -> None:
        if len(self.notes) == self.limit:
            raise KeyboardInterrupt
        self.notes[name] = json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize("limit", [0, 1, 4, 6])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(limit):
    arguments = (network, ["taylor"], [0.5], data(), replace(OPTIONS, seeds=(0, 1)))
    whole = compare(*arguments)
    notebook = Notebook(limit)
    with pytest.raises(KeyboardInterrupt):
        compare(*arguments, journal=notebook)
    notebook.limit = 100
    again = compare(*arguments, journal=notebook)
    assert without_seconds(again) == without_seconds(whole)
    assert again.dense == whole.dense
    assert again.facts == whole.facts


def test_what_is_noted_is_not_run_again():
    notebook = Notebook()
    first = compare(network, ["taylor"], [0.5], data(), OPTIONS, journal=notebook)
    again = compare(
        lambda _: pytest.fail("made again"), ["taylor"], [0.5], data(), OPTIONS, journal=notebook
    )
    assert asdict(again) == asdict(first)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criteria", "budgets", "error", "match"),
    [
        (["obaa"], [0.5], ConfigError, "'obaa'"),
        ([Contestant("oba", "narrow")], [0.5], ConfigError, "narrow"),
        (["oba"], [], ConfigError, "No budget"),
        (["oba"], [1.5], ConfigError, "flops=1.5"),
        (["oba"], [0.0], ConfigError, "flops=0"),
        (["oba"], [1e-4], BudgetError, "flops"),
    ],
)
def test_what_nobody_can_mean_is_refused(criteria, budgets, error, match):
    with pytest.raises(error, match=match):
        compare(network(), criteria, budgets, data(), OPTIONS)


def test_fine_tuning_needs_training_data():
    with pytest.raises(DataError, match="epochs=2 of fine-tuning were asked for"):
        compare(network(), [], [0.5], data(training=None), OPTIONS)


def test_batches_that_can_be_read_once_are_refused():
    with pytest.raises(DataError, match="only once"):
        compare(network(), [], [0.5], data(test=iter(samples(1))), OPTIONS)


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_seeds_are_named_once(seeds):
    with pytest.raises(ConfigError, match="seeds="):
        CompareOptions(seeds=seeds)


def test_a_network_whose_training_fails_has_no_figures_and_the_others_go_on():
    wild = replace(OPTIONS, fit=replace(OPTIONS.fit, learning_rate=1e30))
    found = compare(network, ["taylor"], [0.5], data(), wild)
    assert len(found.trials) == 3
    for trial in found.trials:
        assert trial.test.accuracy is not None
        assert (trial.tuned_test.accuracy, trial.tuned_test.loss) == (None, None)
        assert trial.tuned_test.count == 40
