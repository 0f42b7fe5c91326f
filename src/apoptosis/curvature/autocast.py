"""Autocast, for values and tangents alike.

Under autocast torch casts the inputs of some operations to the lower precision and of others to float32, in the
dispatcher, below where operations are intercepted. A rule calls kernels of its own choosing, so the casts are made
before it instead, on value and tangent, and autocast is off while the rule runs. Tangents therefore have their
value's dtype. The tables follow torch's; a test compares the resulting dtypes operation by operation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.duals import Dual, alias_tangent, same_data

__all__ = ["cast_arguments", "without_autocast"]

# fmt: off
_LOWER = frozenset([
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum",
    "linalg_multi_dot", "linalg_vecdot", "linear", "matmul", "mm", "mv", "prelu",
    "scaled_dot_product_attention",
])
_FLOAT32 = {
    "cuda": frozenset([
        "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "exp", "expm1",
        "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp",
        "norm", "pow", "prod", "reciprocal", "rms_norm", "rsqrt", "sinh", "softmax", "softplus",
        "sum", "tan", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
    ]),
    "cpu": frozenset(["avg_pool3d", "cdist", "prod", "quantile", "trace"]),
}
_WIDEST = frozenset([
    "addcdiv", "addcmul", "bilinear", "cat", "cross", "dot", "index_copy", "index_put",
    "scatter_add", "stack", "tensordot", "vdot",
])
# fmt: on


def cast_arguments(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operation as autocast would hand them to it."""
    device = _device_of((args, kwargs))
    if device is None or not torch.is_autocast_enabled(device):
        return args, kwargs
    if name in _LOWER:
        dtype = torch.get_autocast_dtype(device)
    elif name in _FLOAT32.get(device, ()):
        dtype = torch.float32
    elif name in _WIDEST:
        dtype = max(_dtypes((args, kwargs)), key=lambda d: torch.finfo(d).bits)
    else:
        return args, kwargs
    return _cast(args, dtype), _cast(kwargs, dtype)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off on every device."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def is_on() -> bool:
    """Whether any autocast region is open."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Dual):
        yield value.value
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)


def _device_of(value: Any) -> str | None:
    return next((tensor.device.type for tensor in _walk(value)), None)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in _walk(value) if t.is_floating_point()]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Dual):
        if not _castable(value.value, dtype):
            return value
        cast = value.value.to(dtype)
        if value.tangent is None:
            return Dual(cast, None, value.weight)
        if same_data(value.value, value.tangent):  # δ = θ stays recognisable
            return Dual(cast, alias_tangent(cast, value.tangent), value.weight)
        return Dual(cast, value.tangent.to(dtype), value.weight)
    if isinstance(value, Tensor):
        return value.to(dtype) if _castable(value, dtype) else value
    if type(value) in (tuple, list):
        return type(value)([_cast(item, dtype) for item in value])
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


def _castable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Autocast leaves float64 and integers alone."""
    return tensor.is_floating_point() and tensor.dtype not in (torch.float64, dtype)
