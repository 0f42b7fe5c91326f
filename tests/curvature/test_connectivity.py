"""`connectivity` is what its definition says, on networks written out by hand (see `oracles.frozen`)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.curvature import curvature_product, reference_product
from oracles.brute_force import flatten, unflatten
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close, relative_error
from oracles.evaluation import gradient, random_direction
from oracles.frozen import connectivity_matrix
from oracles.networks import NETWORKS, HandWrittenNorm

BY_ID = {written.id: written for written in NETWORKS}


def size(product):
    return torch.stack([value.norm() for value in product.values()]).norm().item()


@pytest.mark.parametrize("path", [curvature_product, reference_product], ids=["fast", "reference"])
@pytest.mark.parametrize("written", NETWORKS, ids=lambda written: written.id)
def test_connectivity_is_the_hessian_of_the_frozen_network(written, path):
    model, batch = written.make_model(), written.make_batch()
    matrix, scale = connectivity_matrix(written.net, model, batch), size(gradient(model, batch))
    for direction in (None, random_direction(model)):
        want = unflatten(matrix @ flatten(model, direction), model)
        got = path(model, [batch], kind="connectivity", direction=direction).product
        assert_products_close(got, want, tolerance=EXACT, scale=scale)


class _Inline(nn.Module):
    """The same normalisation as `HandWrittenNorm`, in a module that is not called a norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _FunctionNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


NORMS = {
    "torch's module": lambda: nn.RMSNorm(4, eps=1e-6),
    "torch's function": lambda: _FunctionNorm(4),
    "by hand, pow": lambda: HandWrittenNorm(4),
    "by hand, x * x": lambda: HandWrittenNorm(4, square="times"),
    "by hand, x * weight": lambda: HandWrittenNorm(4, order="last"),
}


def _normed(make_norm):
    return built(
        lambda: Net(
            lambda m, x: m.head(m.norm(m.stem(x))),
            stem=nn.Linear(4, 4),
            norm=make_norm(),
            head=nn.Linear(4, CLASSES),
        )
    )


@pytest.mark.parametrize("path", [curvature_product, reference_product], ids=["fast", "reference"])
@pytest.mark.parametrize("name", NORMS)
def test_root_mean_square_norm_is_one_operation_however_it_is_written(name, path):
    """Pinned: normalisation frozen, weight × normalised input counts, for torch's and for hand-written norm modules."""
    want = path(_normed(NORMS["torch's module"]), [rows()], kind="connectivity").product
    got = path(_normed(NORMS[name]), [rows()], kind="connectivity").product
    assert_products_close(got, want, tolerance=EXACT)


@pytest.mark.parametrize("path", [curvature_product, reference_product], ids=["fast", "reference"])
def test_a_normalisation_outside_norm_modules_is_what_it_is_made_of(path):
    norm = path(_normed(NORMS["by hand, pow"]), [rows()], kind="connectivity").product
    inline = path(_normed(lambda: _Inline(4)), [rows()], kind="connectivity").product
    gap = {name: inline[name] - norm[name] for name in norm}
    assert size(gap) > 1e-2 * size(norm)


@pytest.mark.parametrize("kind", ["functional", "hessian", "ggn"])
@pytest.mark.parametrize("name", NORMS)
def test_the_other_kinds_have_no_such_freedom(name, kind):
    models = [_normed(make) for make in (lambda: _Inline(4), NORMS[name])]
    inline, norm = (curvature_product(model, [rows()], kind=kind).product for model in models)
    assert_products_close(norm, inline, tolerance=EXACT)


def test_a_tensor_times_itself_is_a_square():
    a, b = (BY_ID[name] for name in ("times-itself", "square"))
    got = curvature_product(a.make_model(), [a.make_batch()]).product
    want = curvature_product(b.make_model(), [b.make_batch()]).product
    assert_products_close(got, want, tolerance=EXACT)


def test_the_oracle_tells_a_counted_product_from_a_frozen_one():
    """SwiGLU with its product frozen is another Hessian: the comparison above can fail."""
    written = BY_ID["swiglu"]
    model, batch = written.make_model(), written.make_batch()
    series = connectivity_matrix(written.net, model, batch, series=True)
    want = unflatten(series @ flatten(model), model)
    got = curvature_product(model, [batch], kind="connectivity").product
    with pytest.raises(AssertionError, match="differs"):
        assert_products_close(got, want, tolerance=1e-2)


def test_an_operand_that_stands_twice_in_einsum_is_no_product_with_itself():
    def forward(m: Net, x: Tensor) -> Tensor:
        u, v = m.left(x), m.right(x)
        return m.head(torch.einsum("ni,ni,ni->ni", u, u, v))

    model = built(
        lambda: Net(
            forward, left=nn.Linear(4, 4), right=nn.Linear(4, 4), head=nn.Linear(4, CLASSES)
        )
    )
    batch = rows()
    fast = curvature_product(model, [batch]).product
    slow = reference_product(model, [batch]).product
    assert_products_close(fast, slow, tolerance=EXACT)
    whole = curvature_product(model, [batch], kind="functional").product
    assert relative_error(fast, whole) > 0.01  # the square's own curvature is frozen
