"""Models of timm, torchvision and transformers as they are, and the table of docs/coverage.md.

`pytest tests/curvature/test_library.py -n 0 --write-coverage` writes the table; without the option
the operations that fell back are compared with those in it.
"""

import math
from pathlib import Path

import pytest
import torch

from apoptosis.curvature import KINDS, curvature_product, paper_terms, reference_product
from oracles.compare import EXACT, FINITE, assert_products_close, relative_error
from oracles.differences import finite_difference_product
from oracles.evaluation import gradient, parameters_of, random_direction
from oracles.library import LIBRARY_CASES, STEPS, float64_everywhere

TABLE = Path(__file__).parents[2] / "docs" / "coverage.md"
HEAD = """# Models checked

Made by `pytest tests/curvature/test_library.py -n 0 --write-coverage`, every model as its authors
wrote it: a small configuration, random weights, float64, hard-coded casts to float32 turned off.
*Differences*: relative error of the fast `hessian` product against central differences of ordinary
gradients (at most 1e-6). *Reference*: the fast path against the slow one, the worst of the four kinds
(at most 1e-10). *Fell back*: operations without a rule of their own, which took the generic path:
right, but slower.

| model | parameters | differences | reference | fell back |
|---|---|---|---|---|
"""

CASES = [
    pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else [])
    for case in LIBRARY_CASES
]


@pytest.fixture(scope="module")
def coverage(request):
    """Rows of this run by model; written over those of the file when asked to."""
    rows = {}
    yield rows
    if request.config.getoption("--write-coverage"):
        merged = {**_committed(), **rows}
        ordered = [merged[case.id] for case in LIBRARY_CASES if case.id in merged]
        TABLE.write_text(HEAD + "\n".join(ordered) + "\n" + _rest(), encoding="utf-8")


def _committed():
    if not TABLE.exists():
        return {}
    lines = [
        line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    return {line.split("|")[1].strip(): line for line in lines[1:]}


def _rest():
    """What stands behind the table, written by hand."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    return text[text.index("\n## ") :] if "\n## " in text else ""


def _row(name, num_parameters, differences, reference, fallbacks):
    fell = ", ".join(f"`{op}`" for op in sorted(fallbacks)) or "none"
    return f"| {name} | {num_parameters:,} | {_power(differences)} | {_power(reference)} | {fell} |"


def _fell_back(row):
    return row.split("|")[-2].strip()


def _power(error):
    """The next power of ten above, so that the table does not change with the machine."""
    return f"< 1e{math.ceil(math.log10(max(error, 1e-16)))}"


def _size(product):
    return torch.stack([value.norm() for value in product.values()]).norm().item()


@pytest.mark.parametrize("case", CASES)
def test_library_model(case, coverage, request):
    model, batch = case.make_model(), case.make_batch()
    with float64_everywhere():
        scale = _size(gradient(model, batch, case.task))
        want = finite_difference_product(model, batch, case.task, "hessian", steps=STEPS)
        got = curvature_product(model, [batch], case.task, kind="hessian")
        assert_products_close(got.product, want, tolerance=FINITE, scale=scale, what="hessian")
        differences, worst, fallbacks = (
            relative_error(got.product, want, scale=scale),
            0.0,
            dict(got.fallbacks),
        )
        for kind in KINDS:
            for direction in (None, random_direction(model)):
                fast = curvature_product(model, [batch], case.task, kind=kind, direction=direction)
                slow = reference_product(model, [batch], case.task, kind=kind, direction=direction)
                worst = max(worst, relative_error(fast.product, slow.product, scale=scale))
                fallbacks |= fast.fallbacks
                assert_products_close(
                    fast.product, slow.product, tolerance=EXACT, scale=scale, what=kind
                )
    num_parameters = sum(p.numel() for p in parameters_of(model).values())
    coverage[case.id] = _row(case.id, num_parameters, differences, worst, fallbacks)
    if not request.config.getoption("--write-coverage"):
        assert case.id in _committed(), "not in docs/coverage.md: run with --write-coverage"
        assert _fell_back(coverage[case.id]) == _fell_back(_committed()[case.id])


@pytest.mark.parametrize(
    "case", [case for case in LIBRARY_CASES if not case.slow][::3], ids=lambda case: case.id
)
def test_paper_terms_of_library_models_add_up(case):
    model, batch = case.make_model(), case.make_batch()
    with float64_everywhere():
        terms = paper_terms(model, [batch], case.task)
        want = curvature_product(model, [batch], case.task).product
    total = {name: terms.upper[name] + terms.lower[name] + terms.parallel[name] for name in want}
    assert_products_close(total, want, tolerance=EXACT)
