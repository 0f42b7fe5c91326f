"""The page of the wide ResNet32 comes from the lines that there are."""

import importlib
import json
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
DENSE = "seed,epochs,learning_rate,label_smoothing,cutout,kept,seconds,validation,test\n"
PRUNED = "criterion,allocation,budget,schedule,seed,epochs,thinnest,cut_test,prune_seconds,validation,test\n"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    yield importlib.import_module("wide_tables")
    del sys.modules["wide_tables"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    dense = [f"{seed},75,0.4,0.1,8,70,150,.95,.94{seed}" for seed in (1, 3)]
    (tmp_path / "wide_dense.csv").write_text(DENSE + "\n".join(dense) + "\n")
    first = [
        "oba,default,0.3,one-shot,0,12,.1,.5,20,.93,.92",
        "oba,default,0.3,one-shot,1,12,.2,.7,40,.93,.94",
        "magnitude-l2,uniform,0.3,one-shot,0,12,.5,.1,1,.95,.90",
    ]
    (tmp_path / "wide_prune.csv").write_text(PRUNED + "\n".join(first) + "\n")
    second = ["oba,default,0.06,iterative,0,12,.05,.2,30,.80,.81"]
    (tmp_path / "wide_prune2.csv").write_text(PRUNED + "\n".join(second) + "\n")
    about = {"commands": ["python …"], "device": "a GPU", "torch": "2.11", "commit": "abc"}
    (tmp_path / "wide.json").write_text(json.dumps(about))
    return tmp_path


def test_cells_are_means_and_deviations_over_the_networks_that_there_are(tables, results):
    tables.write_page(results)
    page = (results / "wide_resnet32.md").read_text()
    assert "Dense: **94.20 ± 0.14 %** (2 seeds), 75 epochs in 150 s each" in page
    assert "| oba | entries, per MAC | 93.00 ± 1.41 (2) | 81.00 (1) |" in page
    assert "| magnitude-l2 | every group by the same share, one step | 90.00 (1) | – |" in page
    assert "| oba | entries, per MAC | 60.0 | 20.0 | 5.0% | 30.0 s |" in page


def test_rows_stand_in_the_order_of_validation_data(tables, results):
    """By test data, OBA would be first."""
    tables.write_page(results)
    page = (results / "wide_resnet32.md").read_text()
    assert page.index("| magnitude-l2 ") < page.index("| oba ")
