"""The Hessian of the loss by a sample's outputs as a sum of squares: H_n = Σ_k b_nk b_nkᵀ.

A backward with the cotangents b_1k … b_Nk serves all samples at once: what is quadratic in H costs one for each k.
Where the task shows its predictions as rows of logits (`task.rows`) and the loss is their cross-entropy, with
p = softmax(z) of each row,

    exact     b_k = √p_k (e_k − p),           one k per class and row:  Σ_k b_k b_kᵀ = diag p − p pᵀ, no labels needed,
              where rows come sample by sample, as many of each;
    sampled   b = (p − e_y) / √draws, y ~ p,  drawn for all rows of a sample at once: E[b bᵀ] is H, with no cross terms
              between rows, which are independent.

A temperature T asks what a change costs of T² KL(before ‖ after) with both softmaxes at T, in the place of the loss:
the same with p = softmax(z / T). A network that is all but sure of its data has next to no curvature there, and that of
few samples; at T it has it in every class. As T grows all logits count alike.

For any other loss H is taken from its second derivative, up to `EXACT_COLUMNS` outputs per sample: H = Q Λ Qᵀ and
b_k = √λ_k q_k. The loss is a mean over predictions; factors here are those of the sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apoptosis.curvature.problem import start_backward
from apoptosis.curvature.switches import KINDS
from apoptosis.errors import ConfigError, LossError, NonFiniteError
from apoptosis.task import Batch, Task

__all__ = ["DEFAULT_DRAWS", "EXACT_COLUMNS", "LossFactors", "check_draws"]

EXACT_COLUMNS = 32
"""Exact factors up to so many numbers (classes × predictions) per sample: each costs a backward."""
DEFAULT_DRAWS = 8
"""Backwards for more than that."""
ALIKE = 1e-3
"""Relative difference up to which two Hessians are one: some losses are float32 inside; a temperature makes more."""


class LossFactors:
    """Factors for the pieces of a data set, one after the other.

    Holds the random numbers of the draws, and whether the loss was found to be the cross-entropy of its rows.
    """

    def __init__(self, task: Task, draws: int | None, seed: int, temperature: float = 1.0) -> None:
        """`draws`: so many, whatever it would cost to be exact; None: exact where that is cheap.

        A loss that is no cross-entropy has no labels to draw, and is exact with `draws` too, at no temperature.

        Raises:
            ConfigError: a temperature or draws that nobody can mean.
        """
        check_draws(draws)
        if not isinstance(temperature, (int, float)) or not temperature > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"temperature={temperature!r} was asked for; it is a number above 0, or infinite."
            )
        self._task = task
        self._temperature = temperature
        self._draws = draws
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._by_rows: bool | None = None if task.rows is not None else False

    def of(self, outputs: Tensor, piece: Batch, num: int, *, labelled: bool) -> Iterator[Tensor]:
        """Cotangents, each of the shape of `outputs` (detached) of `num` samples."""
        if self._by_rows is None and labelled and self._task.count(piece):
            self._by_rows = _is_cross_entropy(self._task, outputs, piece)
        if self._by_rows is False and labelled:
            return self._own(outputs, piece, num)
        return self._of_rows(_Rows.of(self._task, outputs, piece, self._temperature), num)

    def count(self, outputs: Tensor, piece: Batch) -> int:
        """Predictions that count, where there are no labels to say so."""
        counted = _Rows.of(self._task, outputs, piece).counted
        return int(counted.sum())

    def _of_rows(self, rows: "_Rows", num: int) -> Iterator[Tensor]:
        num_rows, num_classes = rows.p.shape
        if (
            self._draws is None
            and num_rows * num_classes <= EXACT_COLUMNS * num
            and rows.come_by_sample(num)
        ):
            yield from rows.exact(num_rows // num)
        else:
            yield from rows.drawn(self._draws or DEFAULT_DRAWS, self._generator(rows.p.device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _own(self, outputs: Tensor, piece: Batch, num: int) -> Iterator[Tensor]:
        """From the loss itself, whatever it is."""
        each = outputs.numel() // num
        if each > EXACT_COLUMNS:
            raise ConfigError(
                f"The curvature of the loss was asked for, of {each} outputs per sample; more than {EXACT_COLUMNS} are "
                "sampled, and labels can be drawn only where the loss is the cross-entropy of logits that `task.rows` "
                "shows. Use such a task, or a network of fewer outputs."
            )
        hessian = _hessians(self._task, outputs, piece, num)
        values, vectors = torch.linalg.eigh(hessian)
        if bool((values.amin() < -1e-6 * values.abs().amax()).item()):
            raise LossError(
                "The loss is not convex in the outputs (its Hessian has negative eigenvalues), so it is no sum of "
                "squares. Use a convex loss of the outputs, such as cross-entropy."
            )
        factors = vectors * values.clamp(min=0).sqrt()[:, None, :]
        for k in range(each):
            yield factors[:, :, k].reshape(outputs.shape).to(outputs.dtype)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Predictions: the leaf that stands for the outputs, its rows of logits (rows, classes), and their p in float64."""

    leaf: Tensor
    logits: Tensor
    p: Tensor
    counted: Tensor

    @classmethod
    def of(cls, task: Task, outputs: Tensor, piece: Batch, temperature: float = 1.0) -> "_Rows":
        if task.rows is None:
            raise ConfigError(
                "The curvature of the loss was asked for without labels, and the task does not say which logits make "
                "up a prediction. Give labels, or a task with `rows`."
            )
        leaf = outputs.detach().requires_grad_()
        logits, counted = task.rows(leaf, piece)
        wide = logits.detach().double()
        p = torch.where(wide.isinf(), wide, wide / temperature).softmax(1)
        if not bool(p.isfinite().all()):
            raise NonFiniteError(
                "Predictions of a batch are NaN. Check its inputs for NaN, and the model's weights; in half precision "
                "try float32."
            )
        return cls(leaf, logits, p, torch.ones_like(p[:, 0]) if counted is None else counted.to(p))

    def exact(self, each: int) -> Iterator[Tensor]:
        """b_k of one row of every sample, row by row and class by class."""
        place = torch.arange(len(self.p), device=self.p.device) % each
        for row in range(each):
            root = (self.counted * (place == row))[:, None] * self.p.sqrt()
            for k in range(self.p.shape[1]):
                column = -self.p * root[:, k : k + 1]
                column[:, k] += root[:, k]
                yield self._pulled(column)

    def drawn(self, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
        """(p − e_y) / √draws of all rows, with the draws of a row one after the other, however data are cut."""
        labels = torch.multinomial(self.p, draws, replacement=True, generator=generator)
        factor = self.counted[:, None] / draws**0.5
        for drawn in labels.split(1, 1):
            yield self._pulled(factor * (self.p - torch.zeros_like(self.p).scatter_(1, drawn, 1.0)))

    def come_by_sample(self, num: int) -> bool:
        """Whether rows come sample by sample, as many of each: tasks may leave out rows that do not count."""
        if len(self.p) % num or self.leaf.numel() % num:
            return False
        numbers = torch.arange(1, num + 1, device=self.p.device).to(self.logits)
        ones = torch.ones_like(self.logits)
        of_rows = numbers.repeat_interleave(len(self.p) // num)[:, None] * ones
        plain, told = (
            torch.autograd.grad(self.logits, self.leaf, own, retain_graph=True)[0].reshape(num, -1)
            for own in (ones, of_rows)
        )
        return torch.allclose(told, plain * numbers[:, None])

    def times_hessian(self, change: Tensor) -> Tensor:
        """(diag p − p pᵀ) v of all rows that count, for a change v (rows, classes)."""
        centred = change - (self.p * change).sum(1, keepdim=True)
        return self._pulled(self.counted[:, None] * self.p * centred)

    def _pulled(self, column: Tensor) -> Tensor:
        """A cotangent of the rows as one of the outputs."""
        return torch.autograd.grad(
            self.logits, self.leaf, column.to(self.logits.dtype), retain_graph=True
        )[0]


def check_draws(draws: int | None) -> None:
    """Refuse what is no number of draws.

    Raises:
        ConfigError: it is neither None nor a whole number from 1 on.
    """
    if draws is not None and (not isinstance(draws, int) or draws < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"draws={draws!r} was asked for; it is a number from 1 on.")


def _hessians(task: Task, outputs: Tensor, piece: Batch, num: int) -> Tensor:
    """(num, d, d) in float64: of the summed loss, by the d outputs of each sample."""
    each, count, columns = outputs.numel() // num, task.count(piece), list[Tensor]()
    for k in range(each):
        unit = torch.zeros(num, each, dtype=outputs.dtype, device=outputs.device)
        unit[:, k] = 1
        start = start_backward(task, piece, outputs, unit.reshape(outputs.shape), KINDS["ggn"])
        columns.append(start.on_value.reshape(num, each).double() * count)
    return torch.stack(columns, 2)


def _is_cross_entropy(task: Task, outputs: Tensor, piece: Batch) -> bool:
    """Whether the loss's own Hessian is diag p − p pᵀ: labels may be smoothed, but a temperature makes another.

    Asked at made-up outputs: where a network is sure of itself both are nearly zero, and rounding tells them apart.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    made_up, probe = (
        torch.randn(outputs.shape, generator=generator).to(outputs.device, wide) for _ in range(2)
    )
    own = start_backward(task, piece, made_up, probe, KINDS["ggn"]).on_value * task.count(piece)
    want = _Rows.of(task, made_up, piece).times_hessian(
        _Rows.of(task, probe, piece).logits.detach()
    )
    return bool(((own - want).norm() <= ALIKE * want.norm()).item())
