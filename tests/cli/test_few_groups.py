"""A plan that takes nearly all from few groups is told on the command line, with what to type against it."""

import json

from oracles.command_runs import done

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    widths = [8, 20, 20, 20, 20, 20, 20]
    layers = []
    for number, (a, b) in enumerate(zip(widths, widths[1:])):
        layer = nn.Linear(a, b)
        layer.weight.data *= 10.0 ** number
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(20, 3))

def both():
    batches = [(torch.randn(16, 8), torch.arange(16) % 3)]
    return batches, batches
"""


def test_it_is_told_and_the_remedy_helps(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    words = ["prune", f"{tmp_path}/mine.py:make", "--data", f"{tmp_path}/mine.py:both"]
    words += ["--criterion", "magnitude", "--steps", "1", "--keep-params", "0.7", "--per", "unit"]
    shown = " ".join(done([*words, "--out", str(tmp_path / "a")]).split())
    assert "Few groups pay for all: 0 (keeps 1 of 20)" in shown
    assert "--cap 0.5" in shown
    found = json.loads(done([*words, "--out", str(tmp_path / "b"), "--json"]))
    assert found["settings"]["few_groups"]["groups"]["0"] == [1, 20]
    more = ["--cap", "0.5", "--out", str(tmp_path / "c")]
    assert "Few groups" not in done([*words, *more])
