import pytest

from apoptosis.training import SCHEDULES


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_stay_in_range_touch_the_top_and_end_at_zero(name):
    values = [SCHEDULES[name](i / 1000) for i in range(1001)]
    assert min(values) >= 0
    assert max(values) == pytest.approx(1, abs=1e-3)
    assert values[-1] == pytest.approx(0, abs=1e-12)


def test_one_cycle_rises_before_it_falls_and_cosine_only_falls():
    for name, rises in [("one-cycle", True), ("cosine", False)]:
        curve = SCHEDULES[name]
        assert (curve(0.2) > curve(0.1)) is rises
        assert curve(0.9) < curve(0.6)


def test_one_cycle_has_no_jump():
    curve = SCHEDULES["one-cycle"]
    steps = [abs(curve((i + 1) / 1000) - curve(i / 1000)) for i in range(1000)]
    assert max(steps) < 0.005
