"""Models as a person names them on the command line, with inputs to run them on.

    resnet32                        a network of this library; the table `apoptosis.models.MODELS` has them all
    timm:resnet18                   from timm; needs the extra `models`
    torchvision:vit_b_16            from torchvision
    transformers:path/to/folder     a folder with a transformers `config.json`
    package.module:make             a function without arguments that returns a model, or a model and its example inputs
    path/to/file.py:make            the same, in a file

Weights are whatever the function gives; library models have random ones.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.errors import ConfigError
from apoptosis.models import MODELS

__all__ = ["NamedModel", "find_model", "parse_shape"]


@dataclass(frozen=True)
class NamedModel:
    """A model, and inputs to run it on."""

    model: nn.Module
    example_inputs: Any


def find_model(name: str, shapes: list[str], *, meta: bool = False) -> NamedModel:
    """The model of that name, and zeros of those shapes to run it on, or inputs it is known to take.

    Args:
        name: see the module's docstring.
        shapes: `1x3x224x224`, one for each positional argument; `int:1x16` for token ids. Empty: the model's own.
        meta: build on the meta device: shapes alone, no memory.

    Raises:
        ConfigError: there is no such model, or no inputs are known for it.
    """
    with torch.device("meta" if meta else "cpu"):
        model, known = _made(name)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} gave {type(model).__name__}, which is no torch.nn.Module.")
    if shapes:
        known = tuple(parse_shape(shape) for shape in shapes)
    if known is None:
        raise ConfigError(
            f"No inputs are known for {name}. Say their shapes: --input 1x3x224x224 (--input int:1x16 for token "
            "ids), or let the function return the model and its example inputs."
        )
    return NamedModel(model, _to_meta(known) if meta else known)


def parse_shape(text: str) -> Tensor:
    """Zeros of a shape such as `1x3x224x224`, or integers with `int:` before.

    Raises:
        ConfigError: it is none.

    >>> parse_shape("int:1x16").dtype, parse_shape("2x3").shape
    (torch.int64, torch.Size([2, 3]))
    """
    kind, _, sizes = text.rpartition(":")
    try:
        shape = [int(size) for size in sizes.lower().split("x")]
        dtype = {"": torch.float32, "float": torch.float32, "int": torch.int64}[kind]
        return torch.zeros(shape, dtype=dtype)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{text!r} is no shape of an input. Write sizes with x between, as 1x3x224x224, and int: before for token "
            "ids."
        ) from error


def _made(name: str) -> tuple[Any, Any]:
    """A model and its inputs, None where none are known."""
    if name in MODELS:
        entry = MODELS[name]
        return entry.make(), (torch.zeros(entry.input_shape),)
    source, _, rest = name.partition(":")
    if source in _LIBRARIES and rest:
        return _LIBRARIES[source](rest)
    path, _, function = name.rpartition(":")
    if not path:
        own, libraries = ", ".join(MODELS), ", ".join(f"{library}:NAME" for library in _LIBRARIES)
        raise ConfigError(
            f"There is no model {name!r}. Known are {own}, {libraries}, and module:function or file.py:function for "
            "your own."
        )
    made = _called(path, function)
    return made if isinstance(made, tuple) else (made, None)


def _called(path: str, name: str) -> Any:
    """What a person's function gives."""
    module = _from_file(Path(path)) if path.endswith(".py") else _imported(path)
    function = _function(module, path, name)
    if needed := _needed_arguments(function):
        raise ConfigError(
            f"{path}:{name} needs arguments: {', '.join(needed)}. Give a function without any that calls it and "
            "returns the model."
        )
    try:
        return function()
    except Exception as error:
        raise ConfigError(_told(f"{path}:{name}", error)) from error


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _told(what: str, error: Exception) -> str:
    """What failed, why, and on which line of the person's file: the first that ran after Python's own and ours."""
    message = f"{what} failed with {type(error).__name__}: {str(error) or 'no message'}."
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__)
        and not frame.filename.startswith("<frozen")
    ]
    if not frames:  # a syntax error; its message has the line
        return message
    frame = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{message} At {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _function(module: Any, path: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key
            for key, item in vars(module).items()
            if callable(item)
            and not key.startswith("_")
            and getattr(item, "__module__", None) == module.__name__
        ]
        raise ConfigError(
            f"{path} has no function {name!r}. It has {', '.join(functions[:10]) or 'none'}."
        )
    return function


def _imported(path: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"{path!r} cannot be imported ({error}). Give a module that Python finds from this folder, or "
            "path/to/file.py."
        ) from error
    except Exception as error:
        raise ConfigError(_told(path, error)) from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    # No import statement can say this name, so the file hides no module.
    name = f"<{path.resolve()}>".replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and type hints look their module up while it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(_told(str(path), error)) from error
    return module


def _timm(name: str) -> tuple[nn.Module, Any]:
    timm = _library("timm")
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name[:6]}*")[:5])
        raise ConfigError(
            f"timm has no model {name!r}. It has {near or 'a list: timm.list_models()'}."
        )
    model = timm.create_model(name)
    return model, (torch.zeros(1, *model.pretrained_cfg["input_size"]),)


def _torchvision(name: str) -> tuple[nn.Module, Any]:
    models = _library("torchvision").models
    try:
        return models.get_model(name, weights=None), (torch.zeros(1, 3, 224, 224),)
    except ValueError as error:
        raise ConfigError(f"torchvision has no model {name!r}: {error}.") from error


def _transformers(folder: str) -> tuple[nn.Module, Any]:
    transformers = _library("transformers")
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"There is no {Path(folder) / 'config.json'}. Give a folder with a model's configuration."
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = getattr(transformers, (config.architectures or ["AutoModel"])[0])
    make = getattr(architecture, "from_config", architecture)
    return make(config), {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "torchvision" if name == "torchvision" else "torch-apoptosis[models]"
        raise ConfigError(
            f"{name} cannot be imported: {error}. Install it: pip install '{extra}'."
        ) from error
    except RuntimeError as error:  # torchvision's compiled operations were built for another torch
        raise ConfigError(
            f"{name} cannot be imported: {error}. Its compiled part does not fit the installed torch "
            f"{torch.__version__}: install both from the same index."
        ) from error


def _to_meta(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to("meta")
    if isinstance(inputs, dict):
        return {key: _to_meta(item) for key, item in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_to_meta(item) for item in inputs)
    return inputs


_LIBRARIES: dict[str, Callable[[str], tuple[nn.Module, Any]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
