"""Gradient and Gauss-Newton matrix by gates: a factor γ_u = 1 on every unit, removed by a step of −1.

With J_n = ∂z_n/∂γ (outputs × units) of sample n and H_n the Hessian of its loss by its outputs,

    g = mean_n ∂ℓ_n/∂γ,        G = mean_n J_nᵀ H_n J_n,        ΔL(S) ≈ −Σ_{u∈S} g_u + ½ Σ_{u,v∈S} G_uv

is the change of the loss when the units of a set S go. A gate's derivative is a ⊙ ∂/∂a, summed over all entries and
positions that carry the unit, for all units of all layers in one backward. With H_n = Σ_k b_nk b_nkᵀ (`loss_factors`)

    G = mean_n Σ_k f_nk f_nkᵀ,        f_nk = J_nᵀ b_nk,

one backward per k, whatever the number of units. Where the units of a group enter the outputs piecewise linearly G is
the exact second derivative within it; between layers the network's own curvature is left out.

Memory, in float64: `dense` (all units)² numbers, `block` the squares of the groups' sizes, `diagonal` the units; and in
each, while it runs, one piece of a batch with its graph and (samples, units) numbers. Samples must not depend on each
other. They are told apart by the first dimension of what passes; where that does not show them (sequence first, or
shared by the batch; found by a backward of one sample) every sample runs by itself: as exact, and slower.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from apoptosis.curvature.activations import Watched, gradients_at, watched
from apoptosis.curvature.containment import contained
from apoptosis.curvature.gate_sums import Gate, GateCurvature, GateSums
from apoptosis.curvature.gradient import buffers_restored
from apoptosis.curvature.loss_factors import LossFactors, check_draws
from apoptosis.curvature.problem import check_devices, constant, pieces, start_backward
from apoptosis.curvature.switches import Kind, Switches
from apoptosis.errors import ConfigError, DataError
from apoptosis.progress import track
from apoptosis.task import Batch, Task, batch_size
from apoptosis.turns import one_at_a_time

__all__ = ["GATE_FORMS", "Gate", "GateCurvature", "GateOptions", "gate_curvature"]

GATE_FORMS = ("dense", "block", "diagonal")
_GRADIENT = Kind("gradient", Switches(), starts_value=False, starts_tangent=True)


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """How to take the curvature by gates.

    Attributes:
        form: `dense` (between all units), `block` (within each group) or `diagonal`.
        draws: draws of labels per sample; None is exact up to 32 numbers (classes × predictions) per sample,
            and losses other than cross-entropy are exact always.
        seed: for the draws.
        micro_batch: at most so many samples at once, to bound memory.
    """

    form: str = "dense"
    draws: int | None = None
    seed: int = 0
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.form not in GATE_FORMS:
            raise ConfigError(
                f"form={self.form!r} was asked for; there are {', '.join(GATE_FORMS)}."
            )
        check_draws(self.draws)


@one_at_a_time
def gate_curvature(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    gates: Sequence[Gate],
    options: GateOptions | None = None,
) -> GateCurvature:
    """g and G by gates, in the mode the model is in; nothing of it changes.

    Args:
        model: as modules; samples of a batch must not depend on each other (eval mode).
        batches: data; without labels there is no g, and G only where the task has `rows`.
        task: what a batch is and what its loss is.
        gates: where they stand. Groups come out in the order in which they come in.
        options: form, sampling and memory.

    Raises:
        DataError: there are no samples.
        NonFiniteError: G is not finite.
    """
    options = options or GateOptions()
    sums, factors = GateSums(gates, options.form), LossFactors(task, options.draws, options.seed)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with contained(model), buffers_restored(model):
        reader = _Reader(model, task, sums, factors)
        for batch in track(batches, "gates"):
            for piece in pieces(batch, task, options.micro_batch):
                check_devices(piece, devices)
                reader.read(constant(piece))
    return sums.mean()


class _Reader:
    """Runs pieces of data, all samples at once as long as they can be told apart."""

    def __init__(self, model: nn.Module, task: Task, sums: GateSums, factors: LossFactors) -> None:
        self._model, self._task, self._sums, self._factors = model, task, sums, factors
        self._together: bool | None = None
        """Whether the first dimension tells samples apart; None until a piece of two has been seen."""

    def read(self, piece: Batch) -> None:
        """Add what a piece says."""
        num, count = batch_size(piece), _count(self._task, piece)
        if num == 0 or count == 0:
            return
        if num > 1 and self._together is False:
            self._one_by_one(piece)
            return
        with watched(self._model, self._sums.places) as seen:
            args, kwargs = self._task.inputs(piece)
            outputs = self._task.outputs(self._model(*args, **kwargs))
        if num == 1 or self._tells_apart(seen, outputs, num):
            self._add(seen, outputs, piece, num, count)
        else:
            del seen, outputs  # their graph, before the next
            self._one_by_one(piece)

    def _one_by_one(self, piece: Batch) -> None:
        for sample in self._task.split(piece, 1):
            self.read(sample)

    def _tells_apart(self, seen: Watched, outputs: Tensor, num: int) -> bool:
        if self._together is None:
            self._together = self._sums.tells_apart(seen, outputs, num)
        return self._together and self._sums.shows(seen, num)

    def _add(
        self, seen: Watched, outputs: Tensor, piece: Batch, num: int, count: int | None
    ) -> None:
        leaf = outputs.detach()
        if count is not None:
            start = start_backward(self._task, piece, leaf, None, _GRADIENT)
            flow = self._sums.flow(gradients_at(seen, outputs, start.slope, again=True), num)
            self._sums.add_gradient(flow.sum(0) * count, start.loss * count)
        for cotangent in self._factors.of(leaf, piece, num, labelled=count is not None):
            self._sums.add(self._sums.flow(gradients_at(seen, outputs, cotangent, again=True), num))
        if count is None:
            self._sums.count(self._factors.count(leaf, piece), labelled=False)
        else:
            self._sums.count(count, labelled=True)


def _count(task: Task, piece: Batch) -> int | None:
    """Predictions that count; None where there are no labels to say so."""
    try:
        return task.count(piece)
    except DataError:
        return None
