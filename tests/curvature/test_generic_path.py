"""Operations whose forward-mode formula in torch is wrong still get the right tangent."""

import pytest
import torch

from apoptosis.curvature.rules import Sample, inputs, sample
from oracles.operations import assert_agrees_with_differences, problem

INDICES = torch.tensor([[0, 1, 0, 2], [0, 0, 1, 2], [2, 1, 0, 2]])
TRIANGLE = 4 * torch.eye(3, dtype=torch.float64) + inputs((3, 3))[0].triu()


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("scatter_reduce", sample(*inputs((3, 4)), 0, INDICES, *inputs((3, 4)), "prod")),
        (
            "scatter_reduce",
            sample(*inputs((3, 4)), 0, INDICES, inputs((3, 4))[0] + 1, "prod", include_self=False),
        ),
        ("triangular_solve", sample(inputs((3, 2))[0], TRIANGLE)),
    ],
)
def test_tangents_agree_with_differences(name: str, own: Sample) -> None:
    fallbacks = assert_agrees_with_differences(*problem(name, own))
    assert set(fallbacks) == {name}
