"""Second moments of what linear layers read and of what their outputs cost: the factors of Kronecker approximations.

For a layer y_t = W x_t + b, the same at every position t of a sample (`linear_maps`),

    A = mean_n Σ_t x_nt x_ntᵀ,        S = Σ_n mean_t s_nt s_ntᵀ / number of predictions,

with s the gradients at the outputs for cotangents whose squares add up to the Hessian of the loss by the network's
outputs (`loss_factors`; drawn labels, so that no labels are needed). A ⊗ S is then the layer's Gauss-Newton matrix as
K-FAC has it: an error E of W costs about ½ tr(S E A Eᵀ). A layer with a bias reads one more input, always 1, the last.
Of a convolution with many places A is taken from some of them, drawn at random: Σ_t is then an estimate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.curvature.activations import Place, gradients_at, watched
from apoptosis.curvature.containment import contained
from apoptosis.curvature.gradient import buffers_restored
from apoptosis.curvature.linear_maps import as_outputs, pairs
from apoptosis.curvature.loss_factors import LossFactors
from apoptosis.curvature.problem import check_devices, constant, pieces
from apoptosis.errors import DataError, NonFiniteError
from apoptosis.progress import track
from apoptosis.task import Batch, Task, batch_size

__all__ = ["LayerMoments", "Moments", "layer_moments"]


@dataclass(frozen=True, eq=False)
class Moments:
    """Of one layer, float64 on the CPU: `inputs` is A, (g, n, n), and `outputs` S, (g, m, m), for g groups."""

    inputs: Tensor
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Moments by path of those layers that the outputs depend on; the mean loss, None where labels are missing."""

    layers: dict[str, Moments]
    loss: float | None
    count: int


def layer_moments(  # noqa: PLR0913 - whose, on what, and three words on how
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    layers: Iterable[str],
    *,
    draws: int = 1,
    seed: int = 0,
    micro_batch: int | None = None,
) -> LayerMoments:
    """Moments of layers at their first call, in the mode the model is in; nothing of it changes.

    Args:
        model: as modules.
        batches: data; labels are not needed where the task has `rows`.
        task: what a batch is and what its loss is.
        layers: paths of linear maps (`is_linear_map`) that every batch passes.
        draws: of labels, per sample.
        seed: for the draws.
        micro_batch: at most so many samples at once, to bound memory.

    Raises:
        DataError: there are no samples.
        NonFiniteError: NaN or infinity passes a layer.
    """
    modules = {path: model.get_submodule(path) for path in layers}
    sums = {path: _Sums(module) for path, module in modules.items()}
    places = {Place(path, 0, side) for path in modules for side in ("input", "output")}
    factors = LossFactors(task, draws, seed)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    total = _Total()
    with contained(model), buffers_restored(model):
        for batch in track(batches, "moments of layers"):
            for piece in pieces(batch, task, micro_batch):
                check_devices(piece, devices)
                piece = constant(piece)  # noqa: PLW2901 - the same, out of others' reach
                with watched(model, places) as seen:
                    args, kwargs = task.inputs(piece)
                    outputs = task.outputs(model(*args, **kwargs))
                is_labelled = total.add(task, outputs.detach(), piece, factors)
                size = batch_size(piece)
                cotangents = factors.of(outputs.detach(), piece, size, labelled=is_labelled)
                for number, cotangent in enumerate(cotangents):
                    passed = gradients_at(seen, outputs, cotangent, again=True)
                    for path, own in sums.items():
                        given, _ = passed[Place(path, 0, "input")]
                        _, slope = passed[Place(path, 0, "output")]
                        if slope is not None:
                            own.add(given if number == 0 else None, slope, size)
    if not total.samples:
        raise DataError(
            "Asked for moments of layers and found no samples: the batches are empty or were used up by an earlier "
            "loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    found = {path: own.mean(path, total) for path, own in sums.items() if not own.is_empty}
    return LayerMoments(found, total.mean_loss, total.predictions)


class _Total:
    """Samples, predictions and losses so far."""

    def __init__(self) -> None:
        self.samples, self.predictions = 0, 0
        self._loss: float | None = 0.0

    def add(self, task: Task, outputs: Tensor, piece: Batch, factors: LossFactors) -> bool:
        """Count a piece; whether it has labels."""
        self.samples += batch_size(piece)
        try:
            count = task.count(piece)
        except DataError:
            self.predictions += factors.count(outputs, piece)
            self._loss = None
            return False
        self.predictions += count
        if self._loss is not None and count:
            self._loss += float(task.loss(outputs, piece)) * count
        return True

    @property
    def mean_loss(self) -> float | None:
        """None where some data had no labels."""
        return None if self._loss is None or not self.predictions else self._loss / self.predictions


class _Sums:
    """Σ x xᵀ, and Σ over samples of the mean over positions of s sᵀ."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._generator = torch.Generator().manual_seed(0)
        self._inputs: Tensor | float = 0.0
        self._outputs: Tensor | float = 0.0

    def add(self, given: Tensor | None, slope: Tensor, num: int) -> None:
        """A piece of `num` samples; inputs only with the first of its cotangents."""
        errors = as_outputs(self._module, slope)
        positions = errors.shape[0] * errors.shape[2]
        groups = getattr(self._module, "groups", 1)
        by_group = errors.double().transpose(0, 1).reshape(groups, -1, positions)
        self._outputs = self._outputs + by_group @ by_group.mT * (num / positions)
        if given is not None:
            gram, seen = slope.new_zeros(()), 0
            for columns, _ in pairs(self._module, given, errors, generator=self._generator):
                gram, seen = gram + columns @ columns.mT, seen + columns.shape[2]
            self._inputs = self._inputs + gram * (positions / seen)

    def mean(self, path: str, total: _Total) -> Moments:
        """Over all that was added."""
        inputs, outputs = torch.as_tensor(self._inputs), torch.as_tensor(self._outputs)
        if not (bool(inputs.isfinite().all()) and bool(outputs.isfinite().all())):
            raise NonFiniteError(
                f"NaN or infinity passes layer {path!r}. Look for bad values in the data, or for a network that "
                "overflows its number type."
            )
        return Moments((inputs / total.samples).cpu(), (outputs / total.predictions).cpu())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not isinstance(self._inputs, Tensor)
