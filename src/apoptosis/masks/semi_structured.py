"""2:4 masks as torch's semi-structured tensors, which NVIDIA GPUs from Ampere on multiply with sparse tensor cores.

Only `nn.Linear` has kernels for them; convolutions keep their zeros and their speed. Whether a layer gains depends on
its shape, on the rows that reach it, on the algorithm among some twenty of cuSPARSELt's (the first of them loses where
the best gains 1.5×), and on whether Python or a CUDA graph calls it: torch plans each product anew, for half a
millisecond. So every layer is measured as it will run, and compressed only where that is faster;
benchmarks/semi_structured.py has the figures.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, to_sparse_semi_structured

from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks.keeping import masks_of, release_
from apoptosis.masks.pattern import Pattern
from apoptosis.structure import Example, copy_with

__all__ = ["semi_structured"]

AnyModel = TypeVar("AnyModel", bound=nn.Module)

TWO_OF_FOUR = Pattern(2, 4)
_MULTIPLES = {torch.float16: (32, 64), torch.bfloat16: (32, 64)}
"""Rows and columns of a weight must be multiples of these."""
_SMALLEST = 256
"""Smaller weights never gain."""
_ROWS = 16
"""Inputs are padded to a multiple of so many rows."""
_ROUND_SECONDS = 5e-3


def semi_structured(
    model: AnyModel, example_inputs: Any, *, replayed: bool = False
) -> tuple[AnyModel, dict[str, float]]:
    """A copy for inference in which 2:4 masked linear weights are compressed where that is faster.

    Args:
        model: untouched; on CUDA, in bfloat16, or float16 which has not the best algorithms.
        example_inputs: a batch such as will be served: a tensor, a tuple of positional or a dict of keyword arguments.
        replayed: the copy will run in a CUDA graph, without the cost of calls from Python.

    Returns:
        The copy, and for each weight with 2:4 masks that the kernels take, how many times faster the compressed layer
        is than the dense one. Those above 1 are compressed, the others dense; if none is, the copy gains nothing.

    Raises:
        ConfigError: the model keeps no 2:4 masks of linear layers.
        ModelError: it is not on a CUDA device, not in 16 bits, or no layer has a size that the kernels take.
    """
    masks = masks_of(model)
    own = {} if masks is None else masks.masks
    linear = {
        f"{path}.weight" if path else "weight": module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    chosen = {
        name: linear[name] for name, m in own.items() if name in linear and m.fits(TWO_OF_FOUR, 1)
    }
    if not chosen:
        found = f"its masks are of {', '.join(list(own)[:3])}" if own else "it keeps none"
        raise ConfigError(
            f"{type(model).__name__} keeps no 2:4 masks of nn.Linear, which alone has kernels ({found}). Where it has "
            'such layers, make them: sparsify(model, batches, Sparsity(pattern="2:4")).'
        )
    for name, module in chosen.items():
        weight = module.weight
        if not weight.is_cuda or weight.dtype not in _MULTIPLES:
            raise ModelError(
                f"{name!r} is {weight.dtype} on {weight.device}; semi-structured tensors are float16 or bfloat16 on a "
                'CUDA device. Convert first: model.to("cuda", torch.float16).'
            )
    fits = [name for name, module in chosen.items() if _fits(module.weight)]
    if not fits:
        name, module = next(iter(chosen.items()))
        units = " and ".join(map(str, _MULTIPLES[module.weight.dtype]))
        raise ModelError(
            f"No 2:4 layer has a size that the kernels take: {name!r} is {tuple(module.weight.shape)}; rows and "
            f"columns must be multiples of {units}, from {_SMALLEST} on."
        )
    fast = release_(copy_with(model, {})).eval().requires_grad_(requires_grad=False)
    modules = dict(fast.named_modules())
    trials = {name: _Trial(modules[name.rpartition(".")[0]], replayed) for name in fits}
    handles = [trial.layer.register_forward_pre_hook(trial) for trial in trials.values()]
    try:
        with torch.inference_mode():
            Example.of(example_inputs).run(fast)
    finally:
        for handle in handles:
            handle.remove()
    for trial in trials.values():
        if trial.gain > 1:
            trial.layer.weight = trial.compressed
    return fast, {name: trial.gain for name, trial in trials.items()}


class _Trial:
    """One layer, dense and compressed, timed on the first inputs that reach it. `gain` is 0 if none do."""

    def __init__(self, layer: nn.Module, replayed: bool) -> None:  # noqa: FBT001 # private
        assert isinstance(layer, nn.Linear), "chosen among linear layers"
        self.layer, self.replayed, self.gain = layer, replayed, 0.0

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if self.gain:
            return
        inputs: Tensor = args[0]
        layer = self.layer
        weight = to_sparse_semi_structured(layer.weight.detach())
        if isinstance(weight, SparseSemiStructuredTensorCUSPARSELT):
            _tune(weight, inputs, layer.bias)
        self.compressed = nn.Parameter(weight, requires_grad=False)
        dense, sparse = (
            lambda own=own: F.linear(inputs, own, layer.bias)
            for own in (layer.weight, self.compressed)
        )
        if self.replayed:
            dense, sparse = _graph(dense), _graph(sparse)
        ratios = sorted(_seconds(dense) / _seconds(sparse) for _ in range(3))
        self.gain = ratios[1]


def _tune(
    weight: SparseSemiStructuredTensorCUSPARSELT, inputs: Tensor, bias: Tensor | None
) -> None:
    """Row-major results by the best algorithm.

    Column-major ones make the next layer copy, which costs a ViT more than it gains; and the algorithm that torch takes
    by default is slow at row-major ones.
    """
    search = getattr(torch, "_cslt_sparse_mm_search", None)
    if weight.dtype != torch.bfloat16 or search is None:
        return  # in float16 the search executes an illegal instruction on an H200 (torch 2.11), and CUDA is lost
    rows = inputs.reshape(-1, inputs.shape[-1])
    rows = F.pad(rows, (0, 0, 0, -len(rows) % _ROWS)).t()
    weight.fuse_transpose_cusparselt = True
    weight.alg_id_cusparselt = search(weight.packed, rows, bias=bias, transpose_result=True)


def _graph(run: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _seconds(run: Callable[[], object]) -> float:
    """One run, the mean of as many as fill a round."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    num = 1
    while True:
        start.record()
        for _ in range(num):
            run()
        end.record()
        torch.cuda.synchronize()
        elapsed = start.elapsed_time(end) / 1e3
        if elapsed > _ROUND_SECONDS:
            return elapsed / num
        num *= 2


def _fits(weight: torch.Tensor) -> bool:
    return all(
        size >= _SMALLEST and size % unit == 0
        for size, unit in zip(weight.shape, _MULTIPLES[weight.dtype], strict=True)
    )
