"""The fast path: right on every tiny case, and every law that the four kinds obey."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.curvature import KINDS, curvature_product, reference_product
from apoptosis.task import Task
from oracles.brute_force import brute_force_product, flatten
from oracles.building import CLASSES, Net, built, images, rows, sequences, tokens
from oracles.cases import SMALL_CASES
from oracles.cases_architectures import densenet, recurrent, resnet, vgg, vit
from oracles.compare import EXACT, FINITE, assert_products_close
from oracles.differences import finite_difference_product, line_derivative
from oracles.evaluation import SEED, forward, gradient, moved, random_direction, seeded
from oracles.expected import (
    by_brute_force,
    by_differences,
    direction_of,
    directions_of,
    gradient_size,
)

TRUE_KINDS = ["hessian", "functional", "ggn"]
TASK = Task.classification()
BY_ID = {case.id: case for case in SMALL_CASES}
LAWFUL = [
    "vgg",
    "resnet",
    "vit",
    "mobilenet",
    "encoder-layer",
    "language-model-tied",
    "bare-parameters",
    "gru",
]


def fast(case, kind, direction=None, **options):
    with seeded(SEED):
        return curvature_product(
            case.make_model(),
            [case.make_batch()],
            case.task,
            kind=kind,
            direction=direction,
            **options,
        )


def bias_free(num_layers=4):
    def make():
        hidden = [(nn.Linear(4, 4, bias=False), nn.ReLU()) for _ in range(num_layers - 1)]
        return nn.Sequential(*itertools.chain(*hidden), nn.Linear(4, CLASSES, bias=False))

    return built(make)


def scaled(product, factor):
    return {name: factor * value for name, value in product.items()}


def summed(*products):
    return {name: sum(product[name] for product in products) for name in products[0]}


def inner(a, b):
    return sum(float((a[name] * b[name]).sum()) for name in a)


# --- against the oracles ---------------------------------------------------------------------------------------------


def test_there_are_four_kinds():
    assert set(KINDS) == {"connectivity", "functional", "hessian", "ggn"}


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", TRUE_KINDS)
def test_fast_is_the_true_product(case, kind):
    if not (case.brute_force or case.differences):
        pytest.skip("no oracle but the reference")
    oracle = by_brute_force if case.brute_force else by_differences
    for direction in directions_of(case):
        want = oracle(case, kind, direction)
        got = fast(case, kind, direction_of(case, direction)).product
        assert_products_close(
            got,
            want.product,
            tolerance=want.tolerance,
            scale=want.scale,
            what=f"{kind}, {direction}",
        )


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_fast_is_the_reference(case, kind):
    chosen = {"functional": "random", "ggn": "parameters"}.get(kind)  # the dense matrices have both
    for name in directions_of(case):
        if chosen not in (None, name) and case.brute_force:
            continue
        direction = direction_of(case, name)
        with seeded(SEED):
            want = reference_product(
                case.make_model(), [case.make_batch()], case.task, kind=kind, direction=direction
            )
        got = fast(case, kind, direction)
        assert_products_close(
            got.product,
            want.product,
            tolerance=EXACT,
            scale=gradient_size(case),
            what=f"{kind}, {name}",
        )
        assert got.loss == pytest.approx(want.loss, rel=1e-12)
        assert got.count == want.count


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
def test_gradient_is_autograds(case):
    # torch's backward of hardsigmoid multiplies by 1/6 rounded to float32; finite differences are with us.
    tolerance = 1e-7 if case.id in ("mobilenet", "op-hardsigmoid") else EXACT
    want = gradient(case.oracle_model(), case.make_batch(), case.task)
    kinds = list(KINDS) if case.id in LAWFUL else ["connectivity"]
    for kind in kinds:
        got = fast(case, kind, gradient=True)
        assert_products_close(got.gradient, want, tolerance=tolerance, what=kind)
    direction = random_direction(case.make_model(), seed=3)
    got = fast(case, "hessian", direction, gradient=True)
    assert_products_close(got.gradient, want, tolerance=tolerance, what="random direction")


@pytest.mark.parametrize("case", [BY_ID[name] for name in LAWFUL], ids=lambda case: case.id)
@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_product_does_not_depend_on_whether_the_gradient_is_asked_for(case, kind):
    got, want = fast(case, kind, gradient=True), fast(case, kind)
    assert want.gradient is None
    assert_products_close(got.product, want.product, tolerance=EXACT)


@pytest.mark.parametrize("case", SMALL_CASES[::9], ids=lambda case: case.id)
def test_loss_and_count_are_the_tasks(case):
    task, batch = case.task or TASK, case.make_batch()
    got = fast(case, "connectivity")
    loss = task.loss(forward(case.oracle_model(), batch, task), batch)
    assert got.loss == pytest.approx(loss.item(), rel=1e-12)
    assert got.count == task.count(batch)


# --- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("kind", ["functional", "connectivity"])
def test_euler_bias_free_relu_network_gives_the_gradient_times_layers_minus_one(num_layers, kind):
    model, batch = bias_free(num_layers), rows()
    got = curvature_product(model, [batch], kind=kind, gradient=True)
    assert_products_close(
        got.product,
        scaled(got.gradient, num_layers - 1),
        tolerance=1e-12,
        scale=inner(got.gradient, got.gradient) ** 0.5,
    )


@pytest.mark.parametrize("name", LAWFUL)
def test_hessian_is_functional_plus_ggn(name):
    case = BY_ID[name]
    direction = random_direction(case.make_model(), seed=4)
    parts = [fast(case, kind, direction).product for kind in ("functional", "ggn")]
    assert_products_close(fast(case, "hessian", direction).product, summed(*parts), tolerance=EXACT)


@pytest.mark.parametrize("name", LAWFUL)
@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_product_is_linear_and_symmetric(name, kind):
    case = BY_ID[name]
    a, b = (random_direction(case.make_model(), seed=seed) for seed in (5, 6))
    ha, hb = fast(case, kind, a).product, fast(case, kind, b).product
    both = fast(case, kind, summed(a, scaled(b, -2.5))).product
    assert_products_close(both, summed(ha, scaled(hb, -2.5)), tolerance=EXACT)
    size = (inner(ha, ha) * inner(b, b)) ** 0.5
    assert inner(a, hb) == pytest.approx(inner(b, ha), abs=1e-12 * size)


@pytest.mark.parametrize("name", LAWFUL)
def test_ggn_is_never_negative(name):
    case = BY_ID[name]
    for seed in range(3):
        direction = random_direction(case.make_model(), seed=seed)
        assert inner(direction, fast(case, "ggn", direction).product) >= 0


@pytest.mark.parametrize("name", LAWFUL)
def test_quadratic_form_is_the_second_derivative_along_the_line(name):
    case = BY_ID[name]
    model, batch, task = case.make_model(), case.make_batch(), case.task or TASK
    direction = random_direction(model, seed=7)
    unit = float(flatten(model).norm() / flatten(model, direction).norm())

    def slope(step):
        with moved(model, direction, step):
            grads = gradient(model, batch, task)
        return torch.tensor(inner(grads, direction), dtype=torch.float64)

    second = float(line_derivative(slope, [unit * step for step in (4e-5, 8e-6, 1.6e-6)]))
    got = inner(direction, fast(case, "hessian", direction).product)
    assert got == pytest.approx(second, rel=FINITE)


@pytest.mark.parametrize("make", [resnet, densenet, vgg], ids=["resnet", "densenet", "vgg"])
def test_relu_network_with_eval_batch_norm_has_no_other_functional_curvature_than_connectivity(
    make,
):
    model, batch = built(make), images()
    functional = brute_force_product(model, batch, TASK, "functional")
    assert_products_close(
        curvature_product(model, [batch], kind="connectivity").product, functional, tolerance=EXACT
    )


def test_connectivity_drops_the_curvature_of_smooth_activations():
    case = BY_ID["op-gelu"]
    gap = summed(fast(case, "connectivity").product, scaled(fast(case, "functional").product, -1))
    assert inner(gap, gap) > 1e-6


def test_connectivity_of_a_linear_model_is_zero():
    got = fast(BY_ID["linear-model"], "connectivity").product
    assert inner(got, got) < 1e-28


# --- batches ---------------------------------------------------------------------------------------------------------


def cut(batch, sizes):
    task, pieces, start = TASK, [], 0
    total = sum(sizes)
    singles = list(task.split(batch, 1))
    assert len(singles) == total
    for size in sizes:
        chosen = singles[start : start + size]
        pieces.append(tuple(torch.cat(parts) for parts in zip(*chosen, strict=True)))
        start += size
    return pieces


@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
@pytest.mark.parametrize("sizes", [(4, 1), (1, 1, 3), (2, 3)], ids=str)
def test_result_does_not_depend_on_how_data_are_cut(kind, sizes):
    model, batch = built(vit), images(5)
    whole = curvature_product(model, [batch], kind=kind, gradient=True)
    parts = curvature_product(model, cut(batch, sizes), kind=kind, gradient=True)
    assert_products_close(parts.product, whole.product, tolerance=EXACT)
    assert_products_close(parts.gradient, whole.gradient, tolerance=EXACT)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.count == whole.count == 5


@pytest.mark.parametrize(
    "case", [c for c in SMALL_CASES if c.splits][::3], ids=lambda case: case.id
)
@pytest.mark.parametrize("kind", ["connectivity", "hessian"])
def test_micro_batches_change_nothing(case, kind):
    whole = fast(case, kind, gradient=True)
    parts = fast(case, kind, gradient=True, micro_batch=2)
    size = gradient_size(case)
    assert_products_close(parts.product, whole.product, tolerance=EXACT, scale=size)
    assert_products_close(parts.gradient, whole.gradient, tolerance=EXACT)
    assert (parts.count, parts.loss) == (whole.count, pytest.approx(whole.loss, rel=1e-12))


def test_tokens_weigh_alike_however_sentences_are_cut():
    case = BY_ID["language-model-tied"]
    ids = tokens(4)[0]
    mask = torch.ones_like(ids)
    mask[0, 2:] = 0
    model = case.make_model()
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    parts = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(4)]
    task = Task.language_model()
    whole = curvature_product(model, [batch], task, kind="hessian")
    cut_up = curvature_product(model, parts, task, kind="hessian")
    assert_products_close(cut_up.product, whole.product, tolerance=EXACT)
    assert whole.count == cut_up.count == 3 * 4 + 1


def test_batches_may_be_a_generator():
    model, batch = built(vit), images(4)
    want = curvature_product(model, [batch]).product
    got = curvature_product(model, (piece for piece in cut(batch, (1, 3)))).product
    assert_products_close(got, want, tolerance=EXACT)


# --- directions and parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_direction_may_leave_names_out(kind):
    model, batch = built(vit), images()
    some = {
        name: p
        for name, p in random_direction(model).items()
        if "norm" in name or name == "head.weight"
    }
    full = {name: some.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()}
    got = curvature_product(model, [batch], kind=kind, direction=some).product
    want = curvature_product(model, [batch], kind=kind, direction=full).product
    assert_products_close(got, want, tolerance=EXACT)


@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_the_parameters_given_as_a_direction_are_the_default(kind):
    for make, batch in ((vit, images()), (resnet, images())):
        model = built(make)
        given = {name: p.detach().clone() for name, p in model.named_parameters()}
        got = curvature_product(model, [batch], kind=kind, direction=given).product
        same = curvature_product(
            model, [batch], kind=kind, direction=dict(model.named_parameters())
        ).product
        want = curvature_product(model, [batch], kind=kind).product
        assert_products_close(got, want, tolerance=EXACT)
        assert_products_close(same, want, tolerance=EXACT)


def test_zero_direction_gives_zero():
    model, batch = built(vit), images()
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for direction in (zero, {}):
        got = curvature_product(model, [batch], kind="hessian", direction=direction).product
        assert set(got) == set(zero)
        assert inner(got, got) == 0


@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_frozen_parameters_do_not_move_and_are_not_in_the_result(kind):
    model, batch = built(resnet), images()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = {"conv2.weight", "bn2.bias", "shortcut.1.weight", "head.bias"}
    direction = {name: p for name, p in whole.items() if name not in frozen}
    want = curvature_product(model, [batch], kind=kind, direction=direction).product
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    got = curvature_product(model, [batch], kind=kind).product
    assert set(got) == set(whole) - frozen
    assert_products_close(got, {name: want[name] for name in got}, tolerance=EXACT)


@pytest.mark.parametrize("path", [curvature_product, reference_product], ids=["fast", "reference"])
@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_unreached_parameters_are_zero_and_named(kind, path):
    case = BY_ID["unused-and-frozen"]
    got = path(case.make_model(), [case.make_batch()], kind=kind, gradient=True)
    assert set(got.unreached) == {"unused.weight", "unused.bias"}
    assert not got.product["unused.weight"].any()
    assert not got.gradient["unused.weight"].any()


@pytest.mark.parametrize("path", [curvature_product, reference_product], ids=["fast", "reference"])
@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_parameters_with_a_gradient_are_reached_even_where_their_product_is_zero(kind, path):
    for name in ("vit", "linear-model", "embedding-padding", "experts"):
        case = BY_ID[name]
        assert path(case.make_model(), [case.make_batch()], kind=kind).unreached == (), name


@pytest.mark.parametrize("kind", ["connectivity", *TRUE_KINDS])
def test_tied_weight_is_the_untied_ones_folded(kind):
    def make(*, tied):
        net = Net(
            lambda m, x: m.head(m.b(torch.tanh(m.a(x)))),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 4),
            head=nn.Linear(4, CLASSES),
        )
        net.b.weight = net.a.weight if tied else nn.Parameter(net.a.weight.detach().clone())
        return net

    tied, untied, batch = built(partial(make, tied=True)), built(partial(make, tied=False)), rows()
    untied.load_state_dict(tied.state_dict())
    direction = random_direction(tied, seed=8)
    got = curvature_product(tied, [batch], kind=kind, direction=direction).product
    apart = curvature_product(
        untied, [batch], kind=kind, direction={**direction, "b.weight": direction["a.weight"]}
    ).product
    folded = {name: apart[name] + (apart["b.weight"] if name == "a.weight" else 0) for name in got}
    assert "b.weight" not in got
    assert_products_close(got, folded, tolerance=EXACT)


def test_result_tensors_are_detached_and_shaped_like_the_parameters():
    model = built(vit)
    got = curvature_product(model, [images()], kind="hessian", gradient=True)
    for result in (got.product, got.gradient):
        for name, p in model.named_parameters():
            assert result[name].shape == p.shape
            assert not result[name].requires_grad
            assert result[name].grad_fn is None


# --- fallbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "vgg",
        "resnet",
        "densenet",
        "mobilenet",
        "vit",
        "mixer",
        "encoder-layer",
        "language-model-tied",
    ],
)
def test_common_networks_need_no_fallback(name):
    for kind in KINDS:
        assert fast(BY_ID[name], kind).fallbacks == {}


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_taken_apart(layer):
    model = built(lambda: recurrent(getattr(nn, layer)(3, 4, batch_first=True)))
    assert curvature_product(model, [sequences()], kind="hessian").fallbacks == {}


def packed_network() -> nn.Module:
    def forward(m: Net, x: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x, [4, 3, 2], batch_first=True)
        return m.head(m.layer(rows)[1][-1])

    return Net(forward, layer=nn.GRU(6, 4, batch_first=True), head=nn.Linear(4, CLASSES))


def test_packed_sequences_fall_back_and_say_so():
    model, batch = built(packed_network), sequences()
    got = curvature_product(model, [batch], kind="hessian")
    assert got.fallbacks == {"gru": 1}
    want = finite_difference_product(model, batch)
    assert_products_close(got.product, want, tolerance=FINITE)


def test_fallbacks_are_counted_over_all_batches():
    model, batch = built(packed_network), sequences()
    assert curvature_product(model, [batch] * 3, kind="hessian").fallbacks == {"gru": 3}


# --- closed forms ----------------------------------------------------------------------------------------------------


def test_quadratic_has_its_own_matrix_as_hessian():
    matrix = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
    model = Net(lambda m, x: (m.weight @ x.T).T, weight=nn.Parameter(torch.randn(1, 4).double()))
    x = matrix.requires_grad_(False)
    task = Task.classification(lambda z, y: 0.5 * (z - y).square().mean())
    batch = (x, torch.ones(4, 1).double())
    direction = random_direction(model)
    want = {"weight": direction["weight"] @ (x.T @ x / 4)}
    for kind in ("hessian", "ggn"):
        got = curvature_product(model, [batch], task, kind=kind, direction=direction).product
        assert_products_close(got, want, tolerance=1e-13)


def test_logit_shift_is_a_null_direction_of_ggn():
    model, batch = (
        built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES))),
        rows(),
    )
    shift = {"2.bias": torch.ones(CLASSES).double()}
    got = curvature_product(model, [batch], kind="ggn", direction=shift).product
    assert inner(got, got) < 1e-28


def test_softmax_cross_entropy_regression_is_fisher():
    model, (x, y) = built(lambda: nn.Linear(4, CLASSES)), rows()
    p = F.softmax(model(x), 1).detach()
    direction = random_direction(model)
    moved_logits = x @ direction["weight"].T + direction["bias"]
    u = p * (moved_logits - (p * moved_logits).sum(1, keepdim=True)) / len(x)
    want = {"weight": u.T @ x, "bias": u.sum(0)}
    assert_products_close(
        curvature_product(model, [(x, y)], kind="hessian", direction=direction).product,
        want,
        tolerance=1e-12,
    )
