"""Pages of the sparse experiments come from the lines that there are; a run measures only what is missing."""

import csv
import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = EXPERIMENTS / "results"
INPUTS = (
    *("sparse_resnet20.csv", "sparse_resnet20.json", "sparse_choose.csv"),
    *("sparse_resnet50.csv", "sparse_resnet50.json"),
)
PAGES = ("sparse_resnet20.md", "sparse_resnet50.md")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Scripts by name; they import each other as files of one folder."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if str(EXPERIMENTS) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in INPUTS:
        shutil.copy(RESULTS / name, tmp_path / name)
    return tmp_path


def test_committed_pages_are_those_of_the_committed_lines(script, results):
    script("sparse_tables").write_pages(results)
    for page in PAGES:
        assert (results / page).read_text() == (RESULTS / page).read_text(), "run sparse_tables.py"
        assert (results / page).with_suffix(".png").stat().st_size > 10_000


def test_pages_are_written_with_gaps(script, results):
    for name, keep in (("sparse_resnet20.csv", 3), ("sparse_choose.csv", 7)):
        lines = (results / name).read_text().splitlines(keepends=True)
        dense = [line for line in lines if line.startswith("dense")][:1]
        left = [line for line in lines[1::keep] if not line.startswith("dense")]
        (results / name).write_text("".join([lines[0], *dense, *left]))
    large = (results / "sparse_resnet50.csv").read_text().splitlines(keepends=True)
    (results / "sparse_resnet50.csv").write_text("".join(large[:20]))
    script("sparse_tables").write_pages(results)
    for page in PAGES:
        text = (results / page).read_text()
        assert "| – |" in text
        assert "nan" not in text.split()
        for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(widths) == 1, table


def test_a_run_leaves_out_what_is_measured(script, tmp_path):
    bench = script("sparse_resnet20")
    asked = ["report", "--only", "magnitude", "oba", "--stages", "1", "5", "--out", "unused.csv"]
    every = bench.ways(bench.parsed(asked))
    assert every[0].criterion == "dense"
    # Three forms: magnitudes once, oba in one stage frozen and in five under both policies.
    assert len(every) == len(set(every)) == 3 + 30 * (3 + 3 * 3)
    assert {way.removed for way in every[3:75]} == {0.8, 0.9}, "what matters most is not first"

    names = ("criterion", "normalise", "magnitude", "stages", "policy", "draw", "removed")
    done, missing = every[:50] + every[60:], every[50:60]
    with (tmp_path / "lines.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        for way in done:
            how = (way.how.normalise, f"{way.how.magnitude:.4g}")
            writer.writerow(
                [way.criterion, *how, way.stages, way.policy, way.draw, f"{way.removed:.4g}"]
            )
    skip = ["--skip", str(tmp_path / "lines.csv")]
    assert bench.ways(bench.parsed([*asked, *skip])) == missing


def test_the_committed_lines_are_skipped(script):
    bench = script("sparse_resnet20")
    asked = ["report", "--stages", "1", "--out", "unused.csv"]
    assert bench.ways(bench.parsed(asked))
    skip = ["--skip", str(RESULTS / "sparse_resnet20.csv")]
    assert not bench.ways(bench.parsed([*asked, *skip]))


def test_joined_lines_are_each_network_once_and_must_agree(script):
    joined = script("sparse_lines").joined
    first = {"criterion": "oba", "saliency": "paper", "removed": "0.8", "accuracy": "0.5"}
    again, other = first | {"seconds": "2"}, first | {"removed": "0.5"}
    first = first | {"seconds": "1"}
    other = other | {"seconds": "1"}
    assert joined([[first], [again, other]]) == [other, first]
    with pytest.raises(AssertionError, match="measured twice"):
        joined([[first], [again | {"accuracy": "0.6"}]])
