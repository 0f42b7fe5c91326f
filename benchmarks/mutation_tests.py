"""Run the tests that reach a changed line, in a process that has imported torch before it was forked.

`TestMap` knows for each test the lines of `src` it runs and the processor time it takes. It is made by running each
test file once on code with a mark before every statement, and is kept in a folder: a test file is run again when it
changed. Where a source file changed since, lines are matched by their text.

A changed file is written into a copy of the tree. A child process imports the package from there and runs the tests,
the fastest first, to the first failure. A test that takes many times its processor time counts as failed.
"""

import ast
import base64
import contextlib
import difflib
import functools
import gc
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = [
    *("-q", "-c", "pyproject.toml", "-p", "no:cacheprovider"),
    *("-o", "addopts=--import-mode=importlib --strict-markers"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # hypothesis is there before pytest
]
QUICK = "not slow and not gpu and not dist"
WALL_S = 1800.0  # against a change that sleeps for ever; processor time is bounded test by test
MEMORY_BYTES = 8 << 30
LONG_S = 5.0  # of a test when lines are found; what goes on after that runs little that is new
COPIED = ("src", "tests", "benchmarks", "pyproject.toml", "docs", "README.md")


def copy_tree(to: Path, changed: dict[str, str] | None = None) -> None:
    """A copy of what tests read, with the times of its files, so that compiled files stay valid."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, to / name, ignore=ignored, dirs_exist_ok=True)
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)
    for name, text in (changed or {}).items():
        (to / name).write_text(text)


# --- children ---
@dataclass
class Child:
    pid: int
    answer: Path
    log: Path
    until: float


def start(work: Callable[[], Any], tree: Path, answer: Path, wall_s: float = WALL_S) -> Child:
    """Fork; the child does `work` in the tree and writes what it returns as JSON."""
    log = answer.with_suffix(".log")
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Child(pid, answer, log, time.monotonic() + wall_s)
    try:
        out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        here = str(Path(__file__).parent)
        rest = [p for p in sys.path if p != here and not p.startswith(str(ROOT / "src"))]
        sys.path[:] = [str(tree / "src"), *rest]
        result = work()
        answer.with_suffix(".part").write_text(json.dumps(result))
        answer.with_suffix(".part").replace(answer)
    except BaseException as err:  # noqa: BLE001 - a child has nobody above it
        print(f"{type(err).__name__}: {err}", flush=True)
        os._exit(1)
    os._exit(0)


def has_ended(child: Child) -> str | None:
    """None while it runs; "" once it has ended by itself, else what ended it."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if not pid:
        if time.monotonic() > child.until:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            return "hang"
        return None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "hang" if number == signal.SIGPROF else f"signal {number}"
    return "" if child.answer.exists() else "exit"


def run_all(
    jobs: Iterable[tuple[Any, Callable[[], Child]]], num: int
) -> Iterable[tuple[Any, Child, str]]:
    """Children, `num` at a time; each as it ends."""
    waiting, running = iter(jobs), list[tuple[Any, Child]]()
    more = True
    while more or running:
        while more and len(running) < num:
            try:
                key, begin = next(waiting)
            except StopIteration:
                more = False
                break
            running.append((key, begin()))
        for key, child in list(running):
            if (ended := has_ended(child)) is not None:
                running.remove((key, child))
                yield key, child, ended
        time.sleep(0.05)


def import_ahead() -> None:
    """What tests import from elsewhere, so that children need not; nothing of our own."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # threads that wait cost time
    names = """
        torch torch.export torch.func torch.utils.flop_counter torch._dynamo hypothesis.strategies hypothesis.stateful
        _hypothesis_pytestplugin xdist.plugin scipy.stats sklearn.datasets PIL.Image
        transformers.models.llama transformers.models.bert torch.distributed.fsdp
    """
    for name in names.split():
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()


# --- which test runs which line ---
class _Marker(ast.NodeTransformer):
    """Puts `__marks__[n] = 1` before every statement and into every lambda; `n` is its line."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def mark(self, line: int, at: ast.AST) -> ast.stmt:
        new = ast.parse(f"__marks__[{self.offset + line}] = 1").body[0]
        for node in ast.walk(new):
            if hasattr(at, "lineno"):
                ast.copy_location(node, at)
        return new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(node, name, None)
            if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
                continue
            marked: list[ast.stmt] = []
            for n, statement in enumerate(block):
                docs = n == 0 and _is_docstring(statement)
                future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
                if not docs and not future:
                    marked.append(self.mark(statement.lineno, statement))
                marked.append(statement)
            setattr(node, name, marked)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        line = self.offset + node.body.lineno
        both = ast.parse(f"(__marks__.__setitem__({line}, 1), 0)[1]", mode="eval").body
        for part in ast.walk(both):
            ast.copy_location(part, node.body)
        assert isinstance(both, ast.Subscript)
        assert isinstance(both.value, ast.Tuple)
        both.value.elts[1] = node.body
        node.body = both
        return node


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _MarkingFinder(PathFinder):
    """Imports files of `src` with marks."""

    offsets: dict[str, int] = {}

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("apoptosis."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin in cls.offsets:
            spec.loader = _MarkingLoader(fullname, spec.origin)
        return spec


class _MarkingLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:  # noqa: ARG002
        text = Path(self.path).read_text()
        tree = _Marker(_MarkingFinder.offsets[self.path]).visit(ast.parse(text))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _TooLongError(BaseException):
    """A test has shown enough of its lines. No `Exception`, so that hypothesis lets it pass."""


def _stop(*_: Any) -> None:
    raise _TooLongError


class _Recorder:
    """Notes the marks of every test. What is computed once for several tests counts for each."""

    def __init__(self, marks: bytearray) -> None:
        self.marks = marks
        self.tests: dict[str, dict[str, Any]] = {}
        self.fixtures: dict[str, np.ndarray] = {}
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.long: set[str] = set()

    def seen(self) -> np.ndarray:
        return np.frombuffer(bytes(self.marks), dtype=np.uint8)

    def apart(self, work: Callable[[], Any]) -> tuple[Any, np.ndarray]:
        before = self.seen()
        self.marks[:] = bytes(len(self.marks))
        try:
            return work(), self.seen()
        finally:
            self.add(before)

    def add(self, other: np.ndarray) -> None:
        self.marks[:] = np.maximum(self.seen(), other).tobytes()

    def cache(self, function: Any) -> Any:
        """In place of `functools.cache` in tests: what a kept result ran counts at every use."""
        if not function.__code__.co_filename.startswith(str(Path.cwd())):
            return functools.lru_cache(maxsize=None)(function)
        kept: dict[Any, tuple[Any, np.ndarray]] = {}

        @functools.wraps(function)
        def cached(*args: Any, **kwargs: Any) -> Any:
            key = (args, tuple(sorted(kwargs.items())))
            if key not in kept:
                kept[key] = self.apart(lambda: function(*args, **kwargs))
            value, ran = kept[key]
            self.add(ran)
            return value

        return cached

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        before = self.seen()
        self.marks[:] = bytes(len(self.marks))
        result = yield
        self.fixtures[fixturedef.argname] = self.seen()
        self.add(before)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.marks[:] = bytes(len(self.marks))
        began = time.process_time()
        signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, LONG_S)
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        for name in getattr(item, "fixturenames", ()):
            if name in self.fixtures:
                self.add(self.fixtures[name])
        self.tests[item.nodeid] = {
            "cpu": round(time.process_time() - began, 3) * (4 if item.nodeid in self.long else 1),
            "lines": base64.b85encode(np.packbits(self.seen()).tobytes()).decode(),
        }
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        if report.failed and "_TooLongError" in str(report.longrepr):
            self.long.add(report.nodeid)
        elif report.failed:
            self.failed.add(report.nodeid)


@dataclass(frozen=True)
class Sources:
    """The files whose lines are marked, one after the other in one numbering."""

    texts: dict[str, str]

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        found, total = dict[str, int](), 0
        for name, text in self.texts.items():
            found[name] = total
            total += text.count("\n") + 2
        return found

    @property
    def num(self) -> int:
        return sum(text.count("\n") + 2 for text in self.texts.values())

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:16]


def _record(tree: Path, files: list[str]) -> dict[str, Any]:
    """In a child of the mapper: run test files on marked code."""
    marks = sys.modules["builtins"].__marks__  # type: ignore[attr-defined]
    recorder = _Recorder(marks)
    functools.cache = recorder.cache  # type: ignore[assignment]
    doctests = ["--doctest-modules"] if files[0].startswith("src") else []
    where = f"--rootdir={tree}"
    pytest.main([*files, *OPTIONS, where, "-m", QUICK, *doctests], plugins=[recorder])
    good = (recorder.passed | recorder.long) - recorder.failed
    return {"tests": {k: v for k, v in recorder.tests.items() if k in good}}


def _mapper(
    tree: Path, sources: Sources, jobs: list[tuple[str, list[str], str]], into: Path
) -> None:
    """In a child: import the marked package once, then fork for each test file."""
    marks = bytearray(sources.num)
    sys.modules["builtins"].__marks__ = marks  # type: ignore[attr-defined]
    at = tree / "src" / "apoptosis"
    _MarkingFinder.offsets = {str(at / name): n for name, n in sources.offsets.items()}
    sys.meta_path.insert(0, _MarkingFinder)
    for name in sources.texts:
        importlib.import_module(
            "apoptosis." + name[:-3].replace("/", ".").removesuffix(".__init__")
        )
    gc.freeze()

    def begin(files: list[str], key: str) -> Callable[[], Child]:
        return lambda: start(lambda: _record(tree, files), tree, into / f"{key}.now")

    waiting = ((job, begin(job[1], job[0])) for job in jobs)
    for (key, files, digest), child, ended in run_all(waiting, 1):
        if ended:
            print(f"{files[0]}: {ended}, see {child.log}", flush=True)
            continue
        found = json.loads(child.answer.read_text())
        found |= {"digest": digest, "sources": sources.digest}
        (into / f"{key}.json").write_text(json.dumps(found))
        child.answer.unlink()
        print(f"{files[0]}: {len(found['tests'])} tests", flush=True)


def make_map(work: Path, room: str, texts: dict[str, str], jobs: int) -> None:
    """Run what has changed since the map in `work` was made."""
    into, tree = work / "map", work / "marked"
    into.mkdir(parents=True, exist_ok=True)
    sources = Sources(texts)
    kept = into / f"sources-{sources.digest}.txt"
    todo: list[tuple[str, list[str], str]] = []
    for name, files in test_files(room).items():
        texts_of = "".join((ROOT / f).read_text() for f in files)
        digest = hashlib.sha256(texts_of.encode()).hexdigest()[:16]
        at = into / f"{name}.json"
        if name.startswith("doctests") and at.exists():
            continue  # examples of a file change with its code; they are few
        if not at.exists() or json.loads(at.read_text())["digest"] != digest:
            todo.append((name, files, digest))
    if not todo:
        return
    kept.write_text(json.dumps(texts))
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    print(f"{room}: finding which lines {len(todo)} test files run", flush=True)
    parts = [part for n in range(jobs) if (part := todo[n::jobs])]

    def begin(n: int, part: list[tuple[str, list[str], str]]) -> Callable[[], Child]:
        return lambda: start(
            lambda: _mapper(tree, sources, part, into),
            tree,
            work / f"mapper{n}.json",
            wall_s=float("inf"),
        )

    for n, child, ended in run_all(((n, begin(n, p)) for n, p in enumerate(parts)), jobs):
        if ended:
            print(f"mapper {n}: {ended}, see {child.log}")


def test_files(room: str) -> dict[str, list[str]]:
    """What judges a room: its test files, each by a name of its own, and the examples of its code."""
    if room == "task":
        return {"task": ["tests/test_task.py"], "doctests-task": ["src/apoptosis/task.py"]}
    tests = sorted(p for p in (ROOT / "tests" / room).glob("test_*.py"))
    code = sorted((ROOT / "src" / "apoptosis" / room).glob("*.py"))
    with_examples = [p for p in code if ">>>" in p.read_text()]
    found = {f"{room}-{p.stem}": [str(p.relative_to(ROOT))] for p in tests}
    if with_examples:
        found[f"doctests-{room}"] = [str(p.relative_to(ROOT)) for p in with_examples]
    return found


class TestMap:
    """Which tests run a line, and for how long."""

    __test__ = False

    def __init__(self, work: Path, room: str, texts: dict[str, str]) -> None:
        self.cpu: dict[str, float] = {}
        self.lines: dict[str, tuple[np.ndarray, str]] = {}
        self.texts, self.sources, self.matched = texts, {}, {}
        for name in test_files(room):
            at = work / "map" / f"{name}.json"
            if not at.exists():
                print(f"no map of {name}: its tests judge nothing", flush=True)
                continue
            found = json.loads(at.read_text())
            digest = found["sources"]
            if digest not in self.sources:
                text = (work / "map" / f"sources-{digest}.txt").read_text()
                self.sources[digest] = Sources(json.loads(text))
            for test, facts in found["tests"].items():
                bits = np.frombuffer(base64.b85decode(facts["lines"]), dtype=np.uint8)
                self.lines[test] = (np.unpackbits(bits), digest)
                self.cpu[test] = facts["cpu"]

    def of(self, file: str, line: int | None) -> list[str]:
        """Tests of the room that run the line, or any of the file, the fastest first."""
        own_examples = f"src/apoptosis/{file}"
        return sorted(
            (
                test
                for test in self.lines
                if test.startswith(("tests/", own_examples + "::")) and self.runs(test, file, line)
            ),
            key=lambda test: self.cpu[test],
        )

    def runs(self, test: str, file: str, line: int | None) -> bool:
        marks, digest = self.lines[test]
        sources = self.sources[digest]
        if file not in sources.offsets:
            return False
        first = sources.offsets[file]
        own = marks[first : first + sources.texts[file].count("\n") + 2]
        if line is None:
            return bool(own.any())
        was = self.match(digest, file).get(line, 0)
        if was < 0:  # the line is new
            return bool(own[max(0, -was - 30) : -was + 30].any())
        return bool(own[was])

    def in_parts(self, tests: list[str], most_s: float) -> list[list[str]]:
        """First the fastest of the two files where that is quickest, then the others, within the time."""
        of_file: dict[str, list[str]] = {}
        for test in tests:
            of_file.setdefault(test.split("::")[0], []).append(test)
        quick = sorted(
            of_file,
            key=lambda f: sum(self.cpu[t] for t in of_file[f][:15]) - 0.05 * len(of_file[f]),
        )
        first = [test for test in tests if test.split("::")[0] in quick[:2]][:40]
        spent, others = sum(self.cpu[test] for test in first), list[str]()
        for test in tests:
            if test not in first and spent + self.cpu[test] <= most_s:
                others.append(test)
                spent += self.cpu[test]
        return [first, others]

    def match(self, digest: str, file: str) -> dict[int, int]:
        """New line numbers to old ones; to the negative of a place near by where the line is new."""
        key = (digest, file)
        if key not in self.matched:
            old, new = self.sources[digest].texts[file].splitlines(), self.texts[file].splitlines()
            if old == new:
                self.matched[key] = {n: n for n in range(1, len(new) + 1)}
            else:
                same = difflib.SequenceMatcher(None, old, new, autojunk=False)
                pairs = dict[int, int]()
                for _, i, i2, j, j2 in same.get_opcodes():
                    equal = i2 - i == j2 - j and old[i:i2] == new[j:j2]
                    for n in range(j, j2):
                        pairs[n + 1] = i + n - j + 1 if equal else -(i + 1)
                self.matched[key] = pairs
        return self.matched[key]


# --- judging ---
class _Chooser:
    """Runs the tests asked for in the order asked for, each within its time."""

    def __init__(self, tests: list[str], cpu: dict[str, float]) -> None:
        self.tests, self.cpu = tests, cpu
        self.by, self.num = "", 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        place = {test: n for n, test in enumerate(self.tests)}
        items[:] = sorted(
            (i for i in items if i.nodeid in place), key=lambda item: place[item.nodeid]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        print(f"\n{item.nodeid}", flush=True)
        self.num += 1
        signal.setitimer(signal.ITIMER_PROF, 10 + 8 * self.cpu.get(item.nodeid, 1.0))
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 120)
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.by = self.by or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.by = self.by or f"{report.nodeid} (collection)"


def judge(tree: Path, parts: list[list[str]], cpu: dict[str, float]) -> dict[str, Any]:
    """In a child: the first test that fails, if one does; part after part."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    num = 0
    for tests in parts:
        if not tests:
            continue
        signal.setitimer(signal.ITIMER_PROF, 120)
        chooser = _Chooser(tests, cpu)
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        doctests = ["--doctest-modules"] if any(f.startswith("src") for f in files) else []
        options = [*OPTIONS, f"--rootdir={tree}", "-x", "--tb=line", *doctests]
        code = pytest.main([*files, *options], plugins=[chooser])
        num += chooser.num
        by = chooser.by or ("" if code in {0, 5} else f"pytest ended with {int(code)}")
        if by:
            return {"by": by, "num": num}
    return {"by": "", "num": num}
