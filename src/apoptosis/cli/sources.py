"""Models as a person names them on the command line, with inputs to run them on.

    resnet32                        a network of this library; the table `apoptosis.models.MODELS` has them all
    timm:resnet18                   from timm; needs the extra `models`
    torchvision:vit_b_16            from torchvision
    transformers:path/to/folder     a folder with a transformers `config.json`, and weights if they are there
    package.module:make             a function without arguments that returns a model, or a model and its example inputs
    path/to/file.py:make            the same, in a file
    path/to/folder                  a checkpoint that a command has saved; `origins` says which need a second name

Weights are whatever the function gives, and those of a transformers folder that has some, and those of a checkpoint;
other library models have random ones.
"""

import inspect
import keyword
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.cli.functions import call_function, check_has_function, is_function_name
from apoptosis.cli.libraries import library
from apoptosis.cli.named_models import NamedModel, saved_model
from apoptosis.cli.names import nearest, quoted
from apoptosis.cli.origins import is_checkpoint
from apoptosis.cli.transformers_folders import transformers_model
from apoptosis.errors import CheckpointError, ConfigError
from apoptosis.models import MODELS

__all__ = ["NamedModel", "find_model", "make_model", "parse_shape"]


LOOKED_AT = 1000
"""Files of a folder, for one that may have been meant."""
WEIGHTS = ("weights", "weights_backbone")
"""By which torchvision is asked for weights."""


def find_model(
    name: str, shapes: list[str], *, dense: Iterable[str] = (), meta: bool = False
) -> NamedModel:
    """The model of that name, and zeros of those shapes to run it on, or inputs it is known to take.

    Args:
        name: see the module's docstring.
        shapes: `1x3x224x224`, one for each positional argument; `int:1x16` for token ids. Empty: the model's own.
        dense: as of `make_model`.
        meta: build on the meta device: shapes alone, no memory.

    Raises:
        ConfigError: there is no such model, or no inputs are known for it.
    """
    with torch.device("meta" if meta else "cpu"):
        named = make_model(name, dense)
    if meta:
        named.model.to("meta")  # a checkpoint has numbers
    known = named.example_inputs
    if shapes:
        known = tuple(parse_shape(shape) for shape in shapes)
    if known is None:
        raise ConfigError(
            f"No inputs are known for {name}. Say their shapes: --input 1x3x224x224 (--input int:1x16 for token "
            "ids), or let the function return the model and its example inputs."
        )
    return replace(named, example_inputs=_to_meta(known) if meta else known)


def make_model(name: str, dense: Iterable[str] = ()) -> NamedModel:
    """The model of that name, whether inputs are known for it or not.

    Args:
        name: see the module's docstring.
        dense: names of a person's own models that checkpoints may be made from.

    Raises:
        ConfigError: there is no such model.
    """
    return _checked(name, _made(name, tuple(dense), ()))


def _checked(name: str, named: NamedModel) -> NamedModel:
    if not isinstance(named.model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{name} gave {type(named.model).__name__}, which is no torch.nn.Module.")
    return named if named.name else replace(named, name=name)


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


def _made(name: str, dense: tuple[str, ...], within: tuple[Path, ...]) -> NamedModel:
    """Made by name; `within` are the checkpoints that lead to it."""
    if name in MODELS:
        entry = MODELS[name]
        return NamedModel(
            entry.make(),
            (torch.zeros(entry.input_shape),),
            "from apoptosis.models import MODELS",
            f"MODELS[{quoted(name)}].make",
            has_random_weights=True,
        )
    if is_checkpoint(name):
        return _saved(name, dense, within)
    source, _, rest = name.partition(":")
    if source in _LIBRARIES and rest:
        return _LIBRARIES[source](rest)
    if not is_function_name(name):
        check_has_function(name)
        _check_is_no_folder(name)
        near = nearest(name, [*_checkpoints_in(Path()), *MODELS])
        own, libraries = ", ".join(MODELS), ", ".join(f"{library}:NAME" for library in _LIBRARIES)
        raise ConfigError(
            f"There is no model {name!r}.{near} Known are {own}, {libraries}, folders of "
            "checkpoints, and module:function or file.py:function for your own."
        )
    return _own(name)


def _saved(name: str, dense: tuple[str, ...], within: tuple[Path, ...]) -> NamedModel:
    folder = Path(name).expanduser().resolve()
    if folder in within:
        raise CheckpointError(
            f"The checkpoint {name} says that it was made from itself: {' from '.join(map(str, within))}. No command "
            "saves such a one. Get it again from where it comes from."
        )
    chain = (*within, folder)
    return saved_model(name, lambda origin: _checked(origin, _made(origin, dense, chain)), dense)


def _check_is_no_folder(name: str) -> None:
    path = Path(name).expanduser()
    if path.is_dir():
        raise ConfigError(
            f"{name} is a folder without run.json, so no checkpoint. Give one that a command has saved; of a "
            f"transformers model write transformers:{name}"
        )
    if len(path.parts) > 1:
        near = get_close_matches(path.name, _checkpoints_in(path.parent), n=1)
        question = f" Did you mean {str(Path(name).with_name(near[0]))!r}?" if near else ""
        raise ConfigError(f"There is no checkpoint {name}.{question}")


def _checkpoints_in(folder: Path) -> list[str]:
    return [place.name for place in islice(folder.glob("*"), LOOKED_AT) if is_checkpoint(place)]


def _own(name: str) -> NamedModel:
    made = call_function(name, "the model")
    path, _, function = name.rpartition(":")
    model: Any
    model, known = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if path.endswith(".py"):
        imports, maker = _of_file(Path(path), function)
    else:
        imports, maker = f"from {path} import {function}", function
    if model is not made:
        maker = f"lambda: {maker}()[0]"
    return NamedModel(model, known, imports, maker, has_random_weights=False)


def _of_file(path: Path, function: str) -> tuple[str, str]:
    """Python that gets a function of a file: by import where that finds it, so that its classes can be pickled."""
    folder = quoted(path.parent.as_posix())
    if not _is_importable(path):  # run_path alone does not find the file's neighbours
        maker = f"runpy.run_path({quoted(path.as_posix())})[{function!r}]"
        return f"import runpy, sys; sys.path.insert(0, {folder})", maker
    is_here = path.parent.resolve() == Path.cwd()
    to_there = "" if is_here else f"import sys; sys.path.insert(0, {folder})\n"
    return f"{to_there}from {path.stem} import {function}", function


def _is_importable(path: Path) -> bool:
    """Whether `import` of its stem gives this file and no other module or package."""
    stem = path.stem
    if not stem.isidentifier() or keyword.iskeyword(stem) or stem in sys.stdlib_module_names:
        return False
    if (path.with_suffix("") / "__init__.py").is_file():
        return False
    if stem not in sys.modules:
        return True
    known = getattr(sys.modules[stem], "__file__", None)
    return known is not None and Path(known).resolve() == path.resolve()


def _timm(name: str) -> NamedModel:
    timm = library("timm")
    if not timm.is_model(name):
        names = timm.list_models()
        near = ", ".join(get_close_matches(name, names, n=5)) or "a list: timm.list_models()"
        raise ConfigError(f"timm has no model {name!r}.{nearest(name, names)} It has {near}.")
    model = timm.create_model(name)
    return NamedModel(
        model,
        (torch.zeros(1, *model.pretrained_cfg["input_size"]),),
        "import timm",
        f"lambda: timm.create_model({quoted(name)})",
        has_random_weights=True,
    )


def _torchvision(name: str) -> NamedModel:
    models = library("torchvision").models
    try:
        builder = models.get_model_builder(name)
    except ValueError as error:
        near = nearest(name, models.list_models())
        raise ConfigError(f"torchvision has no model {name!r}.{near} It says: {error}.") from error
    # Models on a backbone would fetch its weights.
    words = [f"{word}=None" for word in WEIGHTS if word in inspect.signature(builder).parameters]
    return NamedModel(
        builder(**dict.fromkeys(word.partition("=")[0] for word in words)),
        (torch.zeros(1, 3, 224, 224),),
        "import torchvision",
        f"lambda: torchvision.models.get_model({', '.join([quoted(name), *words])})",
        has_random_weights=True,
    )


def _to_meta(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to("meta")
    if isinstance(inputs, dict):
        return {key: _to_meta(item) for key, item in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_to_meta(item) for item in inputs)
    return inputs


_LIBRARIES: dict[str, Callable[[str], NamedModel]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": transformers_model,
}
