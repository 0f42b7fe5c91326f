"""Norms in eval mode give the same numbers and gradients by another way, and only inside the block."""

import pytest
import torch
from torch import nn

from apoptosis.frozen_norms import frozen_norms

KINDS = {
    "1d": (nn.BatchNorm1d, (5, 3)),
    "1d, sequences": (nn.BatchNorm1d, (5, 3, 4)),
    "2d": (nn.BatchNorm2d, (5, 3, 4, 2)),
    "3d": (nn.BatchNorm3d, (5, 3, 2, 2, 2)),
}


def lived(norm: nn.Module) -> nn.Module:
    """With numbers that training leaves."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        if tensor is not None:
            with torch.no_grad():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm.eval()


def slopes(norm: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What comes out, and the gradients of a sum that weighs all of it differently."""
    x = x.clone().requires_grad_()
    y = norm(x)
    wanted = [x, norm.weight, norm.bias]
    return [y, *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), wanted)]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_the_norm(kind):
    make, shape = KINDS[kind]
    norm = lived(make(3).double())
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = slopes(norm, x)
    with frozen_norms(norm):
        found = slopes(norm, x)
    assert found[0].grad_fn.name() == "AddcmulBackward0"
    torch.testing.assert_close(found, wanted)


def test_they_work_with_parameters_that_a_call_brings_along():
    norm, x = lived(nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 4)
    values = {"weight": 2 * norm.weight.detach(), "bias": norm.bias.detach() - 1}
    wanted = torch.func.functional_call(norm, values, (x,))
    with frozen_norms(norm):
        torch.testing.assert_close(torch.func.functional_call(norm, values, (x,)), wanted)


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (nn.BatchNorm2d(3).train(), torch.float32),
        (nn.BatchNorm2d(3, affine=False), torch.float32),
        (nn.BatchNorm2d(3, track_running_stats=False), torch.float32),
        (lived(nn.BatchNorm2d(3)).bfloat16(), torch.bfloat16),
        (lived(Own(3)), torch.float32),
        (nn.GroupNorm(3, 3), torch.float32),
    ],
    ids=["train", "no weights", "no statistics", "16 bits", "subclass", "another norm"],
)
def test_other_norms_are_left_to_themselves(norm, dtype):
    norm.train(norm.training and norm.weight is not None)
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    state = {name: own.clone() for name, own in norm.state_dict().items()}
    wanted = norm(x)
    norm.load_state_dict(state)
    with frozen_norms(norm):
        torch.testing.assert_close(norm(x), wanted, rtol=0, atol=0)


def test_wrong_inputs_are_refused_as_by_the_norm():
    norm = lived(nn.BatchNorm2d(3))
    with frozen_norms(norm), pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.zeros(2, 3))


def test_nothing_stays_behind_whatever_happens():
    norm = lived(nn.BatchNorm2d(3))
    with pytest.raises(RuntimeError, match="inside"), frozen_norms(norm):
        raise RuntimeError("inside")
    assert "forward" not in vars(norm)


def test_a_forward_of_the_users_own_stays():
    norm = lived(nn.BatchNorm2d(3))
    norm.forward = lambda x: x + 1
    with frozen_norms(norm):
        assert norm(torch.zeros(1)).item() == 1
    assert norm(torch.zeros(1)).item() == 1
