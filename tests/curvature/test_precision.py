"""Other precisions and devices: float32, bfloat16 autocast, CUDA; and checkpointing, which must change nothing."""

import pytest
import torch

from apoptosis.curvature import KINDS, curvature_product, reference_product
from oracles.building import built, images, rows
from oracles.cases import SMALL_CASES
from oracles.cases_architectures import densenet, mobilenet, resnet, vit
from oracles.cases_programs import checkpointed
from oracles.compare import EXACT, assert_products_close
from oracles.evaluation import random_direction

NETWORKS = {"resnet": resnet, "densenet": densenet, "mobilenet": mobilenet, "vit": vit}
BY_ID = {case.id: case for case in SMALL_CASES}
SINGLE = (
    2e-4  # float32 after some twenty operations; a parameter's size has a floor (compare.FLOOR)
)


def lower(batch, dtype=torch.float32):
    return batch[0].to(dtype), batch[1]


def size(product):
    return torch.stack([value.double().norm() for value in product.values()]).norm().item()


def gap(a, b):
    return size({name: a[name].double() - b[name].double() for name in b}) / size(b)


@pytest.mark.parametrize("path", [curvature_product, reference_product], ids=["fast", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_float32_is_float64_rounded(name, kind, path):
    model = built(NETWORKS[name])
    want = path(model, [images()], kind=kind).product
    got = path(model.float(), [lower(images())], kind=kind).product
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_products_close(got, want, tolerance=SINGLE, what=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("random", [False, True], ids=["parameters", "random"])
def test_bfloat16_autocast_is_close_and_its_results_are_float32(name, kind, random):
    model, batch = built(NETWORKS[name]).float(), lower(images())
    direction = random_direction(model) if random else None
    want = curvature_product(model, [batch], kind=kind, direction=direction, gradient=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = curvature_product(model, [batch], kind=kind, direction=direction, gradient=True)
    for result in (got.product, got.gradient):
        assert {value.dtype for value in result.values()} == {torch.float32}
    assert gap(got.gradient, want.gradient) < 0.05
    assert gap(got.product, want.product) < 0.1
    assert gap(got.product, want.product) > 1e-5, "autocast had no effect"


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_inside_the_model(kind):
    case = BY_ID["vit"]
    model, batch = case.make_model().float(), lower(case.make_batch())
    want = curvature_product(model, [batch], kind=kind).product
    plain = model.function

    def forward(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(*args)

    model.function = forward
    got = curvature_product(model, [batch], kind=kind).product
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert 1e-5 < gap(got, want) < 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
def test_checkpointed_is_the_same(kind, reentrant):
    plain = built(lambda: checkpointed(reentrant=None))
    saving = built(lambda: checkpointed(reentrant=reentrant))
    for direction in (None, random_direction(plain)):
        want = curvature_product(plain, [rows()], kind=kind, direction=direction, gradient=True)
        got = curvature_product(saving, [rows()], kind=kind, direction=direction, gradient=True)
        assert_products_close(got.product, want.product, tolerance=EXACT)
        assert_products_close(got.gradient, want.gradient, tolerance=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_with_autocast_is_close(kind):
    plain = built(lambda: checkpointed(reentrant=None)).float()
    saving = built(lambda: checkpointed(reentrant=False)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = curvature_product(plain, [lower(rows())], kind=kind).product
        got = curvature_product(saving, [lower(rows())], kind=kind).product
    assert gap(got, want) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [*NETWORKS, "attention-causal", "encoder-layer", "lstm", "checkpoint"]
)
def test_cuda_is_cpu(name, kind):
    case = BY_ID[name]
    model, batch = case.make_model(), case.make_batch()
    want = curvature_product(model, [batch], case.task, kind=kind, gradient=True)
    moved = tuple(part.cuda() for part in batch)
    got = curvature_product(model.cuda(), [moved], case.task, kind=kind, gradient=True)
    for a, b in ((got.product, want.product), (got.gradient, want.gradient)):
        # CUDA's hardswish and hardsigmoid multiply by 1/6 rounded to float32, in float64 too.
        tolerance = 1e-6 if name == "mobilenet" else 1e-9
        on_cpu = {parameter: value.cpu() for parameter, value in a.items()}
        assert_products_close(on_cpu, b, tolerance=tolerance)
