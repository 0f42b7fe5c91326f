"""Models written to break the engine: aliases, writes to what is not theirs, hidden derivatives, hooks, threads.

Each was found by comparing with double backward and finite differences, or by a state that had changed.
"""

import gc
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from apoptosis.curvature import KINDS, curvature_product, reference_product
from apoptosis.errors import (
    ConfigError,
    DataError,
    DirectionError,
    LossError,
    LostTangentError,
    ModelError,
    NonFiniteError,
)
from apoptosis.task import Task
from oracles.brute_force import double_backward_product, flatten, unflatten
from oracles.building import CLASSES, Net, built, rows, tokens
from oracles.compare import EXACT, assert_products_close
from oracles.evaluation import gradient, random_direction, undisturbed
from oracles.untouched import Snapshot

WIDTH = 6


def perceptron(middle, **parts):
    """Layer, then `middle`, then layer."""
    return built(
        lambda: Net(
            lambda m, x: m.head(middle(m, m.stem(x))),
            stem=nn.Linear(4, WIDTH),
            head=nn.Linear(WIDTH, CLASSES),
            **{name: make() for name, make in parts.items()},
        )
    )


def assert_exact(model, batch=None):
    """Gradient and product of a model that torch can differentiate twice are torch's; nothing changes."""
    batch = batch or rows()
    want = gradient(model, batch)
    scale = torch.cat([g.flatten() for g in want.values()]).norm().item()
    for delta in (None, random_direction(model)):
        before = Snapshot(model)
        got = curvature_product(model, [batch], kind="hessian", direction=delta, gradient=True)
        before.assert_unchanged()
        with undisturbed(model):
            vector = double_backward_product(model, batch, None, "hessian", flatten(model, delta))
        assert_products_close(got.gradient, want, tolerance=EXACT)
        assert_products_close(
            got.product, unflatten(vector, model), tolerance=EXACT, scale=scale, what="hessian"
        )


# --- aliases ---------------------------------------------------------------------------------------------------------


def detached_alias_sees_write(_m, x):
    y = x * 1.0
    alias = y.detach()
    y += x.tanh()
    return y * alias


def data_alias_sees_write(_m, x):
    y = x * 1.0
    alias = y.data
    y.mul_(x.tanh())
    return y + alias


def view_sees_every_write(_m, x):
    y = x + 0.0
    view = y.view(-1)
    y.mul_(2)
    y.add_(x.tanh())
    y.mul_(0.5)
    return view.view_as(x) * x


def view_of_a_constant_sees_write(_m, x):
    y = torch.ones(len(x), WIDTH, dtype=x.dtype)
    left, middle = y[:, :3], y[:, 1:4]
    left.mul_(x[:, :3])
    return torch.cat([middle.tanh(), middle * middle], 1)


def shape_of_a_view_changed_in_place(_m, x):
    y = (x * 1)[:, None]
    y.squeeze_(1)
    z = (x * 2).t()
    z.t_()
    return y.tanh() * z


def slices_added_to(_m, x):
    y = torch.zeros_like(x)
    y[:, 1:3] += x[:, :2].tanh()
    y[:, 1:3] *= x[:, 2:4]
    return y + x


ALIASES = (
    detached_alias_sees_write,
    data_alias_sees_write,
    view_sees_every_write,
    view_of_a_constant_sees_write,
    shape_of_a_view_changed_in_place,
    slices_added_to,
)


@pytest.mark.parametrize("middle", ALIASES, ids=lambda f: f.__name__)
def test_who_shares_memory_sees_writes(middle):
    assert_exact(perceptron(middle))


@pytest.mark.parametrize("kind", KINDS)
def test_writes_of_what_the_direction_does_not_move_are_followed(kind):
    model = perceptron(slices_added_to)
    direction = {"head.bias": torch.ones(CLASSES).double()}
    got = curvature_product(model, [rows()], kind=kind, direction=direction).product
    want = reference_product(model, [rows()], kind=kind, direction=direction).product
    assert_products_close(got, want, tolerance=EXACT, scale=1e-3)


# --- what is not the model's to change -------------------------------------------------------------------------------


def update_by_data(m, x):
    m.average.data.mul_(0.9).add_(0.1 * x.data.mean(0))
    return x * m.average


def update_a_view(m, x):
    with torch.no_grad():
        m.average[1:].mul_(0.9)
    m.average.view(-1)[:2].add_(x.detach().mean())
    return x * m.average


def update_by_out(m, x):
    with torch.no_grad():
        torch.mul(m.average, 0.9, out=m.average)
    return x * m.average


def rebind(m, x):
    m.average = m.average * 0.9 + 0.1 * x.mean(0)
    return x * m.average


def fill_cache(m, x):
    m.cache[0][: len(x)] = x
    return m.cache[0, : len(x)].tanh()


@pytest.mark.parametrize(
    "middle",
    [update_by_data, update_a_view, update_by_out, rebind, fill_cache],
    ids=lambda f: f.__name__,
)
def test_buffers_are_not_written_to(middle):
    def make():
        return perceptron(
            middle,
            average=partial(torch.ones, WIDTH),
            cache=partial(torch.zeros, 2, 9, WIDTH),
        )

    model, before = make(), None
    want = gradient(make(), rows())
    before = Snapshot(model)
    for _ in range(2):  # and the second call finds what the first one found
        got = curvature_product(model, [rows()], kind="hessian", gradient=True)
        before.assert_unchanged()
        assert_products_close(got.gradient, want, tolerance=EXACT)
    assert not any(b.requires_grad or vars(b) for b in model.buffers())


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, spectral_norm])
@pytest.mark.filterwarnings("ignore")
def test_spectral_norm_in_train_mode_keeps_its_vectors(wrap):
    def make():
        return built(lambda: nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 3)), train=True)

    model, want = make(), gradient(make(), rows())
    before = Snapshot(model)
    got = curvature_product(model, [rows()], gradient=True)
    before.assert_unchanged()
    assert_products_close(got.gradient, want, tolerance=EXACT)


def test_batch_norm_without_gradient_keeps_its_statistics():
    def forward(m, x):
        with torch.no_grad():
            gate = m.norm(m.stem(x))
        return m.head(m.stem(x) * gate)

    parts = {"stem": (4, 6), "head": (6, 3)}
    model = built(
        lambda: Net(
            forward,
            norm=nn.BatchNorm1d(6),
            **{name: nn.Linear(*shape) for name, shape in parts.items()},
        ),
        train=True,
    )
    before = Snapshot(model)
    curvature_product(model, [rows()])
    before.assert_unchanged()


class MaxNorm(nn.Linear):
    """Overwrites its weight at every call, as networks for EEG do."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


@pytest.mark.parametrize("layer", [MaxNorm, Clamped])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_overwritten_in_the_forward_is_scored_where_it_was_put_and_stays_where_it_is(
    layer, kind
):
    def make(cls):
        return built(lambda: nn.Sequential(cls(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)))

    settled = make(layer)
    settled(rows()[0])  # puts the weight where it wants it
    plain = make(nn.Linear)
    plain.load_state_dict(settled.state_dict())
    model = make(layer)
    before = Snapshot(model)
    got = curvature_product(model, [rows()], kind=kind, gradient=True)
    before.assert_unchanged()
    want = curvature_product(plain, [rows()], kind=kind, gradient=True)
    assert_products_close(got.product, want.product, tolerance=EXACT)
    assert_products_close(got.gradient, want.gradient, tolerance=EXACT)


def test_embedding_with_a_largest_norm_keeps_its_table():
    model = built(
        lambda: Net(
            lambda m, x: m.head(m.table(x).mean(1)),
            table=nn.Embedding(7, 4, max_norm=0.8),
            head=nn.Linear(4, CLASSES),
        )
    )
    before = Snapshot(model)
    curvature_product(model, [tokens()], gradient=True)
    before.assert_unchanged()


@pytest.mark.parametrize(
    "prepare", [lambda _m, x: x.relu_(), lambda m, x: (x[:, :1].add_(m.shift), x)[1]]
)
def test_batches_are_not_written_to(prepare):
    model = built(
        lambda: Net(
            lambda m, x: m.head(prepare(m, x)),
            head=nn.Linear(4, CLASSES),
            shift=nn.Parameter(torch.ones(1)),
        )
    )
    x, y = rows()
    curvature_product(model, [(x, y)], kind="hessian")
    assert torch.equal(x, rows()[0])
    assert not x.requires_grad
    assert not vars(x)


def test_attributes_are_put_back_and_keep_nothing_alive():
    def middle(m, x):
        m.last, m.calls = x, m.calls + 1
        m.kept.append(x)
        return m.last.tanh()

    model = perceptron(middle, calls=int, kept=list)
    before = Snapshot(model)
    curvature_product(model, [rows()], kind="hessian")
    before.assert_unchanged()
    assert model.calls == 0
    (outlived,) = model.kept  # what was kept in a list of the model's own holds no tangent
    assert outlived._apoptosis_record.tangent is None


def test_interrupted_in_the_middle_it_puts_everything_back():
    def middle(m, x):
        m.last = x
        raise KeyboardInterrupt

    model = perceptron(middle)
    before = Snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        curvature_product(model, [rows()])
    before.assert_unchanged()


# --- memory ----------------------------------------------------------------------------------------------------------


def _tensors_alive():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def scattered(_m, x):
    y = x * 1
    y.index_fill_(1, torch.tensor([1]), 0.3)  # in place, by the generic path
    return y


def broken(_m, x):
    y = x * 1
    y.mul_(x.sigmoid())
    return y.softmax(1) * float("nan")


@pytest.mark.parametrize("middle", [scattered, broken], ids=["in-place", "error"])
def test_no_call_leaves_tensors_behind(middle):
    model = perceptron(middle)
    counts = []
    for _ in range(3):
        try:
            curvature_product(model, [rows()], kind="hessian")
        except NonFiniteError:
            assert middle is broken
        counts.append(_tensors_alive())
    assert counts[1] == counts[2]


# --- hidden derivatives ----------------------------------------------------------------------------------------------


class Reversal(torch.autograd.Function):
    """A view of its input whose derivative is not that of a view."""

    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, grad):
        return -grad


class Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_ctx, grad):
        return 2 * grad


def own_derivative(_m, x):
    (slope,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    return x - slope


def gradient_hook(_m, x):
    x.register_hook(lambda grad: -grad)
    return x.tanh()


HIDDEN = {
    "reversal": lambda _m, x: Reversal.apply(x).tanh(),
    "overwriting": lambda _m, x: Overwriting.apply(x * 1).tanh(),
    "own derivative": own_derivative,
    "gradient hook": gradient_hook,
    "vmap over a layer": lambda m, x: torch.vmap(m.more)(x),
    "sparse": lambda m, x: torch.sparse.mm(m.more.weight.to_sparse(), x.t()).t(),
    "no derivative": lambda _m, x: x * torch.unique(x).sum(),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hidden_derivative_is_an_error(name, kind):
    model = perceptron(HIDDEN[name], more=lambda: nn.Linear(WIDTH, WIDTH))
    before = Snapshot(model)
    with pytest.raises(LostTangentError, match=r"could not be followed|cannot be followed"):
        curvature_product(model, [rows()], kind=kind)
    before.assert_unchanged()


def test_a_missing_second_derivative_is_an_error_that_names_the_operation():
    model = perceptron(lambda _m, x: torch._standard_gamma(x.exp()))
    curvature_product(model, [rows()])
    with pytest.raises(LostTangentError, match=r"_standard_gamma.*connectivity"):
        curvature_product(model, [rows()], kind="hessian")


def test_integers_beside_a_missing_derivative_may_be_used():
    assert_exact(perceptron(lambda _m, x: x * torch.unique(x, return_inverse=True)[1]))


# --- hooks on gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_gradients_neither_run_nor_count(kind):
    model = perceptron(lambda _m, x: x.tanh())
    want = curvature_product(model, [rows()], kind=kind, gradient=True)
    called = []
    model.stem.weight.register_hook(lambda grad: called.append(grad) or 2 * grad)
    model.head.register_full_backward_hook(lambda _m, i, _o: called.append(i) or (3 * i[0],))
    before = Snapshot(model)
    got = curvature_product(model, [rows()], kind=kind, gradient=True)
    before.assert_unchanged()
    assert not called
    assert_products_close(got.product, want.product, tolerance=EXACT)
    assert_products_close(got.gradient, want.gradient, tolerance=EXACT)
    model(rows()[0]).sum().backward()
    assert len(called) == 2


# --- spellings -------------------------------------------------------------------------------------------------------


def by_keyword(_m, x):
    square = x.t() @ x
    y = torch.matmul(other=square, input=x) + torch.addmm(x, mat2=square, mat1=x)
    y = y + torch.bmm(mat2=square[None], input=x[None])[0] + torch.linalg.vecdot(x, y, dim=0)
    return torch.cat(tensors=[y[:, :2], y[:, 2:]], dim=1)


def square_by_keyword(_m, x):
    a, b = x[:, :5], x[:, 1:]
    return torch.matmul(other=a, input=b)[:, [0, 1, 2, 3, 4, 0]]


def empty_layer(m, x):
    return x.tanh() + F.linear(m.empty(x), torch.ones(WIDTH, 0, dtype=x.dtype))


def zero_to_a_learned_power(m, x):
    return (x.relu() + (x > 0) * 0.1) ** (m.more.bias.exp() + 2)


@pytest.mark.parametrize("middle", [by_keyword, square_by_keyword, empty_layer])
def test_rare_spellings_are_the_common_ones(middle):
    assert_exact(perceptron(middle, empty=lambda: nn.Linear(WIDTH, 0)))


def test_a_power_of_zero_does_not_move_with_its_exponent():
    model = perceptron(zero_to_a_learned_power, more=lambda: nn.Linear(WIDTH, WIDTH))
    got = curvature_product(model, [rows()], kind="hessian", gradient=True)
    assert_products_close(got.gradient, gradient(model, rows()), tolerance=EXACT)


ITSELF = {
    "linear": lambda _m, x: F.linear(x, x) @ x,
    "einsum": lambda _m, x: torch.einsum("bi,bj->bj", x, x),
    "einsum of three": lambda _m, x: torch.einsum("bi,bi,bj->bj", x, x, x),
    "alpha dropout": lambda _m, x: F.alpha_dropout(x, 0.3, training=True) * x,
    "rrelu": lambda _m, x: F.rrelu(x, training=True) * x,
}


@pytest.mark.parametrize("name", ITSELF)
@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_mean_the_same(name, kind):
    model = perceptron(ITSELF[name])
    got = curvature_product(model, [rows()], kind=kind).product
    want = reference_product(model, [rows()], kind=kind).product
    assert_products_close(got, want, tolerance=EXACT, scale=1e-3)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_take_turns_and_leave_torch_as_it_was():
    def make(seed):
        return built(
            lambda: Net(
                lambda m, x: m.head(checkpoint(m.body, m.stem(x), use_reentrant=True)),
                stem=nn.Linear(4, WIDTH),
                body=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
                head=nn.Linear(WIDTH, CLASSES),
            ),
            seed=seed,
        )

    models = [make(seed) for seed in range(4)]
    paths = [curvature_product, reference_product] * 2
    want = [curvature_product(model, [rows()], kind="hessian").product for model in models]
    got = [[] for _ in models]
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    before = [getattr(torch_checkpoint, name) for name in names], torch.get_rng_state()

    def work(i):
        for _ in range(5):
            got[i].append(paths[i](models[i], [rows()], kind="hessian").product)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(torch_checkpoint, name) for name in names] == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    for products, expected in zip(got, want, strict=True):
        assert len(products) == 5
        for product in products:
            assert_products_close(product, expected, tolerance=EXACT)


# --- bad input -------------------------------------------------------------------------------------------------------


def penalised(model):
    penalty = sum(p.square().sum() for p in model.parameters())
    return Task.classification(lambda z, y: F.cross_entropy(z, y) + 0.1 * penalty)


def test_a_loss_that_looks_past_the_outputs_is_refused():
    model = perceptron(lambda _m, x: x.tanh())
    with pytest.raises(LossError, match="penalty on the"):
        curvature_product(model, [rows()], penalised(model))


def test_what_nobody_can_mean_is_refused():
    model, batch = perceptron(lambda _m, x: x.tanh()), rows()
    with pytest.raises(ModelError, match="function"):
        curvature_product(lambda x: x, [batch])
    with pytest.raises(DataError, match="NoneType"):
        curvature_product(model, None)
    with pytest.raises(ConfigError, match="micro_batch=2.5"):
        curvature_product(model, [batch], micro_batch=2.5)
    with pytest.raises(DirectionError, match="list"):
        curvature_product(model, [batch], direction=[torch.ones(3)])
    with pytest.raises(DirectionError, match=r"head\.bias.*complex"):
        curvature_product(
            model, [batch], direction={"head.bias": torch.ones(3, dtype=torch.complex128)}
        )


def test_a_direction_may_be_of_integers():
    model = perceptron(lambda _m, x: x.tanh())
    ones = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    want = curvature_product(model, [rows()], direction=ones).product
    whole = {name: delta.long() for name, delta in ones.items()}
    got = curvature_product(model, [rows()], direction=whole).product
    assert_products_close(got, want, tolerance=EXACT)


def test_the_right_name_is_given_for_a_bad_direction():
    model = perceptron(lambda _m, x: x, nothing=lambda: nn.Parameter(torch.zeros(0)))
    direction = {"nothing": torch.zeros(0), "head.bias": torch.full((CLASSES,), float("nan"))}
    with pytest.raises(DirectionError, match=r"head\.bias"):
        curvature_product(model, [rows()], direction=direction)
