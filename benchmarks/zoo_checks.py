"""What is asked of a cut network, written apart from the library that cut it.

Costs are counted anew: parameters by `numel`, MACs by torch's own flop counter, which sees matrix products and
convolutions where they are dispatched. It misses fused attention (so attention is forced to its open form, and the
encoder's fast path is off), products by `mv`, `addmv` and `dot` (given to it here), and the fused LSTM of float32; in
float64, which is what is measured, recurrent layers are taken apart into matrix products before it looks.
"""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["call", "difference", "float_outputs", "recount_macs", "round_trips", "run", "trains"]

aten = torch.ops.aten


def call(model: nn.Module, inputs: Any) -> Any:
    """Run it without gradients on a tensor, a tuple or a dict of arguments."""
    with torch.no_grad():
        return run(model, inputs)


def run(model: nn.Module, inputs: Any) -> Any:
    """Run it on a tensor, a tuple or a dict of arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def float_outputs(result: Any) -> list[Tensor]:
    """Tensors of floating point in a result, in order; a cache is no result."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in float_outputs(item)]
    return []


def difference(found: Any, expected: Any) -> float:
    """Greatest distance over all outputs, each relative to its greatest entry; infinite where shapes differ.

    Infinities must stand at the same places (masked logits); a NaN is equal to nothing.
    """
    a, b = float_outputs(found), float_outputs(expected)
    if not a or [t.shape for t in a] != [t.shape for t in b]:
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.isnan().any() or y.isnan().any() or not x[y.isinf()].equal(y[y.isinf()]):
            return float("inf")
        finite = ~y.isinf()
        if finite.any():
            greatest = y[finite].abs().max().clamp(min=1e-30)
            worst = max(worst, ((x - y)[finite].abs().max() / greatest).item())
    return worst


def recount_macs(model: nn.Module, inputs: Any) -> int:
    """Multiply-accumulates of one forward pass, attention included."""
    rules: dict[Any, Callable[..., int]] = {
        aten.mv: lambda a, *_, **__: 2 * a[0] * a[1],
        aten.addmv: lambda _, a, *__, **___: 2 * a[0] * a[1],
        aten.dot: lambda a, *_, **__: 2 * a[0],
    }
    counter = FlopCounterMode(display=False, custom_mapping=rules)
    with _attention_in_the_open(), counter:
        call(model, inputs)
    return counter.get_total_flops() // 2


@contextmanager
def _attention_in_the_open() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def round_trips(model: nn.Module, inputs: Any) -> str:
    """Save, load into a copy with other weights, strictly; the copy must give the same, bit for bit."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.5)
    twin.load_state_dict(torch.load(file, weights_only=True), strict=True)
    results: list[Any] = []
    for network in (twin, model):
        torch.manual_seed(0)  # for those that draw numbers in eval mode as well
        results.append(call(network, inputs))
    return "" if difference(*results) == 0 else "outputs differ"


def trains(model: nn.Module, inputs: Any) -> str:
    """One step of SGD in train mode on the mean square of the first output; empty if all is finite."""
    model = copy.deepcopy(model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    loss = float_outputs(run(model, inputs))[0].square().mean()
    loss.backward()
    if all(p.grad is None for p in trained):
        return "no gradient arrives"
    optimizer.step()
    finite = bool(loss.isfinite()) and all(bool(p.isfinite().all()) for p in trained)
    return "" if finite else "not finite"
