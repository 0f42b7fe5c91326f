"""Activations times gradients are derivatives by factors, one place at a time, on models that stay as they were."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from apoptosis.curvature import Place, visit_activations
from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.progress import listen
from apoptosis.task import Task
from oracles.building import CLASSES, built, images, rows
from oracles.untouched import Snapshot

TASK = Task.classification()


def flows(model, batches, places, **options) -> dict[Place, torch.Tensor]:
    """Σ a ⊙ ∂L/∂a of the mean loss at each place."""
    total, count = dict.fromkeys(places, 0.0), 0

    def visit(seen, piece):
        nonlocal count
        count += TASK.count(piece)
        assert set(seen) == set(places)
        for place, (activation, gradient) in seen.items():
            assert activation.shape == gradient.shape
            assert not activation.requires_grad
            total[place] += (activation * gradient).sum() * TASK.count(piece)

    loss, samples = visit_activations(model, batches, TASK, places, visit, **options)
    assert samples == count
    assert loss > 0
    return {place: value / count for place, value in total.items()}


def differenced(model, batch, module: str, call: int, side: str) -> torch.Tensor:
    """The oracle: a factor on one call's first tensor, moved a little both ways."""
    losses = []
    for factor in (1 + 1e-5, 1 - 1e-5):
        twin, calls = copy.deepcopy(model), []
        part = twin.get_submodule(module)

        def before(_module, args, calls=calls, factor=factor):
            calls.append(1)
            chosen = side == "input" and len(calls) - 1 == call
            return (args[0] * factor, *args[1:]) if chosen else None

        def after(_module, _args, output, calls=calls, factor=factor):
            return output * factor if side == "output" and len(calls) - 1 == call else None

        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)
        with torch.no_grad():
            losses.append(TASK.loss(twin(batch[0]), batch))
    return (losses[0] - losses[1]) / 2e-5


class Branching(nn.Module):
    """One activation read by two modules, one module called twice, and ReLU that writes where it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.relu(self.conv(x))
        y = self.left(x) + self.right(x)
        y = self.left(torch.tanh(y))
        return self.head(self.relu(y).mean((2, 3)))


PLACES = [
    Place("conv", 0, "output"),
    Place("relu", 0, "output"),
    Place("left", 0, "input"),
    Place("left", 1, "input"),
    Place("left", 0, "output"),
    Place("left", 1, "output"),
    Place("right", 0, "input"),
    Place("relu", 1, "output"),
    Place("head", 0, "input"),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_each_place_is_the_derivative_by_a_factor_there(place):
    model, batch = built(Branching), images()
    found = flows(model, [batch], [place])[place]
    want = differenced(model, batch, place.module, place.call, place.side)
    assert want.abs() > 1e-5
    assert_close(found, want, rtol=1e-6, atol=1e-10)


def test_places_watched_together_are_those_watched_alone():
    model, batch = built(Branching), images()
    together = flows(model, [batch], PLACES)
    for place in PLACES:
        assert_close(flows(model, [batch], [place])[place], together[place], rtol=1e-12, atol=0)


def test_readers_of_one_activation_have_gradients_of_their_own_which_add_up():
    model, batch = built(Branching), images()
    whole, left, right = (
        Place("relu", 0, "output"),
        *(Place(m, 0, "input") for m in ("left", "right")),
    )
    seen = {}
    visit_activations(
        model, [batch], TASK, [whole, left, right], lambda found, _: seen.update(found)
    )
    assert_close(seen[left][0], seen[whole][0], rtol=0, atol=0)
    assert_close(seen[left][1] + seen[right][1], seen[whole][1], rtol=1e-12, atol=1e-16)
    assert (seen[left][1] - seen[right][1]).abs().max() > 1e-4


def test_gradients_and_activations_are_those_of_autograd():
    model, (x, y) = built(Branching), images()
    hidden = torch.relu(model.conv(x)).detach().requires_grad_()
    out = model.left(torch.tanh(model.left(hidden) + model.right(hidden)))
    F.cross_entropy(model.head(torch.relu(out).mean((2, 3))), y).backward()
    seen = {}
    place = Place("relu", 0, "output")
    loss, count = visit_activations(
        model, [(x, y)], TASK, [place], lambda found, _: seen.update(found)
    )
    assert_close(seen[place][0], hidden.detach(), rtol=0, atol=0)
    assert_close(seen[place][1], hidden.grad, rtol=1e-12, atol=1e-16)
    assert loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    assert count == len(x)


def test_an_output_that_is_written_to_keeps_its_value():
    model, (x, y) = built(Branching), images()
    seen = {}
    place = Place("conv", 0, "output")
    visit_activations(model, [(x, y)], TASK, [place], lambda found, _: seen.update(found))
    assert (seen[place][0] < 0).any()
    assert_close(seen[place][0], model.conv(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["all", "first half", "last half"])
def test_frozen_models_give_the_same(frozen):
    model, batch = built(Branching), images()
    want = flows(model, [batch], PLACES)
    for number, part in enumerate(model.children()):
        chosen = {"all": True, "first half": number < 2, "last half": number >= 2}[frozen]
        part.requires_grad_(not chosen)
    before = Snapshot(model)
    found = flows(model, [batch], PLACES)
    before.assert_unchanged()
    for place in PLACES:
        assert_close(found[place], want[place], rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_without_gradients_get_them_here(mode):
    model, batch = built(Branching), images()
    want = flows(model, [batch], PLACES)
    with mode():
        found = flows(model, [batch], PLACES)
    for place in PLACES:
        assert_close(found[place], want[place], rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"micro_batch": 1}])
def test_pieces_give_the_same(options):
    model, (x, y) = built(Branching), images(5)
    want = flows(model, [(x, y)], PLACES)
    found = flows(model, [(x[:3], y[:3]), (x[3:], y[3:])], PLACES, **options)
    for place in PLACES:
        assert_close(found[place], want[place], rtol=1e-10, atol=1e-14)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, CLASSES)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = checkpoint(lambda h: torch.tanh(self.inner(h)), x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_places_inside_checkpoints_are_seen(reentrant):
    model, batch = built(lambda: Checkpointed(reentrant=reentrant)), rows()
    for place in (
        Place("inner", 0, "input"),
        Place("inner", 0, "output"),
        Place("head", 0, "input"),
    ):
        found = flows(model, [batch], [place])[place]
        plain = built(lambda: Checkpointed(reentrant=False))
        want = differenced(plain, batch, place.module, 0, place.side)
        assert_close(found, want, rtol=1e-6, atol=1e-10)


class Overwriting(nn.Module):
    """What the second layer has read is changed afterwards; frozen, autograd does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        x += 1
        return self.c(x + y)


def test_an_activation_that_is_overwritten_is_refused():
    model = built(Overwriting).requires_grad_(requires_grad=False)
    before = Snapshot(model)
    with pytest.raises(ModelError, match=r"input of module 'b' is overwritten.*without in-place"):
        flows(model, [rows()], [Place("b", 0, "input")])
    before.assert_unchanged()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place("left", 2, "input"), "input of call 2 of module 'left' was to be seen, and nothing"),
        (
            Place("spare", 0, "output"),
            "output of call 0 of module 'spare' was to be seen, and noth",
        ),
        (Place("nowhere", 0, "input"), "module 'nowhere' were asked for; the model has none"),
    ],
)
def test_places_that_are_never_passed_are_refused(place, message):
    model = built(Branching)
    model.spare = nn.ReLU()
    before = Snapshot(model)
    with pytest.raises(ModelError, match=message):
        flows(model, [images()], [Place("conv", 0, "output"), place])
    before.assert_unchanged()


class WithNorm(nn.Module):
    """Dropout and statistics, which a run in train mode moves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.a(x))))


@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_left_as_it_was(train):
    model = built(WithNorm, train=train)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    model.a.register_forward_hook(lambda _m, _a, out: out)
    model.head.register_full_backward_hook(lambda *_: pytest.fail("a hook of the caller ran"))
    before = Snapshot(model)
    flows(model, [rows(), rows(seed=5)], [Place("head", 0, "input"), Place("a", 0, "output")])
    before.assert_unchanged()


@pytest.mark.parametrize("failing", ["visit", "loss"])
def test_the_model_is_left_as_it_was_when_something_fails(failing):
    def boom(*_):
        raise RuntimeError("failed on purpose")

    model = built(WithNorm, train=True)
    before = Snapshot(model)
    task = Task.classification(boom) if failing == "loss" else TASK
    visit = boom if failing == "visit" else (lambda *_: None)
    with pytest.raises(RuntimeError, match="on purpose"):
        visit_activations(model, [rows()], task, [Place("a", 0, "output")], visit)
    before.assert_unchanged()


class Several(nn.Module):
    """A module with two arguments and two results: the first of each is the place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cell, self.head = nn.Linear(4, 5), nn.LSTM(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        out, (last, _) = self.cell(torch.tanh(self.a(x))[None])
        return self.head(out[0] + last[0])


def test_of_several_tensors_the_first_is_the_place():
    model, batch = built(Several), rows()
    place = Place("cell", 0, "output")
    found = flows(model, [batch], [place])[place]
    twin = copy.deepcopy(model)
    out, (last, _) = twin.cell(torch.tanh(twin.a(batch[0]))[None])
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(twin.head((out * factor)[0] + last[0]), batch[1])
    (want,) = torch.autograd.grad(loss, factor)
    assert_close(found, want, rtol=1e-12, atol=1e-16)


def test_data_that_are_none_and_pieces_of_nothing_are_refused():
    model = built(WithNorm)
    for empty in ([], iter([]), [(torch.zeros(0, 4).double(), torch.zeros(0).long())]):
        with pytest.raises(DataError, match="found no samples"):
            flows(model, empty, [Place("a", 0, "output")])
    with pytest.raises(ConfigError, match="micro_batch=0"):
        flows(model, [rows()], [Place("a", 0, "output")], micro_batch=0)


def test_progress_is_told():
    events = []
    with listen(events.append):
        flows(built(WithNorm), [rows(), rows(seed=6)], [Place("a", 0, "output")])
    assert [(e.what, e.done, e.total) for e in events][-1] == ("activations", 2, 2)
