"""Whole runs: budgets are recounted on the network that came out, and steps are repeated by hand."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.checkpoint import Journal
from apoptosis.criteria import CRITERIA, Aggregation, Criterion, find_criterion, magnitude
from apoptosis.criteria.obs import obs_units
from apoptosis.data import digits
from apoptosis.errors import (
    ApoptosisError,
    BudgetError,
    ConfigError,
    DataError,
    ModelError,
    NonFiniteError,
)
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.progress import listen
from apoptosis.records import Outcome
from apoptosis.repair import Distil, Refit, batch_norm
from apoptosis.structure import CutProgram
from apoptosis.task import Task
from apoptosis.workflow import first_sample, pruning
from apoptosis.workflow.removal_order import RemovalOrder
from oracles.building import built
from oracles.cut_checks import counted_macs
from oracles.random_networks import RandomNetwork, build, random_blueprint
from oracles.shrinking import small_case
from oracles.untouched import Snapshot

IMAGES = list(digits().train.batches(40))[:2]
ONE_IMAGE = IMAGES[0][0][:1]


def cnn(width: int = 8) -> nn.Module:
    """Batch norms have seen something, so that no score is zero by chance."""
    model = digits_cnn(width=width)
    with torch.no_grad():
        for images, _ in IMAGES:
            model(images)
    return model.eval()


def num_params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def same_networks(one: nn.Module, other: nn.Module) -> None:
    assert type(one) is type(other)
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def consistent(outcome: Outcome, model: nn.Module, steps: int) -> None:
    """What records say of each other, and of the network."""
    plan, history = outcome.plan, outcome.history
    assert [record.step for record in history] == list(range(1, steps + 1))
    for attribute in ("macs", "params"):
        costs = [getattr(record, attribute) for record in history[:-1]]
        assert costs == sorted(costs, reverse=True)
    gone = {}
    for record in history:
        # Only at the end may units come back, to spend what is left of the budget.
        assert all(num > 0 or (record is history[-1] and num) for num in record.removed.values())
        for group, num in record.removed.items():
            gone[group] = gone.get(group, 0) + num
        assert record.seconds > 0
    gone = {group: num for group, num in gone.items() if num}
    assert gone == {group: whole - left for group, (left, whole) in plan.counts().items()}
    last = history[-1]
    assert last.params == num_params(outcome.model)
    for group, left in last.left.items():
        assert left == plan.sizes[group] - gone.get(group, 0)
    spent = {line.what: line for line in outcome.spent}
    assert spent["params"].dense == num_params(model)
    assert (spent["params"].left, spent["flops"].left) == (last.params, last.macs)
    assert all(line.got <= line.asked for line in outcome.spent)
    assert json.loads(json.dumps(outcome.settings)) is not None


# --------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    "budget",
    [
        Budget(flops=0.5),
        Budget(params=0.2),
        Budget(units=0.6),
        Budget(flops=0.7, params=0.3, units=0.8),
    ],
    ids=lambda budget: str(budget.shares()),
)
@pytest.mark.parametrize("steps", [1, 4])
def test_budgets_are_met_by_recount(budget, steps):
    model = cnn()
    outcome = ap.prune(model, IMAGES, budget, criterion="taylor", steps=steps)
    got = {
        "flops": counted_macs(outcome.model, ONE_IMAGE) / counted_macs(model, ONE_IMAGE),
        "params": num_params(outcome.model) / num_params(model),
        "units": sum(outcome.history[-1].left.values()) / sum(outcome.plan.sizes.values()),
    }
    for line in outcome.spent:
        assert line.got == pytest.approx(got[line.what], rel=1e-12)
        assert line.asked == budget.shares().get(line.what, 1.0)
    assert all(got[what] <= share for what, share in budget.shares().items())
    nearest = max(got[what] / share for what, share in budget.shares().items())
    assert nearest > 0.85  # and little is left unspent: units of this network are coarse
    consistent(outcome, model, steps)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_prunes(criterion):
    model = cnn(4)
    outcome = ap.prune(model, IMAGES[:1], Budget(flops=0.6), criterion=criterion, steps=2)
    consistent(outcome, model, 2)
    assert outcome.settings["criterion"] == criterion
    data_free = criterion in ("magnitude", "magnitude-l2", "random")
    assert [record.count for record in outcome.history] == [0 if data_free else 40] * 2
    losses = [record.loss for record in outcome.history]
    if data_free:
        assert losses == [None, None]
    else:
        with torch.no_grad():
            assert losses[0] == pytest.approx(
                F.cross_entropy(model(IMAGES[0][0]), IMAGES[0][1]).item(), rel=1e-5
            )
        assert losses[1] != losses[0]


def test_the_network_is_that_of_its_plan_bit_for_bit():
    model = cnn()
    outcome = ap.prune(model, IMAGES, Budget(flops=0.4), criterion="oba", steps=5)
    same_networks(ap.cut(model, outcome.plan), outcome.model)
    read = ap.Plan.from_json(outcome.plan.to_json())
    same_networks(ap.cut(model, read), outcome.model)
    assert outcome.plan.fingerprint_after == ap.trace(outcome.model, ONE_IMAGE).fingerprint


def test_a_budget_of_everything_gives_an_equal_copy():
    model = cnn()
    outcome = ap.prune(model, IMAGES, Budget(flops=1.0), criterion="magnitude", steps=3)
    assert outcome.model is not model
    same_networks(outcome.model, model)
    assert outcome.plan.kept == {}
    assert [record.removed for record in outcome.history] == [{}] * 3
    for one, other in zip(outcome.model.parameters(), model.parameters(), strict=True):
        assert one.data_ptr() != other.data_ptr()


def test_the_same_call_gives_the_same_network():
    model = cnn()
    for criterion in ("random", "oba"):
        one, other = (
            ap.prune(model, IMAGES, Budget(flops=0.5), criterion=criterion, steps=3)
            for _ in range(2)
        )
        same_networks(one.model, other.model)
        assert one.settings == other.settings


# ----------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("criterion", ["oba", "taylor-gate", "gates", "magnitude"])
@pytest.mark.parametrize("aggregation", [None, "paper"])
def test_one_step_is_scoring_planning_and_cutting_by_hand(criterion, aggregation):
    model = cnn()
    structure = ap.trace(model, ONE_IMAGE)
    units = find_criterion(criterion).units(model, structure, IMAGES, None, aggregation)
    plan = make_plan(structure, units, Budget(flops=0.5))
    outcome = ap.prune(
        model, IMAGES, Budget(flops=0.5), criterion=criterion, steps=1, aggregation=aggregation
    )
    assert outcome.plan.to_json() == plan.to_json()
    same_networks(outcome.model, ap.cut(model, plan))
    (record,) = outcome.history
    for group, own in units.values.items():
        summary = record.scores[group]
        assert (summary.lowest, summary.highest) == (float(own.min()), float(own.max()))
        assert summary.median == float(own.median())


@pytest.mark.parametrize("criterion", ["taylor", "taylor-activation", "gates", "oba"])
def test_steps_are_those_of_a_loop_that_traces_every_network_anew(criterion, monkeypatch):
    """Step t of T leaves at most b^(t/T) of the dense network; each scores what the last one left."""
    monkeypatch.setattr(RemovalOrder, "with_budget_spent", lambda *_: None)
    model, steps, share = cnn(), 4, 0.3
    small, dense = model, num_params(model)
    for step in range(1, steps + 1):
        structure = ap.trace(small, ONE_IMAGE)
        units = find_criterion(criterion).units(small, structure, IMAGES)
        allowed = int(dense * share ** (step / steps))
        plan = make_plan(structure, units, Budget(params=(allowed + 0.5) / num_params(small)))
        small = ap.cut(small, plan)
    outcome = ap.prune(model, IMAGES, Budget(params=share), criterion=criterion, steps=steps)
    same_networks(outcome.model, small)
    for record in outcome.history:
        assert record.params <= dense * share ** (record.step / steps)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("criterion", ["magnitude", "taylor", "gates"])
def test_no_unit_that_went_could_come_back_within_the_budget(criterion, share):
    """Steps at such widths overshoot: one channel of the stream is worth several of them."""
    model = cnn()
    outcome = ap.prune(model, IMAGES, Budget(flops=share), criterion=criterion, steps=20)
    structure = ap.trace(model, ONE_IMAGE)
    left = {name: now for name, (now, _) in outcome.plan.counts().items()}
    allowed = share * structure.macs()
    assert structure.macs(left) <= allowed
    for name, (now, whole) in outcome.plan.counts().items():
        if now < whole:
            assert structure.macs(left | {name: now + 1}) > allowed, name


def test_what_comes_back_went_last(monkeypatch):
    model = cnn()
    spent = ap.prune(model, IMAGES, Budget(flops=0.4), criterion="taylor", steps=20)
    monkeypatch.setattr(RemovalOrder, "with_budget_spent", lambda *_: None)
    as_it_fell = ap.prune(model, IMAGES, Budget(flops=0.4), criterion="taylor", steps=20)
    assert spent.history[-1].macs > as_it_fell.history[-1].macs
    for name, kept in as_it_fell.plan.kept.items():
        assert set(kept) <= set(spent.plan.kept.get(name, range(as_it_fell.plan.sizes[name])))
    assert min(spent.history[-1].removed.values()) < 0


def test_units_go_jointly_unless_told_otherwise():
    model = cnn()
    joint, alone = (
        ap.prune(model, IMAGES, Budget(flops=0.4), criterion="gates", steps=2, selection=how)
        for how in (None, Selection(interactions="ignore"))
    )
    assert joint.settings["selection"]["interactions"] == "joint"
    assert {g: own.tolist() for g, own in joint.plan.kept.items()} != {
        g: own.tolist() for g, own in alone.plan.kept.items()
    }


def test_scoring_again_matters():
    """The oracle of steps can fail: all at once is another network."""
    model = cnn()
    once, often = (ap.prune(model, IMAGES, Budget(flops=0.3), steps=n) for n in (1, 6))
    assert {g: own.tolist() for g, own in once.plan.kept.items()} != {
        g: own.tolist() for g, own in often.plan.kept.items()
    }


def test_the_model_is_traced_once(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return ap.trace(*args, **kwargs)

    monkeypatch.setattr("apoptosis.workflow.pricing.trace", counted)
    monkeypatch.setattr("apoptosis.structure.cutting.trace", counted)
    ap.prune(cnn(), IMAGES, Budget(flops=0.4), criterion="taylor", steps=6)
    assert len(calls) == 1


def test_every_step_reads_the_data_once():
    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    data = Counted(IMAGES)
    ap.prune(cnn(), data, Budget(flops=0.5), criterion="taylor", steps=5, example_inputs=ONE_IMAGE)
    assert data.passes == 5 + 1  # what is delivered is tried on the first batch


def test_progress_says_how_many_steps_there_are():
    events = []
    with listen(events.append):
        ap.prune(cnn(4), IMAGES, Budget(flops=0.5), criterion="taylor", steps=3)
    outer = [e for e in events if e.what == "pruning by taylor"]
    assert {e.total for e in outer} == {3}
    assert [e.done for e in outer if not e.finished] == [0, 1, 2, 3]
    assert outer[-1].finished
    assert len({e.what for e in events}) > 1


def test_the_callers_model_is_left_as_it_was():
    model = cnn().train()
    model.down.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.stem.register_forward_hook(lambda _m, _a, out: out)
    before = Snapshot(model)
    for criterion in ("oba", "taylor-gate", "obd-fisher", "random"):
        ap.prune(
            model, IMAGES, Budget(flops=0.5), criterion=criterion, steps=2, repair=["batch_norm"]
        )
        before.assert_unchanged()


# ------------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_caps_and_floors_are_of_the_dense_network_through_all_steps(steps, widths):
    model = cnn()
    sizes = {group.name: group.size for group in ap.trace(model, ONE_IMAGE).groups}
    for selection in (
        Selection(cap=0.5, widths=widths),
        Selection(floor=5, widths=widths),
        Selection(floor=3, cap=0.75, widths=widths),
    ):
        fewest = {
            n: max(selection.floor, size - int(size * selection.cap)) for n, size in sizes.items()
        }
        least = ap.trace(model, ONE_IMAGE).params(fewest) / num_params(model)
        outcome = ap.prune(
            model,
            IMAGES,
            Budget(params=least * 1.02),
            criterion="taylor",
            steps=steps,
            selection=selection,
        )
        left = outcome.history[-1].left
        assert all(left[name] >= fewest[name] for name in sizes)
        assert any(left[name] == fewest[name] for name in sizes)


def test_widths_are_multiples_at_every_step():
    model = cnn(16)
    selection = Selection(round_to=4)
    outcome = ap.prune(
        model, IMAGES, Budget(flops=0.35), criterion="taylor", steps=5, selection=selection
    )
    for record in outcome.history:
        assert all(left % 4 == 0 for left in record.left.values())
    consistent(outcome, model, 5)
    assert len([r for r in outcome.history if r.removed]) >= 2


def test_protected_groups_stay_whole_and_shares_of_single_groups_are_kept():
    model = cnn()
    selection = Selection(names=("*", "!stem*"), shares={"top.conv": 0.25})
    outcome = ap.prune(
        model, IMAGES, Budget(params=0.4), criterion="taylor", steps=5, selection=selection
    )
    left = outcome.history[-1].left
    assert (left["stem.conv"], left["top.conv"]) == (8, 4)
    sizes = [record.left["top.conv"] for record in outcome.history]
    assert sizes == [round(16 * 0.25 ** (t / 5)) for t in range(1, 6)]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_shares_that_are_met_at_the_end_are_no_hindrance_on_the_way(steps):
    """Two of three units are more than √⅓, which step 1 of 2 leaves."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    outcome = ap.prune(
        model,
        [],
        Budget(params=1 / 3),
        criterion="magnitude",
        steps=steps,
        selection=Selection(shares={"*": 1 / 3}),
        example_inputs=torch.zeros(1, 2),
    )
    assert outcome.plan.counts() == {"0": (1, 3)}


def test_widths_fit_the_hardware_unless_told_otherwise():
    def model(dtype, *, is_cuda):
        parameter = SimpleNamespace(dtype=dtype, is_cuda=is_cuda)
        return SimpleNamespace(parameters=lambda: iter([parameter]))

    assert pruning.default_selection(model(torch.bfloat16, is_cuda=True)).round_to == 8
    assert pruning.default_selection(model(torch.float16, is_cuda=True)).round_to == 8
    assert pruning.default_selection(model(torch.float32, is_cuda=True)) == Selection()
    assert pruning.default_selection(model(torch.bfloat16, is_cuda=False)) == Selection()


# -------------------------------------------------------------------------------------------------------- networks


def first_tensor(raw):
    while not isinstance(raw, torch.Tensor):
        raw = next(iter(raw.values())) if isinstance(raw, Mapping) else raw[0]
    return raw


RANDOM_TASK = Task(
    inputs=lambda batch: ((batch,), {}),
    outputs=first_tensor,
    loss=lambda outputs, _batch: (outputs - 1).square().mean(),
    count=len,
    split=lambda batch, n: iter(batch.split(n)),
    sample=lambda _outputs, batch, _generator: batch,
    metrics=lambda _outputs, _batch: {},
)


def pruned_or_refused(network: RandomNetwork, criterion: str) -> Outcome | ApoptosisError:
    x = network.inputs(network.batch, 0)
    try:
        return ap.prune(
            network.model,
            [x],
            Budget(params=0.7),
            RANDOM_TASK,
            criterion=criterion,
            steps=1 + network.blueprint.seed % 4,
            example_inputs=x,
        )
    except (BudgetError, ConfigError, ModelError) as error:
        return error


def pruned_at_random(seed: int) -> bool:
    network = build(random_blueprint(seed, longest=3))
    model, x = network.model, network.inputs(network.batch, 0)
    before = Snapshot(model)
    outcome = pruned_or_refused(network, criterion=("taylor", "magnitude", "oba-ggn")[seed % 3])
    before.assert_unchanged()
    if isinstance(outcome, BudgetError):
        assert outcome.reachable["params"] > 0.7
        return False
    if isinstance(outcome, ApoptosisError):
        assert re.search("No group is chosen|requires grad", str(outcome))
        return False
    consistent(outcome, model, 1 + seed % 4)
    assert num_params(outcome.model) <= 0.7 * num_params(model)
    with torch.no_grad():
        again, twin = ap.cut(model, outcome.plan), ap.zero(model, outcome.plan)
        found, want = first_tensor(outcome.model(x)), first_tensor(twin(x))
        assert torch.equal(found, first_tensor(again(x)))
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-8 * float(want.abs().max()))
    return True


@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_random_networks_meet_their_budgets_and_equal_their_zeroed_twins(first):
    pruned = [pruned_at_random(seed) for seed in range(first, first + 10)]
    assert sum(pruned) >= 4


@pytest.mark.parametrize("steps", [1, 3])
def test_a_network_that_becomes_a_program_goes_on_as_one(steps):
    case = small_case("hard coded")
    model, x = case.model(), case.inputs(6)
    batches = [(x, torch.arange(6) % 3)]
    before = Snapshot(model)
    outcome = ap.prune(model, batches, Budget(params=0.5), criterion="taylor", steps=steps)
    before.assert_unchanged()
    assert outcome.plan.delivery == "program"
    assert "own code does not run" in outcome.plan.delivery_because
    consistent(outcome, model, steps)
    with torch.no_grad():
        twin = ap.zero(model, outcome.plan)
        torch.testing.assert_close(outcome.model(x), twin(x), rtol=1e-11, atol=1e-13)
        assert torch.equal(ap.cut(model, outcome.plan)(x), outcome.model(x))


class Viewed(nn.Module):
    """Its code names a width, or leaves it open: the same network, delivered as a program or as modules."""

    def __init__(self, *, named: bool = True) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 10)
        self.third = nn.Linear(10, 3)
        self.named = named
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(self.first(x)).relu().view(len(x), 12 if self.named else -1)
        return self.third(self.second(seen).relu())


NUMBERS = [
    (torch.randn(40, 6, generator=torch.Generator().manual_seed(5)).double(), torch.arange(40) % 3)
]
"""Of `Viewed`."""


OF_UNITS = {name: own for name, own in CRITERIA.items() if own.score_units is not None}
OF_UNITS["obs"] = replace(OF_UNITS["obs"], score_units=partial(obs_units, ridge=1e-12))
"""The penalty of `obs` is in parts of the mean over inputs; zeros among them make it another one."""


@pytest.mark.parametrize("aggregation", [None, Aggregation(normalise="mean")], ids=["", "mean"])
@pytest.mark.parametrize("criterion", OF_UNITS)
def test_criteria_that_need_modules_score_a_program_as_they_score_modules(criterion, aggregation):
    how = {"criterion": OF_UNITS[criterion], "steps": 4, "repair": [], "aggregation": aggregation}
    program, modules = (
        ap.prune(Viewed(named=named), NUMBERS, Budget(flops=0.3), **how) for named in (True, False)
    )
    assert (program.plan.delivery, modules.plan.delivery) == ("program", "module")
    assert any("first" in step.removed for step in program.history[:-1]), "scored as a program"
    for found, want in zip(program.history, modules.history, strict=True):
        assert found.left == want.left
        assert found.loss == pytest.approx(want.loss, rel=1e-9)
        for name, own in found.scores.items():
            assert astuple(own) == pytest.approx(astuple(want.scores[name]), rel=1e-6)
    kept, theirs = program.plan.kept, modules.plan.kept
    assert {n: list(own) for n, own in kept.items()} == {n: list(own) for n, own in theirs.items()}
    consistent(program, Viewed(), 4)


def test_a_program_whose_twin_gives_something_else_is_refused_in_words():
    """Mean and spread of a layer norm are taken over zeros too."""

    class Normed(Viewed):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(12).double()

    model = Normed()
    names = [group.name for group in ap.trace(model, NUMBERS[0][0][:1]).choose(inexact=True)]
    kinds = tuple({ap.trace(model, NUMBERS[0][0][:1])[name].kind for name in names})
    how = {"criterion": "taylor-gate", "steps": 4, "selection": Selection(kinds=kinds)}
    with pytest.raises(ModelError, match=r"program.*first.*one step.*oba.*Selection\(names="):
        ap.prune(model, NUMBERS, Budget(flops=0.3), **how)
    one = ap.prune(model, NUMBERS, Budget(flops=0.3), **{**how, "steps": 1})
    assert one.plan.delivery == "program"


def test_a_program_that_was_repaired_between_steps_is_refused_where_modules_are_needed():
    how = {"criterion": "taylor-gate", "steps": 4, "repair": [Distil(steps=2)]}
    with pytest.raises(ModelError, match=r"program.*distil.*repair_between"):
        ap.prune(Viewed(), NUMBERS, Budget(flops=0.3), **how, repair_between=True)
    assert ap.prune(Viewed(), NUMBERS, Budget(flops=0.3), **how).history


def test_a_program_to_begin_with_is_refused_by_criteria_that_need_modules():
    model = Viewed()
    plan = ap.trace(model, NUMBERS[0][0][:1]).plan({"first": range(8)})
    small = ap.cut(model, plan)
    assert isinstance(small, CutProgram)
    with pytest.raises(ModelError, match="delivered as a program"):
        ap.prune(small, NUMBERS, Budget(flops=0.5), criterion="obs", steps=2)


def test_a_program_that_was_to_be_refitted_is_refused_once_it_is_the_last():
    scored = []

    def score(small, batches, task):
        scored.append(small)
        return magnitude(small)

    case = small_case("hard coded")
    batches = [(case.inputs(6), torch.arange(6) % 3)]
    how = {"criterion": Criterion("mine", "of mine", score), "steps": 3, "repair": ["refit"]}
    with pytest.raises(ModelError, match="delivered as a program"):
        ap.prune(case.model(), batches, Budget(params=0.5), **how)
    assert len(scored) == 3, "the last network might have been modules again"
    one = ap.prune(case.model(), batches, Budget(params=0.8), criterion="magnitude", steps=1)
    program = one.model
    with pytest.raises(ModelError, match="delivered as a program"):
        ap.prune(program, batches, Budget(params=0.5), **how)
    assert len(scored) == 3, "one to begin with is refused before work"


@pytest.mark.parametrize(
    "id", ["fused", "separate", "gqa", "glu", "encoder", "experts", "recurrent"]
)
def test_networks_of_every_kind_prune_and_equal_their_zeroed_twins(id):
    case = small_case(id)
    model, x = case.model(), case.inputs(6)
    task = Task.classification(
        lambda logits, labels: F.cross_entropy(
            logits if logits.dim() == 2 else logits.mean(1), labels
        )
    )
    batches = [(x, torch.arange(6) % 3)]
    outcome = ap.prune(model, batches, Budget(params=0.8), task, criterion="taylor", steps=3)
    consistent(outcome, model, 3)
    with torch.no_grad():
        twin = ap.zero(model, outcome.plan)
        torch.testing.assert_close(outcome.model(x), twin(x), rtol=1e-9, atol=1e-11)


def test_a_tied_language_model_prunes_from_dicts_and_stays_tied():
    case = small_case("tied")
    model, ids = case.model(), case.inputs(6)
    batches = [{"ids": ids[:4]}, {"ids": ids[4:]}]
    words = Task.language_model()
    task = replace(
        words,
        inputs=lambda batch: ((), {"ids": batch["ids"]}),
        loss=lambda outputs, batch: words.loss(outputs, batch["ids"]),
        count=lambda batch: words.count(batch["ids"]),
    )
    outcome = ap.prune(model, batches, Budget(params=0.6), task, criterion="oba", steps=3)
    consistent(outcome, model, 3)
    assert outcome.model.head.weight is outcome.model.words.weight
    assert [record.count for record in outcome.history] == [18] * 3
    assert torch.equal(outcome.example_inputs["ids"], ids[:1])


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, *, shift):
        return self.b(torch.relu(self.a(x) + shift[:, None]))


class Open(Shifted):
    """Takes any keyword, as networks from transformers do."""

    def forward(self, x, **others):
        return super().forward(x, shift=others["shift"])


@pytest.mark.parametrize("make", [Shifted, Open])
def test_tasks_may_give_arguments_and_keywords_together(make):
    model = built(make)
    batch = (torch.randn(6, 4).double(), torch.randn(6).double(), torch.arange(6) % 3)
    plain = Task.classification()
    task = replace(
        plain,
        inputs=lambda batch: ((batch[0],), {"shift": batch[1]}),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[2]),
        count=lambda batch: len(batch[2]),
    )
    outcome = ap.prune(model, [batch], Budget(params=0.5), task, steps=3, repair=[])
    consistent(outcome, model, 3)
    small = outcome.model(batch[0], shift=batch[1])
    torch.testing.assert_close(small, ap.zero(model, outcome.plan)(batch[0], shift=batch[1]))


def test_criteria_that_read_no_data_need_none():
    model = cnn()
    outcome = ap.prune(
        model, [], Budget(flops=0.5), criterion="magnitude", steps=3, example_inputs=ONE_IMAGE
    )
    consistent(outcome, model, 3)
    assert [(r.loss, r.count) for r in outcome.history] == [(None, 0)] * 3


def test_the_first_sample_is_a_copy_of_one():
    model = cnn(4)
    (example,) = first_sample(model, IMAGES, Task.classification())
    assert torch.equal(example, ONE_IMAGE)
    assert example.data_ptr() != ONE_IMAGE.data_ptr()


# --------------------------------------------------------------------------------------------------------- repairs


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_repairs_run_once_at_the_end_in_their_order(share):
    model, log, scored = cnn(4), [], []

    def repair(name, change):
        def mend(dense, small, plan, batches, task):
            assert dense is model
            assert small is not model
            assert batches is IMAGES
            assert plan.fingerprint_after == ap.trace(small, ONE_IMAGE).fingerprint
            log.append(name)
            other = copy.deepcopy(small)
            with torch.no_grad():
                change(other.head.bias)
            return other

        return mend

    def score(small, batches, task):
        scored.append(small.head.bias.detach().clone())
        return magnitude(small)

    outcome = ap.prune(
        model,
        IMAGES,
        Budget(flops=share),
        criterion=Criterion("mine", "magnitude, watched", score),
        steps=3,
        repair=(repair("add", lambda b: b.add_(1)), repair("double", lambda b: b.mul_(2))),
    )
    assert log == ["add", "double"]
    assert len(scored) == 3
    assert all(torch.equal(bias, model.head.bias) for bias in scored)
    assert torch.equal(outcome.model.head.bias, (model.head.bias + 1) * 2)
    assert (outcome.settings["criterion"], outcome.settings["repair"]) == ("mine", ["mend"] * 2)


def test_with_repairs_in_between_every_step_scores_the_repaired_cut_of_the_dense_network():
    model, scored, mended = cnn(4), [], []

    def score(small, structure, batches, task):
        scored.append(small)
        return CRITERIA["magnitude"].units(small, structure, batches, task)

    def mend(dense, small, plan, batches, task):
        assert dense is model
        for name, own in ap.cut(dense, plan).state_dict().items():
            torch.testing.assert_close(small.state_dict()[name], own)  # not repaired twice
        mended.append(copy.deepcopy(small))
        return mended[-1]

    mine = Criterion("mine", "of mine", score_units=score)
    options = {"criterion": mine, "steps": 3, "repair": [mend]}
    outcome = ap.prune(model, IMAGES, Budget(units=0.4), **options, repair_between=True)
    assert scored[0] is model
    assert scored[1:] == mended[:-1]
    assert outcome.model is mended[-1]
    assert outcome.settings["repair_between"] is True


def test_batch_norms_measured_after_the_cut_are_those_of_the_repair_alone():
    model = cnn()
    outcome = ap.prune(model, IMAGES, Budget(flops=0.5), steps=3, repair=["batch_norm"])
    bare = ap.cut(model, outcome.plan)
    same_networks(outcome.model, batch_norm(model, bare, outcome.plan, IMAGES))
    assert not torch.equal(outcome.model.top.norm.running_mean, bare.top.norm.running_mean)
    assert outcome.settings["repair"] == ["batch_norm"]


def test_batch_norms_may_be_measured_before_a_refit():
    model = cnn()
    outcome = ap.prune(model, IMAGES, Budget(flops=0.5), repair=iter(["batch_norm", "refit"]))
    bare = ap.cut(model, outcome.plan)
    measured = batch_norm(model, bare, outcome.plan, IMAGES)
    same_networks(outcome.model, Refit()(model, measured, outcome.plan, IMAGES))


# ---------------------------------------------------------------------------------------------------------- errors


def counting(calls: list) -> Criterion:
    def score(model, batches, task):
        calls.append(1)
        return magnitude(model)

    return Criterion("counting", "magnitude, counted", score)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ConfigError, "steps=0 was asked for; it is a whole number from 1 on"),
        ({"steps": -1}, ConfigError, "steps=-1 was asked for"),
        ({"steps": True}, ConfigError, "steps=True was asked for"),
        ({"steps": 1.5}, ConfigError, r"steps=1\.5 was asked for"),
        ({"steps": "3"}, ConfigError, "steps='3' was asked for"),
        (
            {"aggregation": "median"},
            ConfigError,
            "'median' was asked for; there are default, paper",
        ),
        ({"repair": ["polish"]}, ConfigError, "'polish' was asked for; there are batch_norm"),
        (
            {"repair": "batch_norm"},
            ConfigError,
            r"one text; a list is meant: repair=\['batch_norm'\]",
        ),
        ({"budget": 0.5}, ConfigError, r"The budget is 0\.5; say of what.*Budget\(flops=0\.5\)"),
        ({"batches": None}, DataError, "The batches are a NoneType; pass a list or a loader"),
        ({"budget": Budget(params=1e-4)}, BudgetError, "params=0.* was asked for, and with every"),
        (
            {"budget": Budget(flops=0.2), "selection": Selection(cap=0.1)},
            BudgetError,
            r"flops=0\.2 was asked for.*In the way: cap=0\.1",
        ),
        ({"selection": Selection(names=("nothing*",))}, ConfigError, "fits no group"),
        ({"batches": []}, DataError, "There are no batches. Give some, or `example_inputs`"),
        ({"batches": iter(IMAGES)}, DataError, "list_iterator that can be read only once"),
        ({"batches": (b for b in IMAGES)}, DataError, "generator that can be read only once"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_scored(options, error, message):
    model, calls = cnn(4), []
    given = {"batches": IMAGES, "budget": Budget(flops=0.5), "criterion": counting(calls)}
    given |= {"repair": (), **options}
    before = Snapshot(model)
    with pytest.raises(error, match=message):
        ap.prune(model, given.pop("batches"), given.pop("budget"), **given)
    assert calls == []
    before.assert_unchanged()


def test_an_unknown_criterion_is_answered_with_all_known_ones():
    with pytest.raises(ConfigError, match="'best' was asked for; there are oba, .*random"):
        ap.prune(cnn(4), IMAGES, Budget(flops=0.5), criterion="best")


def test_data_that_would_be_used_up_on_the_way_are_refused():
    with pytest.raises(DataError, match="read only once"):
        ap.prune(
            cnn(4),
            iter(IMAGES),
            Budget(flops=0.5),
            criterion="taylor",
            steps=2,
            example_inputs=ONE_IMAGE,
        )


def test_a_frozen_model_is_refused_by_parameter_scores_and_pruned_by_gates():
    model = cnn(4).requires_grad_(requires_grad=False)
    before = Snapshot(model)
    for criterion in ("oba", "taylor", "magnitude"):
        with pytest.raises(ModelError, match="requires grad"):
            ap.prune(model, IMAGES, Budget(flops=0.5), criterion=criterion)
    before.assert_unchanged()
    outcome = ap.prune(model, IMAGES, Budget(flops=0.5), criterion="taylor-gate", steps=2)
    consistent(outcome, model, 2)
    assert not any(p.requires_grad for p in outcome.model.parameters())


def test_groups_without_scores_stand_in_the_way_and_are_named():
    model = cnn(4)
    for part in (model.down, model.top):
        part.requires_grad_(requires_grad=False)
    model.head.requires_grad_(requires_grad=False)
    calls = []
    in_the_way = r"stay \(792 of 1,182\)\. In the way: groups without scores \(down\.conv, top\.conv\); [^;]*$"
    with pytest.raises(BudgetError, match=in_the_way):
        ap.prune(model, IMAGES, Budget(params=0.15), criterion=counting(calls), steps=4)
    assert calls == [1]


@pytest.mark.parametrize("criterion", ["magnitude", "taylor", "taylor-gate", "oba", "obd-fisher"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(criterion, bad):
    model = cnn(4)
    with torch.no_grad():
        model.down.conv.weight[1, 2, 0, 0] = bad
    before = Snapshot(model)
    with pytest.raises(NonFiniteError, match=r"(NaN|infinity) in 'down\.conv\.weight'"):
        ap.prune(model, IMAGES, Budget(flops=0.5), criterion=criterion, steps=2)
    before.assert_unchanged()


@pytest.mark.parametrize("steps", [5, 20])
def test_uniform_widths_are_uniform_however_many_steps_lead_there(steps):
    """One unit of a small layer is more than a small step takes: what counts is the share of the first network."""
    layers = [nn.Linear(16, 8), nn.Linear(8, 256), nn.Linear(256, 16), nn.Linear(16, 3)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    selection = Selection(widths="uniform")
    batches = [(torch.zeros(2, 16), torch.tensor([0, 1]))]

    def left(num):
        outcome = ap.prune(
            model,
            batches,
            Budget(flops=0.4),
            criterion="magnitude",
            steps=num,
            selection=selection,
        )
        return {name: outcome.history[-1].left[name] for name in outcome.plan.sizes}

    assert left(steps) == left(1)


def test_an_empty_first_batch_is_passed_over():
    images, labels = IMAGES[0]
    outcome = ap.prune(
        cnn(4), [(images[:0], labels[:0]), *IMAGES], Budget(flops=0.6), criterion="taylor", steps=1
    )
    assert outcome.example_inputs[0].shape == ONE_IMAGE.shape
    with pytest.raises(DataError, match="All batches are empty"):
        ap.prune(cnn(4), [(images[:0], labels[:0])], Budget(flops=0.6), steps=1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"repair": batch_norm}, "it is a list of repairs"),
        ({"repair": [3]}, "The repair 3 was asked for"),
        ({"repair": ["refit", "batch_norm"]}, "Put 'batch_norm' before 'refit'"),
        ({"repair": [Refit(rounds=0), "distil", batch_norm]}, "'batch_norm' was asked for after"),
        ({"task": "classification"}, "The task is a str"),
        ({"selection": {"floor": 2}}, "make one: Selection"),
        ({"criterion": ["oba"]}, "there are oba"),
        ({"aggregation": {"absolute": "unit"}}, "or an `Aggregation`"),
    ],
    ids=[
        "a repair alone",
        "no repair",
        "order",
        "order of objects",
        "task",
        "selection",
        "criterion",
        "aggregation",
    ],
)
def test_arguments_of_another_kind_are_refused_before_the_work(wrong, told):
    with (
        listen(lambda event: pytest.fail(f"{event} was begun")),
        pytest.raises(ConfigError, match=told),
    ):
        ap.prune(cnn(4), IMAGES, Budget(flops=0.6), **wrong)


def test_groups_that_a_criterion_of_ones_own_left_out_are_named():
    mine = Criterion("mine", "", score_units=lambda *_: ap.criteria.UnitScores({}, "mine"))
    with pytest.raises(BudgetError, match=r"In the way: groups without scores \(stem.conv"):
        ap.prune(cnn(4), IMAGES, Budget(flops=0.6), criterion=mine, steps=1)


@pytest.mark.parametrize(
    "labels",
    [torch.zeros(39, dtype=torch.int64), torch.zeros(40), torch.full((40,), 11)],
    ids=["one short", "fractions", "out of range"],
)
@pytest.mark.parametrize("criterion", ["oba", "taylor-gate"])
def test_labels_that_do_not_fit_are_answered_in_words(labels, criterion):
    model = cnn(4)
    before = Snapshot(model)
    with pytest.raises(DataError, match="Labels must fit the outputs"):
        ap.prune(model, [(IMAGES[0][0], labels)], Budget(flops=0.5), criterion=criterion)
    before.assert_unchanged()


def test_a_tensor_is_no_list_of_batches():
    with pytest.raises(DataError, match=r"one tensor of shape \(40, 1, 8, 8\)"):
        ap.prune(cnn(4), IMAGES[0][0], Budget(flops=0.5))


@pytest.mark.parametrize("steps", [1, 2])
def test_shuffled_batches_are_read_alike_by_runs_that_go_on(tmp_path, steps):
    """A run that was stopped has read fewer passes in this life; repairs must not see other orders for that."""
    torch.manual_seed(0)
    model = digits_cnn(width=4)

    def run(journal: Journal | None = None) -> Outcome:
        batches = digits().train.first(200).batches(40, shuffle_seed=0)
        return ap.prune(
            model,
            batches,
            Budget(flops=0.6),
            steps=steps,
            repair=[Distil(steps=7)],
            journal=journal,
        )

    whole = run()
    for _ in range(2):  # the second finds the notes of the first, all of whose steps are done
        with ap.open_journal(tmp_path / "notes", {}, resume=True) as journal:
            again = run(journal)
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], tensor), name
