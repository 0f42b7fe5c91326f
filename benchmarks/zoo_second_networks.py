"""One network of the second zoo, and how it is built: weights random and all different, nothing dropped in training."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed

import torch
from torch import Tensor, nn

from oracles.library import define_torchvision_ops, float64_everywhere, transformers_model
from zoo_checks import float_outputs
from zoo_models import Entry, build

__all__ = ["Network", "built", "first_output", "hugging_face", "logits_first", "pictures"]

LIBRARIES = ("transformers.models.", "diffusers.models.", "ultralytics.nn.", "torch_geometric.nn.")


@dataclass(frozen=True)
class Network(Entry):
    """An entry that says how it is trained, and what else it can be called with than the first inputs."""

    family: str = ""
    other: Callable[[int], Any] | None = None
    """Inputs of another size for a batch of a given size; None where the architecture takes but one."""

    kind: str = "classes"
    """Of the task: `classes` (logits along dimension 1), `text` (next tokens), `values` (some tensor to come near)."""

    read: Callable[[Any], Tensor] | None = None
    """The tensor that the task reads of what the model returns; its `logits`, or its first, unless said."""

    whole: bool = False
    """A batch is one sample, such as a graph, and cannot be split."""

    def in_float64(self) -> AbstractContextManager[None]:
        """Casts to float32 in places are casts to float64 here."""
        return float64_everywhere(LIBRARIES)


def built(network: Network, seed: int) -> nn.Module:
    """The network in eval mode; in train mode it drops nothing, so that runs of two of them can be compared."""
    model = build(network, seed)
    for module in model.modules():
        _without_dropping(module)
        if (config := getattr(module, "config", None)) is not None:
            _without_dropping(config)
    return model


def _without_dropping(holder: Any) -> None:
    """Set rates of dropout, and of what goes by other names, to zero."""
    if isinstance(holder, nn.modules.dropout._DropoutNd) or "Stochastic" in type(holder).__name__:
        holder.p = 0.0
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        dropping = "drop" in name or (name.startswith("mask_") and name.endswith("prob"))
        if dropping and type(value) is float:
            setattr(holder, name, 0.0)
        if name == "apply_spec_augment":
            setattr(holder, name, False)


def hugging_face(
    kind: str, parts: dict[str, tuple[str, dict[str, Any]]], **options: Any
) -> nn.Module:
    """A model of transformers by the classes of its configuration and its own, with fused attention where it can.

    `parts` are configurations within the configuration: an option, the class, its options.
    """
    define_torchvision_ops()
    import transformers

    config, model = kind.split(" ")
    inner = {option: getattr(transformers, name)(**own) for option, (name, own) in parts.items()}
    try:
        return transformers_model(model, config, "sdpa", **inner, **options)
    except (
        ValueError
    ):  # where there is none for this network; of what else is wrong the next line says the same
        return transformers_model(model, config, "eager", **inner, **options)


def first_output(raw: Any) -> Tensor:
    """The first tensor of floating point."""
    return float_outputs(raw)[0]


def logits_first(raw: Any) -> Tensor:
    """Logits of sequences with the classes along dimension 1."""
    return raw.logits.transpose(1, 2)


def pictures(size: int, batch: int, channels: int = 3) -> Tensor:
    """Random pictures."""
    return torch.randn(batch, channels, size, size, dtype=torch.float64)
