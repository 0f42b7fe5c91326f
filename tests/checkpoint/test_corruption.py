"""Damage of every kind in every file: what loads is exactly the network that was saved, or nothing does."""

import random
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apoptosis.checkpoint import load, save
from apoptosis.errors import CheckpointError
from apoptosis.masks import masks_of
from apoptosis.records import Outcome
from oracles.checkpoints import assert_same_network
from oracles.masked_networks import masked
from oracles.small_networks import Convolutions, Counting, InCode, pruned

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 8).view(2, 4)


def bit_flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def other_byte(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def other_digit(data: bytearray, rng: random.Random) -> bytearray:
    """Numbers in JSON: the damage that is still well-formed."""
    digits = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    data[rng.choice(digits)] = ord(rng.choice("0123456789"))
    return data


def truncation(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def insertion(data: bytearray, rng: random.Random) -> bytearray:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 1, 8, 100))) + data[place:]


def gap(data: bytearray, rng: random.Random) -> bytearray:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.choice((1, 2, 8, 64)) :]


def zeros(data: bytearray, rng: random.Random) -> bytearray:
    """A block that never reached the disk."""
    place, length = rng.randrange(len(data)), rng.choice((1, 16, 512))
    data[place : place + length] = bytes(len(data[place : place + length]))
    return data


def huge_header(data: bytearray, rng: random.Random) -> bytearray:
    """What a safetensors file would say of itself."""
    data[:8] = rng.choice((2**63, 2**40, 2**32, 10**8)).to_bytes(8, "little")
    return data


def nothing(data: bytearray, rng: random.Random) -> bytearray:
    return bytearray()


def doubled(data: bytearray, rng: random.Random) -> bytearray:
    return data + data


KINDS: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    bit_flip,
    bit_flip,
    other_byte,
    other_digit,
    truncation,
    insertion,
    gap,
    zeros,
    huge_header,
    nothing,
    doubled,
)


def cut_pair(make: type, inputs: torch.Tensor) -> tuple[Outcome, Outcome]:
    other = pruned(make, inputs, plan=lambda s: s.plan({s.groups[0].name: [0]}))
    return pruned(make, inputs), other


def masked_pair(make: type, inputs: torch.Tensor) -> tuple[Outcome, Outcome]:
    return masked(make), masked(make, keep=0.31)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def try_damage(
    folder: Path, pair: Callable, make: type, inputs: torch.Tensor, times: int, seed: int
) -> Counter[str]:
    outcome, another = pair(make, inputs)
    path, dense = save(folder / "run", outcome), make()
    whole, others = files_of(path), files_of(save(folder / "other", another))
    rng, seen = random.Random(seed), Counter[str]()
    for _ in range(times):
        damaged = damage(dict(whole), others, rng, seen)
        for name, data in damaged.items():
            (path / name).write_bytes(data)
        try:
            found = load(path, dense=dense)
        except CheckpointError as error:
            seen["refused" if len(str(error)) < 1500 else "refused at length"] += 1
        else:
            seen["whole"] += 1
            assert_same_network(found, outcome.model, inputs)
            if pair is masked_pair:
                assert masks_of(found).same_as(outcome.plan)
    return seen


def damage(
    files: dict[str, bytes], others: dict[str, bytes], rng: random.Random, seen: Counter[str]
) -> dict[str, bytes]:
    choice, members = rng.random(), list(files)
    if choice < 0.03:
        one, two = rng.sample(members, 2)
        files[one], files[two] = files[two], files[one]
        seen["swapped"] += 1
    elif choice < 0.06:
        for name in rng.sample(members, rng.choice((1, 2))):
            files[name] = others[name]
        seen["of another checkpoint"] += 1
    else:
        name, kind = rng.choice(members), rng.choice(KINDS)
        files[name] = bytes(kind(bytearray(files[name]), rng))
        seen[f"{name} {kind.__name__}"] += 1
    return files


@pytest.mark.parametrize(
    ("pair", "make", "inputs"),
    [
        (cut_pair, Convolutions, IMAGES),
        (cut_pair, InCode, ROWS),
        (masked_pair, Convolutions, IMAGES),
    ],
    ids=["module", "program", "masked"],
)
def test_damage_is_refused_or_harmless(tmp_path, pair, make, inputs):
    seen = try_damage(tmp_path, pair, make, inputs, 750, 0)
    assert seen["refused"] > 700
    assert seen["whole"] > 0, "a digit replaced by itself changes nothing"
    assert len(seen) == 3 * (len(set(KINDS))) + 4


@pytest.mark.slow
@pytest.mark.parametrize("pair", [cut_pair, masked_pair], ids=["cut", "masked"])
def test_ten_thousand_times(tmp_path, pair):
    seen = try_damage(tmp_path, pair, Counting, ROWS, 10_000, 1)
    assert seen["refused"] > 9_000


def test_a_damaged_header_takes_no_memory(tmp_path):
    """Under a limit that one allocation of what the header says would break."""
    path = save(tmp_path / "run", pruned(Convolutions, IMAGES))
    data = bytearray((path / "model.safetensors").read_bytes())
    data[:8] = (2**36).to_bytes(8, "little")
    (path / "model.safetensors").write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model.safetensors was changed after it was saved"):
        load(path, dense=Convolutions)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
