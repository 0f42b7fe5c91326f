"""Numbers of a network that nothing good can come of: NaN, infinity, weights that are no real numbers.

They spread without a word: comparisons with NaN are false, so a NaN weight is neither least nor largest, and statistics
with one are NaN from then on. So networks are looked at where they come in and where they go out.

Parameters must be finite floating-point numbers, and what norms keep of their data must be finite, variances not below
zero. Other buffers are free: masks of attention hold -inf, and so may parameters that are frozen and hold nothing but
0 and -inf.
"""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apoptosis.errors import ConfigError, ModelError, NonFiniteError

__all__ = ["check_default_device", "check_numbers", "is_sound"]

STATISTICS = ("running_mean", "running_var")


def check_numbers(model: nn.Module, what: str = "The network", *, real: bool = True) -> None:
    """Refuse a network with numbers that nothing good can come of; see the module docstring.

    Args:
        model: looked at, not run. What has no numbers (the meta device) is passed over.
        what: how it is called in the message.
        real: whether weights that are integers or complex are refused too: they can be kept, and not scored.

    Raises:
        ConfigError: numbers would be made on another device than the CPU.
        ModelError: a weight is of another kind, or a variance is below zero.
        NonFiniteError: there is NaN or infinity.

    >>> from apoptosis.errors import NonFiniteError
    >>> net = nn.Linear(2, 1)
    >>> _ = nn.init.constant_(net.bias, float("nan"))
    >>> try:
    ...     check_numbers(net)
    ... except NonFiniteError as error:
    ...     print(str(error).split(".")[0])
    The network has NaN in 'bias'
    """
    if real:
        check_default_device()
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"{what} is a {type(model).__name__}. Give a torch.nn.Module.")
    for name, parameter in model.named_parameters():
        if not (is_lazy(parameter) or parameter.is_meta):
            _check_weight(name, parameter, what, real=real)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] not in STATISTICS or buffer.is_meta or is_lazy(buffer):
            continue
        if not is_sound(buffer):
            raise NonFiniteError(
                f"{what} has {_found(buffer)} in {name!r}, which a norm keeps of its data. Look for NaN and very large "
                "values in these; then measure them anew, with the repair `batch_norm`."
            )
        if name.endswith("running_var") and buffer.numel() and bool((buffer < 0).any()):
            raise ModelError(
                f"{what} has variances below zero in {name!r} (the least is {float(buffer.min()):g}), of which no norm "
                "can take a root. Measure them anew, or take another copy of the weights."
            )


def _check_weight(name: str, parameter: Tensor, what: str, *, real: bool) -> None:
    kind = str(parameter.dtype).removeprefix("torch.")
    if real and not parameter.is_floating_point() and parameter.dtype != torch.bool:
        raise ModelError(
            f"{what} has weights of type {kind} in {name!r}. Weights are scored and mended as real numbers: give a "
            "network in floating point (dequantised, or with real and imaginary parts apart), or hold what is no "
            "weight as a buffer."
        )
    if not is_sound(parameter) and not _is_frozen_mask(parameter):
        raise NonFiniteError(
            f"{what} has {_found(parameter)} in {name!r}. Look where it comes from: the data that it was trained or "
            f"measured on, a learning rate that is too high, numbers too large for the type {kind}."
        )


def check_default_device() -> None:
    """Refuse to compute where tensors are made elsewhere than on the CPU unless one says.

    Raises:
        ConfigError: a default device is set.
    """
    if (device := torch.get_default_device()).type != "cpu":
        raise ConfigError(
            f"The default device is {device} (torch.set_default_device, or a block `with torch.device(…)`), and sums "
            "and random numbers are kept on the CPU here. Work outside of the block, or after "
            "torch.set_default_device('cpu'); the network and its batches stay where they are."
        )


def is_sound(tensor: Tensor) -> bool:
    """True if all its numbers are finite; integers always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # of eight bits, torch cannot say
        tensor = tensor.float()
    return bool(tensor.detach().isfinite().all())


def _is_frozen_mask(parameter: Tensor) -> bool:
    plain = parameter.detach()
    return not parameter.requires_grad and bool(((plain == 0) | plain.isneginf()).all())


def _found(tensor: Tensor) -> str:
    tensor = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    return "NaN" if bool(tensor.isnan().any()) else "infinity"
