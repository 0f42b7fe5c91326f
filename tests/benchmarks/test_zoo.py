"""The zoo benchmark: small entries pass, a wrong cut is told, results are kept and written."""

import json
from pathlib import Path

import pytest

from benchmarks import zoo  # its folder joins the path, as when it is run as a script

import zoo_models  # isort: skip
import zoo_ours  # isort: skip

SMALL = ("toy tied embedding", "toy GLU by slice", "toy hard-coded reshapes")


def entry(name: str) -> zoo_models.Entry:
    return next(e for e in zoo_models.ENTRIES if e.id == name)


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_pass_every_check(name: str) -> None:
    record = zoo_ours.measure(entry(name), seed=0)
    assert record["status"] == "pass", record
    assert set(record["checks"]) == set(zoo.CHECKS)
    assert abs(record["share"] - 0.6) <= 0.011
    assert (
        record["effect"] > 1e-3
    )  # the cut changes something, so being equal to the twin says something


def test_a_wrong_twin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_ours, "zero", lambda model, _: model)
    record = zoo_ours.measure(entry(SMALL[0]), seed=0)
    assert record["status"] == "WRONG"
    assert "differs" in record["checks"]["equal"]


def test_wrong_costs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_ours, "recount_macs", lambda *_: 7)
    record = zoo_ours.measure(entry(SMALL[0]), seed=0)
    assert record["status"] == "WRONG"
    assert "against 7 recounted" in record["checks"]["macs"]


def test_results_are_written_and_a_second_run_goes_on_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "toy tied*", "--runs", str(tmp_path), "--results", str(tmp_path / "out")]
    assert zoo.main(options) == 0
    kept = tmp_path / "toy_tied_embedding.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"status": "WRONG"}))
    assert zoo.main(options) == 1  # read, not measured again
    record = json.loads((tmp_path / "out" / "structure_zoo.json").read_text())
    assert [network["status"] for network in record["networks"]] == ["WRONG"]
    assert "toy tied embedding" in (tmp_path / "out" / "structure_zoo.md").read_text()
    assert "1 networks: 1 WRONG" in capsys.readouterr().out
