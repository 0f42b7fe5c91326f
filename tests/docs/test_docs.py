"""Pages keep their word: every python block runs, every relative link leads somewhere, every command exists.

The blocks of one page are one program, run from top to bottom in a fresh interpreter with warnings as errors.
"""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = PAGES["README.md"]
TEMPORARY = TemporaryDirectory()
"""Where pages write what they write."""
LINKS = [
    (page, link)
    for page, text in PAGES.items()
    for link in re.findall(r"\]\(([^)\s]+)\)", text)
    if not re.match(r"[a-z]+:", link)
]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)


@cache
def run(page: str) -> str:
    """What the page's program prints."""
    program = "\n".join(python_blocks(page))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=TEMPORARY.name,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
def test_python_blocks_run(page):
    run(page)


def test_pages_that_should_show_code_do():
    assert {
        "README.md",
        "docs/design.md",
        "docs/method.md",
        "docs/pruning.md",
        "docs/structure.md",
    } <= {page for page in PAGES if python_blocks(page)}


def commands(page: str) -> list[list[str]]:
    """Lines `$ apoptosis …` that are about the digits, as words: the others need files or libraries of a reader's."""
    blocks = re.findall(r"```console\n(.*?)```", PAGES[page], flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    own = [line for line in lines if line.startswith("$ apoptosis ") and "digits" in line]
    return [shlex.split(line, comments=True)[2:] for line in own]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_on_the_digits_run(page, tmp_path, monkeypatch):
    """In one folder, from top to bottom; a block of TOML whose first line names a file is that file."""
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", PAGES[page], flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    for words in commands(page):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.stderr}"


def test_the_page_of_commands_runs_them_all():
    shown = {words[0] for words in commands("docs/commands.md")}
    assert shown == {"train", "inspect", "score", "prune", "finetune", "evaluate", "compare"}


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_somewhere(page, link):
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.exists()
    if anchor:
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert anchor in {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- README ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", python_blocks("README.md"), ids=["prune", "parts"])
def test_examples_are_short(example):
    assert len([line for line in example.splitlines() if line.strip()]) <= 22


def test_the_example_prints_what_it_promises():
    printed = run("README.md")
    assert float(re.search(r"test accuracy ([\d.]+)% before", printed)[1]) > 90
    assert float(re.search(r"([\d.]+)% after", printed)[1]) > 90
    assert re.search(r"flops: asked 50\.0%, got (4\d|50)\.\d+%", printed)
    assert re.search(r"loss \d\.\d+ +θ·Hθ [+-]\d+\.\d+", printed)
    assert "stem.conv stream 16" in printed


@pytest.mark.parametrize("target", re.findall(r"\$ make ([\w-]+)", README))
def test_commands_named_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
