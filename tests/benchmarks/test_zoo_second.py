"""The second zoo: its checks pass what is right, and each of them tells what is wrong, raw, refused or late."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.errors import ModelError
from benchmarks import zoo  # its folder joins the path, as when it is run as a script

import zoo_models  # isort: skip
import zoo_second  # isort: skip
import zoo_second_checks as checks  # isort: skip
import zoo_second_report as report  # isort: skip
from zoo_second_networks import Network  # isort: skip


class Small(nn.Module):
    """A batch norm, dropout and a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8)
        self.more, self.head = nn.Conv2d(8, 12, 3), nn.Linear(12, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x)).relu())
        return self.head(self.more(x).relu().mean((2, 3)))


def pictures(size: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 2, size, size, dtype=torch.float64)


def network(make: Callable[[], nn.Module] = Small) -> Network:
    return Network("own", "small", make, pictures(8), family="own code", other=pictures(11))


def measured(of: Network) -> dict[str, Any]:
    return checks.joined(of, [checks.measure(of, 0, stage) for stage in checks.STAGES])


def told(record: dict[str, Any], name: str) -> str:
    return record["checks"][name]


def test_a_network_that_is_cut_well_passes_every_check() -> None:
    record = measured(network())
    assert record["status"] == "pass", record
    assert all(text == "" for text in record["checks"].values()), record
    assert len(record["checks"]) == 2 * len(checks.PLAN_CHECKS) + len(checks.PRUNINGS)
    assert "equal in every check of both plans: 1 of 1, 100.0%" in report.bars([record])[4]


def test_a_cut_of_other_units_is_wrong_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_elsewhere(model: nn.Module, plan: Any) -> nn.Module:
        small = cut(model, plan)
        with torch.no_grad():
            small.head.weight.copy_(small.head.weight.flip(1))
        return small

    cut = checks.cut
    monkeypatch.setattr(checks, "cut", cut_elsewhere)
    record = measured(network())
    assert record["status"] == "WRONG"
    for name in ("equal 1", "batch 1", "size 1", "train 1", "gradient 1"):
        assert "WRONG: differs" in told(record, name)
    assert "silently wrong: 1 (asked 0)" in report.bars([record])


class ByMode(Small):
    """Cut right in eval mode: what it does in train mode can be spoilt."""

    spoilt = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 1.01 if self.training and self.spoilt else out


class BySize(ByMode):
    """The same for other sizes."""

    def forward(self, x: Tensor) -> Tensor:
        out = Small.forward(self, x)
        return out * 1.01 if x.shape[2] != 8 and self.spoilt else out


class ByBatch(ByMode):
    """The same for other batches."""

    def forward(self, x: Tensor) -> Tensor:
        out = Small.forward(self, x)
        return out * 1.01 if len(x) == 3 and self.spoilt else out


class Detached(ByMode):
    """The same for gradients."""

    def forward(self, x: Tensor) -> Tensor:
        out = Small.forward(self, x)
        return out.detach() + 0 * out if self.spoilt else out


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ByMode, "train"), (BySize, "size"), (ByBatch, "batch"), (Detached, "gradient")],
)
def test_what_differs_in_one_situation_is_told_there(
    kind: type[ByMode], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt_cut(model: nn.Module, plan: Any) -> nn.Module:
        small = cut(model, plan)
        small.spoilt = True
        return small

    cut = checks.cut
    monkeypatch.setattr(checks, "cut", spoilt_cut)
    record = measured(network(kind))
    assert "WRONG: differs" in told(record, f"{name} 1")
    assert told(record, "equal 1") == ""


def test_an_error_that_is_not_ours_is_raw_and_ours_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(error: Exception) -> Callable[..., Any]:
        def failing(*_: Any, **__: Any) -> Any:
            raise error

        return failing

    monkeypatch.setattr(checks, "cut", raising(RuntimeError("mat1 and mat2 shapes")))
    monkeypatch.setattr(checks.ap, "prune", raising(ModelError("it cannot be")))
    record = measured(network())
    assert told(record, "size 2").startswith("raw: RuntimeError: mat1 and mat2 shapes")
    assert told(record, "magnitude") == "refused: ModelError: it cannot be"
    assert record["status"] == "raw"
    found = report.bars([record])
    assert "raw errors: 1 (asked 0)" in found
    assert "usable after magnitude: 0 of 1, 0.0% (asked 95%)" in found


def test_what_takes_too_long_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any, **__: Any) -> None:
        while True:
            with suppress(Exception):  # as code under test may
                time.process_time()

    monkeypatch.setattr(checks, "LIMIT_S", 0.3)
    monkeypatch.setattr(checks.ap, "prune", endless)
    record = measured(network())
    assert told(record, "default").startswith("hang: over")
    assert "hanging: 1" in report.bars([record])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: model.head.weight.data.mul_(1.1), "WRONG: on its own batches it differs"),
        (lambda model: model.head.weight.data.fill_(torch.nan), "WRONG: no finite number"),
    ],
)
def test_a_pruned_network_of_no_use_is_told(
    spoil: Callable[[Any], Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiling(*args: Any, **options: Any) -> Any:
        outcome = prune(*args, **options)
        spoil(outcome.model)
        return outcome

    prune = checks.ap.prune
    monkeypatch.setattr(checks.ap, "prune", spoiling)
    assert says in told(measured(network()), "magnitude")


def test_experts_are_fused_where_there_are_some() -> None:
    class Mixture(nn.Linear):
        has_experts, chosen = True, "eager"

        def _can_set_experts_implementation(self) -> bool:
            return self.has_experts

        def set_experts_implementation(self, name: str) -> None:
            assert self.has_experts
            self.chosen = name

    class Dense(Mixture):
        has_experts = False

    assert checks._as_users_run_it(Mixture(2, 2).double()).chosen == "grouped_mm"
    assert checks._as_users_run_it(Dense(2, 2)).chosen == "eager"
    assert checks._as_users_run_it(nn.Linear(2, 2).double()).weight.dtype == torch.float32


def test_a_missing_package_is_skipped_and_no_pass() -> None:
    def make() -> nn.Module:
        raise ModuleNotFoundError("No module named 'ultralytics'")

    record = measured(network(make))
    assert record["status"] == "skipped"
    assert report.bars([record])[0] == "networks: 0, and 1 skipped"


def test_the_second_zoo_has_other_networks_than_the_first() -> None:
    first = {entry.name.lower() for entry in zoo_models.ENTRIES}
    ids = [entry.id for entry in zoo_second.ENTRIES]
    assert len(ids) == len(set(ids)) >= 75
    assert not first & {entry.name.lower() for entry in zoo_second.ENTRIES}
    assert len({entry.family for entry in zoo_second.ENTRIES}) >= 10


def test_a_child_that_dies_is_told_and_a_late_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "measure", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    found = zoo._from_fork(network(), "magnitude", tmp_path / "x.json")
    assert found["checks"] == {"magnitude": "raw: a child ended with 9"}
    monkeypatch.setattr(checks, "measure", lambda *_: os.kill(os.getpid(), signal.SIGXCPU))
    found = zoo._from_fork(network(), "plans", tmp_path / "x.json")
    assert set(found["checks"].values()) == {"hang: over 300 s of CPU time"}
    assert len(found["checks"]) == 2 * len(checks.PLAN_CHECKS)


def test_a_run_is_written_and_goes_on_from_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--list", "second", "--only", "own DLRM", "--runs", str(tmp_path)]
    options += ["--results", str(tmp_path / "out")]
    assert zoo.main(options) == 0
    kept = tmp_path / "own_DLRM.plans.json"
    record = json.loads(kept.read_text())
    record["checks"]["size 1"] = "WRONG: differs by 1.0e+00"
    kept.write_text(json.dumps(record))
    assert zoo.main(options) == 1  # read, not measured again
    assert "silently wrong: 1" in capsys.readouterr().out
    table = (tmp_path / "out" / "zoo_second.md").read_text()
    assert "- own DLRM: size 1: WRONG: differs by 1.0e+00" in table

    assert zoo.main([*options, "--measured"]) == 1
    kept.unlink()
    capsys.readouterr()
    assert zoo.main([*options, "--measured"]) == 0
    found = capsys.readouterr().out
    assert "equal in every check of both plans: 0 of 0" in found
    assert "usable after magnitude: 1 of 1" in found
