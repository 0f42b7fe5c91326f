import pytest
import torch

from apoptosis.training import SCHEDULES
from apoptosis.training.schedules import stepwise

ENDS = {"constant": 1.0, "step": 0.01, "cosine": 0.0, "one-cycle": 0.0}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_stay_in_range_touch_the_top_and_end_where_they_should(name):
    values = [SCHEDULES[name](i / 1000) for i in range(1001)]
    assert min(values) >= 0
    assert max(values) == pytest.approx(1, abs=1e-3)
    assert values[-1] == pytest.approx(ENDS[name], abs=1e-12)


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "milestones"),
    [(150, 7, [80, 120]), (200, 391, [60, 100, 150]), (4, 1, [2, 3])],
)
def test_steps_come_at_whole_epochs(epochs, per_epoch, milestones):
    """As torch's MultiStepLR counts them."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    peer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(peer, milestones)
    ours, num_steps = stepwise([m / epochs for m in milestones]), epochs * per_epoch
    for epoch in range(epochs):
        for step in (epoch * per_epoch, (epoch + 1) * per_epoch - 1):
            assert ours(step / (num_steps - 1)) == pytest.approx(scheduler.get_last_lr()[0])
        peer.step()
        scheduler.step()


def test_one_cycle_rises_before_it_falls_and_cosine_only_falls():
    for name, rises in [("one-cycle", True), ("cosine", False)]:
        curve = SCHEDULES[name]
        assert (curve(0.2) > curve(0.1)) is rises
        assert curve(0.9) < curve(0.6)


def test_one_cycle_has_no_jump():
    curve = SCHEDULES["one-cycle"]
    steps = [abs(curve((i + 1) / 1000) - curve(i / 1000)) for i in range(1000)]
    assert max(steps) < 0.005
