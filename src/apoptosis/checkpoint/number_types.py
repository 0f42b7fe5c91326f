"""Types of numbers that a checkpoint can hold, and what they are called in its files."""

import torch

__all__ = ["ALL_DTYPES", "CODES", "DTYPES", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `float32`."""
    return str(dtype).removeprefix("torch.")


CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""Names of number types in a safetensors file."""

DTYPES = {dtype_name(dtype): dtype for dtype in CODES}
"""By the names they have in `run.json`."""

ALL_DTYPES = {dtype_name(own): own for own in vars(torch).values() if isinstance(own, torch.dtype)}
"""All that this torch has, by name: a name in a file is looked up here, for torch's own look-up imports modules."""
