"""A network delivered as a recorded program calls `torch.ops.aten` directly, and is scored like its zeroed twin."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from apoptosis.criteria import oba
from apoptosis.models import cifar_vit, resnet20, vgg19_bn
from apoptosis.structure import Structure, trace, zero

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: resnet20(width=4),
    "vit": lambda: cifar_vit(),
    "vgg": lambda: vgg19_bn(width=4),
}


def halves(structure: Structure) -> dict[str, range]:
    return {group.name: range((group.size + 1) // 2) for group in structure.groups if group.exact}


@pytest.mark.parametrize("kind", ["connectivity", "functional", "hessian", "ggn"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_has_the_scores_of_its_twin(name: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    batches = [(images, torch.tensor([3, 7]))]
    model = NETWORKS[name]().double().eval()
    structure = trace(model, images)
    plan = structure.plan(halves(structure))
    found = oba(structure.program(model, plan), batches, kind=kind)
    expected = oba(zero(model, plan), batches, kind=kind)
    assert found.fallbacks == {}
    for cut in plan.tensors:
        if cut.names[0] in expected.values:
            torch.testing.assert_close(
                found.values[cut.names[0]], kept(expected.values[cut.names[0]], cut.kept)
            )


def kept(values: Tensor, indices: dict) -> Tensor:
    for dim, own in indices.items():
        values = values.index_select(dim, torch.as_tensor(own))
    return values
