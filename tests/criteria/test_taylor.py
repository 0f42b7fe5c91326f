"""First-order Taylor is θ ⊙ g of the mean loss, and what makes a channel is worth what reads it.

Gates of units are held to finite differences of factors put in by hand, at places and entries written down here.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.criteria import Aggregation, taylor, taylor_units, unit_scores
from apoptosis.errors import ConfigError, ModelError
from apoptosis.structure import cut, trace
from apoptosis.task import Task
from oracles.building import CLASSES, built, images, rows
from oracles.compare import EXACT, assert_products_close
from oracles.shrinking import small_case


def normed():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )


def by_autograd(model, x, y):
    twin = copy.deepcopy(model).eval()
    F.cross_entropy(twin(x), y).backward()
    return {name: p.detach() * p.grad for name, p in twin.named_parameters()}


@pytest.mark.parametrize("cut", [7, 3, 1])
def test_taylor_is_theta_times_gradient_of_the_mean_however_data_are_cut(cut):
    model, (x, y) = built(normed, train=True), images(7)
    batches = list(zip(x.split(cut), y.split(cut), strict=True))
    scores = taylor(model, batches)
    assert_products_close(scores.values, by_autograd(model, x, y), tolerance=EXACT)
    assert (scores.criterion, scores.count, scores.fallbacks) == ("taylor", 7, {})


def test_a_mean_of_batch_means_would_be_caught():
    model, (x, y) = built(normed), images(7)
    parts = [by_autograd(model, *part) for part in ((x[:5], y[:5]), (x[5:], y[5:]))]
    wrong = {name: sum(part[name] for part in parts) / 2 for name in parts[0]}
    with pytest.raises(AssertionError, match="differs"):
        assert_products_close(wrong, by_autograd(model, x, y), tolerance=1e-2)


def test_tokens_count_where_the_task_says_so():
    """Two batches with 6 and 2 predicted tokens weigh 3 to 1."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

        def forward(self, input_ids):
            return self.head(self.table(input_ids))

    model = built(Tiny)
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 2, 0, 0]])
    labels = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 2, 0, -100]])
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    want = {
        name: p.detach() * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)
    }
    batches = [{"input_ids": ids[i], "labels": labels[i]} for i in (slice(2), slice(2, 3))]
    scores = taylor(model, batches, Task.language_model())
    assert scores.count == 8
    assert_products_close(scores.values, want, tolerance=EXACT)


def chain(*middle):
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *middle)


@pytest.mark.parametrize(
    ("make", "reader", "sum_over"),
    [
        pytest.param(
            chain(nn.MaxPool2d(2), nn.Conv2d(4, CLASSES, 2), nn.Flatten()),
            "3.weight",
            lambda v: v.sum((0, 2, 3)),
            id="conv-max-pool-conv",
        ),
        pytest.param(
            chain(nn.AvgPool2d(2), nn.Conv2d(4, CLASSES, 2), nn.Flatten()),
            "3.weight",
            lambda v: v.sum((0, 2, 3)),
            id="conv-avg-pool-conv",
        ),
        pytest.param(
            chain(nn.Flatten(), nn.Linear(64, CLASSES)),
            "3.weight",
            lambda v: v.view(CLASSES, 4, 16).sum((0, 2)),
            id="conv-flatten-linear",
        ),
    ],
)
def test_worth_is_conserved_from_producer_rows_to_consumer_columns(make, reader, sum_over):
    values = taylor(built(make), [images()]).values
    made = values["0.weight"].sum((1, 2, 3)) + values["0.bias"]
    assert made.abs().min() > 1e-4
    torch.testing.assert_close(made, sum_over(values[reader]), rtol=1e-9, atol=1e-13)


def test_conservation_fails_with_an_activation_that_is_not_homogeneous():
    def make():
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES))

    values = taylor(built(make), [images()]).values
    made = values["0.weight"].sum((1, 2, 3)) + values["0.bias"]
    assert (made - values["3.weight"].view(CLASSES, 4, 16).sum((0, 2))).norm() > 0.05 * made.norm()


def test_weight_and_bias_of_a_norm_are_worth_the_gate_after_it():
    """Σ z·∂L/∂z = γ ∂L/∂γ + β ∂L/∂β for z the norm's output, in eval mode."""
    model, (x, y) = built(normed, train=True), images()
    values = taylor(model, [(x, y)]).values
    twin = copy.deepcopy(model).eval()
    z = twin[:2](x).detach().requires_grad_()
    F.cross_entropy(twin[2:](z), y).backward()
    want = (z * z.grad).sum((0, 2, 3)).detach()
    torch.testing.assert_close(values["1.weight"] + values["1.bias"], want, rtol=1e-9, atol=1e-13)


def test_micro_batches_change_nothing():
    model, batch = built(normed), images(5)
    want = taylor(model, [batch]).values
    assert_products_close(taylor(model, [batch], micro_batch=2).values, want, tolerance=EXACT)


def test_impossible_micro_batch():
    with pytest.raises(ConfigError, match="micro_batch=0"):
        taylor(built(lambda: nn.Linear(4, CLASSES)), [rows()], micro_batch=0)


# ----------------------------------------------------------------------------------------------------------- units

LOSS = {
    2: Task.classification(),
    3: Task.classification(lambda logits, labels: F.cross_entropy(logits.mT, labels)),
}
"""By the number of dimensions of the logits: one label per sample, or one per position."""


def batch_for(model: nn.Module, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], Task]:
    with torch.no_grad():
        out = model(x)
    generator = torch.Generator().manual_seed(9)
    return (x, torch.randint(out.shape[-1], out.shape[:-1], generator=generator)), LOSS[out.dim()]


@contextmanager
def gate(
    model: nn.Module, places: list[str], dim: int, entries: list[int], value: float
) -> Iterator[None]:
    """Entries along `dim` times `value`: at the inputs of modules, or at the output where the place says so."""

    def scaled(tensor):
        factor = torch.ones(tensor.shape[dim], dtype=tensor.dtype)
        factor[entries] = value
        return tensor * factor.view(-1, *[1] * (tensor.dim() - 1 - dim % tensor.dim()))

    handles = []
    for place in places:
        module = model.get_submodule(place.removesuffix(" output"))
        if place.endswith(" output"):
            handles.append(module.register_forward_hook(lambda _m, _a, out: scaled(out)))
        else:
            handles.append(module.register_forward_pre_hook(lambda _m, args: (scaled(args[0]),)))
    yield
    for handle in handles:
        handle.remove()


def by_differences(model, batch, task, places, dim, entries) -> float:
    step, losses = 1e-5, []
    for value in (1 + step, 1 - step):
        with gate(model, places, dim, entries, value), torch.no_grad():
            losses.append(task.loss(model(batch[0]), batch).item())
    return (losses[0] - losses[1]) / (2 * step)


@dataclass(frozen=True)
class Gated:
    """A group of a network, where it is read, and which entries a unit owns there."""

    case: str
    group: str
    places: tuple[str, ...]
    dim: int
    entries: Callable[[int], list[int]] = lambda u: [u]

    def __str__(self) -> str:
        return f"{self.case} {self.group}"


GATED = [
    Gated("mlp", "2", ("4",), 1),
    Gated("residual", "stem.0", ("blocks.0.conv1", "blocks.1.conv1", "head"), 1),
    Gated("residual", "blocks.1.conv1", ("blocks.1.conv2",), 1),
    Gated(
        "fused", "parts.0.qkv:head", ("parts.0.proj",), 2, lambda u: list(range(4 * u, 4 * u + 4))
    ),
    # One dimension of queries and keys, whose product has one factor, and of values: queries 0–7, keys, values 16–23.
    Gated(
        "fused",
        "parts.0.qkv:head_dim",
        ("parts.0.qkv output",),
        2,
        lambda u: [u, u + 4, u + 16, u + 20],
    ),
    Gated("separate", "embed", ("parts.0.q", "parts.0.k", "parts.0.v", "head"), -1),
    Gated("separate", "parts.0.v:v_dim", ("parts.0.o",), 2, lambda u: [u, u + 4]),
    # The product of queries and keys has one factor per unit: a gate on the queries alone is one on the product.
    Gated("separate", "parts.0.q:qk_dim", ("parts.0.q output",), 2, lambda u: [u, u + 4]),
    Gated("separate", "parts.0.q:qk_dim", ("parts.0.k output",), 2, lambda u: [u, u + 4]),
    Gated("gqa", "parts.0.q:kv_head", ("parts.0.o",), 2, lambda u: list(range(4 * u, 4 * u + 4))),
    Gated(
        "gqa",
        "parts.0.q:query_head",
        ("parts.0.o",),
        2,
        lambda u: [2 * u, 2 * u + 1, 2 * u + 4, 2 * u + 5],
    ),
    Gated("gqa", "parts.0.q:qk_dim", ("parts.0.q output",), 2, lambda u: [u, u + 2, u + 4, u + 6]),
    Gated("gqa", "parts.0.v:v_dim", ("parts.0.o",), 2, lambda u: [u, u + 2, u + 4, u + 6]),
    Gated("glu", "parts.0.both", ("parts.0.down",), 2),
    Gated("tied", "words", ("inner", "head"), 2),
    Gated("encoder", "1.layers.1.linear1", ("1.layers.1.linear2",), 2),
]


@pytest.mark.parametrize("gated", GATED, ids=str)
def test_the_gate_form_is_the_derivative_by_a_factor_on_all_that_is_read(gated: Gated):
    case = small_case(gated.case)
    model = case.model()
    batch, task = batch_for(model, case.inputs(3))
    structure = trace(model, batch[0])
    found = taylor_units(model, structure, [batch], task).values[gated.group]
    want = [
        abs(by_differences(model, batch, task, gated.places, gated.dim, gated.entries(u)))
        for u in range(structure[gated.group].size)
    ]
    assert sorted(want)[len(want) // 2] > 1e-5
    torch.testing.assert_close(found, torch.tensor(want).double(), rtol=1e-5, atol=1e-9)


def test_a_gate_on_one_reader_of_two_would_be_caught():
    case = small_case("residual")
    model = case.model()
    batch, task = batch_for(model, case.inputs(3))
    found = taylor_units(model, trace(model, batch[0]), [batch], task).values["stem.0"]
    part = abs(by_differences(model, batch, task, ["head"], 1, [0]))
    assert abs(float(found[0]) - part) > 0.01 * part


CONSUMERS = Aggregation(absolute="unit", roles=("consumer",))


@pytest.mark.parametrize(
    "id", ["mlp", "residual", "depthwise", "fused", "separate", "gqa", "glu", "hard coded"]
)
def test_the_gate_form_is_what_the_columns_of_its_readers_are_worth(id):
    case = small_case(id)
    model = case.model()
    batch, task = batch_for(model, case.inputs(3))
    structure = trace(model, batch[0])
    by_gate = taylor_units(model, structure, [batch], task)
    by_weight = unit_scores(taylor(model, [batch], task), structure, CONSUMERS)
    read = [
        name
        for name in by_gate.values
        if name in by_weight.values and structure[name].kind != "head_dim"  # also multiplied
    ]
    assert read
    for name in read:
        torch.testing.assert_close(
            by_gate.values[name], by_weight.values[name], rtol=1e-10, atol=1e-14
        )


def flattened():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def test_the_gate_after_a_norm_is_worth_its_weight_and_bias():
    """|γ ∂L/∂γ + β ∂L/∂β|, as ReLU passes a factor on; positions of a map are read side by side."""
    model, batch = built(flattened), images()
    values = taylor(model, [batch]).values
    found = taylor_units(model, trace(model, batch[0]), [batch]).values["0"]
    want = (values["1.weight"] + values["1.bias"]).abs()
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-14)


def by_loop(model, x, y, task, places: dict[str, Callable]) -> torch.Tensor:
    """(units,): Molchanov's form, a sample at a time; `places` gives (positions, units) from what a module reads."""
    rows = []
    for i in range(len(x)):
        held = {}
        handles = [
            model.get_submodule(path).register_forward_pre_hook(
                lambda _m, args, path=path, held=held: (held.setdefault(path, args[0] + 0.0),)
            )
            for path in places
        ]
        batch = (x[i : i + 1], y[i : i + 1])
        loss = task.loss(model(batch[0]), batch)
        gradients = torch.autograd.grad(loss, list(held.values()))
        for handle in handles:
            handle.remove()
        rows.append(
            sum(
                arranged((held[path] * gradient)[0]).mean(0)
                for (path, arranged), gradient in zip(places.items(), gradients, strict=True)
            ).abs()
        )
    return torch.stack(rows).mean(0).detach()


def by_channel(flow):
    return flow.flatten(1).T


@pytest.mark.parametrize(
    ("make", "group", "places"),
    [
        pytest.param(
            small_case("residual").make,
            "stem.0",
            {"blocks.0.conv1": by_channel, "blocks.1.conv1": by_channel, "head": lambda f: f[None]},
            id="three readers",
        ),
        pytest.param(flattened, "0", {"4": lambda f: f.view(4, 16).T}, id="positions side by side"),
        pytest.param(
            small_case("fused").make,
            "parts.0.qkv:head",
            {"parts.0.proj": lambda f: f.view(4, 2, 4).transpose(1, 2).flatten(0, 1)},
            id="heads over tokens",
        ),
    ],
)
def test_the_activation_form_is_molchanovs_sample_by_sample(make, group, places):
    model = built(make)
    x = images(5)[0] if next(iter(places)) != "parts.0.proj" else small_case("fused").inputs(5)
    (x, y), task = batch_for(model, x)
    found = taylor_units(model, trace(model, x), [(x, y)], task, form="activation")
    want = by_loop(model, x, y, task, places)
    torch.testing.assert_close(found.values[group], want, rtol=1e-10, atol=1e-14)
    assert (found.criterion, found.count) == ("taylor-activation", 5)


def test_samples_cancel_in_the_gate_form_and_not_in_the_activation_form():
    model, batch = built(flattened), images(8)
    structure = trace(model, batch[0])
    by_gate = taylor_units(model, structure, [batch]).values["0"]
    by_sample = taylor_units(model, structure, [batch], form="activation").values["0"] * 16
    assert (by_sample > 1.01 * by_gate).all()


@pytest.mark.parametrize("form", ["gate", "activation"])
@pytest.mark.parametrize("id", ["residual", "separate", "tied"])
def test_units_do_not_depend_on_how_data_are_cut(form, id):
    case = small_case(id)
    model = case.model()
    (x, y), task = batch_for(model, case.inputs(7))
    structure = trace(model, x[:1])
    whole = taylor_units(model, structure, [(x, y)], task, form=form)
    parts = list(zip(x.split(3), y.split(3), strict=True))
    for other in (
        taylor_units(model, structure, parts, task, form=form),
        taylor_units(model, structure, iter([(x, y)]), task, form=form, micro_batch=2),
    ):
        assert (other.count, other.missing) == (whole.count, whole.missing)
        assert other.loss == pytest.approx(whole.loss, rel=1e-12)
        assert_products_close(other.values, whole.values, tolerance=1e-10)


def test_a_cut_network_is_scored_by_the_structure_that_was_derived():
    case = small_case("residual")
    model = case.model()
    batch, task = batch_for(model, case.inputs(3))
    structure = trace(model, batch[0])
    plan = structure.plan({"stem.0": [0, 2, 3, 5], "blocks.0.conv1": [1, 4]})
    small = cut(model, plan)
    for form in ("gate", "activation"):
        found = taylor_units(small, structure.after(plan), [batch], task, form=form).values
        want = taylor_units(small, trace(small, batch[0]), [batch], task, form=form).values
        assert_products_close(found, want, tolerance=EXACT)


class Deaf(nn.Module):
    """One reader of the stream is a parameter of the network itself, and no module shows what it reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.mix = nn.Parameter(torch.randn(CLASSES, 6))

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(x))) + x @ self.mix.T


def test_groups_of_which_a_reader_is_out_of_sight_are_missing():
    model = built(Deaf)
    for form in ("gate", "activation"):
        found = taylor_units(model, trace(model, rows()[0]), [rows()], form=form)
        assert (list(found.values), found.missing) == (["b"], ("a",))


class Around(nn.Module):
    """A shortcut inside a module without parts: what goes in is read by the weights and by whoever comes next."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(9, 6)), nn.Parameter(torch.randn(6, 9))

    def forward(self, x):
        return x + torch.relu(x @ self.up.T) @ self.down.T


def test_groups_that_a_module_may_hand_past_its_weights_are_missing():
    """A factor at its input would act on the next reader as well, which has one of its own."""

    def make():
        return nn.Sequential(
            nn.Linear(4, 6), Around(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES)
        )

    model = built(make)
    found = taylor_units(model, trace(model, rows()[0]), [rows()])
    assert (list(found.values), found.missing) == (["2"], ("0", "1.up"))


def test_groups_that_torchs_own_attention_reads_or_holds_are_missing():
    case = small_case("encoder")
    model = case.model()
    batch, task = batch_for(model, case.inputs())
    structure = trace(model, batch[0])
    found = taylor_units(model, structure, [batch], task)
    assert set(found.values) == {"1.layers.0.linear1", "1.layers.1.linear1"}
    assert set(found.missing) == {g.name for g in structure.groups} - set(found.values)
    assert {structure[name].kind for name in found.missing} == {"stream", "head", "head_dim"}


@pytest.mark.parametrize("id", ["recurrent", "experts"])
def test_networks_that_show_no_group_whole_are_refused(id):
    case = small_case(id)
    model = case.model()
    batch, task = batch_for(model, case.inputs())
    with pytest.raises(ModelError, match="no place for a gate"):
        taylor_units(model, trace(model, batch[0]), [batch], task)


def test_programs_are_refused_and_can_be_scored_by_parameters():
    case = small_case("hard coded")
    model, x = case.model(), case.inputs()
    structure = trace(model, x)
    plan = structure.plan({g.name: range(g.size - 1) for g in structure.groups})
    program = cut(model, plan)
    batch = (x, torch.tensor([0, 1]))
    with pytest.raises(ModelError, match="delivered as a program has none"):
        taylor_units(program, structure.after(plan), [batch])
    assert taylor(program, [batch]).count == 2


def test_an_unknown_form_is_answered_with_those_there_are():
    model = built(flattened)
    with pytest.raises(ConfigError, match="form='weights' was asked for; there are gate, activ"):
        taylor_units(model, trace(model, images()[0]), [images()], form="weights")


class Windows(nn.Module):
    """Units are read as they are, and in windows that stand among the samples, as in Swin transformers."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.up, self.whole, self.window = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        units = self.up(x).tanh()
        windows = units.unflatten(1, (2, -1)).flatten(0, 1)
        windows = units.transpose(0, 1)[:3] if self.mixes else windows
        return self.whole(units).mean(1) + self.window(windows).sum((0, 1))


def windowed(mixes: bool = False):
    torch.manual_seed(0)
    model = Windows(mixes).double()
    return model, [(torch.randn(2, 4, 3).double(), torch.tensor([0, 3]))]


def test_windows_among_the_samples_are_positions_of_theirs():
    model, data = windowed()
    structure = trace(model, data[0][0])
    found = taylor_units(model, structure, data, form="activation").values["up"]
    x, labels = data[0]
    whole, window = (model.up(x).tanh().detach().requires_grad_() for _ in range(2))
    out = model.whole(whole).mean(1) + model.window(window.unflatten(1, (2, -1)).flatten(0, 1)).sum(
        (0, 1)
    )
    F.cross_entropy(out, labels, reduction="sum").backward()
    each = sum((a * a.grad).mean(1) for a in (whole, window))
    torch.testing.assert_close(found, each.abs().mean(0))


def test_readers_that_do_not_show_the_same_samples_are_refused_in_words():
    model, data = windowed(mixes=True)
    with pytest.raises(ModelError, match=r"group 'up' show it in 2 and 3 rows.*taylor-gate"):
        taylor_units(model, trace(model, data[0][0]), data, form="activation")
    taylor_units(model, trace(model, data[0][0]), data, form="gate")
