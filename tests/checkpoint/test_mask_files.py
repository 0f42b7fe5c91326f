"""Masks alone in a file: what is read is what was written, or there is an error in words."""

import errno
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from apoptosis.checkpoint import load_masks, save, save_masks
from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.masks import MaskPlan, identity_masks, mask, masks_of
from oracles.masked_networks import masked, random_masks, two_of_four
from oracles.small_networks import Convolutions, Counting, Tied


@pytest.fixture
def masks() -> MaskPlan:
    return random_masks(Counting(), 0.3)


@pytest.mark.parametrize(
    "plan",
    [
        random_masks(Convolutions(), 0.3),
        random_masks(Tied(), 0.0),
        identity_masks(Counting()),
        two_of_four(Counting(), ("a.weight",)),
        MaskPlan({}, "of nothing"),
    ],
    ids=["random", "empty", "whole", "2:4", "none"],
)
def test_masks_come_back(tmp_path, plan):
    path = save_masks(tmp_path / "masks.safetensors", plan)
    found = load_masks(path)
    assert found.same_as(plan)
    assert [(o.names, o.shape, o.pattern, o.dim) for o in found.masks.values()] == [
        (o.names, o.shape, o.pattern, o.dim) for o in plan.masks.values()
    ]
    assert path.read_bytes() == plan.to_bytes()


def test_masks_from_a_file_can_be_put_on(tmp_path, masks):
    model = mask(Counting(), load_masks(save_masks(tmp_path / "x", masks)))
    assert masks.holds(model)
    assert masks_of(model).same_as(masks)


def test_the_file_is_read_without_this_library(tmp_path, masks):
    from safetensors.numpy import load_file

    bits = load_file(save_masks(tmp_path / "x", masks))["a.weight"]
    kept = np.unpackbits(bits, count=32, bitorder="little").reshape(8, 4)
    assert torch.equal(torch.from_numpy(kept).bool(), masks.kept("a.weight"))


def test_a_checkpoint_has_such_a_file(tmp_path):
    outcome = masked(Counting)
    path = save(tmp_path / "run", outcome)
    assert load_masks(path / "masks.safetensors").same_as(outcome.plan)
    with pytest.raises(CheckpointError, match=r"run is a folder; .* Give .*masks.safetensors\."):
        load_masks(path)


def test_a_file_is_replaced_and_folders_are_made(tmp_path, masks):
    path = save_masks(tmp_path / "deep" / "er" / "x", masks)
    save_masks(path, identity_masks(Counting()))
    assert load_masks(path).density == 1
    assert [file.name for file in path.parent.iterdir()] == ["x"]


def test_a_link_stays_a_link(tmp_path, masks):
    save_masks(tmp_path / "real", identity_masks(Counting()))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_masks(tmp_path / "link", masks)
    assert (tmp_path / "link").is_symlink()
    assert load_masks(tmp_path / "real").same_as(masks)


def test_home_folders(tmp_path, monkeypatch, masks):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save_masks("~/x", masks) == tmp_path / "x"
    assert load_masks("~/x").same_as(masks)
    with pytest.raises(CheckpointError, match="home directory. Give the whole path"):
        load_masks("~nobody-of-that-name/x")


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="no such file. Give the file that `save_masks`"):
        load_masks(tmp_path / "nowhere")


def test_a_folder(tmp_path, masks):
    with pytest.raises(CheckpointError, match="is a folder; masks are one file. Give the file"):
        load_masks(tmp_path)
    with pytest.raises(CheckpointError, match="is a folder; masks are one file. Give the name"):
        save_masks(tmp_path, masks)


def test_a_file_on_the_way(tmp_path, masks):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="could not be written: .*Give a place"):
        save_masks(tmp_path / "x" / "y", masks)
    with pytest.raises(CheckpointError, match="cannot be read: .*Give a file that may be read"):
        load_masks(tmp_path / "x" / "y")


@pytest.mark.parametrize("what", [None, nn.Linear(2, 2), {"weight": torch.ones(2)}], ids=str)
def test_something_else_is_refused(tmp_path, what):
    with pytest.raises(CheckpointError, match=f"A {type(what).__name__} was to be saved as masks"):
        save_masks(tmp_path / "x", what)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch, masks):
    path = save_masks(tmp_path / "x", masks)

    def full(_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("apoptosis.checkpoint.mask_files.sync_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*takes [\d,]+ bytes") as caught:
        save_masks(path, identity_masks(Counting()))
    assert isinstance(caught.value.__cause__, OSError)
    assert load_masks(path).same_as(masks)
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_somebody_else(tmp_path):
    path = save(tmp_path / "run", masked(Counting))
    for name in ("model.safetensors", "run.json"):
        with pytest.raises(
            CheckpointError, match=f"{name} cannot be read. These are no masks"
        ) as e:
            load_masks(path / name)
        assert isinstance(e.value.__cause__, ApoptosisError)


def test_any_damage_is_refused_or_harmless(tmp_path, masks):
    whole, rng, refused = masks.to_bytes(), random.Random(0), 0
    for _ in range(600):
        data = bytearray(whole)
        kind = rng.randrange(5)
        place = rng.randrange(len(data))
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[:place]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.choice((1, 8)))
        elif kind == 3:
            del data[place : place + rng.choice((1, 8))]
        else:
            data[:8] = rng.choice((2**63, 2**40, 10**8)).to_bytes(8, "little")
        (tmp_path / "x").write_bytes(data)
        try:
            found = load_masks(tmp_path / "x")
        except CheckpointError:
            refused += 1
        else:
            assert found.same_as(masks)
    assert refused > 550


def test_a_part_of_a_checkpoint_is_not_overwritten(tmp_path):
    path = save(tmp_path / "run", masked(Counting))
    for name in ("run.json", "model.safetensors", "masks.safetensors"):
        with pytest.raises(CheckpointError, match="part of a checkpoint"):
            save_masks(path / name, identity_masks(Counting()))
    save_masks(path.parent / "masks.safetensors", identity_masks(Counting()))
