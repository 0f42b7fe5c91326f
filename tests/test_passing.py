"""What passes a module is seen on either side, may be changed, and no hook stays behind."""

import pytest
import torch
from torch import nn

from apoptosis.passing import passing


class Scaled(nn.Module):
    def forward(self, x, *, by=1.0):
        return x * by


@pytest.mark.parametrize(
    ("side", "want"), [("input", ((3.0,), {"by": 2.0})), ("output", 6.0)], ids=["input", "output"]
)
def test_what_passes_is_seen_at_every_call_and_stays_as_it_is(side, want):
    module, seen = Scaled(), []
    with passing(module, side, seen.append):
        assert [module(3.0, by=2.0), module(3.0, by=2.0)] == [6.0, 6.0]
    assert seen == [want, want]


def test_what_is_given_back_goes_on_instead():
    module = Scaled()
    with passing(module, "input", lambda given: (given[0], {"by": 5.0})):
        assert module(3.0, by=2.0) == 15.0
    with passing(module, "output", lambda given: -given):
        assert module(3.0) == -3.0


def test_no_hook_stays_behind_whatever_happens():
    module = nn.Linear(2, 2)
    for side in ("input", "output"):
        with pytest.raises(RuntimeError, match="inside"), passing(module, side, lambda _: None):
            raise RuntimeError("inside")
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    module(torch.zeros(1, 2))
