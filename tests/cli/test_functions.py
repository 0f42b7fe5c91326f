import subprocess
import sys

import pytest

from apoptosis.cli.functions import call_function, check_has_function
from apoptosis.errors import ConfigError

SOURCE = """
from {neighbour} import WIDTH

def make():
    from {lazy} import DEPTH
    return WIDTH, DEPTH

def later():
    def imported():
        from {late} import HEADS
        return HEADS
    return imported

def _hidden():
    pass
"""


@pytest.fixture
def own(tmp_path, request):
    """Files of names that no other test has imported."""
    folder = tmp_path / "deep"
    folder.mkdir()
    mark = f"of_{abs(hash(request.node.name))}"
    names = {name: f"{name}_{mark}" for name in ("neighbour", "lazy", "late")}
    for (name, file), variable in zip(names.items(), ("WIDTH", "DEPTH", "HEADS"), strict=True):
        (folder / f"{file}.py").write_text(f"{variable} = {len(name)}")
    path = folder / f"nets_{mark}.py"
    path.write_text(SOURCE.format(**names))
    return path


@pytest.mark.parametrize("form", ["file", "relative", "module"])
def test_a_file_finds_its_neighbours_whenever_it_imports_them(own, monkeypatch, form):
    monkeypatch.chdir(own.parent.parent if form == "relative" else own.parent)
    name = {"file": str(own), "relative": f"deep/{own.name}", "module": own.stem}[form]
    assert call_function(f"{name}:make", "sizes") == (9, 4)
    assert call_function(f"{name}:later", "a function")() == 4
    assert sys.path.count(str(own.parent)) == 1


def test_the_folder_of_the_last_file_is_the_first_looked_at(own, tmp_path):
    (tmp_path / "other.py").write_text("def make():\n    return 1\n")
    call_function(f"{own}:make", "sizes")
    call_function(f"{tmp_path}/other.py:make", "a number")
    assert sys.path[:2] == [str(tmp_path), str(own.parent)]


def test_the_lines_to_load_find_the_neighbours(tmp_path):
    from apoptosis.cli.sources import make_model

    (tmp_path / "sizes_beside.py").write_text("WIDTH = 3")
    path = tmp_path / "nets_beside.py"
    path.write_text(
        "from torch import nn\nfrom sizes_beside import WIDTH\ndef make():\n    return nn.Linear(WIDTH, 2)\n"
    )
    named = make_model(f"{path}:make")
    code = f"{named.imports}\nassert ({named.maker})().in_features == 3"
    subprocess.run([sys.executable, "-c", code], check=True)


NET_SOURCE = """
from torch import nn

class Net(nn.Linear):
    pass

def make():
    return Net(3, 2)
"""


def test_what_the_lines_load_can_be_pickled(tmp_path, monkeypatch):
    from apoptosis.cli.sources import make_model

    (tmp_path / "nets_to_pickle.py").write_text(NET_SOURCE)
    for folder, name in ((tmp_path, "nets_to_pickle.py"), (tmp_path.parent, None)):
        monkeypatch.chdir(folder)
        named = make_model(f"{name or tmp_path / 'nets_to_pickle.py'}:make")
        assert ("sys.path" in named.imports) == (name is None)
        assert named.imports.splitlines()[-1] == "from nets_to_pickle import make"
        code = f"{named.imports}\nimport io, torch\ntorch.save(({named.maker})(), io.BytesIO())"
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["my-nets", "class", "two words", 'a"b', "näh😀"])
def test_files_that_cannot_be_imported_by_name_are_run(tmp_path, name):
    from apoptosis.cli.sources import make_model

    path = tmp_path / f"{name}.py"
    path.write_text(NET_SOURCE)
    named = make_model(f"{path}:make")
    assert "runpy" in named.imports
    code = f"{named.imports}\nassert ({named.maker})().in_features == 3"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["json", "torch"])
def test_the_name_of_another_module_is_not_imported(tmp_path, name):
    from apoptosis.cli.sources import make_model

    (tmp_path / f"{name}.py").write_text(NET_SOURCE)
    assert "runpy" in make_model(f"{tmp_path / name}.py:make").maker


def test_a_file_without_a_function_is_answered_with_those_it_has(own):
    for name in (own, f"{own}:"):
        with pytest.raises(
            ConfigError, match=r"Say which function: .*:make\. It has make, later\."
        ):
            check_has_function(str(name))
    own.write_text("def broken(:")
    with pytest.raises(ConfigError, match=r"Say which function: .*:make\.$"):
        check_has_function(str(own))
    check_has_function("digits")


def test_a_file_that_is_not_there_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "my_nets.py").write_text("")
    for refused in (check_has_function, lambda name: call_function(f"{name}:make", "a model")):
        with pytest.raises(ConfigError, match=r"no file .*my_net.py. Did you mean 'my_nets.py'\?"):
            refused(f"{tmp_path}/my_net.py")


def test_the_words_of_others_end_with_one_full_stop(tmp_path):
    path = tmp_path / "nets.py"
    for said in ("no more", "no more."):
        path.write_text(f"def make():\n    raise ValueError('{said}')\n")
        with pytest.raises(ConfigError, match=r"ValueError: no more\. At "):
            call_function(f"{path}:make", "a model")


@pytest.mark.parametrize(
    "line", ["sys.exit(3)", "raise SystemExit", "def make():\n    sys.exit(3)"]
)
def test_a_file_that_ends_python_is_refused_in_words(tmp_path, line):
    path = tmp_path / "quits.py"
    path.write_text(f"import sys\n{line}\n")
    with pytest.raises(ConfigError, match=r"ended Python by itself .*__main__.* At .*quits.py:\d"):
        call_function(f"{path}:make", "a model")


def test_a_misspelt_function_is_answered_with_the_nearest_and_lists_say_that_they_end(tmp_path):
    path = tmp_path / "many.py"
    names = ["make", *(f"net{number}" for number in range(10))]
    path.write_text("".join(f"def {name}():\n    pass\n" for name in names))
    with pytest.raises(ConfigError, match=r"'mak'\. Did you mean 'make'\? It has .*net8, …\."):
        call_function(f"{path}:mak", "a model")
    with pytest.raises(ConfigError, match=r"It has make, .*net8, …\."):
        check_has_function(str(path))
