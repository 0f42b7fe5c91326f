from threading import Thread

import pytest

from apoptosis.progress import Progress, listen, track


def heard(work) -> list[Progress]:
    events: list[Progress] = []
    with listen(events.append):
        work()
    return events


def test_without_a_listener_items_pass_through():
    assert list(track(iter("abc"), "letters")) == ["a", "b", "c"]


def test_every_step_is_told_and_the_end_once():
    events = heard(lambda: list(track("ab", "letters")))
    assert [(e.what, e.done, e.total, e.finished) for e in events] == [
        ("letters", 0, 2, False),
        ("letters", 1, 2, False),
        ("letters", 2, 2, False),
        ("letters", 2, 2, True),
    ]


def test_a_total_that_cannot_be_known_is_none_unless_given():
    assert heard(lambda: list(track(iter("ab"), "letters")))[0].total is None
    assert heard(lambda: list(track(iter("ab"), "letters", total=2)))[0].total == 2


def test_nested_loops_are_told_apart():
    def work():
        for _ in track("ab", "outer"):
            for _ in track("xy", "inner"):
                pass

    events = heard(work)
    loops = {e.loop: e.what for e in events}
    assert sorted(loops.values()) == ["inner", "inner", "outer"]
    assert [e.loop for e in events if e.finished] == [e.loop for e in events if e.done == 2][::2]


def test_a_loop_left_early_still_ends():
    def work():
        loop = track("abc", "letters")
        next(loop)
        next(loop)
        loop.close()

    assert [(e.done, e.finished) for e in heard(work)] == [(0, False), (1, False), (1, True)]


def test_a_loop_whose_source_fails_still_ends():
    def source():
        yield 1
        raise ValueError("source broke")

    events: list[Progress] = []
    with pytest.raises(ValueError, match="source broke"), listen(events.append):
        list(track(source(), "items"))
    assert events[-1].finished


def test_nobody_hears_after_the_block_or_in_another_thread():
    events: list[Progress] = []
    with listen(events.append):
        thread = Thread(target=lambda: list(track("ab", "elsewhere")))
        thread.start()
        thread.join()
    list(track("ab", "later"))
    assert events == []


def test_the_innermost_listener_hears_and_the_outer_one_comes_back():
    outer: list[Progress] = []
    inner: list[Progress] = []
    with listen(outer.append):
        with listen(inner.append):
            list(track("a", "inner"))
        list(track("a", "outer"))
    assert {e.what for e in inner} == {"inner"}
    assert {e.what for e in outer} == {"outer"}
