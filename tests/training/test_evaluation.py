import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from apoptosis.errors import DataError
from apoptosis.models import digits_cnn
from apoptosis.training import evaluate


def images_and_labels(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 10


def test_loss_and_accuracy_are_means_over_samples_however_cut():
    x, y = images_and_labels(23)
    model = digits_cnn().eval()
    logits = model(x)
    for size in (1, 7, 23):
        result = evaluate(model, list(zip(x.split(size), y.split(size), strict=True)))
        assert_close(result.loss, F.cross_entropy(logits, y).item(), rtol=1e-5, atol=0)
        assert result.metrics == {"correct": pytest.approx((logits.argmax(1) == y).double().mean())}
        assert result.count == 23


def test_the_model_is_left_as_it_was():
    x, y = images_and_labels(8)
    model = digits_cnn().train()
    model.stem.norm.eval()
    flags = [m.training for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, [(x, y)])
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_samples_is_an_error_that_says_why(batches):
    with pytest.raises(DataError, match="found no samples"):
        evaluate(nn.Identity(), batches)
