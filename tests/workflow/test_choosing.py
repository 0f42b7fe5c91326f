"""What `prune` does when nothing is said: the best that the network, the budget and the task allow."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.criteria import CRITERIA
from apoptosis.data import digits
from apoptosis.errors import ConfigError, ModelError, NonFiniteError
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget, Selection
from apoptosis.repair import REPAIRS, Refit, batch_norm, repair_name
from apoptosis.structure import trace
from apoptosis.task import Task
from apoptosis.workflow import choose_criterion, settled
from apoptosis.workflow.pruning import _Mends
from oracles.shrinking import small_case

HALF = Budget(flops=0.5)
BOTH = (REPAIRS["refit"], REPAIRS["refit_blocks"])


def said(outcome) -> tuple[str, int, list[str]]:
    settings = outcome.settings
    return settings["criterion"], settings["steps"], settings["repair"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


def test_obs_in_one_step_and_a_refit_without_labels():
    outcome = ap.prune(mlp(), [X], HALF)
    assert said(outcome) == (
        "obs",
        1,
        [repair_name(REPAIRS[own]) for own in ("refit", "refit_blocks")],
    )
    assert not torch.equal(outcome.model[4].weight, ap.cut(mlp(), outcome.plan)[4].weight)


def test_what_is_said_counts():
    assert said(ap.prune(mlp(), [X], HALF, repair=[])) == ("obs", 1, [])
    assert said(ap.prune(mlp(), [X], HALF, steps=2, repair=[])) == ("obs", 2, [])
    labelled = [(X, torch.arange(40) % 3)]
    assert said(ap.prune(mlp(), labelled, HALF, criterion="oba")) == ("oba", 20, [])
    assert said(ap.prune(mlp(), [X], HALF, criterion="magnitude", steps=3)) == ("magnitude", 3, [])
    own = replace(CRITERIA["magnitude"], name="mine", steps=4, repair=("refit",))
    assert said(ap.prune(mlp(), [X], HALF, criterion=own))[:2] == ("mine", 4)


def test_an_aggregation_is_of_scores_of_parameters():
    labelled = [(X, torch.arange(40) % 3)]
    assert said(ap.prune(mlp(), labelled, HALF, aggregation="paper", steps=2)) == ("oba", 2, [])


def chosen(
    model: nn.Module, x: torch.Tensor, budget: Budget = HALF, task: Task | None = None
) -> str:
    structure = trace(model, x[:1])
    return choose_criterion(model, structure, budget, Selection(), task or Task.classification())


def test_where_too_little_can_be_priced_it_is_oba():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert chosen(model, X) == "obs"

    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 4))
            self.second = nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return (x @ self.first.T).relu() @ self.second.T

    assert chosen(Raw(), X) == "oba"
    labelled = [(X, torch.arange(40) % 3)]
    outcome = ap.prune(Raw(), labelled, HALF)
    assert said(outcome) == ("oba", 20, [])
    assert set(outcome.settings["repair_left_out"]) == {
        repair_name(own) for own in BOTH
    }  # no layers


def test_what_little_can_be_priced_is_not_crushed():
    """Heads inside torch's own attention are not priced; a budget that all groups could share is shared."""
    layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(160, 3)
    )
    x = torch.randn(4, 5, 32)
    assert chosen(model, x, Budget(flops=0.7)) == "obs"
    assert chosen(model, x, Budget(flops=0.38)) == "oba"


def test_layers_that_read_too_much_at_once_are_neither_priced_nor_refitted(monkeypatch):
    model, x = (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)),
        torch.randn(9, 1, 8, 8),
    )
    assert chosen(model, x) == "obs"
    for place in ("curvature.linear_maps", "repair.survey"):
        monkeypatch.setattr(f"apoptosis.{place}.MOST_SIDE", 50)
    assert chosen(model, x) == "oba"
    structure = trace(model, x[:1])
    plan = structure.plan({structure.groups[0].name: [0, 1]})
    found = Refit().fitted(model, ap.cut(model, plan), plan, [x])
    assert "reads 72 numbers at once" in found.left_alone["2"]


def test_a_task_that_shows_no_predictions_gets_oba():
    task = replace(
        Task.classification(),
        rows=None,
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1]),
    )
    assert chosen(mlp(), X, task=task) == "oba"
    batches = [(X, torch.randn(40, 3))]
    outcome = ap.prune(mlp(), batches, HALF, task, steps=2)
    assert said(outcome) == ("oba", 2, [repair_name(own) for own in BOTH])
    unrepaired = ap.prune(mlp(), batches, HALF, task, steps=2, repair=[])
    assert outcome.plan.counts() == unrepaired.plan.counts()
    dense, loss = mlp(), nn.functional.mse_loss
    with torch.no_grad():
        mended, left = (loss(own.model(X), dense(X)) for own in (outcome, unrepaired))
    assert mended < left


def test_a_program_on_the_way_is_no_reason_to_leave_a_repair_out():
    """Widths that the code cannot run in one step may be those it can run in the next."""
    case = small_case("hard coded")
    model, x = case.model(), case.inputs(8)
    plan = ap.prune(model, [(x, None)], Budget(params=0.8), repair=[]).plan
    program = ap.cut(model, plan)
    mends = _Mends(model, [Refit()], [x], Task.classification(), were_asked_for=False)
    for asked in (False, True):
        mends = replace(mends, were_asked_for=asked)
        assert mends(program, plan) is program
        assert list(mends.left_out) == [repair_name(Refit())]
        assert mends.repairs == [Refit()]
    with pytest.raises(ModelError, match="delivered as a program"):
        mends(program, plan, last=True)


def test_a_program_is_not_refitted_unless_asked_for_by_name():
    case = small_case("hard coded")
    model, x = case.model(), case.inputs(8)
    outcome = ap.prune(model, [(x, None)], Budget(params=0.8))
    assert outcome.plan.delivery == "program"
    assert said(outcome)[2] == []
    assert "delivered as a program" in str(outcome.settings["repair_left_out"])
    with pytest.raises(ModelError, match="delivered as a program"):
        ap.prune(model, [(x, None)], Budget(params=0.8), repair=["refit"])


def test_a_refit_that_meets_nan_is_left_out_unless_asked_for_by_name():
    """Of one sample alone, which the criterion does not read."""
    mine = replace(CRITERIA["magnitude"], name="mine", steps=1, repair=("refit",))
    x = X.clone()
    x[5, 0] = float("nan")
    outcome = ap.prune(mlp(), [x], HALF, criterion=mine)
    assert said(outcome) == ("mine", 1, [])
    (name, why), *others = outcome.settings["repair_left_out"].items()
    assert not others
    assert name == "refit(scope='every', ridge=None, rounds=3)"
    assert "NaN or infinity passes it" in why
    for own, want in zip(
        outcome.model.parameters(), ap.cut(mlp(), outcome.plan).parameters(), strict=True
    ):
        assert torch.equal(own, want)
    with pytest.raises(NonFiniteError, match="was to be fitted, and NaN or infinity"):
        ap.prune(mlp(), [x], HALF, criterion=mine, repair=["refit"])
    assert ap.prune(mlp(), [X], HALF, criterion=mine).settings["repair_left_out"] == {}


def test_unknown_names_are_told_before_the_model_is_run():
    class Never(nn.Module):
        def forward(self, _):
            pytest.fail("it was run")

    with pytest.raises(ConfigError, match="criterion 'obz'"):
        ap.prune(Never(), [X], HALF, criterion="obz")


def test_settled_says_what_is_good_for_a_criterion():
    assert settled("obs", None, None)[1:] == (1, ("refit", "refit_blocks"))
    assert settled("taylor", None, None)[1:] == (20, ())
    assert settled("obs", 3, [batch_norm])[1:] == (3, (batch_norm,))


def test_it_keeps_more_of_the_digits_than_oba_did():
    """The default that it replaced: 20 steps and no repair. No labels are read here."""
    torch.manual_seed(0)
    parts, model = digits(), digits_cnn(width=8)
    ap.training.fit_(
        model, parts.train.batches(64, shuffle_seed=0), options=ap.training.FitOptions(epochs=4)
    )
    unlabelled = [(x, None) for x, _ in parts.train.batches(400)]
    quarter = Budget(flops=0.25)
    ours = ap.prune(model, unlabelled, quarter).model
    before = ap.prune(model, parts.train.batches(400), quarter, criterion="oba").model
    kept = [
        ap.training.evaluate(m, parts.validation.batches(300)).metrics["correct"]
        for m in (ours, before)
    ]
    assert kept[0] > kept[1] + 0.1
