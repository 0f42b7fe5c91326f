"""Numbers that were tried in a configuration and not taken are gone without a trace."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import CheckpointError


class Inner:
    def __init__(self, hidden: int = 8) -> None:
        self.hidden = hidden

    def to_dict(self):
        return {"hidden": self.hidden}

    @classmethod
    def from_dict(cls, data):
        return cls(**data)


class Outer:
    def __init__(self, text=None) -> None:
        self.text = Inner(**(text or {}))

    def to_dict(self):
        return {"text": self.text.to_dict()}

    @classmethod
    def from_dict(cls, data):
        return cls(**data)


class Part(nn.Module):
    def __init__(self, config: Inner) -> None:
        super().__init__()
        self.config = config
        self.a, self.b = nn.Linear(4, config.hidden, bias=False), nn.Linear(config.hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.config.hidden**0.5)


class Whole(nn.Module):
    def __init__(self, config: Outer) -> None:
        super().__init__()
        self.config, self.part = config, Part(config.text)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)

    def save_pretrained(self, _folder) -> None:
        raise AssertionError("the cut network wrote what nothing can load")


@pytest.mark.parametrize("example", [torch.zeros(1, 4), torch.ones(1, 4)], ids=["zeros", "ones"])
def test_a_number_that_changes_what_is_computed_is_taken_back(example: Tensor) -> None:
    torch.manual_seed(0)
    model = Whole(Outer()).eval()
    structure = ap.trace(model, example)
    plan = structure.plan({structure.groups[0].name: [0, 2, 3, 7]})
    small, x = ap.cut(model, plan), torch.randn(3, 4)
    torch.testing.assert_close(small(x), ap.structure.zero(model, plan)(x))
    assert small.part.config is small.config.text
    assert small.config.text.hidden == model.config.text.hidden == 8
    with pytest.raises(CheckpointError, match=r"ap\.save"):
        small.save_pretrained("folder")
