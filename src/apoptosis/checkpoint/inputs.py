"""What a network was traced on, without its numbers: shapes, number types, and how they are arranged.

Tensors, tuples, lists and dicts are described however deep; values that are JSON stay as they are. Of anything else
the class is noted: zeros of its form cannot be made, and whoever needs them passes an example.
"""

from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from apoptosis.checkpoint.number_types import ALL_DTYPES, dtype_name
from apoptosis.errors import CheckpointError
from apoptosis.reading import EXAMPLE

__all__ = ["describe", "zeros_like_description"]


def describe(inputs: Any) -> dict[str, Any]:
    """The form of inputs as plain JSON.

    >>> describe((torch.zeros(2, 3), {"scale": 0.5}))["tuple"][0]
    {'tensor': [2, 3], 'dtype': 'float32'}
    """
    if isinstance(inputs, Tensor):
        return {"tensor": list(inputs.shape), "dtype": dtype_name(inputs.dtype)}
    if type(inputs) in (tuple, list):
        return {type(inputs).__name__: [describe(item) for item in inputs]}
    if type(inputs) is dict and all(isinstance(key, str) for key in inputs):
        return {"dict": {key: describe(item) for key, item in inputs.items()}}
    if _is_json(inputs):
        return {"value": inputs}
    return {"other": f"{type(inputs).__module__}.{type(inputs).__qualname__}"}


def zeros_like_description(form: Any, device: torch.device) -> Any:
    """Zeros in the form of what was described.

    Raises:
        CheckpointError: there was something in it that only its user can make.
    """
    match form:
        case {"tensor": list(shape), "dtype": str(name)}:
            return _zeros([int(n) for n in shape], name, device)
        case {"tuple": list(items)}:
            return tuple(zeros_like_description(item, device) for item in items)
        case {"list": list(items)}:
            return [zeros_like_description(item, device) for item in items]
        case {"dict": dict(items)}:
            return {key: zeros_like_description(item, device) for key, item in items.items()}
        case {"value": value}:
            return value
        case _:
            what = form.get("other") if isinstance(form, dict) else form
            raise CheckpointError(
                f"The network was traced on inputs that hold a {what!s:.80}, which a checkpoint cannot keep. Pass "
                "`example_inputs` to `load`, as they were passed to `trace`."
            )


def _zeros(shape: list[int], name: str, device: torch.device) -> Tensor:
    dtype = ALL_DTYPES.get(name)
    if dtype is None:
        raise CheckpointError(
            f"This version of torch has no numbers of type {name!r:.40}. Use the one that wrote the checkpoint."
        )
    try:
        if not 0 <= prod(shape) <= EXAMPLE:
            raise ValueError(f"more than {EXAMPLE:,} numbers")
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"Example inputs of shape {str(shape):.80} cannot be made here ({str(error):.80}). Pass smaller "
            "`example_inputs` to `load`."
        ) from error


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the same; containers are looked at one level above."""
    return value is None or type(value) in (bool, int, str) or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return type(value) is float and isfinite(value)
