"""Second moments of what linear layers read and of what their outputs cost: the factors of Kronecker approximations.

For a layer y_t = W x_t + b, the same at every position t of a sample (`linear_maps`),

    A = mean_n Σ_t x_nt x_ntᵀ,        S = Σ_n mean_t s_nt s_ntᵀ / number of predictions,

with s the gradients at the outputs for cotangents whose squares add up to the Hessian of the loss by the network's
outputs (`loss_factors`; drawn labels, so that no labels are needed). A ⊗ S is then the layer's Gauss-Newton matrix as
K-FAC has it: an error E of W costs about ½ tr(S E A Eᵀ). A layer with a bias reads one more input, always 1, the last.
Of a convolution with many places A and S are taken from some, drawn at random: Σ_t and mean_t are then estimates.

The Kronecker form takes positions as independent, and what is read as independent of what it costs. How far that holds
differs between layers by orders of magnitude (ahead of a mean over all places, errors of one sign add up). So there is
also the exact Γ = Σ_n q_n q_nᵀ / number of predictions with q_nc = Σ_t x_ntc ∂/∂x_ntc, the Gauss-Newton matrix by
factors on what the layer reads of each channel c, to hold prices against. Units that no layer reads (queries and keys
meet in a product) have gates wherever the caller says, in the same backwards: `gates.gate_curvature`'s diagonal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from apoptosis.curvature.activations import Place, Seen, Watched, gradients_at, watched
from apoptosis.curvature.containment import contained
from apoptosis.curvature.gate_sums import Gate, GateSums
from apoptosis.curvature.gradient import buffers_restored
from apoptosis.curvature.grams import Gram, Products
from apoptosis.curvature.linear_maps import (
    FEWEST_PLACES,
    as_inputs,
    as_outputs,
    enough_places,
    pairs,
)
from apoptosis.curvature.loss_factors import LossFactors
from apoptosis.curvature.problem import check_devices, constant, pieces
from apoptosis.errors import DataError, NonFiniteError
from apoptosis.progress import track
from apoptosis.task import Batch, Task, batch_size
from apoptosis.turns import one_at_a_time

__all__ = ["LayerMoments", "Moments", "layer_moments"]


@dataclass(frozen=True, eq=False)
class Moments:
    """Of one layer, float64 on the CPU: `inputs` is A, (g, n, n), `outputs` S, (g, m, m), for g groups of channels.

    `parts` are two that add up to A, of every second sample as far as samples come first; of one sample the second is
    zero. `gates` is Γ, (channels, channels), of all groups together.
    """

    parts: tuple[Products, Products]
    outputs: Tensor
    gates: Tensor

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Both parts as matrices, (g, n, n)."""
        return self.parts[0].matrix, self.parts[1].matrix

    @property
    def inputs(self) -> Tensor:
        """A."""
        return (self.parts[0] + self.parts[1]).matrix


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Moments by path of those layers that the outputs depend on; the mean loss, None where labels are missing.

    `gates` has the diagonal of the Gauss-Newton matrix by the gates that were asked for, (units,) by group; none of
    them where what passes does not tell samples apart.
    """

    layers: dict[str, Moments]
    gates: dict[str, Tensor]
    loss: float | None
    count: int


@one_at_a_time
def layer_moments(  # noqa: PLR0913 - whose, on what, and a word on each choice
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    layers: Iterable[str],
    *,
    gates: Sequence[Gate] = (),
    draws: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    micro_batch: int | None = None,
) -> LayerMoments:
    """Moments of layers at their first call, in the mode the model is in; nothing of it changes.

    Args:
        model: as modules.
        batches: data; labels are not needed where the task has `rows`.
        task: what a batch is and what its loss is.
        layers: paths of linear maps (`is_linear_map`) that every batch passes.
        gates: on units that are wanted beside them.
        draws: of labels, per sample; None is exact up to 32 numbers (classes × predictions) per sample, 8 beyond.
        seed: for the draws.
        temperature: of the predictions that errors are held against (`loss_factors`).
        micro_batch: at most so many samples at once, to bound memory.

    Raises:
        DataError: there are no samples.
        NonFiniteError: NaN or infinity passes a layer.
    """
    modules = {path: model.get_submodule(path) for path in layers}
    sums = {path: _Sums(module) for path, module in modules.items()}
    standing = _Gates(gates)
    places = {Place(path, 0, side) for path in modules for side in ("input", "output")}
    places |= {gate.place for gate in gates}
    factors = LossFactors(task, draws, seed, temperature)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    total = _Total()
    with contained(model), buffers_restored(model):
        for batch in track(batches, "moments of layers"):
            for piece in pieces(batch, task, micro_batch):
                if not (size := batch_size(piece)):
                    continue
                check_devices(piece, devices)
                piece = constant(piece)  # noqa: PLW2901 - the same, out of others' reach
                with watched(model, places) as seen:
                    args, kwargs = task.inputs(piece)
                    outputs = task.outputs(model(*args, **kwargs))
                standing.look_at(seen, outputs, size)
                is_labelled = total.add(task, outputs.detach(), piece, factors)
                cotangents = factors.of(outputs.detach(), piece, size, labelled=is_labelled)
                for number, cotangent in enumerate(cotangents):
                    passed = gradients_at(seen, outputs, cotangent, again=True)
                    standing.add(passed, size)
                    for path, own in sums.items():
                        given, pull = passed[Place(path, 0, "input")]
                        _, slope = passed[Place(path, 0, "output")]
                        if slope is not None and pull is not None:
                            own.add_slopes(_wide(given) * _wide(pull), slope, size)
                            if number == 0:
                                own.add_inputs(given, slope, size)
    if not total.samples:
        raise DataError(
            "Asked for moments of layers and found no samples: the batches are empty or were used up by an earlier "
            "loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    found = {path: own.mean(path, total) for path, own in sums.items() if not own.is_empty}
    return LayerMoments(found, standing.mean(total.predictions), total.mean_loss, total.predictions)


class _Gates:
    """Gates beside the layers, as long as samples can be told apart at their places."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._sums = GateSums(gates, "diagonal") if gates else None
        self._looked = False

    def look_at(self, seen: Watched, outputs: Tensor, num: int) -> None:
        """Give up where samples cannot be told apart: what would be added up would be something else."""
        if self._sums is None:
            return
        shows = self._sums.shows(seen, num)
        if shows and num > 1 and not self._looked:
            self._looked, shows = True, self._sums.tells_apart(seen, outputs, num)
        if not shows:
            self._sums = None

    def add(self, passed: Seen, num: int) -> None:
        """One factor of every sample of a piece."""
        if self._sums is not None:
            self._sums.add(self._sums.flow(passed, num))

    def mean(self, predictions: int) -> dict[str, Tensor]:
        """By group."""
        if self._sums is None:
            return {}
        self._sums.count(predictions, labelled=False)
        return self._sums.mean().diagonal


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
    """Σ x xᵀ, Σ over samples of the mean over positions of s sᵀ, and Σ over samples of q qᵀ."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._of_inputs, self._of_slopes = (torch.Generator().manual_seed(0) for _ in range(2))
        self._inputs, self._outputs, self._gates = (Gram(), Gram()), Gram(), Gram()
        self._num_samples = 0

    def add_inputs(self, given: Tensor, slope: Tensor, num: int) -> None:
        """What a piece of `num` samples sends into the layer: every second sample into the same half, however cut."""
        inputs, errors = as_inputs(self._module, given), as_outputs(self._module, slope)
        samples = torch.arange(len(errors), device=errors.device) * num // len(errors)
        halves = (samples + self._num_samples) % 2
        self._num_samples += num
        all_places = errors.shape[2]
        factor = all_places / min(all_places, enough_places(self._module))
        for number, half in enumerate(self._inputs):
            own = (inputs[halves == number], errors[halves == number])
            if len(own[0]):
                for columns, _ in pairs(self._module, *own, generator=self._of_inputs):
                    half.add_(columns, factor)

    def add_slopes(self, pulls: Tensor, slope: Tensor, num: int) -> None:
        """Gradients of `num` samples for one cotangent: at the outputs, and times the inputs there."""
        errors = as_outputs(self._module, slope)
        if errors.shape[2] > FEWEST_PLACES:  # all of a ResNet50's cost more than its backward
            some = torch.randperm(errors.shape[2], generator=self._of_slopes)[:FEWEST_PLACES]
            errors = errors[:, :, some.to(errors.device)]
        positions = errors.shape[0] * errors.shape[2]
        groups = getattr(self._module, "groups", 1)
        by_group = errors.double().transpose(0, 1).reshape(groups, -1, positions)
        self._outputs.add_(by_group, num / positions)
        self._gates.add_(_by_sample(self._module, pulls, num).T[None])

    def mean(self, path: str, total: _Total) -> Moments:
        """Over all that was added, which is used up."""
        if not all(own.is_finite for own in (*self._inputs, self._outputs, self._gates)):
            raise NonFiniteError(
                f"NaN or infinity passes layer {path!r}. Look for bad values in the data, or for a network that "
                "overflows its number type."
            )
        if not total.samples or not total.predictions:
            raise DataError(
                "Moments of layers were asked for and nothing counts: the batches are empty, were used up by an "
                "earlier loop, or every label is ignored (-100). Give batches that can be iterated again, with labels "
                "that count."
            )
        found = [own.products(1 / total.samples).cpu() for own in self._inputs if not own.is_empty]
        return Moments(
            (found[0], found[1] if found[1:] else replace(found[0], own=0 * found[0].own)),
            self._outputs.taken(1 / total.predictions).cpu(),
            self._gates.taken(1 / total.predictions)[0].cpu(),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return all(own.is_empty for own in self._inputs)


def _wide(tensor: Tensor) -> Tensor:
    """In 32 bits at least: in 16 a product of what is small is zero."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _by_sample(module: Any, pulls: Tensor, num: int) -> Tensor:
    """Summed over the positions of each sample: (samples, channels)."""
    if isinstance(module, _ConvNd):
        return pulls.reshape(-1, *pulls.shape[-1 - len(module.kernel_size) :]).flatten(2).sum(2)
    if pulls.ndim > 1 and len(pulls) == num:
        return pulls.reshape(num, -1, pulls.shape[-1]).sum(1)
    return pulls.reshape(-1, pulls.shape[-1])  # samples do not come first: every position by itself
