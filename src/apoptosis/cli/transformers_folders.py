"""Models of a folder with a transformers `config.json`. Such folders are handed around: none of their code is run.

transformers would run Python files that a configuration names, fetch kernels and weights by names in it, and call what
`architectures` says. Here the first are refused, nothing is fetched, and the last must be a model of its own.
"""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from apoptosis.cli.libraries import library
from apoptosis.cli.named_models import NamedModel
from apoptosis.cli.names import quoted, sentence
from apoptosis.errors import ConfigError
from apoptosis.reading import OPTIONS, read_file

__all__ = ["transformers_model"]

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""Keys of a configuration under which transformers takes the name of a repository of compiled code."""


def transformers_model(folder: str) -> NamedModel:
    """The model that a folder describes, with its weights where it has some.

    Raises:
        ConfigError: there is no configuration, or transformers cannot make the model without code from elsewhere.
    """
    transformers = library("transformers")
    place = Path(folder) / "config.json"
    if not place.is_file():
        raise ConfigError(f"There is no {place}. Give a folder with a model's configuration.")
    has_weights = any((Path(folder) / name).is_file() for name in WEIGHTS)
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        _check_brings_no_kernel(json.loads(read_file(place, OPTIONS)))
        with _offline():
            config = transformers.AutoConfig.from_pretrained(folder, **local)
            architecture = _architecture(transformers, (config.architectures or ["AutoModel"])[0])
            if has_weights and torch.get_default_device().type != "meta":
                model = architecture.from_pretrained(folder, **local)
            elif hasattr(architecture, "from_config"):
                model = architecture.from_config(config, trust_remote_code=False)
            else:
                model = architecture(config)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"transformers cannot make the model of {folder}: {type(error).__name__}: "
            f"{sentence(lines[0][:200])} Look at its config.json, at `architectures` and `model_type` first."
        ) from error
    made, place = f"lambda: transformers.{type(model).__name__}", quoted(folder)
    return NamedModel(
        model,
        {"input_ids": torch.zeros(1, 16, dtype=torch.int64)},
        "import transformers",
        f"{made}.from_pretrained({place}, local_files_only=True)"
        if has_weights
        else f"{made}(transformers.AutoConfig.from_pretrained({place}))",
        has_random_weights=not has_weights,
    )


def _architecture(transformers: Any, name: Any) -> Any:
    """A class of models, not whatever else transformers has under a name."""
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    is_auto = isinstance(name, str) and name.startswith("AutoModel") and inspect.isclass(found)
    if not (is_auto or is_model) or found is transformers.PreTrainedModel:
        raise ValueError(f"transformers has no model {name!r}")
    return found


def _check_brings_no_kernel(config: Any) -> None:
    if isinstance(config, dict):
        for key, value in config.items():
            texts = value.values() if isinstance(value, dict) else [value]
            if key in KERNELS and any(isinstance(text, str) and "/" in text for text in texts):
                raise ValueError(f"{key} {value!r:.80} is compiled code from elsewhere")
            _check_brings_no_kernel(value)


@contextmanager
def _offline() -> Iterator[None]:
    """No requests to the hub inside the block, as with HF_HUB_OFFLINE=1."""
    constants = library("huggingface_hub").constants
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
