"""Masks of `torch.nn.utils.prune` taken over: the same outputs, plain names, and kept from there on."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from apoptosis.errors import ModelError
from apoptosis.masks import import_masks, masks_of


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def pruned_randomly(net: nn.Sequential) -> None:
    torch_prune.random_unstructured(net[0], "weight", amount=0.4)


def pruned_twice(net: nn.Sequential) -> None:
    torch_prune.l1_unstructured(net[3], "weight", amount=0.3)
    torch_prune.ln_structured(net[3], "weight", amount=0.5, n=2, dim=1)


def pruned_globally(net: nn.Sequential) -> None:
    torch_prune.global_unstructured(
        [(net[0], "weight"), (net[3], "weight")], torch_prune.L1Unstructured, amount=0.6
    )


def pruned_bias(net: nn.Sequential) -> None:
    torch_prune.custom_from_mask(net[0], "bias", torch.tensor([1, 0, 0, 1]))


WAYS = (pruned_randomly, pruned_twice, pruned_globally, pruned_bias)


@pytest.mark.parametrize("prune", WAYS)
def test_outputs_are_the_same_and_names_are_plain_again(prune) -> None:  # noqa: ANN001
    dense, net = network(), network()
    prune(net)
    before = list(net.state_dict())
    plain = import_masks(net)
    assert sorted(plain.state_dict()) == sorted(dense.state_dict())
    assert all(not module._forward_pre_hooks for module in plain.modules())
    x = torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(plain(x), net(x), rtol=0, atol=0)
    assert list(net.state_dict()) == before, "the given model is untouched"


@pytest.mark.parametrize("prune", WAYS)
def test_masks_are_those_of_torch_and_are_kept_in_training(prune) -> None:  # noqa: ANN001
    net = network()
    prune(net)
    buffers = {n.removesuffix("_mask"): b for n, b in net.named_buffers() if n.endswith("_mask")}
    plain = import_masks(net)
    masks = masks_of(plain)
    assert masks is not None
    assert masks.masks.keys() == buffers.keys()
    for name, buffer in buffers.items():
        assert torch.equal(masks.kept(name), buffer.bool())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        plain(torch.randn(2, 2, 4, 4)).square().sum().backward()
        optimizer.step()
    assert masks.holds(plain)


def test_a_model_that_ran_and_trained_under_torchs_masks_is_taken_over() -> None:
    net = network()
    pruned_globally(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.randn(2, 2, 4, 4)).square().sum().backward()
    optimizer.step()
    x = torch.randn(2, 2, 4, 4)
    expected = net(x)  # makes the weights of after the step
    torch.testing.assert_close(import_masks(net)(x), expected, rtol=0, atol=0)


def test_a_model_without_such_masks_is_refused() -> None:
    with pytest.raises(ModelError, match="zeros_of"):
        import_masks(network())
