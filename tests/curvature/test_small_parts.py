"""Parts of the engine that only show in speed, in messages or in what stays behind, each asked directly."""

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import Place, fisher_diagonal
from apoptosis.curvature.activations import watched
from apoptosis.curvature.autocast import _castable
from apoptosis.curvature.fallback import _says_no_derivative
from apoptosis.curvature.stacking import stack_of
from apoptosis.errors import ModelError
from apoptosis.task import Task
from oracles.building import built
from oracles.compare import EXACT, assert_products_close


def halves(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    both = torch.arange(2 * torch.Size(shape).numel()).to(dtype).view(2, *shape)
    return both[0], both[1]


@pytest.mark.parametrize("shape", [(3,), (3, 4), (4, 3, 2), (1, 5), (5, 1), (2, 2)])
def test_halves_of_one_batch_are_found_as_it(shape: tuple[int, ...]) -> None:
    x, tangent = halves(*shape)
    found = stack_of(x, tangent)
    assert found is not None
    torch.testing.assert_close(found, torch.cat([x, tangent]))
    assert found.data_ptr() == x.data_ptr()


def test_what_is_no_half_is_not_stacked() -> None:
    x, tangent = halves(3, 4)
    assert stack_of(tangent, x) is None, "the wrong way round"
    assert stack_of(x, tangent.clone()) is None
    assert stack_of(x.clone(), tangent.clone()) is None
    assert stack_of(x[:2], tangent[:2]) is None
    assert stack_of(x[:, :2], tangent[:, :2]) is None
    assert stack_of(x.t(), tangent.t()) is None, "its samples do not lie one after the other"
    assert stack_of(x, tangent.t()) is None
    assert stack_of(x, tangent.float()) is None
    assert stack_of(torch.ones(()), torch.ones(())) is None
    assert stack_of(*halves(0, 4)) is None
    square, other = halves(3, 3)
    assert stack_of(square.t(), other.t()) is None


def test_watching_leaves_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    wanted = {Place("0", 0, "output"), Place("1", 0, "input")}
    with watched(model, wanted) as seen:
        model(torch.ones(1, 2))
    assert set(seen) == wanted
    with pytest.raises(ModelError), watched(model, wanted):
        pass
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_autocast_leaves_wide_numbers_and_integers_alone() -> None:
    low = torch.bfloat16
    castable = {dtype: _castable(torch.ones(2, dtype=dtype), low) for dtype in DTYPES}
    assert [dtype for dtype, own in castable.items() if own] == [torch.float32, torch.float16]


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)


def test_a_missing_derivative_is_told_from_a_missing_kernel() -> None:
    x = torch.full((2,), 1.5, requires_grad=True)
    with pytest.raises(RuntimeError) as derivative:
        torch.igamma(x, torch.ones(2)).sum().backward()
    assert _says_no_derivative(derivative.value)
    with pytest.raises((RuntimeError, NotImplementedError)) as kernel:
        torch.linalg.svd(torch.ones(2, 2).half())
    assert not _says_no_derivative(kernel.value)
    assert not _says_no_derivative(RuntimeError("the derivative for x is infinite"))


def test_a_sentence_without_labels_counts_for_nothing() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.table(input_ids))

    ids = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 0], [4, 3, 2, 1]])
    labels = torch.tensor([[0, 1, 2, 3], [-100] * 4, [4, 3, 2, -100]])
    model, task = built(Words), Task.language_model()

    def found(places: list[int]) -> dict[str, Tensor]:
        batch = {"input_ids": ids[places], "labels": labels[places]}
        return fisher_diagonal(model, [batch], task, labels="data").product

    whole = found([0, 1, 2])
    assert all(own.isfinite().all() for own in whole.values())
    assert_products_close(whole, found([0, 2]), tolerance=EXACT)
