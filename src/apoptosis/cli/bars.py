"""Progress bars drawn from the events of `apoptosis.progress`: one line per running loop, with the time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from apoptosis import progress

__all__ = ["progress_bars"]


@contextmanager
def progress_bars(console: Console) -> Iterator[None]:
    """Draw every tracked loop inside the block; the lines go away with their loops."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    drawn: dict[int, TaskID] = {}

    def draw(event: progress.Progress) -> None:
        if event.finished:
            if event.loop in drawn:
                bars.remove_task(drawn.pop(event.loop))
        elif event.loop not in drawn:
            drawn[event.loop] = bars.add_task(event.what, total=event.total)
        else:
            bars.update(drawn[event.loop], completed=event.done)

    with bars, progress.listen(draw):
        yield
