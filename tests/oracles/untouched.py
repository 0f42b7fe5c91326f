"""Everything a call must leave as it was: the model, torch's global state and the RNGs."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_globals
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["Snapshot"]


class Snapshot:
    """The state before; `assert_unchanged` compares it with the state after."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = {name: (t, t.detach().clone()) for name, t in _tensors(model).items()}
        self.grads = {
            name: (p.grad, None if p.grad is None else p.grad.clone())
            for name, p in model.named_parameters()
        }
        self.flags = _flags(model)
        self.world = _world()
        self.rng = torch.get_rng_state()
        self.numpy = np.random.get_state()[1].copy()  # noqa: NPY002

    def assert_unchanged(self) -> None:
        """Raise on the first thing that is not as it was."""
        for name, (tensor, value) in self.tensors.items():
            assert _tensors(self.model).get(name) is tensor, f"{name} is another tensor"
            torch.testing.assert_close(
                tensor.detach(), value, rtol=0, atol=0, equal_nan=True, msg=f"{name} changed"
            )
        assert set(_tensors(self.model)) == set(self.tensors), (
            "parameters or buffers were added or removed"
        )
        for name, parameter in self.model.named_parameters():
            grad, value = self.grads[name]
            assert parameter.grad is grad, f"the grad of {name} was replaced"
            if grad is not None:
                torch.testing.assert_close(
                    grad, value, rtol=0, atol=0, msg=f"the grad of {name} changed"
                )
        _assert_same(_flags(self.model), self.flags)
        _assert_same(_world(), self.world)
        assert torch.equal(torch.get_rng_state(), self.rng), "torch's RNG moved"
        assert np.array_equal(np.random.get_state()[1], self.numpy), "numpy's RNG moved"  # noqa: NPY002


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _flags(model: nn.Module) -> dict[str, Any]:
    """Modes, hooks, requires_grad and attributes."""
    flags: dict[str, Any] = {}
    for name, module in model.named_modules():
        flags[f"{name} class"] = type(module)
        flags[f"{name} training"] = module.training
        flags[f"{name} attributes"] = sorted(vars(module))
        for attribute, value in vars(module).items():
            if "hooks" in attribute and value is not None:
                flags[f"{name} {attribute}"] = [id(hook) for hook in value.values()]
    for name, tensor in _tensors(model).items():
        flags[f"{name} requires_grad"] = tensor.requires_grad
        flags[f"{name} tensor hooks"] = len(getattr(tensor, "_backward_hooks", None) or ())
        flags[f"{name} accumulate hooks"] = len(
            getattr(tensor, "_post_accumulate_grad_hooks", None) or ()
        )
        flags[f"{name} attributes"] = sorted(vars(tensor))
    return flags


def _world() -> dict[str, Any]:
    """Global state of torch that a careless tool leaves behind."""
    world: dict[str, Any] = {
        f"global {name}": [id(hook) for hook in value.values()]
        for name, value in vars(module_globals).items()
        if name.startswith("_global") and isinstance(value, dict)
    }
    return world | {
        "python RNG": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "fused attention": torch.backends.cuda.flash_sdp_enabled(),
        "efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": torch.backends.cuda.math_sdp_enabled(),
        "transformer fast path": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "dual level": torch.autograd.forward_ad._current_level,
        "tensor methods": {
            name: id(value) for name, value in vars(torch.Tensor).items() if callable(value)
        },
        "functions": {name: id(value) for name, value in vars(F).items() if callable(value)},
        "torch functions": {
            name: id(vars(torch)[name])
            for name in ("matmul", "einsum", "softmax", "compile", "vmap")
        },
        "backward": (
            id(torch.autograd.grad),
            id(torch.autograd.backward),
            id(nn.Module.__call__),
            id(nn.Module.forward),
        ),
        "checkpoint": id(torch.utils.checkpoint.checkpoint),
    }


def _assert_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    for name in before.keys() | after.keys():
        assert after.get(name) == before.get(name), f"changed: {name}"
