"""Runs that are stopped at any moment go on to the same end, bit for bit.

Stopped from inside: at every reading of a batch, and at every writing of a note. Stopped from outside: `kill -9` at
random moments, again and again, until the run has come through.
"""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from apoptosis.checkpoint import open_journal
from apoptosis.criteria import find_criterion
from apoptosis.errors import CheckpointError, ModelError
from apoptosis.planning import Budget, Selection
from apoptosis.repair import Refit, batch_norm
from apoptosis.structure import trace
from apoptosis.workflow import prune
from oracles.interrupted_run import RUNS, material, trained

KINDS = sorted(RUNS)
SCRIPT = Path(__file__).parents[1] / "oracles" / "interrupted_run.py"


class Stopped(BaseException):
    """As if the process had ended here."""


class Fuse:
    """Counts what happens, and ends it at a given moment."""

    def __init__(self, at: int | None = None) -> None:
        self.seen, self.at = 0, at

    def __call__(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise Stopped


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return trained()


@pytest.fixture(scope="module")
def unbroken(dense):
    """What each run comes to without any journal, and how many batches it reads."""
    found = {}
    for kind in KINDS:
        fuse = Fuse()
        model = RUNS[kind](dense, material(fuse), None)
        found[kind] = ({name: own.clone() for name, own in model.state_dict().items()}, fuse.seen)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert torch.equal(own, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_changes_nothing(kind, dense, unbroken, tmp_path):
    with open_journal(tmp_path / "run", {"kind": kind}) as journal:
        model = RUNS[kind](dense, material(), journal)
    assert_same(model.state_dict(), unbroken[kind][0])


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_any_batch_it_ends_the_same(kind, dense, unbroken, tmp_path):
    expected, num_batches = unbroken[kind]
    draw = random.Random(kind)
    for trial in range(4):
        place = tmp_path / str(trial)
        moments = sorted(draw.sample(range(1, num_batches), 3))
        for life, moment in enumerate(moments):
            with (
                pytest.raises(Stopped),
                open_journal(place, {"kind": kind}, resume=life > 0) as journal,
            ):
                RUNS[kind](dense, material(Fuse(max(1, moment // (life + 1)))), journal)
        with open_journal(place, {"kind": kind}, resume=True) as journal:
            model = RUNS[kind](dense, material(), journal)
        assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("kind", ["iterative", "gradual"])
def test_what_was_done_is_not_done_again(kind, dense, unbroken, tmp_path):
    _, num_batches = unbroken[kind]
    late = int(0.9 * num_batches)
    with pytest.raises(Stopped), open_journal(tmp_path / "run", {"kind": kind}) as journal:
        RUNS[kind](dense, material(Fuse(late)), journal)
    fuse = Fuse()
    with open_journal(tmp_path / "run", {"kind": kind}, resume=True) as journal:
        RUNS[kind](dense, material(fuse), journal)
    assert fuse.seen < 0.6 * num_batches


@pytest.mark.parametrize("kind", ["fit", "prune", "sparsify"])
@pytest.mark.parametrize("before", [True, False], ids=["before the rename", "after it"])
def test_stopped_while_a_note_is_written_it_ends_the_same(
    kind, before, dense, unbroken, tmp_path, monkeypatch
):
    expected, _ = unbroken[kind]
    renamed = Path.replace

    for number in (1, 2):
        place, fuse = tmp_path / str(number), Fuse(number)

        def dying(path: Path, target: Path, fuse: Fuse = fuse) -> Path:
            if before and target.suffix == ".note":
                fuse()
            found = renamed(path, target)
            if not before and target.suffix == ".note":
                fuse()
            return found

        monkeypatch.setattr(Path, "replace", dying)
        with pytest.raises(Stopped), open_journal(place, {"kind": kind}) as journal:
            RUNS[kind](dense, material(), journal)
        monkeypatch.setattr(Path, "replace", renamed)
        with open_journal(place, {"kind": kind}, resume=True) as journal:
            model = RUNS[kind](dense, material(), journal)
        assert_same(model.state_dict(), expected)


def killed_until_done(kind: str, place: Path, draw: random.Random, longest: float) -> int:
    """Kill the process at random moments until it comes through; how often that was."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *sys.path]),
    }
    for life in range(30):
        words = [sys.executable, str(SCRIPT), kind, str(place), *(["resume"] if life else [])]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            # Later lives are given longer, so that the run comes through.
            process.wait(draw.uniform(0, longest) * (1 + life / 2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.stdout.close()
        if process.wait() == 0:
            return life
    raise AssertionError("it never came through")


def check_killed(kind: str, unbroken, tmp_path: Path, seed: int, longest: float = 0.5) -> None:
    start = time.perf_counter()
    assert killed_until_done(kind, tmp_path, random.Random(seed), longest) >= 1, (
        "else nothing is shown"
    )
    assert time.perf_counter() - start < 300
    assert_same(load_file(tmp_path / "result.safetensors"), unbroken[kind][0])
    assert not (tmp_path / "notes").exists(), "nothing is left of the notes"


@pytest.mark.skipif(os.name == "nt", reason="there is no kill -9")
def test_killed_at_random_moments_it_ends_the_same(unbroken, tmp_path):
    check_killed("iterative", unbroken, tmp_path, seed=2, longest=0.8)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there is no kill -9")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_more_random_moments_it_ends_the_same(kind, seed, unbroken, tmp_path):
    check_killed(kind, unbroken, tmp_path, seed=seed + 100)


def pruned(dense: nn.Module, place: Path, *, stop_at: int | None = None, **choices):
    """`prune` with a journal in `place`, gone on with if it is there."""
    with open_journal(place, {}, resume=place.exists()) as journal:
        data = material(Fuse(stop_at))
        return prune(dense, data.scoring, Budget(flops=0.4), journal=journal, **choices)


def stopped_run(dense: nn.Module, place: Path, **choices) -> None:
    """Ended in its second step: each reads the batches, and there are two of them."""
    with pytest.raises(Stopped):
        pruned(dense, place, stop_at=5, **choices)
    assert list(place.glob("*.note"))


def test_choices_that_were_not_said_again_are_those_the_run_began_with(dense, tmp_path):
    """As if defaults had been others when it began."""
    begun = {"criterion": "taylor-gate", "steps": 3, "repair": ["batch_norm"]}
    whole = pruned(dense, tmp_path / "whole", **begun)
    stopped_run(dense, tmp_path / "parts", **begun)
    found = pruned(dense, tmp_path / "parts")
    assert_same(found.model.state_dict(), whole.model.state_dict())
    assert found.settings == whole.settings
    assert len(found.history) == 3


def test_a_default_repair_stays_one_that_nobody_insists_on(dense, tmp_path, monkeypatch):
    """Where it fails, it is left out, in the second life too; said to begin with, it is told."""

    def failing(*_):
        raise ModelError("no layers")

    monkeypatch.setattr(Refit, "__call__", failing)
    stopped_run(dense, tmp_path / "unsaid", criterion="obs", steps=2)
    found = pruned(dense, tmp_path / "unsaid")
    assert list(found.settings["repair_left_out"].values()) == ["no layers"]
    stopped_run(dense, tmp_path / "said", criterion="obs", steps=2, repair=["refit"])
    with pytest.raises(ModelError, match="no layers"):
        pruned(dense, tmp_path / "said")


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"criterion": "magnitude"}, r"criterion \"taylor-gate\" \(now \"magnitude\"\)"),
        ({"steps": 5}, r"steps 3 \(now 5\)"),
        ({"repair": ["batch_norm"]}, r"repair \[\] \(now \[\"batch_norm\"\]\)"),
        ({"repair_between": True}, r"repair_between false \(now true\)"),
        ({"selection": Selection(floor=2)}, r"selection.floor 1 \(now 2\)"),
        ({"aggregation": "paper"}, r"aggregation null \(now "),
    ],
    ids=lambda own: next(iter(own)) if isinstance(own, dict) else "",
)
def test_other_choices_than_the_run_began_with_are_refused(dense, tmp_path, now, told):
    place = tmp_path / "run"
    stopped_run(dense, place, criterion="taylor-gate", steps=3)
    with pytest.raises(CheckpointError, match=told) as caught:
        pruned(dense, place, **now)
    assert "Go on with the same" in str(caught.value)
    assert str(place) in str(caught.value)
    assert len(str(caught.value)) < 600
    assert len(pruned(dense, place, criterion="taylor-gate").history) == 3, "notes are as they were"


def test_another_budget_than_the_run_began_with_is_refused(dense, tmp_path):
    stopped_run(dense, tmp_path / "run", criterion="taylor-gate", steps=3)
    with (
        open_journal(tmp_path / "run", {}, resume=True) as journal,
        pytest.raises(CheckpointError, match=r"budget.flops 0.4 \(now 0.3\)"),
    ):
        prune(dense, material().scoring, Budget(flops=0.3), journal=journal)


def test_what_was_given_as_an_object_has_to_be_given_again(dense, tmp_path):
    own = replace(find_criterion("taylor-gate"), name="mine")
    mend = Refit(scope="consumers")
    begun = {"criterion": own, "steps": 3, "repair": [mend]}
    whole = pruned(dense, tmp_path / "whole", **begun)
    stopped_run(dense, tmp_path / "parts", **begun)
    with pytest.raises(CheckpointError, match=r"criterion 'mine'.*criterion="):
        pruned(dense, tmp_path / "parts", repair=[mend])
    with pytest.raises(CheckpointError, match=r"repair .*consumers.*repair="):
        pruned(dense, tmp_path / "parts", criterion=own)
    found = pruned(dense, tmp_path / "parts", criterion=own, repair=[mend])
    assert_same(found.model.state_dict(), whole.model.state_dict())


def test_a_criterion_of_ones_own_does_not_pass_for_the_one_whose_name_it_has(dense, tmp_path):
    own = replace(find_criterion("taylor-gate"), score_units=find_criterion("gates").score_units)
    stopped_run(dense, tmp_path / "run", criterion=own, steps=3)
    with pytest.raises(CheckpointError, match=r"criterion 'taylor-gate \(your own\)'.*again"):
        pruned(dense, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"your own.* \(now \"taylor-gate\"\)"):
        pruned(dense, tmp_path / "run", criterion="taylor-gate")
    found = pruned(dense, tmp_path / "run", criterion=own)
    assert found.settings["criterion"] == "taylor-gate"


def test_a_repair_of_ones_own_does_not_pass_for_the_one_whose_name_it_has(dense, tmp_path):
    def own(*args):
        return batch_norm(*args)

    own.__name__ = "batch_norm"
    begun = {"criterion": "taylor-gate", "steps": 3}
    stopped_run(dense, tmp_path / "run", repair=[own], **begun)
    with pytest.raises(CheckpointError, match=r"repair 'batch_norm \(your own\)'.*again"):
        pruned(dense, tmp_path / "run", **begun)
    assert pruned(dense, tmp_path / "run", repair=[own], **begun).settings["repair"] == [
        "batch_norm"
    ]


def test_choices_given_as_sets_are_noted_in_the_same_order_by_every_process(dense, tmp_path):
    """Texts have other hashes in each process, and sets another order."""
    inputs, _ = next(iter(material().scoring))
    chosen = Selection(kinds={group.kind for group in trace(dense, inputs[:1]).groups})
    place = tmp_path / "run"
    stopped_run(dense, place, criterion="taylor-gate", steps=3, selection=chosen)
    with open_journal(place, {}, resume=True) as journal:
        note = journal.read("step")
    assert note is not None
    assert note.facts["choices"]["selection"]["kinds"] == sorted(chosen.kinds)


def test_a_repair_without_a_name_of_its_own_is_known_again(dense, tmp_path):
    """Its text has an address in it, which is another one in each process."""
    begun = {"criterion": "taylor-gate", "steps": 3}
    stopped_run(dense, tmp_path / "run", repair=[partial(batch_norm)], **begun)
    away = [partial(batch_norm) for _ in range(3)]
    found = pruned(dense, tmp_path / "run", repair=[away[-1]], **begun)
    assert "0x" not in found.settings["repair"][0]


def without_choices_(place: Path) -> None:
    """As notes were before they had them."""
    with open_journal(place, {}, resume=True) as journal:
        note = journal.read("step")
        assert note is not None
        facts = {name: own for name, own in note.facts.items() if name != "choices"}
        journal.write("step", facts, note.tensors)


@pytest.mark.parametrize("said", [{}, {"criterion": "taylor-gate"}, {"steps": 3}])
def test_notes_that_do_not_say_what_they_are_of_are_refused(dense, tmp_path, said):
    stopped_run(dense, tmp_path / "run", criterion="taylor-gate", steps=3)
    without_choices_(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"older version.*[Bb]egin again in a new folder"):
        pruned(dense, tmp_path / "run", **said)


def test_notes_that_do_not_say_what_they_are_of_go_on_where_that_is_said(dense, tmp_path):
    begun = {"criterion": "taylor-gate", "steps": 3}
    whole = pruned(dense, tmp_path / "whole", **begun)
    stopped_run(dense, tmp_path / "parts", **begun)
    without_choices_(tmp_path / "parts")
    found = pruned(dense, tmp_path / "parts", **begun)
    assert_same(found.model.state_dict(), whole.model.state_dict())
