"""The paper's terms, X̂ per layer, and the identities they must obey (baselines.md D 21–31)."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.curvature import curvature_product, layer_tangents, paper_terms
from apoptosis.task import Task
from oracles.brute_force import brute_force_product, dense_kind, flatten
from oracles.building import CLASSES, Net, built, images, rows, sequences
from oracles.cases import SMALL_CASES
from oracles.compare import EXACT, assert_products_close
from oracles.differences import line_derivative
from oracles.evaluation import forward, gradient, moved, random_direction
from oracles.frozen import paper_split
from oracles.networks import NETWORKS, heads_apart

TASK = Task.classification()
LINEAR_LOSS = Task.classification(lambda z, _: (z * _weights(z)).sum(1).mean())
ORDERED = [written for written in NETWORKS if written.ordered]
BY_ID = {case.id: case for case in SMALL_CASES}
LAYERED = [
    "vgg",
    "resnet",
    "densenet",
    "unet",
    "mixer",
    "vit",
    "attention-none",
    "attention-rope",
    "encoder-layer",
]


def _weights(z):
    return torch.linspace(-1, 2, z.shape[1], dtype=z.dtype, device=z.device)


def bias_free(num_layers):
    def make():
        hidden = [(nn.Linear(4, 4, bias=False), nn.ReLU()) for _ in range(num_layers - 1)]
        return nn.Sequential(*itertools.chain(*hidden), nn.Linear(4, CLASSES, bias=False))

    return built(make)


def size(product):
    return torch.stack([value.norm() for value in product.values()]).norm().item()


def summed(*products):
    return {name: sum(product[name] for product in products) for name in products[0]}


# --- the three terms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_series_terms_of_a_bias_free_relu_chain_count_layers(num_layers):
    model, batch = bias_free(num_layers), rows()
    terms, grads = paper_terms(model, [batch]), gradient(model, batch)
    names, scale = list(grads), size(grads)
    above = {name: (num_layers - 1 - i) * grads[name] for i, name in enumerate(names)}
    below = {name: i * grads[name] for i, name in enumerate(names)}
    nothing = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    assert_products_close(terms.upper, above, tolerance=1e-12, scale=scale, what="upper")
    assert_products_close(terms.lower, below, tolerance=1e-12, scale=scale, what="lower")
    assert_products_close(terms.parallel, nothing, tolerance=1e-9, scale=scale, what="parallel")


@pytest.mark.parametrize("written", ORDERED, ids=lambda written: written.id)
def test_terms_are_those_of_the_network_written_out(written):
    model, batch = written.make_model(), written.make_batch()
    scale = size(gradient(model, batch))
    for direction in (None, random_direction(model)):
        want, got = (
            paper_split(written.net, model, batch, TASK, direction),
            paper_terms(model, [batch], direction=direction),
        )
        for term in ("upper", "lower", "parallel"):
            assert_products_close(
                getattr(got, term), getattr(want, term), tolerance=EXACT, scale=scale, what=term
            )


@pytest.mark.parametrize("case", SMALL_CASES[::4], ids=lambda case: case.id)
def test_terms_add_up_to_connectivity(case):
    if case.id in {"dropout", "drop-path"}:
        pytest.skip("another mask in every run")
    scale = size(gradient(case.oracle_model(), case.make_batch(), case.task))
    for direction in (None, random_direction(case.make_model())):
        model, batches = case.make_model(), [case.make_batch()]
        want = curvature_product(model, batches, case.task, direction=direction).product
        terms = paper_terms(model, batches, case.task, direction=direction)
        total = summed(terms.upper, terms.lower, terms.parallel)
        assert_products_close(total, want, tolerance=EXACT, scale=scale)


@pytest.mark.parametrize("name", LAYERED)
def test_terms_add_up_over_several_batches(name):
    case = BY_ID[name]
    model, batch = case.make_model(), case.make_batch()
    batches = list(TASK.split(batch, 2))
    terms = paper_terms(model, batches)
    want = curvature_product(model, [batch]).product
    assert_products_close(summed(terms.upper, terms.lower, terms.parallel), want, tolerance=EXACT)


def test_chains_have_no_parallel_term_and_attention_has_one():
    model, batch = built(partial(_chain)), images()
    terms = paper_terms(model, [batch])
    assert size(terms.parallel) < 1e-13 * size(terms.upper)
    case = BY_ID["attention-none"]
    terms = paper_terms(case.make_model(), [case.make_batch()])
    assert size(terms.parallel) > 1e-6 * size(terms.upper)


def _chain():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


def test_a_direction_in_one_layer_is_above_those_before_it_and_below_those_after():
    model, batch = built(_chain), images()
    terms = paper_terms(model, [batch], direction={"4.weight": random_direction(model)["4.weight"]})
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert terms.upper[name].norm() > 0
        assert terms.lower[name].norm() < 1e-14
    assert terms.lower["7.weight"].norm() > 0
    assert terms.upper["7.weight"].norm() < 1e-14
    for name in ("4.weight", "4.bias", "7.bias"):
        assert terms.upper[name].norm() + terms.lower[name].norm() < 1e-14


# --- X̂ ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("random", [False, True], ids=["parameters", "random"])
def test_layer_tangents_are_how_fast_inputs_of_layers_move(name, random):
    case = BY_ID[name]
    model, batch = case.make_model(), case.make_batch()
    direction = random_direction(model) if random else None
    delta = direction or {key: p.detach().clone() for key, p in model.named_parameters()}
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    layers = {
        f"{key}.weight": module
        for key, module in model.named_modules()
        if isinstance(module, kinds)
    }
    got = layer_tangents(model, batch, direction=direction)
    unit = float(flatten(model).norm() / flatten(model, delta).norm())
    for key, module in layers.items():
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue  # it only lends its parameters to attention, hooks do not see it

        def seen(step, module=module):
            inputs = []
            with (
                moved(model, delta, step),
                module.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
            ):
                forward(model, batch, TASK)
            return inputs[0].detach()

        want = line_derivative(seen, [unit * step for step in (4e-5, 8e-6, 1.6e-6)])
        assert got[key].shape == want.shape
        torch.testing.assert_close(got[key], want, rtol=1e-6, atol=1e-7 * float(want.norm() + 1))


def test_layer_tangents_are_the_forward_derivative():
    model, (x, y) = built(_mlp), rows()
    got = layer_tangents(model, (x, y))

    def hidden(params):
        a = torch.tanh(x @ params["0.weight"].T + params["0.bias"])
        b = torch.relu(a @ params["2.weight"].T + params["2.bias"])
        return a, b

    theta = {name: p.detach() for name, p in model.named_parameters()}
    _, (first, second) = torch.func.jvp(hidden, (theta,), (theta,))
    assert set(got) == {"0.weight", "2.weight", "4.weight"}
    assert not got["0.weight"].any()
    torch.testing.assert_close(got["2.weight"], first, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got["4.weight"], second, rtol=1e-12, atol=1e-13)


def _mlp():
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, CLASSES)
    )


def test_softmax_tangents_sum_to_zero():
    """D 28; the paper prints softmax(Â), which would sum to one."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.Softmax(1), nn.Linear(5, CLASSES)))
    tangent = layer_tangents(model, rows())["2.weight"]
    assert tangent.norm() > 1e-3
    assert tangent.sum(1).abs().max() < 1e-15


# --- D 21–23: Taylor -------------------------------------------------------------------------------------------------


def taylor(model, batch, task=None):
    got = curvature_product(model, [batch], task, gradient=True)
    return {name: p.detach() * got.gradient[name] for name, p in model.named_parameters()}


def test_first_order_worth_is_conserved_from_producer_to_consumer():
    """D 21: what makes a channel is worth what reads it, where only homogeneous operations stand between."""
    model = built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 3, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3, CLASSES),
        )
    )
    worth = taylor(model, images())
    made = worth["0.weight"].sum((1, 2, 3)) + worth["0.bias"]
    torch.testing.assert_close(made, worth["3.weight"].sum((0, 2, 3)), rtol=1e-9, atol=1e-13)
    made = worth["3.weight"].sum((1, 2, 3)) + worth["3.bias"]
    torch.testing.assert_close(made, worth["6.weight"].sum(0), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_gate_after_batch_norm_is_worth_its_weight_and_bias(train):
    """D 22."""
    model, (x, y) = built(_chain, train=train), images()
    worth = taylor(model, (x, y))
    kept = []
    with model[1].register_forward_hook(
        lambda _m, _i, out: (out.retain_grad(), kept.append(out))[0]
    ):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    want = (kept[0] * kept[0].grad).sum((0, 2, 3)).detach()
    torch.testing.assert_close(worth["1.weight"] + worth["1.bias"], want, rtol=1e-9, atol=1e-13)


def _normalised_convs():
    norm = partial(nn.BatchNorm2d, affine=False, eps=1e-30)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False),
        norm(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, bias=False),
        norm(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, CLASSES, bias=False),
    )


def test_filters_before_train_mode_batch_norm_are_worth_nothing_in_sum():
    """D 23: such filters are scale invariant, so both sums vanish, and (Hθ) = −g + H_fc θ_fc on them."""
    model, batch = built(_normalised_convs, train=True), images(4)
    got = curvature_product(model, [batch], kind="hessian", gradient=True)
    head = curvature_product(
        model, [batch], kind="hessian", direction={"7.weight": model[7].weight}
    ).product
    for name in ("0.weight", "3.weight"):
        theta, scale = model.get_parameter(name).detach(), got.product[name].norm() * 2
        assert (theta * got.gradient[name]).sum((1, 2, 3)).abs().max() < 1e-12 * scale
        assert (theta * got.product[name]).sum((1, 2, 3)).abs().max() < 1e-12 * scale
        torch.testing.assert_close(
            got.product[name], head[name] - got.gradient[name], rtol=1e-9, atol=1e-12 * float(scale)
        )
    evaluated = curvature_product(model.eval(), [batch], kind="hessian", gradient=True)
    theta = model[0].weight.detach()
    assert (theta * evaluated.gradient["0.weight"]).sum((1, 2, 3)).abs().max() > 1e-4


def test_sign_vectors_average_to_the_exact_diagonal():
    """D 24: Hutchinson over all 2^p sign vectors."""
    model = built(
        lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    )
    batch = rows(4, 2, classes=2)
    total = torch.zeros(8, dtype=torch.float64)
    for signs in itertools.product((-1.0, 1.0), repeat=8):
        v = torch.tensor(signs, dtype=torch.float64)
        direction = {"0.weight": v[:4].view(2, 2), "2.weight": v[4:].view(2, 2)}
        product = curvature_product(model, [batch], kind="hessian", direction=direction).product
        total += v * flatten(model, product) / 2**8
    torch.testing.assert_close(
        total, dense_kind(model, batch, TASK).diagonal(), rtol=1e-9, atol=1e-14
    )


# --- D 25–30: OBA ----------------------------------------------------------------------------------------------------


def test_homogeneous_network_has_its_exact_product_from_one_backward():
    """D 25: Jθ = Lz, hessian − ggn = (L−1)g, and Hθ = Jᵀ((L−1)g_z + L·H_z z)."""
    num_layers = 4
    model, (x, y) = bias_free(num_layers), rows()
    hessian = curvature_product(model, [(x, y)], kind="hessian", gradient=True)
    ggn = curvature_product(model, [(x, y)], kind="ggn").product
    rest = {name: hessian.product[name] - ggn[name] for name in ggn}
    want = {name: (num_layers - 1) * g for name, g in hessian.gradient.items()}
    assert_products_close(rest, want, tolerance=1e-11)
    z = model(x)
    leaf = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(leaf, y), leaf, create_graph=True)
    (bend,) = torch.autograd.grad(slope, leaf, leaf.detach())
    cotangent = (num_layers - 1) * slope.detach() + num_layers * bend
    pulled = torch.autograd.grad(z, list(model.parameters()), cotangent)
    assert_products_close(
        hessian.product, dict(zip(hessian.product, pulled, strict=True)), tolerance=1e-11
    )
    last = layer_tangents(model, (x, y))["6.weight"]
    torch.testing.assert_close(
        last, (num_layers - 1) * model[:6](x).detach(), rtol=1e-11, atol=1e-13
    )


def _piecewise_linear():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, affine=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 1, stride=2),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


def test_for_a_loss_linear_in_logits_connectivity_is_the_hessian():
    """D 26; and with cross-entropy it is not."""
    model, batch = built(_piecewise_linear), images()
    got = curvature_product(model, [batch], LINEAR_LOSS).product
    assert_products_close(got, brute_force_product(model, batch, LINEAR_LOSS), tolerance=1e-12)
    got = curvature_product(model, [batch]).product
    with pytest.raises(AssertionError, match=r"7\.bias"):
        assert_products_close(got, brute_force_product(model, batch), tolerance=0.08)


def test_linearising_at_the_tangent_is_caught():
    """D 27: the published scorer takes ReLU's mask from the tangent; with biases that is another product."""
    model, (x, y) = built(_wide_mlp), rows(12)
    right = layer_tangents(model, (x, y))["6.weight"]
    got = _chain_tangent(model, x, at_tangent=False)
    torch.testing.assert_close(right, got, rtol=1e-12, atol=1e-13)
    wrong = _chain_tangent(model, x, at_tangent=True)
    assert (wrong - right).norm() > 0.05 * right.norm()


def _wide_mlp():
    layers = itertools.chain(*((nn.Linear(4 if i == 0 else 8, 8), nn.ReLU()) for i in range(3)))
    model = nn.Sequential(*layers, nn.Linear(8, CLASSES))
    for layer in model[:6:2]:
        nn.init.normal_(layer.bias, std=0.7)
    return model


def _chain_tangent(model, x, *, at_tangent):
    tangent = torch.zeros_like(x)
    for layer in model[:6]:
        if isinstance(layer, nn.Linear):
            x, tangent = (
                layer(x).detach(),
                (x @ layer.weight.T + tangent @ layer.weight.T + layer.bias).detach(),
            )
        else:
            mask = (tangent if at_tangent else x) > 0
            x, tangent = x.relu(), tangent * mask
    return tangent


@pytest.mark.parametrize("softmax", [False, True], ids=["identity", "softmax"])
def test_attention_drops_exactly_the_curvature_of_softmax(softmax):
    """D 29: with a loss linear in logits and no other smooth operation."""

    def forward(m, x):
        q, k, v = (heads_apart(part(x)) for part in (m.q, m.k, m.v))
        scores = q @ k.transpose(-2, -1)
        weights = scores.softmax(-1) if softmax else scores
        return m.head(m.out((weights @ v).transpose(1, 2).flatten(2)).mean(1))

    parts = {name: partial(nn.Linear, 6, 6) for name in ("q", "k", "v", "out")}
    model = built(
        lambda: Net(
            forward, **{name: make() for name, make in parts.items()}, head=nn.Linear(6, CLASSES)
        )
    )
    got = curvature_product(model, [sequences()], LINEAR_LOSS).product
    want = brute_force_product(model, sequences(), LINEAR_LOSS)
    gap = size({name: got[name] - want[name] for name in got}) / size(want)
    assert gap > 1e-4 if softmax else gap < 1e-12


def test_removing_everything_from_a_quadratic_is_predicted_with_one_half():
    """D 30: L(0) − L(θ) = −g·θ + ½ θᵀHθ."""
    model = built(lambda: nn.Linear(4, 2))
    (x, _), (y, _) = rows(), rows(width=2, seed=9)
    task = Task.classification(F.mse_loss)
    got = curvature_product(model, [(x, y)], task, kind="hessian", gradient=True)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    predicted = sum(
        float((theta[n] * (0.5 * got.product[n] - got.gradient[n])).sum()) for n in theta
    )
    true = (F.mse_loss(torch.zeros_like(y), y) - F.mse_loss(model(x), y)).item()
    assert predicted == pytest.approx(true, rel=1e-12)
