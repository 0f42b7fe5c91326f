"""Little memory and little time for what files ask for: a test that reads more than it may fails."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIGABYTE = 2**30


@contextmanager
def little(memory: int = GIGABYTE, seconds: int = 20) -> Iterator[None]:
    """Inside the block so much memory can be asked for besides what is there, and so long be waited."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)

    def too_long(*_):
        raise AssertionError(f"nothing came of it in {seconds} s")

    handler = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)
