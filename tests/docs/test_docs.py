import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_one_short_example():
    (example,) = python_blocks()
    assert len([line for line in example.splitlines() if line.strip()]) <= 22


def test_the_example_runs_and_prints_what_it_promises():
    (example,) = python_blocks()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", done.stdout)[1])
    assert accuracy > 90
    assert re.search(r"loss \d\.\d+ +θ·g [+-]\d+\.\d+ +θ·Hθ [+-]\d+\.\d+", done.stdout)
    assert "stem.conv.weight   (16, 1, 3, 3)" in done.stdout


@pytest.mark.parametrize("target", re.findall(r"\$ make ([\w-]+)", README))
def test_commands_named_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
