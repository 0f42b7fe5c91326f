"""Masked networks come back with their masks, in every bit; what is removed takes no room on the disk."""

import copy
import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import apoptosis as ap
from apoptosis.checkpoint import load, load_outcome, read_run, save
from apoptosis.errors import CheckpointError, PlanMismatchError
from apoptosis.masks import (
    Mask,
    MaskPlan,
    identity_masks,
    mask,
    mask_,
    masks_of,
    release_,
    zeros_of,
)
from apoptosis.records import Outcome
from apoptosis.structure import CutProgram, Structure, cut, trace
from oracles.checkpoints import assert_same_network
from oracles.masked_networks import masked, num_model_bytes, random_masks, two_of_four
from oracles.small_networks import Convolutions, Counting, InCode, Tied, pruned
from oracles.untouched import Snapshot

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 8).view(2, 4)
WORDS = torch.tensor([[0, 1, 2], [6, 5, 4]])


def round_trip(folder: Path, outcome: Outcome[MaskPlan], make, *inputs) -> nn.Module:
    """What comes back, if it is what was saved."""
    before = Snapshot(outcome.model)
    path = save(folder / "run", outcome)
    before.assert_unchanged()
    found = load(path, dense=make)
    assert_same_network(found, outcome.model, *inputs)
    assert masks_of(found).same_as(masks_of(mask(outcome.model, outcome.plan)))
    assert sorted(file.name for file in path.iterdir()) == [
        "masks.safetensors",
        "model.safetensors",
        "run.json",
    ]
    assert (path / "masks.safetensors").read_bytes() == outcome.plan.to_bytes()
    return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 6, num_layers=2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0])


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Convolutions, IMAGES),
        (Tied, WORDS),
        (lambda: Counting({"seen": [1, 2.5, None]}), ROWS),
        (Recurrent, ROWS.view(1, 2, 4)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), torch.ones(2, 3, 8)),
    ],
    ids=["convolutions", "tied", "extra state", "recurrent", "attention"],
)
@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_a_masked_network_comes_back_as_it_was(tmp_path, make, inputs, keep):
    round_trip(tmp_path, masked(make, keep=keep), make, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_number_types_are_those_of_the_saved_network(tmp_path, dtype):
    found = round_trip(tmp_path, masked(Convolutions, dtype=dtype), Convolutions, IMAGES.to(dtype))
    assert found.a.weight.dtype == dtype


def test_memory_order_comes_back(tmp_path):
    def make():
        return Convolutions().to(memory_format=torch.channels_last)

    outcome = masked(make)
    assert not outcome.model.a.weight.is_contiguous()
    last = IMAGES.to(memory_format=torch.channels_last)
    round_trip(tmp_path, outcome, Convolutions, IMAGES, last)


def test_kept_numbers_stand_in_plain_order(tmp_path):
    from safetensors.torch import load_file

    outcome = masked(lambda: Convolutions().to(memory_format=torch.channels_last))
    path = save(tmp_path / "run", outcome)
    numbers, bits = load_file(path / "model.safetensors"), load_file(path / "masks.safetensors")
    weight = outcome.model.a.weight.detach()
    by_hand = [bool(bits["a.weight"][q // 8] >> (q % 8) & 1) for q in range(weight.numel())]
    assert torch.equal(numbers["a.weight"], weight.reshape(-1)[torch.tensor(by_hand)])
    assert torch.equal(numbers["a.bias"], outcome.model.a.bias)


def test_zeros_among_what_stays(tmp_path):
    outcome = masked(Counting)
    with torch.no_grad():
        places = outcome.plan.kept("a.weight").nonzero()
        outcome.model.a.weight[tuple(places[2])] = 0.0  # stays, and happens to be zero
        outcome.model.a.weight[tuple(places[3])] = -0.0
    round_trip(tmp_path, outcome, Counting)


def test_a_removed_weight_may_be_minus_zero(tmp_path):
    """As `weight * mask` leaves it; it comes back as plain zero."""
    outcome = masked(Counting)
    with torch.no_grad():
        outcome.model.a.weight[~outcome.plan.kept("a.weight")] = -0.0
    found = load(save(tmp_path / "run", outcome), dense=Counting)
    assert torch.equal(found.a.weight, outcome.model.a.weight)
    assert not found.a.weight[~outcome.plan.kept("a.weight")].signbit().any()


def test_patterns_come_back(tmp_path):
    outcome = masked(Counting, masks=lambda m: two_of_four(m, ("a.weight", "head.weight")))
    found = masks_of(round_trip(tmp_path, outcome, Counting, ROWS))
    assert {key: (str(own.pattern), own.dim) for key, own in found.masks.items()} == {
        "a.weight": ("2:4", 1),
        "head.weight": ("2:4", 1),
    }


def test_layers_without_weights(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Conv1d(2, 2, 1), Hollow())

    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 0))

    round_trip(tmp_path, masked(make), make)


def test_biases_and_norms_may_be_masked_by_name(tmp_path):
    names = ("a.weight", "a.bias", "norm.weight")
    outcome = masked(Convolutions, masks=lambda m: random_masks(m, 0.5, names))
    round_trip(tmp_path, outcome, Convolutions, IMAGES)
    kept = {held.names[0]: held.kept for held in read_run(tmp_path / "run").tensors}
    assert kept["a.bias"] == outcome.plan.masks["a.bias"].num_kept
    assert kept["b.weight"] is None


def test_frozen_parameters_stay_frozen(tmp_path):
    outcome = masked(Convolutions)
    outcome.model.a.weight.requires_grad_(False)
    found = round_trip(tmp_path, outcome, Convolutions, IMAGES)
    assert [n for n, p in found.named_parameters() if not p.requires_grad] == ["a.weight"]


def test_a_mask_may_name_a_tied_tensor_by_one_of_its_names_only(tmp_path):
    plan = identity_masks(Tied(), ("inner.weight",))
    half = torch.arange(64).view(8, 8) % 3 > 0
    for names in (["again.weight"], ["again.weight", "inner.weight"]):
        masks = MaskPlan({"again.weight": Mask.of(names, half)}, plan.fingerprint)
        round_trip(tmp_path, masked(Tied, masks=lambda _, masks=masks: masks), Tied, WORDS)
        (held,) = [h for h in read_run(tmp_path / "run").tensors if "inner.weight" in h.names]
        assert (held.names, held.kept) == (("inner.weight", "again.weight"), int(half.sum()))


def test_two_masks_of_one_tied_tensor_hold_both(tmp_path):
    fingerprint = identity_masks(Tied()).fingerprint
    rows = torch.arange(64).view(8, 8)
    masks = MaskPlan(
        {
            "inner.weight": Mask.of(["inner.weight"], rows % 2 > 0),
            "again.weight": Mask.of(["again.weight"], rows % 3 > 0),
        },
        fingerprint,
    )
    found = round_trip(tmp_path, masked(Tied, masks=lambda _: masks), Tied, WORDS)
    assert int((found.inner.weight != 0).sum()) == int(((rows % 2 > 0) & (rows % 3 > 0)).sum())


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_mask_of_any_memory_order(tmp_path_factory, shape, data, dtype):
    dims = len(shape)
    order = data.draw(st.permutations(range(dims)))
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=256, max_size=256)))

    def make():
        model = nn.Module()
        laid = torch.randn([shape[d] for d in order], dtype=dtype)
        model.weight = nn.Parameter(laid.permute([order.index(d) for d in range(dims)]))
        return model

    def masks(model):
        own = kept[: model.weight.numel()].view(shape)
        return MaskPlan({"weight": Mask.of(["weight"], own)}, identity_masks(model).fingerprint)

    round_trip(tmp_path_factory.mktemp("masked"), masked(make, masks=masks), make)


# --- size ------------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 101))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16], ids=lambda d: str(d)
)
@pytest.mark.parametrize("keep", [0.1, 1.0])
def test_size_is_what_stays_and_one_bit_for_each_that_was_there(tmp_path, dtype, keep):
    outcome = masked(wide, keep=keep, dtype=dtype)
    path = save(tmp_path / "run", outcome)
    model = (path / "model.safetensors").stat().st_size
    assert model == num_model_bytes(outcome.model, outcome.plan)
    masks = (path / "masks.safetensors").read_bytes()
    bits = sum(-(-own.numel // 8) for own in outcome.plan.masks.values())
    assert len(masks) == 8 + int.from_bytes(masks[:8], "little") + bits
    numbers = outcome.plan.num_kept + 301
    assert 0 < model - numbers * dtype.itemsize < 500
    if keep == 0.1 and dtype == torch.float32:
        assert model + len(masks) < 0.15 * 4 * sum(p.numel() for p in outcome.model.parameters())


def test_masks_are_unpacked_one_at_a_time(tmp_path):
    outcome = masked(lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)]), keep=0.5)
    tracemalloc.start()
    try:
        save(tmp_path / "run", outcome)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    one = 512 * 512
    assert most < 3 * one + 3 * 16 * one // 8  # the mask of one tensor, and the bits of all


# --- what comes back is a network that keeps its masks ---------------------------------------------------------------


def test_training_after_loading_keeps_what_is_gone(tmp_path):
    outcome = masked(Convolutions)
    found = load(save(tmp_path / "run", outcome), dense=Convolutions).train()
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        found(IMAGES).square().sum().backward()
        optimizer.step()
    assert outcome.plan.holds(found)
    assert not torch.equal(found.a.weight, outcome.model.a.weight)
    again = Outcome(found.eval(), masks_of(found))
    round_trip(tmp_path / "again", again, Convolutions, IMAGES)


def test_an_outcome_comes_back_and_is_saved_again_in_the_same_bytes(tmp_path):
    outcome = masked(Counting)
    first = save(tmp_path / "first", outcome)
    again = load_outcome(first, dense=Counting)
    assert isinstance(again.plan, MaskPlan)
    assert again.plan.same_as(outcome.plan)
    assert again.history == outcome.history
    assert again.history[0].macs is None
    assert (again.spent, again.settings) == (outcome.spent, outcome.settings)
    second = save(tmp_path / "second", again)
    for name in ("masks.safetensors", "model.safetensors", "run.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_record_says_what_is_stored(tmp_path):
    outcome = masked(Tied)
    run = read_run(save(tmp_path / "run", outcome))
    assert (run.format, run.delivery, run.program) == (2, "masks", None)
    assert run.shapes["inner.weight"] == (8, 8)
    kept = {held.names[0]: held.kept for held in run.tensors}
    assert kept == {
        "table.weight": None,
        "inner.weight": outcome.plan.masks["inner.weight"].num_kept,
        "inner.bias": None,
    }


def test_sparsify_saves_and_loads(tmp_path):
    outcome = ap.sparsify(
        Counting(), [(ROWS, torch.tensor([0, 1]))], ap.Sparsity(keep=0.5), stages=2
    )
    path = ap.save(tmp_path / "run", outcome)
    again = ap.load_outcome(path, dense=Counting)
    assert_same_network(again.model, outcome.model.eval(), ROWS)
    assert (again.history, again.spent) == (outcome.history, outcome.spent)
    assert again.settings == json.loads(json.dumps(outcome.settings))


@pytest.mark.parametrize("make", [Tied, Counting])
def test_the_dense_network_may_be_on_the_meta_device(tmp_path, make):
    def on_meta():
        with torch.device("meta"):
            return make()

    inputs = WORDS if make is Tied else ROWS
    outcome = masked(make)
    round_trip(tmp_path, outcome, on_meta, inputs)
    with torch.device("meta"):
        found = load(tmp_path / "run", dense=make)
    assert_same_network(found, outcome.model, inputs)


@pytest.mark.parametrize("keep", [0.1, 0.9])
def test_masks_of_the_dense_network_do_not_matter(tmp_path, keep):
    outcome = masked(Counting)
    dense = mask(Counting(), random_masks(Counting(), keep))
    before = Snapshot(dense)
    round_trip(tmp_path, outcome, dense, ROWS)
    before.assert_unchanged()
    assert masks_of(dense).density != outcome.plan.density
    structured = pruned(Counting, ROWS, plan=Structure.identity)
    found = load(save(tmp_path / "other", structured), dense=dense)
    assert_same_network(found, structured.model, ROWS)
    assert masks_of(found) is None


@pytest.mark.parametrize("make", [Convolutions, InCode], ids=["module", "program"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_after_a_cut(tmp_path, make, dtype):
    inputs = IMAGES if make is Convolutions else ROWS
    first = save(tmp_path / "cut", pruned(make, inputs))

    def small():
        return load(first, dense=make)

    outcome = masked(small, dtype=dtype)
    assert isinstance(outcome.model, CutProgram) == (make is InCode)
    round_trip(tmp_path / "masked", outcome, small, inputs.to(dtype))
    if make is InCode:
        with pytest.raises(CheckpointError, match="whose 'a.weight' has shape"):
            load(tmp_path / "masked" / "run", dense=InCode)


def test_a_program_is_not_taken_for_a_module(tmp_path):
    identity = pruned(InCode, ROWS)
    cut_path = save(tmp_path / "cut", identity)
    outcome = masked(lambda: load(cut_path, dense=InCode))
    path = save(tmp_path / "run", outcome)
    stand_in = nn.Module()
    for name in ("a", "b", "head"):
        stand_in.add_module(name, copy.deepcopy(outcome.model.get_submodule(name)))
    with pytest.raises(CheckpointError, match="do not do the same operations: one of them was"):
        load(path, dense=stand_in)


# --- what is refused when saving -------------------------------------------------------------------------------------


def test_removed_weights_that_are_not_zero_are_refused(tmp_path):
    outcome = masked(Counting)
    gone = ~outcome.plan.kept("head.weight")
    release_(outcome.model)
    with torch.no_grad():
        outcome.model.head.weight[tuple(gone.nonzero()[0])] = 1e-30
        outcome.model.head.weight[tuple(gone.nonzero()[1])] = float("nan")
    with pytest.raises(
        CheckpointError,
        match=rf"2 of the {int(gone.sum())} weights of 'head.weight' .* `mask_\(model, masks\)`",
    ):
        save(tmp_path / "run", outcome)
    assert list(tmp_path.iterdir()) == []
    mask_(outcome.model, outcome.plan)
    round_trip(tmp_path, outcome, Counting, ROWS)


def test_masks_need_not_be_kept_by_what_is_saved(tmp_path):
    outcome = masked(Counting)
    release_(outcome.model)
    round_trip(tmp_path, outcome, Counting, ROWS)


def test_masks_of_another_network_are_refused(tmp_path):
    for model, message in [
        (Convolutions(), "The mask of 'a.weight' has shape"),
        (nn.Sequential(masked(Counting).model), "a network with 'a.weight'; Sequential has none"),
    ]:
        with pytest.raises(CheckpointError, match=rf"not for its network. .*{message}"):
            save(tmp_path / "run", replace(masked(Counting), model=model))
    assert list(tmp_path.iterdir()) == []


def test_masks_of_what_is_not_saved_are_refused(tmp_path):
    fingerprint = identity_masks(Convolutions()).fingerprint
    masks = MaskPlan({"scale": Mask.of(["scale"], torch.ones(4) > 0)}, fingerprint)
    with pytest.raises(PlanMismatchError, match="'scale' is no floating-point parameter"):
        masked(Convolutions, masks=lambda _: masks)


def test_masks_that_were_put_on_later_are_not_lost(tmp_path):
    outcome = masked(Counting, keep=0.9)
    later = outcome.plan.then(random_masks(Counting(), 0.2))
    mask_(outcome.model, later)
    with pytest.raises(CheckpointError, match=r"keeps other masks .* plan=masks_of\(model\)"):
        save(tmp_path / "run", outcome)
    round_trip(tmp_path, replace(outcome, plan=masks_of(outcome.model)), Counting, ROWS)


def test_masks_may_remove_more_than_the_network_keeps(tmp_path):
    outcome = masked(Counting, keep=0.9)
    with torch.no_grad():
        outcome.model.a.weight[0] = 0
    found = round_trip(tmp_path, replace(outcome, plan=zeros_of(outcome.model)), Counting, ROWS)
    assert not masks_of(found).kept("a.weight")[0].any()


def test_a_plan_of_no_kind(tmp_path):
    with pytest.raises(CheckpointError, match="plan of the outcome is a NoneType"):
        save(tmp_path / "run", Outcome(Counting(), None))


# --- what is refused when loading ------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "run", masked(Counting))


def resealed(path: Path, **changes: object) -> None:
    """A record with other content and the right checksums of all files, as another program might write it."""
    content = json.loads((path / "run.json").read_text()) | changes
    content.pop("checksum")
    for name in content["files"]:
        data = (path / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        content["files"][name] = {"bytes": len(data), "sha256": digest}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(content))


def test_missing_masks(path):
    (path / "masks.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no masks.safetensors: it is no checkpoint"):
        load(path, dense=Counting)
    assert read_run(path).delivery == "masks"


def test_masks_of_another_checkpoint(path, tmp_path):
    other = save(tmp_path / "other", masked(Counting, keep=0.31))
    (other / "masks.safetensors").replace(path / "masks.safetensors")
    with pytest.raises(CheckpointError, match="masks.safetensors was changed after it was saved"):
        load(path, dense=Counting)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (lambda: random_masks(Counting(), 0.8), r"numbers of '\w+.weight' stay and \d+ are saved"),
        (lambda: identity_masks(Counting()), r"all numbers of '\w+.weight' stay and \d+ are saved"),
        (lambda: random_masks(Convolutions(), 0.3), "for a network of other names or shapes"),
    ],
    ids=["other", "none", "another network"],
)
def test_masks_and_numbers_that_disagree(path, masks, message):
    (path / "masks.safetensors").write_bytes(masks().to_bytes())
    resealed(path)
    with pytest.raises(CheckpointError, match=rf"does not fit what run.json says: .*{message}"):
        load(path, dense=Counting)


@pytest.mark.parametrize(
    ("key", "names", "shape"),
    [
        ("a.weight", ["b.weight"], (8, 4)),
        ("b.weight", ["a.weight"], (8, 4)),
        ("a.weight", ["a.weight"], (4, 8)),
        ("a.weight", ["a.weight", "head.weight"], (8, 4)),
        ("head.weight", ["a.weight"], (8, 4)),
    ],
    ids=str,
)
def test_masks_that_nobody_has_written(path, key, names, shape):
    fingerprint = identity_masks(Counting()).fingerprint
    kept = torch.ones(shape, dtype=torch.bool)
    plan = MaskPlan({key: Mask.of(names, kept)}, fingerprint)
    (path / "masks.safetensors").write_bytes(plan.to_bytes())
    resealed(path)
    with pytest.raises(CheckpointError, match=r"does not fit|cannot be read"):
        load(path, dense=Counting)


@pytest.mark.parametrize("kept", [-1, 32, 33, 2.0, "3", True, [1]])
def test_counts_that_nobody_has_written(path, kept):
    tensors = json.loads((path / "run.json").read_text())["tensors"]
    (index,) = [i for i, own in enumerate(tensors) if own["names"] == ["a.weight"]]
    tensors[index] |= {"kept": kept}
    resealed(path, tensors=tensors)
    with pytest.raises(CheckpointError, match="is no record of a run"):
        load(path, dense=Counting)


def test_counts_of_another_mask(path):
    tensors = json.loads((path / "run.json").read_text())["tensors"]
    resealed(path, tensors=[own | {"kept": None} for own in tensors])
    with pytest.raises(CheckpointError, match="stay and all are saved"):
        load(path, dense=Counting)


def test_something_else_in_the_place_of_masks(path):
    (path / "masks.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    resealed(path)
    with pytest.raises(CheckpointError, match="masks.safetensors cannot be read. These are no"):
        load(path, dense=Counting)


def test_formats_are_not_mixed_up(path, tmp_path):
    structured = save(tmp_path / "cut", pruned(Counting, ROWS))
    resealed(structured, format=2)
    with pytest.raises(CheckpointError, match="is no record of a run"):
        load(structured, dense=Counting)
    resealed(path, format=1)
    with pytest.raises(CheckpointError, match=r"has no plan.json"):
        load(path, dense=Counting)


def test_another_dense_network(path):
    with pytest.raises(CheckpointError, match=r"whose 'a.weight' has shape \(8, 4\); that of Conv"):
        load(path, dense=Convolutions)


# --- one in the place of the other -----------------------------------------------------------------------------------


def test_each_kind_replaces_the_other_and_leaves_nothing(tmp_path):
    cut_outcome, mask_outcome = pruned(Counting, ROWS), masked(Counting)
    for _ in range(2):
        path = save(tmp_path / "run", cut_outcome)
        assert sorted(f.name for f in path.iterdir()) == [
            "model.safetensors",
            "plan.json",
            "run.json",
        ]
        assert_same_network(load(path, dense=Counting), cut_outcome.model, ROWS)
        round_trip(tmp_path, mask_outcome, Counting, ROWS)
    assert list(tmp_path.iterdir()) == [path]


def test_structured_records_say_nothing_of_masks(tmp_path):
    """Versions that know no masks read them."""
    path = save(tmp_path / "run", pruned(Counting, ROWS))
    content = json.loads((path / "run.json").read_text())
    assert content["format"] == 1
    assert all("kept" not in own for own in content["tensors"])
    assert set(content["files"]) == {"model.safetensors", "plan.json"}


def test_a_cut_network_that_keeps_masks_is_saved_by_its_plan(tmp_path):
    """Masks that go along with a cut are put on again by who has them: `masks.cut(plan)`."""
    torch.manual_seed(0)
    model = Counting().eval()
    masks = random_masks(model, 0.5)
    plan = trace(model, ROWS).plan({"a": [0, 2, 5]})
    small = mask_(cut(mask(model, masks), plan), masks.cut(plan))
    found = load(save(tmp_path / "run", Outcome(small, plan)), dense=Counting)
    assert_same_network(found, small, ROWS)
    assert masks.cut(plan).holds(found)
