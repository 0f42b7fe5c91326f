"""Bad input is refused with cause and remedy, and whatever happens the model is left as it was."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.curvature import (
    KINDS,
    curvature_product,
    layer_tangents,
    paper_terms,
    reference_product,
)
from apoptosis.errors import (
    ApoptosisError,
    ConfigError,
    DataError,
    DirectionError,
    LossError,
    LostTangentError,
    ModelError,
    NonFiniteError,
)
from apoptosis.task import Task
from oracles.building import CLASSES, Net, built, images, rows
from oracles.cases import SMALL_CASES
from oracles.cases_architectures import resnet, vit
from oracles.compare import EXACT, assert_products_close
from oracles.untouched import Snapshot

PATHS = [
    pytest.param(curvature_product, id="fast"),
    pytest.param(reference_product, id="reference"),
    pytest.param(paper_terms, id="terms"),
]


def mlp():
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES)
    )


def lived_in(make=mlp, *, train=True):
    """A model with grads, hooks, mixed modes and a frozen parameter: things a careless call would lose."""
    model = built(make, train=train)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    first = next(module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d)))
    first.bias is None or first.bias.requires_grad_(requires_grad=False)
    first.register_forward_hook(lambda _m, _i, out: out)
    first.register_forward_pre_hook(lambda _m, args: args)
    first.weight.register_hook(lambda grad: grad)
    first.eval()
    return model


def refused(path, error, match, model, batches, *args, **kwargs):
    before = Snapshot(model)
    with pytest.raises(error, match=match) as caught:
        path(model, batches, *args, **kwargs)
    assert isinstance(caught.value, ApoptosisError)
    before.assert_unchanged()


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batches", [[], (), iter(())], ids=["list", "tuple", "iterator"])
def test_no_batches(path, batches):
    refused(path, DataError, r"(?i)(no batch|empty)", lived_in(), batches)


@pytest.mark.parametrize("path", PATHS)
def test_batches_without_samples(path):
    x, y = rows()
    refused(path, DataError, r"(?i)(no sample|empty)", lived_in(train=False), [(x[:0], y[:0])])


@pytest.mark.parametrize("path", PATHS)
def test_batch_on_another_device(path):
    x, y = rows()
    refused(path, DataError, "meta.*on cpu", lived_in(), [(x.to("meta"), y.to("meta"))])


@pytest.mark.parametrize("path", PATHS)
def test_second_batch_is_bad(path):
    x, y = rows()
    refused(path, DataError, "meta.*on cpu", lived_in(), [(x, y), (x.to("meta"), y)])


@pytest.mark.parametrize("path", PATHS)
def test_batch_without_labels(path):
    refused(path, DataError, r"(?i)label", lived_in(), [rows()[0]])


@pytest.mark.parametrize("path", PATHS)
def test_output_without_logits(path):
    model = built(lambda: Net(lambda m, x: {"scores": m.head(x)}, head=nn.Linear(4, CLASSES)))
    refused(path, DataError, r"(?i)logits", model, [rows()])


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_loss_that_is_no_number(path, bad):
    x, y = rows()
    x[1, 2] = bad
    refused(path, NonFiniteError, r"(?i)loss.*(nan|inf|finite)", lived_in(), [(x, y)])


@pytest.mark.parametrize("path", PATHS)
def test_loss_that_is_no_scalar(path):
    task = Task.classification(lambda z, y: F.cross_entropy(z, y, reduction="none"))
    refused(path, LossError, r"shape \(5,\).*mean", lived_in(), [rows()], task)


@pytest.mark.parametrize("path", PATHS)
def test_loss_that_is_no_tensor(path):
    task = Task.classification(lambda _z, _y: 1.0)
    refused(path, LossError, "(?i)float", lived_in(), [rows()], task)


@pytest.mark.parametrize("path", PATHS)
def test_loss_cut_off_from_the_model(path):
    task = Task.classification(lambda z, y: F.cross_entropy(z.detach(), y))
    refused(path, LossError, r"(?i)depend|detach|gradient|differentia", lived_in(), [rows()], task)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_nothing_requires_grad(path):
    model = lived_in().requires_grad_(requires_grad=False)
    refused(path, ModelError, r"(?i)requires?_?.?grad", model, [rows()])


@pytest.mark.parametrize("path", PATHS)
def test_model_without_parameters(path):
    refused(path, ModelError, r"(?i)parameter", nn.Sequential(nn.ReLU()), [rows(width=CLASSES)])


@pytest.mark.parametrize("path", PATHS)
def test_integer_model(path):
    model = nn.Linear(4, CLASSES)
    for name in ("weight", "bias"):
        value = getattr(model, name).detach().mul(9).to(torch.int8)
        setattr(model, name, nn.Parameter(value, requires_grad=False))
    refused(path, ModelError, r"(?i)(int|floating|quanti)", model, [rows()])


# --- directions and options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_direction_with_a_name_the_model_does_not_have(path):
    refused(
        path,
        DirectionError,
        r"0\.wieght",
        lived_in(),
        [rows()],
        direction={"0.wieght": torch.zeros(5, 4)},
    )


@pytest.mark.parametrize("path", PATHS)
def test_direction_of_another_shape(path):
    direction = {"0.weight": torch.zeros(4, 5).double()}
    refused(path, DirectionError, r"(?s)0\.weight.*4, 5", lived_in(), [rows()], direction=direction)


@pytest.mark.parametrize("path", PATHS)
def test_direction_along_a_frozen_parameter(path):
    model = lived_in()
    direction = {"0.bias": torch.ones(5).double()}
    refused(path, DirectionError, r"(?s)0\.bias", model, [rows()], direction=direction)


@pytest.mark.parametrize("path", PATHS)
def test_direction_that_is_no_number(path):
    direction = {"0.weight": torch.full((5, 4), float("nan")).double()}
    refused(
        path,
        (DirectionError, NonFiniteError),
        r"(?i)0\.weight|finite|nan",
        lived_in(),
        [rows()],
        direction=direction,
    )


@pytest.mark.parametrize("path", PATHS[:2])
def test_unknown_kind(path):
    refused(path, ConfigError, r"(?s)fisher.*connectivity", lived_in(), [rows()], kind="fisher")


@pytest.mark.parametrize("size", [0, -1])
def test_micro_batch_nobody_can_mean(size):
    refused(
        curvature_product, ConfigError, r"(?i)micro_batch", lived_in(), [rows()], micro_batch=size
    )


# --- lost tangents ---------------------------------------------------------------------------------------------------


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return 2 * x

    @staticmethod
    def backward(_ctx, grad):
        return 2 * grad


class WithSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def scripted():
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.layer(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(Body().double(), torch.zeros(2, 4).double())


HIDING = {
    "function": (
        lambda: Net(
            lambda m, x: m.head(Doubling.apply(m.stem(x))),
            stem=nn.Linear(4, 4),
            head=nn.Linear(4, CLASSES),
        ),
        "Doubling",
    ),
    "function-with-setup": (
        lambda: Net(
            lambda m, x: m.head(WithSetup.apply(m.stem(x))),
            stem=nn.Linear(4, 4),
            head=nn.Linear(4, CLASSES),
        ),
        "WithSetup",
    ),
    "function-of-a-parameter": (
        lambda: Net(
            lambda m, x: x @ Doubling.apply(m.weight), weight=nn.Parameter(torch.randn(4, CLASSES))
        ),
        "Doubling",
    ),
    "vmap": (
        lambda: Net(
            lambda m, x: m.head(torch.vmap(torch.tanh)(m.stem(x))),
            stem=nn.Linear(4, 4),
            head=nn.Linear(4, CLASSES),
        ),
        "vmap",
    ),
    "vmap-of-a-layer": (
        lambda: Net(lambda m, x: torch.vmap(m.head)(x), head=nn.Linear(4, CLASSES)),
        "vmap",
    ),
    "script": (
        lambda: Net(lambda m, x: m.head(m.body(x)), body=scripted(), head=nn.Linear(4, CLASSES)),
        "(?i)script",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tangent_that_would_be_lost_is_an_error(name, kind):
    make, match = HIDING[name]
    refused(curvature_product, LostTangentError, match, built(make), [rows()], kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_touches_data_alone_loses_nothing(kind):
    def make(prepare):
        return lambda: Net(
            lambda m, x: m.head(m.stem(prepare(x)).tanh()),
            stem=nn.Linear(4, 4),
            head=nn.Linear(4, CLASSES),
        )

    want = curvature_product(built(make(lambda x: 2 * x)), [rows()], kind=kind).product
    for prepare in (Doubling.apply, torch.vmap(lambda row: 2 * row)):
        got = curvature_product(built(make(prepare)), [rows()], kind=kind).product
        assert_products_close(got, want, tolerance=EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_submodules_run_eagerly(kind):
    def make(wrap):
        body = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        return built(
            lambda: Net(
                lambda m, x: m.head(m.body(m.stem(x))),
                stem=nn.Linear(4, 4),
                body=wrap(body),
                head=nn.Linear(4, CLASSES),
            )
        )

    torch.manual_seed(0)
    plain = make(lambda body: body)
    compiled = make(lambda body: torch.compile(body, backend="eager"))
    compiled.load_state_dict(
        dict(zip(compiled.state_dict(), plain.state_dict().values(), strict=True))
    )
    got = curvature_product(compiled, [rows()], kind=kind).product
    want = curvature_product(plain, [rows()], kind=kind).product
    assert_products_close(
        {name.replace("_orig_mod.", ""): value for name, value in got.items()},
        want,
        tolerance=EXACT,
    )


# --- untouched after success -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_success_leaves_everything_as_it_was(path, train):
    for make, batch in ((mlp, rows()), (resnet, images()), (vit, images())):
        model = lived_in(make, train=train)
        before = Snapshot(model)
        path(model, [batch, batch])
        before.assert_unchanged()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_option_leaves_everything_as_it_was(kind):
    model = lived_in(resnet)
    before = Snapshot(model)
    curvature_product(model, [images()], kind=kind, gradient=True, micro_batch=2)
    direction = {
        name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad
    }
    curvature_product(model, [images()], kind=kind, direction=direction)
    before.assert_unchanged()
    for name, value in direction.items():
        assert torch.equal(value, torch.ones_like(value)), name


def test_layer_tangents_leave_everything_as_it_was():
    model = lived_in(resnet)
    before = Snapshot(model)
    layer_tangents(model, images())
    before.assert_unchanged()


@pytest.mark.parametrize("case", SMALL_CASES[::5], ids=lambda case: case.id)
def test_no_case_is_touched(case):
    model = case.make_model()
    batch = case.make_batch()
    before = Snapshot(model)
    curvature_product(model, [batch], case.task, kind="hessian", gradient=True)
    before.assert_unchanged()


def test_a_model_that_fails_itself_is_left_as_it_was_and_says_why():
    def forward(m, x):
        x = m.stem(x)
        torch.rand(3)
        raise RuntimeError("the model's own trouble")

    model = built(lambda: Net(forward, stem=nn.Linear(4, 4)), train=True)
    for path in (curvature_product, reference_product, paper_terms):
        before = Snapshot(model)
        with pytest.raises(RuntimeError, match="the model's own trouble"):
            path(model, [rows()])
        before.assert_unchanged()


def test_inputs_are_not_written_to():
    model = built(
        lambda: Net(
            lambda m, x: m.head(m.stem(x).relu_()), stem=nn.Linear(4, 4), head=nn.Linear(4, CLASSES)
        )
    )
    x, y = rows()
    before = x.clone()
    curvature_product(model, [(x, y)], kind="hessian")
    assert torch.equal(x, before)
    assert not x.requires_grad


@pytest.mark.parametrize("path", PATHS[:2])
def test_it_works_where_gradients_are_off(path):
    model, batch = built(vit), images()
    want = path(model, [batch], kind="hessian").product
    before = Snapshot(model)
    with torch.no_grad():
        got = path(model, [batch], kind="hessian").product
    before.assert_unchanged()
    assert_products_close(got, want, tolerance=EXACT)


def test_nothing_of_a_batch_stays_alive():
    """A tangent stored on its own tensor is a cycle: activations would live until the next garbage collection."""
    model = built(resnet)
    seen = []
    handle = model.stem.register_forward_hook(lambda _m, _i, out: seen.append(weakref.ref(out)))
    batch = images()
    curvature_product(model, [batch])
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        batch = images()
        inputs = weakref.ref(batch[0])
        curvature_product(model, [batch], kind="hessian")
        del batch
        assert inputs() is None, "the inputs are still alive"
        assert seen, "the hook did not run"
        assert all(ref() is None for ref in seen), "an activation is still alive"
    finally:
        gc.enable()
        handle.remove()
