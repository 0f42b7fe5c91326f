"""Under autocast every operation gives the dtypes it gives without tangents, and tangents have their value's.

Torch casts in its dispatcher, below where operations are seen, so the engine casts by lists of its own. Here the
samples of each rule run both ways under `torch.autocast("cpu", bfloat16)`, in the layouts of dtypes that occur: all
float32, all bfloat16, and two mixtures (a half-precision activation with float32 weights, and the reverse).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import KINDS, RULES
from apoptosis.curvature.duals import Ledger
from apoptosis.curvature.rules import Sample, inputs, sample
from apoptosis.curvature.tangents import TangentMode
from oracles.operations import call

HIGH, LOW = torch.float32, torch.bfloat16
LAYOUTS: dict[str, Callable[[int], torch.dtype]] = {
    "high": lambda _: HIGH,
    "low": lambda _: LOW,
    "low-high": lambda i: HIGH if i else LOW,
    "high-low": lambda i: LOW if i else HIGH,
}
WITHOUT_RULE = {
    "atan2": [sample(*inputs((2, 3), (2, 3)))],
    "logsumexp": [sample(inputs((2, 3))[0], 1)],
    "var": [sample(inputs((2, 3))[0])],
}
SAMPLES = {name: rule.samples() for name, rule in RULES.items() if name != "cuda"} | WITHOUT_RULE

# Where the engine's dtype is another than torch's, and why that is left so. Each entry must really differ.
ONE_LIST = "the list of operations in lower precision is CUDA's too, where torch lowers it"
INSIDE = "torch does not list it, but makes it of products that it lowers"
ALONE = "torch lowers the product of two operands; with one operand there is none"
WIDER = "torch's CPU list widens it for want of a kernel; the rule's own kernels take bfloat16"
EXCEPTIONS = {
    ("einsum", 2, "high"): ALONE,
    ("mv", 0, "high"): ONE_LIST,
    ("addmv", 0, "high"): ONE_LIST,
    ("addr", 0, "high"): ONE_LIST,
    ("addr", 0, "low-high"): ONE_LIST,
    ("addr", 0, "high-low"): ONE_LIST,
    ("tensordot", 0, "high"): INSIDE,
    ("inner", 0, "high"): INSIDE,
    ("pad", 2, "low"): WIDER,
    ("adaptive_avg_pool3d", 0, "low"): WIDER,
    ("max_pool3d", 0, "low"): WIDER,
    ("max_pool3d", 1, "low"): WIDER,
}


def arranged(value: Any, layout: Callable[[int], torch.dtype], found: list[nn.Parameter]) -> Any:
    """A sample with its float64 tensors as parameters of the layout's dtypes, statistics in float32."""
    if isinstance(value, (list, tuple)):
        return type(value)(arranged(item, layout, found) for item in value)
    if isinstance(value, dict):
        return {key: arranged(item, layout, found) for key, item in value.items()}
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        found.append(nn.Parameter(value.to(layout(len(found)))))
        return found[-1]
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in tensors(part)]
    return [result] if isinstance(result, Tensor) and result.is_floating_point() else []


def run_both(
    name: str, args: Sample, layout: str, *, along_parameters: bool
) -> tuple[list[torch.dtype], list[torch.dtype], list[torch.dtype]] | None:
    """Dtypes of torch's outputs, of the engine's, and of its tangents; None where torch itself refuses."""
    parameters: list[nn.Parameter] = []
    positional = arranged(args.args, LAYOUTS[layout], parameters)
    named = arranged(args.kwargs, LAYOUTS[layout], parameters)
    if "-" in layout and len(parameters) < 2:
        return None
    delta = {p: p.detach() if along_parameters else torch.ones_like(p) for p in parameters}
    mode = TangentMode(Ledger(delta), KINDS["hessian"].kept)
    with torch.autocast("cpu", dtype=LOW):
        try:
            plain = tensors(call(name)(*positional, **named))
        except RuntimeError:
            return None
        with mode:
            outputs = tensors(call(name)(*positional, **named))
    moved = [mode.ledger.current(y)[1].tangent for y in outputs]
    return [y.dtype for y in plain], [y.dtype for y in outputs], [t.dtype for t in moved]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SAMPLES)
def test_outputs_and_tangents_have_the_dtype_that_torch_gives(name: str, layout: str) -> None:
    for index, args in enumerate(SAMPLES[name]):
        found = [run_both(name, args, layout, along_parameters=same) for same in (True, False)]
        if None in found:
            continue
        for _, outputs, moved in found:
            assert moved == outputs, "a tangent has another dtype than its value"
        differs = any(plain != outputs for plain, outputs, _ in found)
        assert differs == ((name, index, layout) in EXCEPTIONS), (index, found)


def test_autocast_is_seen_at_all() -> None:
    """Torch lowers a float32 matrix product and so does the engine; it leaves an addition alone."""
    (args, *_), (plus, *_) = SAMPLES["matmul"], SAMPLES["add"]
    lowered = run_both("matmul", args, "high", along_parameters=True)
    assert lowered == ([LOW], [LOW], [LOW])
    assert run_both("add", plus, "high", along_parameters=True) == ([HIGH], [HIGH], [HIGH])


def test_exceptions_name_samples_that_exist() -> None:
    for name, index, layout in EXCEPTIONS:
        assert index < len(SAMPLES[name])
        assert layout in LAYOUTS
