"""A unit that owns two rows and two columns of one tensor counts each of its entries once, and no other's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.criteria import Aggregation, Scores, unit_scores
from apoptosis.structure import trace
from oracles.building import Net, built
from oracles.unit_sums import ROLES, unit_sums

WIDTH = 5


def doubled(m: Any, x: Tensor) -> Tensor:
    """The square weight reads each unit twice and writes it twice."""
    h = m.stem(x)
    one, two = m.square(torch.cat([h, h.tanh()], -1)).chunk(2, -1)
    return m.head(h + one * two)


def tripled(m: Any, x: Tensor) -> Tensor:
    """Twice read, once written, by the same weight."""
    h = m.stem(x)
    return m.head(h + m.wide(torch.cat([h, h.tanh()], -1)))


@pytest.mark.parametrize("code", [doubled, tripled], ids=lambda code: code.__name__)
@pytest.mark.parametrize("absolute", ["none", "unit", "slice", "entry"])
@pytest.mark.parametrize("over_slices", ["sum", "mean"])
def test_scores_are_those_of_masks(code: Any, absolute: str, over_slices: str) -> None:
    parts: dict[str, nn.Module] = {"stem": nn.Linear(3, WIDTH), "head": nn.Linear(WIDTH, 2)}
    if code is doubled:
        parts["square"] = nn.Linear(2 * WIDTH, 2 * WIDTH)
    else:
        parts["wide"] = nn.Linear(2 * WIDTH, WIDTH)
    model = built(lambda: Net(code, **parts))
    structure = trace(model, torch.zeros(2, 3, dtype=torch.float64))
    assert [group.size for group in structure.groups] == [WIDTH]
    torch.manual_seed(0)
    scores = {name: torch.randn_like(own).detach() for name, own in model.named_parameters()}
    options: dict[str, Any] = {"absolute": absolute, "over_slices": over_slices, "roles": ROLES}
    found = unit_scores(Scores(scores, "made up"), structure, Aggregation(**options))
    want = unit_sums(scores, structure, **options)
    for name, own in found.values.items():
        torch.testing.assert_close(own, torch.tensor(want[name], dtype=torch.float64))
