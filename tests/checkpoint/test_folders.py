"""At every moment a checkpoint is the old one or the new one: full disks, kills, leftovers, other people's files."""

import copy
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apoptosis.checkpoint import folders, load, loading, read_run, save
from apoptosis.checkpoint.folders import find_folder
from apoptosis.errors import CheckpointError
from apoptosis.masks import Mask, MaskPlan, mask, masks_of
from apoptosis.records import Outcome
from apoptosis.structure import Structure
from oracles.checkpoints import assert_same_network
from oracles.masked_networks import masked
from oracles.small_networks import Counting, pruned
from oracles.untouched import Snapshot

ROWS = torch.linspace(-1, 1, 8).view(2, 4)


def make(kept: int) -> Outcome:
    return pruned(Counting, ROWS, plan=lambda s: s.plan({"a": range(kept)}))


@pytest.fixture
def old() -> Outcome:
    return make(3)


@pytest.fixture(params=["cut", "masked"])
def new(request) -> Outcome:
    """What takes the place of the old one, of either kind."""
    return make(5) if request.param == "cut" else masked(Counting)


@pytest.fixture(params=["exchange", "step aside"])
def way(request, monkeypatch) -> str:
    """Both ways of replacing a folder."""
    if request.param == "step aside":
        monkeypatch.setattr(folders, "_renameat2", lambda: None)
    return request.param


def assert_holds(path: Path, outcome: Outcome) -> None:
    assert_same_network(load(path, dense=Counting), outcome.model, ROWS)


def test_a_checkpoint_is_replaced(tmp_path, old, new, way):
    path = save(tmp_path / "run", old)
    assert save(path, new) == path
    assert_holds(path, new)
    assert list(tmp_path.iterdir()) == [path]


def test_the_exchange_is_what_is_used_here(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "here").touch()
    assert folders._exchange(one, two) == (sys.platform == "linux")
    assert (two / "here").exists() == (sys.platform == "linux")


def test_a_system_that_cannot_exchange(tmp_path, old, new, monkeypatch):
    def refuses(*_) -> int:
        folders.ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(folders, "_renameat2", lambda: refuses)
    path = save(tmp_path / "run", old)
    save(path, new)
    assert_holds(path, new)
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_folder_is_filled(tmp_path, new):
    (tmp_path / "run").mkdir()
    assert_holds(save(tmp_path / "run", new), new)


def test_a_link_stays_a_link(tmp_path, old, new):
    save(tmp_path / "real", old)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link", new)
    assert (tmp_path / "link").is_symlink()
    assert_holds(tmp_path / "real", new)


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", ".hidden"])
def test_a_folder_with_other_files_is_not_replaced(tmp_path, new, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    with pytest.raises(
        CheckpointError, match=f"{name}.*it is no checkpoint, and saving would remove"
    ):
        save(tmp_path / "run", new)
    assert (tmp_path / "run" / name).read_text() == "mine"


def test_a_damaged_checkpoint_may_be_replaced(tmp_path, old, new):
    path = save(tmp_path / "run", old)
    (path / "run.json").write_text("")
    assert_holds(save(path, new), new)


def test_folders_are_as_readable_as_others(tmp_path, new):
    path = save(tmp_path / "run", new)
    (tmp_path / "plain").mkdir()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("failing", range(1, 4))
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch, old, new, failing, number):
    path = save(tmp_path / "run", old)
    before, calls = Snapshot(new.model), []

    def full(stream) -> None:
        calls.append(stream)
        if len(calls) == failing:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("apoptosis.checkpoint.weights.sync_file", full)
        patch.setattr("apoptosis.checkpoint.saving.sync_file", full)
        with pytest.raises(CheckpointError, match=r"takes [\d,]+ bytes; [\d,]+ are free") as caught:
            save(path, new)
    assert isinstance(caught.value.__cause__, OSError)
    before.assert_unchanged()
    assert_holds(path, old)
    assert list(tmp_path.iterdir()) == [path]


def test_a_limit_of_the_system_keeps_the_old_checkpoint(tmp_path, old, new):
    path = save(tmp_path / "run", old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(CheckpointError, match="File too large. The checkpoint takes") as caught:
            save(path, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert_holds(path, old)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_really_full(tmp_path, old):
    """A file system of 64 kB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not allowed here")
    try:
        path = save(disk / "run", old)
        wide = pruned(
            lambda: torch.nn.Sequential(torch.nn.Linear(4, 8000), torch.nn.Linear(8000, 2)), ROWS
        )
        with pytest.raises(CheckpointError, match="No space left on device. The checkpoint takes"):
            save(path, wide)
        assert_holds(path, old)
        assert list(disk.iterdir()) == [path]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch, old, new):
    path = save(tmp_path / "run", old)

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_take_name", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, new)
    assert_holds(path, old)
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_between_the_two_steps(tmp_path, monkeypatch, old, new):
    """Without an exchange, the old checkpoint waits beside its place: it is found, and put back by the next save."""
    path = save(tmp_path / "run", old)
    aside = path.with_name(".run.previous")
    path.rename(aside)
    assert find_folder(path) == aside
    assert_holds(path, old)
    assert read_run(path).delivery == "module"
    with pytest.raises(CheckpointError, match="Setting"):
        save(path, Outcome(new.model, new.plan, settings={"x": object()}))
    assert_holds(path, old)
    save(path, new)
    assert_holds(path, new)
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_between_the_two_steps_behind_a_link(tmp_path, old):
    path = save(tmp_path / "run", old)
    (tmp_path / "link").symlink_to(path)
    path.rename(path.with_name(".run.previous"))
    assert_holds(tmp_path / "link", old)


def test_a_crash_after_the_two_steps(tmp_path, old, new):
    path = save(tmp_path / "run", new)
    save(path.with_name(".run.previous"), old)
    assert_holds(path, new)
    save(path, new)
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_process_go_and_those_of_a_living_one_stay(tmp_path, old, new):
    dead = tmp_path / ".run.saving-0123456789ab"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    foreign = tmp_path / ".run.saving-mine"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with folders._locked_folder(tmp_path / "run") as alive:
        path = save(tmp_path / "run", old)
        assert alive.exists()
        alive.rmdir()
    assert not dead.exists()
    assert (foreign / "notes.txt").read_text() == "mine"
    assert_holds(path, old)


def test_names_with_odd_letters(tmp_path, old, new):
    path = save(tmp_path / "a [1] *ü", old)
    save(path, new)
    assert_holds(path, new)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_read_while_others_write_is_whole(tmp_path, old, new, way):
    """A reader sees one or the other, also where a save happens in the middle of its reading."""
    path, stop = save(tmp_path / "run", old), threading.Event()

    def keep_saving() -> None:
        while not stop.is_set():
            save(path, new)
            save(path, old)
            time.sleep(0.01)

    writer = threading.Thread(target=keep_saving)
    writer.start()
    try:
        widths = {load(path, dense=Counting).a.out_features for _ in range(40)}
    finally:
        stop.set()
        writer.join()
    assert widths <= {3, new.model.a.out_features}


def moved(outcome: Outcome) -> Outcome:
    """The dangerous case: a network of the same names and shapes, so that only numbers tell them apart."""
    new = replace(outcome, model=copy.deepcopy(outcome.model))
    with torch.no_grad():
        new.model.a.weight.mul_(2)
    return new


def turned(outcome: Outcome) -> Outcome:
    """As many weights stay, and others."""
    plan = outcome.plan
    masks = {key: Mask.of(own.names, own.kept().flip(0)) for key, own in plan.masks.items()}
    other = MaskPlan(masks, plan.fingerprint)
    return replace(outcome, model=mask(Counting(), other).eval(), plan=other)


@pytest.mark.parametrize("moment", ["parse_run", "_check_unchanged", "read_part", "read_weights"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: make(3), lambda: moved(make(3))),
        (lambda: masked(Counting), lambda: moved(masked(Counting))),
        (lambda: masked(Counting), lambda: turned(masked(Counting))),
        (lambda: pruned(Counting, ROWS, plan=Structure.identity), lambda: masked(Counting)),
        (lambda: masked(Counting), lambda: pruned(Counting, ROWS, plan=Structure.identity)),
    ],
    ids=["cut", "masked", "other masks", "cut, then masked", "masked, then cut"],
)
def test_a_checkpoint_replaced_in_the_middle_of_a_load_is_not_mixed(
    tmp_path, monkeypatch, before, after, way, moment
):
    old, new = before(), after()
    path, original, calls = save(tmp_path / "run", old), getattr(loading, moment), []

    def replaced(*arguments):
        calls.append(moment)
        if len(calls) == 1:
            save(path, new)
        return original(*arguments)

    monkeypatch.setattr(loading, moment, replaced)
    found = load(path, dense=Counting)
    expected = new if torch.equal(found.a.weight, new.model.a.weight) else old
    assert_same_network(found, expected.model, ROWS)
    kept = masks_of(found)
    assert kept is None or kept.same_as(expected.plan)


def test_many_may_save_at_once(tmp_path, old, new):
    path, failures = tmp_path / "run", []

    def keep_saving(outcome: Outcome) -> None:
        try:
            for _ in range(20):
                save(path, outcome)
        except Exception as error:  # noqa: BLE001 - a thread cannot raise
            failures.append(error)

    writers = [threading.Thread(target=keep_saving, args=(o,)) for o in (old, new, old)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failures == []
    assert load(path, dense=Counting).a.out_features in (3, new.model.a.out_features)
    assert list(tmp_path.iterdir()) == [path]


SERVER = """
import os, sys
from oracles.masked_networks import masked
from oracles.small_networks import Counting, pruned
from apoptosis.checkpoint import folders, save
import torch

rows = torch.linspace(-1, 1, 8).view(2, 4)
old, new = (pruned(Counting, rows, plan=lambda s: s.plan({"a": range(n)})) for n in (3, 5))
if sys.argv[2] == "step aside":
    folders._renameat2 = lambda: None
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        while True:
            save(sys.argv[1], new)
            save(sys.argv[1], old)
            save(sys.argv[1], masked(Counting))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", ["exchange", "step aside"])
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path, old, way):
    outcomes = {3: old, 5: make(5), 8: masked(Counting)}
    path, rng = tmp_path / "run", random.Random(0)
    tests = Path(__file__).parents[1]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tests)},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    save(path, old)
    kills = leftovers = 0
    try:
        assert server.stdout.readline() == "ready\n"
        while kills < 15 or (not leftovers and kills < 100):
            server.stdin.write("go\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            time.sleep(rng.random() * 0.03)
            os.kill(child, signal.SIGKILL)
            assert server.stdout.readline() == "gone\n"
            kills += 1
            leftovers += any(".saving-" in item.name for item in tmp_path.iterdir())
            found = load(path, dense=Counting)
            assert_same_network(found, outcomes[found.a.out_features].model, ROWS)
    finally:
        server.kill()
        server.communicate()
    assert leftovers, "no kill came in the middle of a save"
    save(path, old)
    assert_holds(path, old)
    assert list(tmp_path.iterdir()) == [path]
