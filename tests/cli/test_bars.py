import io

from rich.console import Console

from apoptosis.cli.bars import progress_bars
from apoptosis.progress import track


def drawn(work, *, terminal: bool) -> str:
    screen = io.StringIO()
    with progress_bars(Console(file=screen, force_terminal=terminal, width=80)):
        work()
    return screen.getvalue()


def nested() -> None:
    for _ in track("ab", "outer loop"):
        list(track("xyz", "inner loop"))


def test_a_running_loop_is_drawn_with_its_count():
    loop = track("abc", "outer loop")

    def stop_at_the_third() -> None:
        for _ in range(3):
            next(loop)

    shown = drawn(stop_at_the_third, terminal=True)
    assert "outer loop" in shown
    assert "2/3" in shown
    loop.close()


def test_nested_loops_come_and_go():
    assert "outer loop" in drawn(nested, terminal=True)


def test_a_file_gets_no_bars():
    assert drawn(nested, terminal=False).strip() == ""
