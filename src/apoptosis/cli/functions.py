"""A person's own functions, named as `package.module:function` or `path/to/file.py:function`.

What goes wrong in them is told with the line of their file: the command line shows no traceback unless asked.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

from apoptosis.cli.names import nearest, sentence
from apoptosis.errors import ConfigError

__all__ = ["call_function", "check_has_function", "is_function_name", "told"]

SHOWN = 10
"""So many names are listed of what a file has."""
AS_A_SCRIPT = (
    "Let what is for running the file as a script stand below `if __name__ == '__main__':`."
)


def is_function_name(name: str) -> bool:
    """Whether it is one by its form.

    >>> is_function_name("nets.py:make"), is_function_name("digits")
    (True, False)
    """
    path, _, function = name.rpartition(":")
    return bool(path and function)


def check_has_function(name: str) -> None:
    """Refuse a file that was named without the function in it. The file is read and not run.

    Raises:
        ConfigError: it is one, with the functions that it has.
    """
    path = Path(name.removesuffix(":"))
    if path.suffix != ".py":
        return
    _check_is_file(path)
    try:
        parts = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parts = []
    found = [p.name for p in parts if isinstance(p, ast.FunctionDef) and p.name[:1] != "_"]
    has = f" It has {_some(found)}." if found else ""
    raise ConfigError(f"Say which function: {path}:{found[0] if found else 'make'}.{has}")


def call_function(name: str, gives: str) -> Any:
    """What the function of that name returns.

    Args:
        name: `module:function` or `file.py:function`; it is called without arguments.
        gives: what it is expected to return, in words.

    Raises:
        ConfigError: there is no such function, it needs arguments, or it fails.
    """
    path, _, function_name = name.rpartition(":")
    # Its neighbours are found as `python file.py` finds them, also by imports that happen only later.
    _put_first_on_path(Path(path).resolve().parent if path.endswith(".py") else Path.cwd())
    with redirect_stdout(sys.stderr):  # what it prints is not ours, and --json is read by machines
        module = _from_file(Path(path)) if path.endswith(".py") else _imported(path)
    function = _function(module, path, function_name)
    if needed := _needed_arguments(function):
        raise ConfigError(
            f"{name} needs arguments: {', '.join(needed)}. Give a function without any that calls it and "
            f"returns {gives}."
        )
    try:
        with redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        raise ConfigError(told(name, error)) from error


def told(what: str, error: BaseException) -> str:
    """What failed, why, and on which line of the person's file: the first that ran after Python's own and ours."""
    message = f"{what} failed with {type(error).__name__}: {sentence(str(error) or 'no message')}"
    if isinstance(error, SystemExit):
        message = f"{what} ended Python by itself (SystemExit: {error.code}). {AS_A_SCRIPT}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).parent != Path(__file__).parent
        and frame.filename != importlib.__file__
        and not frame.filename.startswith("<frozen")
    ]
    # A loader of a library may stand between us and the person's code.
    frames = [f for f in frames if "site-packages" not in f.filename] or frames
    if not frames:  # a syntax error; its message has the line
        return message
    frame = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{message} At {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


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
            f"{path} has no function {name!r}.{nearest(name, functions)} It has {_some(functions) or 'none'}."
        )
    return function


def _some(names: list[str]) -> str:
    return ", ".join([*names[:SHOWN], *(["…"] if len(names) > SHOWN else [])])


def _imported(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"{path!r} cannot be imported ({error}). Give a module that Python finds from this folder, or "
            "path/to/file.py."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(told(path, error)) from error


def _from_file(path: Path) -> Any:
    _check_is_file(path)
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
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(told(str(path), error)) from error
    return module


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        near = nearest(path.name, [other.name for other in islice(path.parent.glob("*.py"), 1000)])
        raise ConfigError(f"There is no file {path}.{near}")


def _put_first_on_path(folder: Path) -> None:
    sys.path[:] = [str(folder), *(place for place in sys.path if place != str(folder))]
