"""`Distil`: a few hundred steps towards the dense network's predictions, without labels.

The loss is what the logits differ by (T² KL(dense ‖ small) at an infinite temperature T), or the divergence at another
temperature; AdamW the optimiser, its rate falling along a cosine. On images that a network was trained on it is all but
sure of itself, so its probabilities say little and its logits much: at T = 1 a refitted ResNet32 lost a point by
distilling where it gains one so (experiments/LOG.md). The network is in eval mode all along: dropout is off and norms
keep the statistics they have, so what is trained is what is run afterwards. (After a refit, train mode lost 3 points
where eval mode won 2.) Same network, batches and options give the same weights.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.masks import MaskPlan
from apoptosis.modes import outside_inference_mode
from apoptosis.progress import track
from apoptosis.repair.reaching import shadow
from apoptosis.structure import Plan, copy_with
from apoptosis.task import Batch, Task
from apoptosis.training import FitOptions, at_pass, fit_
from apoptosis.turns import one_at_a_time

__all__ = ["Distil"]


@dataclass(frozen=True, kw_only=True)
class Distil:
    """A repair: trained to follow the dense network. See the module's docstring.

    Attributes:
        steps: batches to train on; the data are read again from the start as often as that takes.
        learning_rate: of the first step.
        temperature: of both predictions.
        seed: of what batches draw at random.
    """

    steps: int = 300
    learning_rate: float = 1e-3
    temperature: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"steps={self.steps!r} was asked for; it is a whole number from 1 on."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(
                f"learning_rate={self.learning_rate!r} was asked for; it is a number above 0."
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature!r} was asked for; it is a number above 0, or infinite."
            )

    @outside_inference_mode
    @one_at_a_time
    def __call__(
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,  # noqa: ARG002 - called like every repair
        batches: Iterable[Batch],
        task: Task | None = None,
    ) -> nn.Module:
        """A copy of `small` that was trained.

        Raises:
            ConfigError: the task does not say which logits make up a prediction.
            DataError: there are no batches.
            ModelError: no parameter requires grad, or they are of float16.
            NonFiniteError: the loss became NaN or infinite.
        """
        if any(p.dtype == torch.float16 for p in small.parameters()):
            raise ModelError(
                "Weights of 16 bits (float16) were to be trained: Adam's steps overflow them. Distil the network in "
                "float32 or bfloat16 (model.float()) and convert what comes out, or use the repair 'refit'."
            )
        mended = copy_with(small, {})
        options = FitOptions(
            epochs=1,
            optimizer="adamw",
            learning_rate=self.learning_rate,
            schedule="cosine",
            weight_decay=0.0,
            distil=1.0,
            temperature=self.temperature,
            seed=self.seed,
        )
        fit_(_Calm(mended), _Steps(batches, self.steps), task, options, teacher=shadow(dense))
        return mended


class _Calm(nn.Module):
    """A network that stays in eval mode whoever trains it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def train(self, mode: bool = True) -> "_Calm":  # noqa: ARG002, FBT001, FBT002 - torch's signature
        """Eval mode, whatever is asked for."""
        return super().train(mode=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's own, on copies, for it may write to what it is given."""
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        return self.inner(*args, **kwargs)


@dataclass(frozen=True)
class _Steps:
    """So many batches, read again from the start as often as that takes."""

    batches: Iterable[Batch]
    num: int

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[Batch]:
        return track(self._again(), "distilling", total=self.num)

    def _again(self) -> Iterator[Batch]:
        left = self.num
        for number in count():
            before = left
            for batch in at_pass(self.batches, number):
                yield batch
                left -= 1
                if not left:
                    return
            if left == before:
                raise DataError(
                    "A network was to follow the dense one and there are no batches: they are empty or were used up by "
                    "an earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
                )
