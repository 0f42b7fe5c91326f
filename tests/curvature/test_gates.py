"""Curvature by gates is Jᵀ H J of factors put in by hand, from dense Jacobians of the whole batch in float64."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.curvature import GateOptions, gate_curvature, loss_factors
from apoptosis.errors import ConfigError, DataError, LossError, ModelError
from apoptosis.task import Task
from oracles.building import CLASSES, built, images, rows
from oracles.compare import EXACT
from oracles.gated import Gated, brute_force, loss_without, of_gates
from oracles.shrinking import small_case
from oracles.untouched import Snapshot

HEADS = tuple(tuple(range(4 * u, 4 * u + 4)) for u in range(2))
WITHIN = tuple((u, u + 4) for u in range(4))
TEMPERED = Task.classification().distillation(
    built(lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, CLASSES))), weight=0.7, temperature=3.0
)


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - F.one_hot(labels, CLASSES)).square().sum(1).mean()


@dataclass(frozen=True)
class Case:
    """A network of `small_case`, its task, and groups with the places where they are read."""

    id: str
    groups: tuple[Gated, ...]
    network: str = ""
    task: Task = Task.classification()
    tolerance: float = EXACT

    def build(self, num: int = 5):
        case = small_case(self.network or self.id)
        x = case.inputs(num)
        labels = torch.randint(CLASSES, (num,), generator=torch.Generator().manual_seed(9))
        return case.model(), x if case.words else (x, labels), list(self.groups)


STREAM = Gated.plain("stem.0", ("blocks.0.conv1", "blocks.1.conv1", "head"), 1, 6)
INSIDE = tuple(Gated.plain(f"blocks.{i}.conv1", (f"blocks.{i}.conv2",), 1, 5) for i in (0, 1))
HIDDEN = (Gated.plain("0", ("2",), 1, 8), Gated.plain("2", ("4",), 1, 6))
TOKENS = (Gated.plain("words", ("inner", "head"), 2, 6), Gated.plain("inner", ("back",), 2, 9))
CASES = [
    Case("mlp", HIDDEN),
    Case("residual", (STREAM, *INSIDE)),
    Case("fused", (Gated("heads", ("parts.0.proj",), 2, HEADS), Gated("dims", ("parts.0.proj",), 2, WITHIN))),
    Case(
        "separate",
        (
            Gated.plain("embed", ("parts.0.q", "parts.0.k", "parts.0.v", "head"), -1, 8),
            Gated("v", ("parts.0.o",), 2, WITHIN),
            Gated("qk", ("parts.0.q output",), 2, WITHIN),
        ),
    ),
    Case("glu", (Gated.plain("both", ("parts.0.down",), 2, 6),)),
    Case("tied", TOKENS, task=Task.language_model()),
    Case("squares", HIDDEN, "mlp", Task.classification(squared)),
    Case("smoothed labels", HIDDEN, "mlp", Task.classification().smoothed(0.2)),
    Case("a teacher at a temperature", (STREAM, *INSIDE), "residual", TEMPERED, 1e-6),  # its loss is float32 inside
]  # fmt: skip
BY_ID = {case.id: case for case in CASES}


def matrix(found) -> Tensor:
    return next(iter(found.blocks.values()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradient_and_matrix_are_those_of_factors_put_in_by_hand(case: Case):
    model, batch, groups = case.build()
    found = gate_curvature(model, [batch], case.task, of_gates(groups))
    gradient, want = brute_force(model, batch, case.task, groups)
    assert list(found.blocks) == [tuple(gated.group for gated in groups)]
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(
        matrix(found), want, rtol=0, atol=case.tolerance * float(want.abs().max())
    )
    slope = torch.cat(list(found.gradient.values()))
    torch.testing.assert_close(
        slope, gradient, rtol=0, atol=case.tolerance * float(gradient.abs().max())
    )
    plain = loss_without(model, batch, case.task, groups, [])
    assert found.loss == pytest.approx(plain, rel=1e-12)
    assert (found.count, found.unreached) == (15 if case.id == "tied" else 5, ())


def wrong_half(gates):
    """Gates at one reader of the stream are left out."""
    return gates[1:]


def wrong_factor(gates):
    return [replace(gates[0], factor=0.5), *gates[1:]]


def wrong_units(gates):
    return [replace(gates[0], indices=gates[0].indices[::-1].copy()), *gates[1:]]


@pytest.mark.parametrize("wrong", [wrong_half, wrong_factor, wrong_units])
def test_gates_that_stand_wrong_would_be_caught(wrong):
    model, batch, groups = BY_ID["residual"].build()
    found = gate_curvature(model, [batch], Task.classification(), wrong(of_gates(groups)))
    _, want = brute_force(model, batch, Task.classification(), groups)
    assert (matrix(found) - want).abs().max() > 1e-2 * want.abs().max()


def test_samples_summed_before_they_are_squared_would_be_caught(monkeypatch):
    """(Σ_n f_n)(Σ_n f_n)ᵀ is not Σ_n f_n f_nᵀ."""

    def summed(activation: Tensor, gradient: Tensor, dim: int, num: int) -> Tensor:
        flow = (activation * gradient).movedim(dim, -1).flatten(0, -2).sum(0)
        return torch.cat([flow[None], flow.new_zeros(num - 1, len(flow))])

    monkeypatch.setattr("apoptosis.curvature.gate_sums._by_sample", summed)
    model, batch, groups = BY_ID["residual"].build()
    found = gate_curvature(model, [batch], Task.classification(), of_gates(groups))
    gradient, want = brute_force(model, batch, Task.classification(), groups)
    torch.testing.assert_close(torch.cat(list(found.gradient.values())), gradient)
    assert (matrix(found) - want).abs().max() > 0.1 * want.abs().max()


@pytest.mark.parametrize("id", ["residual", "separate", "tied", "squares"])
def test_how_data_are_cut_changes_nothing(id):
    model, batch, groups = BY_ID[id].build()
    task, gates = BY_ID[id].task, of_gates(groups)
    whole = gate_curvature(model, [batch], task, gates)
    for batches, options in (
        (list(task.split(batch, 2)), None),
        ([batch], GateOptions(micro_batch=1)),
        (iter([batch]), GateOptions(micro_batch=3)),
    ):
        other = gate_curvature(model, batches, task, gates, options)
        torch.testing.assert_close(matrix(other), matrix(whole), rtol=1e-10, atol=1e-14)
        assert (other.count, other.loss) == (whole.count, pytest.approx(whole.loss, rel=1e-12))
        for name, own in whole.gradient.items():
            torch.testing.assert_close(other.gradient[name], own, rtol=1e-10, atol=1e-14)


def test_block_and_diagonal_are_parts_of_dense():
    model, batch, groups = BY_ID["residual"].build()
    by_form = {
        form: gate_curvature(
            model, [batch], Task.classification(), of_gates(groups), GateOptions(form=form)
        )
        for form in ("dense", "block", "diagonal")
    }
    dense, start = matrix(by_form["dense"]), 0
    assert by_form["diagonal"].blocks == {}
    for gated in groups:
        span = slice(start, start := start + gated.size)
        block = by_form["block"].blocks[gated.group,]
        torch.testing.assert_close(block, dense[span, span], rtol=1e-12, atol=1e-16)
        for form in by_form.values():
            own = form.diagonal[gated.group]
            torch.testing.assert_close(own, dense.diagonal()[span], rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("id", ["residual", "tied"])
def test_drawn_labels_converge_to_the_exact_matrix(id):
    case = BY_ID[id]
    model, batch, groups = case.build()
    want = matrix(gate_curvature(model, [batch], case.task, of_gates(groups)))

    def error(draws: int, seed: int = 0) -> float:
        options = GateOptions(draws=draws, seed=seed)
        found = gate_curvature(model, [batch], case.task, of_gates(groups), options)
        return float((matrix(found) - want).norm() / want.norm())

    few = sum(error(4, seed) for seed in range(8)) / 8
    assert error(400) < 0.15
    assert error(400) < few / 4  # a tenth, but for luck
    assert error(4, 1) == error(4, 1) != error(4, 2)


def test_labels_drawn_from_another_distribution_would_be_caught():
    model, (x, _), groups = BY_ID["residual"].build()
    gates, task = of_gates(groups), Task.classification()
    want = matrix(gate_curvature(model, [x], task, gates))
    flat = replace(task, rows=lambda out, _batch: (out - 0.9 * out.detach(), None))
    found = matrix(gate_curvature(model, [x], flat, gates, GateOptions(draws=400)))
    assert (found - want).norm() > 0.2 * want.norm()


def many_classes():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 40))


def test_many_classes_are_sampled_unless_told():
    """In expectation the same; with few backwards it is not exact."""
    model, batch = built(many_classes), rows(64, classes=40)
    groups = [Gated.plain("0", ("2",), 1, 6)]
    _, want = brute_force(model, batch, Task.classification(), groups)
    plain = gate_curvature(model, [batch], Task.classification(), of_gates(groups))
    error = (matrix(plain) - want).norm() / want.norm()
    assert 1e-6 < error < 0.3
    many = gate_curvature(
        model, [batch], Task.classification(), of_gates(groups), GateOptions(draws=300)
    )
    assert (matrix(many) - want).norm() / want.norm() < 0.05


def test_networks_that_are_sure_of_themselves_are_sampled_as_others_are():
    """Where p is 0 or 1 to rounding, the Hessian of the loss tells nothing of which loss it is."""

    def sure():
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 40))
        model[2].weight.data *= 400
        return model

    model, (x, _) = built(sure).float(), rows(6)
    labels = model(x.float()).argmax(1)
    gates = of_gates([Gated.plain("0", ("2",), 1, 6)])
    found = gate_curvature(model, [(x.float(), labels)], Task.classification(), gates)
    assert found.loss < 1e-3
    assert matrix(found).isfinite().all()


def test_labels_are_needed_for_the_gradient_alone():
    model, (x, y), groups = BY_ID["residual"].build()
    gates, task = of_gates(groups), Task.classification()
    labelled = gate_curvature(model, [(x, y)], task, gates)
    for batch in (x, (x,)):
        found = gate_curvature(model, [batch], task, gates)
        torch.testing.assert_close(matrix(found), matrix(labelled), rtol=1e-12, atol=1e-16)
        assert (found.gradient, found.loss, found.count) == (None, None, 5)
    mixed = gate_curvature(model, [x[:2], (x[2:], y[2:])], task, gates)
    torch.testing.assert_close(matrix(mixed), matrix(labelled), rtol=1e-12, atol=1e-16)
    assert mixed.gradient is None


def test_samples_that_do_not_count_are_left_out():
    model, (x, y), groups = BY_ID["residual"].build()
    gates, task = of_gates(groups), Task.classification()
    ignored = torch.where(torch.arange(5) < 3, y, -100)
    found = gate_curvature(model, [(x, ignored)], task, gates)
    want = gate_curvature(model, [(x[:3], y[:3])], task, gates)
    torch.testing.assert_close(matrix(found), matrix(want), rtol=1e-12, atol=1e-16)
    assert found.count == 3


def positions():
    """Logits (samples, classes, positions)."""
    return nn.Sequential(nn.Conv1d(4, 6, 1), nn.ReLU(), nn.Conv1d(6, CLASSES, 2))


def test_predictions_at_positions_are_exact_and_independent():
    model, groups = built(positions), [Gated.plain("0", ("2",), 1, 6)]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (3, 4), generator=generator)
    y[1, 2] = -100
    found = gate_curvature(model, [(x, y)], Task.classification(), of_gates(groups))
    _, want = brute_force(model, (x, y), Task.classification(), groups)
    torch.testing.assert_close(matrix(found), want, rtol=1e-10, atol=1e-14)


class SequenceFirst(nn.Module):
    """What the second layer reads is (length, samples, units)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).transpose(0, 1)).tanh().mean(0)


class Shared(nn.Module):
    """Positions that all samples share go through the layer once."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 3, 6))
        self.b, self.c = nn.Linear(6, CLASSES), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.places) * self.c(x)).mean(1)


@pytest.mark.parametrize("length", [3, 5, 10], ids=["other", "equal", "multiple"])
@pytest.mark.parametrize("make", [SequenceFirst, Shared])
def test_samples_that_the_first_dimension_does_not_show_run_one_by_one(make, length):
    """Lengths equal to the number of samples look like samples and are none."""
    model = built(make)
    x = torch.randn(
        5, 3 if make is Shared else length, 4, generator=torch.Generator().manual_seed(0)
    ).double()
    batch, groups = (x, torch.tensor([0, 1, 2, 0, 1])), [Gated.plain("a", ("b",), -1, 6)]
    task = Task.classification()
    found = gate_curvature(model, [batch, batch], task, of_gates(groups))
    gradient, want = brute_force(model, batch, task, groups)
    torch.testing.assert_close(matrix(found), want, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found.gradient["a"], gradient, rtol=1e-10, atol=1e-14)


def test_within_a_layer_of_a_piecewise_linear_network_it_is_the_exact_second_order_term():
    """L(γ) of one layer, by central differences of the loss itself: −t g + ½ t² G for a small step t."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES)))
    batch, groups, task = rows(7), [Gated.plain("0", ("2",), 1, 6)], Task.classification()
    found = gate_curvature(model, [batch], task, of_gates(groups))
    full = torch.autograd.functional.hessian(
        lambda gamma: F.cross_entropy(model[2](torch.relu(model[0](batch[0])) * gamma), batch[1]),
        torch.ones(6, dtype=torch.float64),
    )
    torch.testing.assert_close(matrix(found), full, rtol=1e-10, atol=1e-14)
    plain, step = loss_without(model, batch, task, groups, []), 1e-3
    for gone in ([2], [0, 5], [1, 3, 4]):
        change = loss_without(model, batch, task, groups, gone, step) - plain
        predicted = (
            -step * found.gradient["0"][gone].sum()
            + step**2 / 2 * matrix(found)[gone][:, gone].sum()
        )
        assert change == pytest.approx(float(predicted), rel=1e-4, abs=1e-10)


def test_for_a_quadratic_loss_of_a_linear_reader_sets_are_predicted_exactly():
    """Squared error of a layer that enters linearly: ΔL(S) = −Σ g + ½ Σ G, without remainder, at the full step."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES)))
    batch, groups = rows(7), [Gated.plain("0", ("2",), 1, 6)]
    task = Task.classification(squared)
    found = gate_curvature(model, [batch], task, of_gates(groups))
    plain = loss_without(model, batch, task, groups, [])
    for gone in ([0], [1, 4], [0, 2, 3, 5], list(range(6))):
        true = loss_without(model, batch, task, groups, gone) - plain
        quadratic = -found.gradient["0"][gone].sum() + matrix(found)[gone][:, gone].sum() / 2
        alone = (-found.gradient["0"] + found.diagonal["0"] / 2)[gone].sum()
        assert true == pytest.approx(float(quadratic), rel=1e-10)
        assert len(gone) < 4 or abs(float(alone) - true) > 0.1 * abs(true)


def test_groups_that_the_outputs_do_not_depend_on_are_named_and_left_out():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.idle = nn.Linear(4, 6), nn.Linear(6, CLASSES), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.a(x))
            self.idle(hidden)
            return self.b(hidden)

    model = built(Idle)
    groups = [Gated.plain("unread", ("idle",), 1, 6), Gated.plain("a", ("b",), 1, 6)]
    found = gate_curvature(model, [rows()], Task.classification(), of_gates(groups))
    alone = gate_curvature(model, [rows()], Task.classification(), of_gates(groups[1:]))
    assert (found.unreached, list(found.blocks), list(found.diagonal)) == (
        ("unread",),
        [("a",)],
        ["a"],
    )
    torch.testing.assert_close(found.blocks["a",], alone.blocks["a",], rtol=1e-12, atol=1e-16)


def test_nothing_of_the_model_changes():
    model = built(partial(small_case("residual").make), train=True)
    model.head.requires_grad_(requires_grad=False)
    before, state = Snapshot(model), torch.random.get_rng_state()
    gates, batches = of_gates([STREAM, *INSIDE]), [images(4, size=5)]
    gate_curvature(model, batches, Task.classification(), gates, GateOptions(draws=2))
    before.assert_unchanged()
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_loss_without_labels_to_draw_is_exact_however_many_are_asked_for():
    model, batch, groups = BY_ID["squares"].build()
    gates, task = of_gates(groups), Task.classification(squared)
    exact, drawn = (
        matrix(gate_curvature(model, [batch], task, gates, GateOptions(draws=own)))
        for own in (None, 1)
    )
    torch.testing.assert_close(drawn, exact, rtol=0, atol=0)


def test_what_cannot_be_had_is_refused_in_words():
    model, batch, groups = BY_ID["mlp"].build()
    gates, task = of_gates(groups), Task.classification()
    own = Task.classification(squared)
    concave = Task.classification(lambda z, _y: -z.square().sum(1).mean())
    late = [replace(gate, place=replace(gate.place, call=3)) for gate in gates]
    with pytest.raises(ConfigError, match="form='full' was asked for; there are dense, block"):
        GateOptions(form="full")
    with pytest.raises(ConfigError, match="draws=0 was asked for"):
        GateOptions(draws=0)
    with pytest.raises(DataError, match="found no samples"):
        gate_curvature(model, [], task, gates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_factors, "EXACT_COLUMNS", CLASSES - 1)
        with pytest.raises(ConfigError, match="labels can be drawn only where"):
            gate_curvature(model, [batch], own, gates, GateOptions(draws=2))
    with pytest.raises(ConfigError, match=r"without labels.*Give labels"):
        gate_curvature(model, [batch[0]], own, gates)
    with pytest.raises(LossError, match="not convex in the outputs"):
        gate_curvature(model, [batch], concave, gates)
    with pytest.raises(ModelError, match="nothing passed there"):
        gate_curvature(model, [batch], task, late)
