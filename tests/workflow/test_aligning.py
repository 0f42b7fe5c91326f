"""`prune` with heads aligned first: who gets it, what records say, and runs that go on."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.alignment import align_heads
from apoptosis.checkpoint import open_journal
from apoptosis.criteria import find_criterion
from apoptosis.errors import CheckpointError, ConfigError
from apoptosis.models import ViTOptions, digits_cnn, vit
from apoptosis.structure import cut, trace
from apoptosis.training import FitOptions
from apoptosis.workflow import Material, Pruning, iterative, one_shot, prune
from apoptosis.workflow import pruning as MODULE
from apoptosis.workflow import turned as TURNED
from oracles.untouched import Snapshot

OPTIONS = ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=2, num_classes=3)
HALF = ap.Budget(flops=0.6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return vit(OPTIONS).eval()


def batches(num: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(num)
    ]


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(own, theirs[name]) for name, own in one.state_dict().items())


def test_unless_said_heads_are_aligned_where_obs_decides():
    model, data = net(), batches()
    before = Snapshot(model)
    unsaid, said, refused = (
        prune(model, data, HALF, align=align, repair=[]) for align in (None, True, False)
    )
    before.assert_unchanged()
    assert (unsaid.settings["criterion"], unsaid.settings["align"]) == ("obs", True)
    assert same(unsaid.model, said.model)
    assert len(unsaid.settings["aligned"]) == 2
    assert unsaid.settings["not_aligned"] == {}
    assert refused.settings["align"] is False
    assert "aligned" not in refused.settings
    assert not same(refused.model, unsaid.model)


def test_it_is_the_cut_of_the_network_that_was_aligned():
    model, data = net(), batches()
    outcome = prune(model, data, HALF, repair=[])
    structure = trace(model, data[0][0][:1])
    turned = align_heads(model, structure, data).model
    assert same(outcome.model, cut(turned, outcome.plan))
    assert any(name.endswith("_dim") for name in outcome.plan.kept)
    by_hand = prune(turned, data, HALF, repair=[], align=False)
    assert by_hand.plan.counts() == outcome.plan.counts()
    assert same(by_hand.model, outcome.model)


def test_repairs_are_given_the_aligned_network():
    model, data, seen = net(), batches(), []

    def watch(dense, small, plan, own, task):
        seen.append(dense)
        return small

    prune(model, data, HALF, repair=[watch])
    structure = trace(model, data[0][0][:1])
    assert same(seen[0], align_heads(model, structure, data).model)


@pytest.mark.parametrize("criterion", ["gates", "magnitude-l2", "taylor"])
def test_others_are_aligned_where_that_is_asked_for(criterion: str):
    model, data = net(), batches()
    plain = prune(model, data, HALF, criterion=criterion, steps=1)
    aligned = prune(model, data, HALF, criterion=criterion, steps=1, align=True)
    assert plain.settings["align"] is False
    assert len(aligned.settings["aligned"]) == 2
    assert not same(plain.model, aligned.model)


def test_groups_that_stay_whole_are_not_turned():
    model, data = net(), batches()
    kinds = ap.Selection(kinds=("hidden", "v_dim"))
    outcome = prune(model, data, ap.Budget(flops=0.8), selection=kinds, repair=[])
    assert all(name.endswith("v_dim") for name in outcome.settings["aligned"])
    assert len(outcome.settings["aligned"]) == 1


def test_networks_without_heads_say_so_and_nothing_else_changes():
    model = digits_cnn(width=6)
    data = [(torch.randn(8, 1, 8, 8), torch.zeros(8).long())]
    outcome = prune(model, data, HALF, repair=[])
    assert (outcome.settings["aligned"], outcome.settings["not_aligned"]) == ([], {})
    assert same(outcome.model, prune(model, data, HALF, align=False, repair=[]).model)


def test_less_is_lost_than_with_heads_as_they_are():
    """Of what the outputs are: head dimensions alone go, and nothing is repaired."""
    torch.manual_seed(0)
    wide = ViTOptions(image_size=8, patch_size=2, width=32, depth=2, num_heads=2, num_classes=3)
    model = vit(wide).eval()
    data = [(torch.randn(64, 3, 8, 8), torch.zeros(64).long())]
    dims = ap.Selection(kinds=("qk_dim", "v_dim"))
    lost = {}
    with torch.no_grad():
        want = model(data[0][0])
        for align in (True, False):
            small = prune(
                *(model, data, ap.Budget(units=0.5)), selection=dims, align=align, repair=[]
            ).model
            lost[align] = float((small(data[0][0]) - want).square().mean())
    assert lost[True] < 0.8 * lost[False]


# ------------------------------------------------------------------------------------------------- runs that go on


class Stop(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("at", range(1, 12, 3))
def test_a_run_that_was_stopped_ends_the_same(at: int, tmp_path):
    model, data = net(), batches()
    how = {"criterion": "gates", "steps": 3, "align": True}
    whole = prune(model, data, HALF, **how)

    class Failing(list):
        num = 0

        def __iter__(self):
            for batch in super().__iter__():
                Failing.num += 1
                if Failing.num == at + 1:  # the first is looked at for its shape
                    raise Stop
                yield batch

    place = tmp_path / "run"
    with pytest.raises(Stop), open_journal(place, {}) as journal:
        prune(model, Failing(data), HALF, **how, journal=journal)
    with open_journal(place, {}, resume=True) as journal:
        found = prune(model, data, HALF, **how, journal=journal)
    assert same(found.model, whole.model)
    assert found.settings == whole.settings


def stopped(model: nn.Module, place, monkeypatch, **how) -> None:
    """After its first step."""

    def write(*_):
        noted(*_)
        raise Stop

    noted = MODULE.note_units
    with monkeypatch.context() as patch, open_journal(place, {}) as journal:
        patch.setattr(MODULE, "note_units", write)
        with pytest.raises(Stop):
            prune(model, batches(), HALF, criterion="gates", steps=3, journal=journal, **how)


@pytest.mark.parametrize("align", [True, False])
def test_it_goes_on_as_it_began_and_as_nothing_else(align: bool, tmp_path, monkeypatch):
    model, place = net(), tmp_path / "run"
    stopped(model, place, monkeypatch, align=align)
    with (
        open_journal(place, {}, resume=True) as journal,
        pytest.raises(CheckpointError, match=f"align {str(align).lower()}"),
    ):
        prune(model, batches(), HALF, align=not align, journal=journal)
    with open_journal(place, {}, resume=True) as journal:
        found = prune(model, batches(), HALF, journal=journal)
    assert found.settings["align"] is align
    assert same(
        found.model, prune(model, batches(), HALF, criterion="gates", steps=3, align=align).model
    )


def test_notes_from_before_there_was_a_choice_go_on_without(tmp_path, monkeypatch):
    model, place = net(), tmp_path / "run"
    stopped(model, place, monkeypatch, align=False)
    with open_journal(place, {}, resume=True) as journal:
        note = journal.read("step")
        assert note is not None
        choices = {name: own for name, own in note.facts["choices"].items() if name != "align"}
        journal.write("step", {**note.facts, "choices": choices}, note.tensors)
    with open_journal(place, {}, resume=True) as journal:
        found = prune(model, batches(), HALF, journal=journal)
    assert found.settings["align"] is False
    assert same(found.model, prune(model, batches(), HALF, criterion="gates", steps=3).model)


def test_notes_of_versions_without_choices_go_on_without(tmp_path, monkeypatch):
    model, place = net(), tmp_path / "run"
    stopped(model, place, monkeypatch, align=False)
    with open_journal(place, {}, resume=True) as journal:
        note = journal.read("step")
        assert note is not None
        facts = {name: own for name, own in note.facts.items() if name != "choices"}
        journal.write("step", facts, note.tensors)
    how = {"criterion": "gates", "steps": 3}
    with (
        open_journal(place, {}, resume=True) as journal,
        pytest.raises(CheckpointError, match="al"),
    ):
        prune(model, batches(), HALF, **how, align=True, journal=journal)
    gates = replace(find_criterion("gates"), align=True)  # as a criterion that wants it by itself
    with open_journal(place, {}, resume=True) as journal:
        found = prune(model, batches(), HALF, criterion=gates, steps=3, journal=journal)
    assert found.settings["align"] is False
    assert same(found.model, prune(model, batches(), HALF, **how).model)


def test_a_run_that_goes_on_has_the_turned_heads_of_its_first_life(tmp_path, monkeypatch):
    model, place = net(), tmp_path / "run"
    stopped(model, place, monkeypatch, align=True)
    how = {"criterion": "gates", "steps": 3, "align": True}
    whole = prune(model, batches(), HALF, **how)
    monkeypatch.setattr(TURNED, "align_heads", None)  # nobody aligns again
    with open_journal(place, {}, resume=True) as journal:
        found = prune(model, batches(), HALF, **how, journal=journal)
    assert same(found.model, whole.model)
    assert same(found.dense, whole.dense)
    assert found.settings == whole.settings


def test_a_run_of_another_network_is_refused(tmp_path, monkeypatch):
    model, place = net(), tmp_path / "run"
    stopped(model, place, monkeypatch, align=True)
    wider = vit(replace(OPTIONS, width=24)).eval()
    with (
        open_journal(place, {}, resume=True) as journal,
        pytest.raises(CheckpointError, match="began with another network"),
    ):
        prune(wider, batches(), HALF, criterion="gates", steps=3, align=True, journal=journal)


def test_before_the_first_step_a_run_already_knows_its_choices(tmp_path):
    model, place = net(), tmp_path / "run"
    how = {"criterion": "gates", "steps": 3, "align": True}

    class Failing(list):
        """Read for the first sample, for the heads, and then no more."""

        num = 0

        def __iter__(self):
            Failing.num += 1
            if Failing.num == 3:
                raise Stop
            return super().__iter__()

    with pytest.raises(Stop), open_journal(place, {}) as journal:
        prune(model, Failing(batches()), HALF, **how, journal=journal)
    other = ap.Selection(kinds=("hidden", "v_dim"))
    with (
        open_journal(place, {}, resume=True) as journal,
        pytest.raises(CheckpointError, match=r"selection\.kinds"),
    ):
        prune(model, batches(), HALF, **how, selection=other, journal=journal)
    with open_journal(place, {}, resume=True) as journal:
        found = prune(model, batches(), HALF, journal=journal)  # as it began
    assert same(found.model, prune(model, batches(), HALF, **how).model)


def test_the_plan_is_one_for_the_network_that_the_outcome_has():
    model, data = net(), batches()
    outcome = prune(model, data, HALF, repair=[])
    assert outcome.dense is not model
    assert same(cut(outcome.dense, outcome.plan), outcome.model)
    x = data[0][0]
    with torch.no_grad():
        torch.testing.assert_close(outcome.dense(x), model(x), rtol=1e-4, atol=1e-5)
    assert prune(model, data, HALF, align=False, repair=[]).dense is model


@pytest.mark.parametrize("align", ["no", 0, 1])
def test_align_is_yes_or_no(align: Any):
    with pytest.raises(ConfigError, match="it is True or False"):
        prune(net(), batches(), HALF, align=align)


class Written(nn.Module):
    """Attention whose code has the width of a head written into it, and a layer with hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.head = nn.Linear(16, 3)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, x.shape[2] // 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(own(x)).transpose(1, 2) for own in (self.q, self.k, self.v))
        mixed = (q @ k.mT / 8**0.5).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return self.head((x + self.down(self.up(x).relu())).mean(1))


class AllWritten(Written):
    """The number of heads as well."""

    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 2, 8)


def written(kind: type[Written]) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    return kind().eval(), [(torch.randn(16, 5, 16), torch.zeros(16).long()) for _ in range(2)]


@pytest.mark.parametrize("kind", [Written, AllWritten])
def test_heads_are_spared_where_a_refit_would_be_lost(kind: type[Written]):
    model, data = written(kind)
    small = prune(model, data, HALF)
    assert small.plan.delivery == "module"
    assert small.settings["repair_left_out"] == {}
    assert small.spent[0].got <= 0.6
    kinds = {group.name: group.kind for group in trace(model, data[0][0][:1]).groups}
    spared = small.settings["spared"]["kinds"]
    assert "qk_dim" in spared
    assert not {kinds[name] for name in small.plan.kept} & set(spared)
    assert small.settings["spared"]["because"]


@pytest.mark.parametrize("share", [0.9, 0.6, 0.5])
@pytest.mark.parametrize("kind", [Written, AllWritten])
def test_what_is_spared_is_spared_in_every_step_and_every_life(
    kind: type[Written], share: float, tmp_path, monkeypatch
):
    model, data = written(kind)
    budget = ap.Budget(flops=share)
    whole = prune(model, data, budget, steps=3)
    assert whole.plan.delivery == "module"
    assert whole.spent[0].got <= share
    noted = MODULE.note_units
    for last in (1, 2, 3):
        place = tmp_path / str(last)

        def write(journal: Any, plan: Any, history: Any, *others: Any, last: int = last) -> None:
            noted(journal, plan, history, *others)
            if len(history) == last:
                raise Stop

        with monkeypatch.context() as patch, open_journal(place, {}) as journal:
            patch.setattr(MODULE, "note_units", write)
            with pytest.raises(Stop):
                prune(model, data, budget, steps=3, journal=journal)
        with open_journal(place, {}, resume=True) as journal:
            found = prune(model, data, budget, journal=journal)
        assert same(found.model, whole.model)
        assert found.settings == whole.settings


@pytest.mark.parametrize(
    ("budget", "how"),
    [
        (HALF, {"selection": ap.Selection(kinds=("qk_dim", "v_dim", "hidden"))}),
        (HALF, {"selection": ap.Selection(shares={"q:qk_dim": 0.5})}),
        (HALF, {"repair": []}),
        (ap.Budget(flops=0.15), {}),
    ],
    ids=["kinds said", "a share said", "no repair", "no other way"],
)
def test_heads_are_not_spared(budget: ap.Budget, how: dict[str, Any]):
    model, data = written(AllWritten)
    small = prune(model, data, budget, **how)
    assert small.plan.delivery == "program"
    assert "spared" not in small.settings


def test_roads_hand_it_on():
    model, data = net(), batches()
    material = Material(scoring=data, training=data, validation=data)
    fit = FitOptions(epochs=1)
    how = Pruning(criterion="gates", steps=1, align=True, repair=())
    assert len(one_shot(model, HALF, material, pruning=how, fit=fit).settings["aligned"]) == 2
    rounds = iterative(model, [ap.Budget(flops=0.8), HALF], material, pruning=how, fit=fit)
    assert all(own.settings["aligned"] for own in rounds)
    assert rounds[0].dense is not None
    assert rounds[1].dense is None
