import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import apoptosis as ap

HEAVY = ("torch", "numpy", "matplotlib", "sklearn", "torchvision", "timm", "transformers")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running `code`."""
    probe = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


HELP = """
import runpy
sys.argv = ["apoptosis", "--help"]
try:
    runpy.run_module("apoptosis", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
"""


def test_all_is_sorted_and_complete():
    assert list(ap.__all__) == sorted(ap.__all__)
    assert set(ap.__all__) == {*ap._ROOMS, "__version__"}
    assert dir(ap) == list(ap.__all__)


@pytest.mark.parametrize("name", ap.__all__)
def test_every_public_name_can_be_fetched(name):
    namespace: dict[str, object] = {}
    exec(f"from apoptosis import {name}", namespace)
    assert namespace[name] is getattr(ap, name)


@pytest.mark.parametrize("name", sorted(name for name, room in ap._ROOMS.items() if name != room))
def test_public_names_are_public_in_their_rooms_too(name):
    assert name in import_module(f"apoptosis.{ap._ROOMS[name]}").__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = ap.no_such_thing


def test_version_is_the_distributions():
    assert ap.__version__ == version("torch-apoptosis")


@pytest.mark.parametrize("code", ["import apoptosis", HELP], ids=["import", "help"])
def test_nothing_heavy_is_imported_until_it_is_needed(code):
    assert modules_after(code).isdisjoint(HEAVY)


def test_the_probe_sees_a_heavy_import():
    assert "torch" in modules_after("import apoptosis; apoptosis.Task")
