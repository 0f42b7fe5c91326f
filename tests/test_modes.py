import pytest
from torch import nn

from apoptosis.modes import in_eval_mode, in_train_mode


def mixed_flags() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Dropout().eval(), nn.Linear(2, 2))


@pytest.mark.parametrize(("mode", "inside"), [(in_eval_mode, False), (in_train_mode, True)])
def test_flags_hold_inside_and_each_is_put_back(mode, inside):
    model = mixed_flags()
    before = [module.training for module in model.modules()]
    with mode(model):
        assert {module.training for module in model.modules()} == {inside}
    assert [module.training for module in model.modules()] == before


def test_flags_are_put_back_after_an_error():
    model = mixed_flags()
    before = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="inside"), in_eval_mode(model):
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == before
