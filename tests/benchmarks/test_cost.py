"""The cost benchmark runs and records what it says it records."""

import json
from pathlib import Path

import pytest
from benchmarks.networks import Network, ResNet

from benchmarks import cost


def test_the_benchmark_runs_and_its_record_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Network(lambda: ResNet((4, 4, 4), 1, 10), 8, 10, 2, 2)
    monkeypatch.setitem(cost.NETWORKS, "tiny", tiny)
    out = tmp_path / "cost.json"
    options = [
        "--models",
        "tiny",
        "--repeats",
        "2",
        "--methods",
        "hessian,double",
        "--out",
        str(out),
    ]
    cost.main(["--device", "cpu", "--threads", "1", *options])
    record = json.loads(out.read_text())
    rows = record["cases"][0]["rows"]
    assert [row["name"] for row in rows] == ["plain step", "hessian", "double backward"]
    assert all(row["time_s"] > 0 for row in rows)
    assert rows[1]["error"] < 1e-4  # against double backward, in float32
    assert "hessian" in capsys.readouterr().out
