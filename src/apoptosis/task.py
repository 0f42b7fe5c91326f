"""A task: how a batch goes into the model, and what the loss of what comes out is.

Everything that touches data takes `(model, batches, task)`. The task alone knows what a batch looks like, so scoring,
pruning and repair work for images, tokens and dictionaries alike:

- `inputs(batch) -> (args, kwargs)` for the model;
- `outputs(raw) -> tensor`: the logits inside whatever the model returns;
- `loss(outputs, batch) -> scalar`: the *mean* over the batch's samples (tokens for sequence losses);
- `count(batch)`: how many samples that mean ran over, so that results do not depend on how data are cut into batches;
- `split(batch, n) -> pieces` of at most n items along the batch dimension;
- `sample(outputs, batch, generator) -> batch`: the same batch with labels drawn from the model's own distribution;
- `metrics(outputs, batch) -> {name: sum over the batch}`, to be divided by `count`;
- `rows(outputs, batch) -> (logits, counted)`: one row of logits for each prediction, and which of them the loss is a
  mean over (None: all); None where there is no such thing. Smoothed labels and distillation are made of it. Rows that
  come sample by sample, as many of each, let curvature be exact where classes are few; of others labels are drawn.

>>> task = Task.classification()
>>> batch = (torch.zeros(6, 2), torch.tensor([0, 1, 1, 0, 1, 0]))
>>> [task.count(piece) for piece in task.split(batch, 4)]
[4, 2]
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.errors import ConfigError, DataError
from apoptosis.modes import in_eval_mode

__all__ = ["Batch", "Task"]

Batch: TypeAlias = Any
Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

Rows: TypeAlias = tuple[Tensor, Tensor | None]

IGNORED = -100  # the label that cross-entropy skips, torch's and transformers' convention

LOSSY = 16.0
"""A temperature above which T² KL is the difference of nearly equal numbers, too nearly for 32 bits."""


@dataclass(frozen=True)
class Task:
    """The questions of the module docstring, as functions."""

    inputs: Callable[[Batch], Inputs]
    outputs: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Batch], Tensor]
    count: Callable[[Batch], int]
    split: Callable[[Batch, int], Iterator[Batch]]
    sample: Callable[[Tensor, Batch, torch.Generator | None], Batch]
    metrics: Callable[[Tensor, Batch], dict[str, float]]
    rows: Callable[[Tensor, Batch], Rows] | None = None

    @classmethod
    def classification(cls, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> "Task":
        """Batches `(inputs, labels)`, `inputs` a tensor, a tuple of arguments or a dict; or one dict with `labels`.

        Args:
            loss: a mean loss of `(logits, labels)`; cross-entropy unless said. Labels are class indices (samples and
                metrics assume so), one per sample or per position, -100 where there is none; any other target works
                for a loss of your own, which must be a plain mean over samples.
        """
        by_label = loss is F.cross_entropy
        return cls(
            inputs=_pair_inputs,
            outputs=find_logits,
            loss=lambda outputs, batch: loss(outputs, _labels(batch)),
            count=lambda batch: _count(_labels(batch)) if by_label else len(_labels(batch)),
            split=split_batch,
            sample=lambda outputs, batch, generator: _relabelled(
                batch, _draw_again(outputs, batch, generator)
            ),
            metrics=lambda outputs, batch: {
                "correct": float((outputs.argmax(1) == _labels(batch)).sum())
            },
            rows=_class_rows if by_label else None,
        )

    @classmethod
    def language_model(cls, *, ignore: int = IGNORED) -> "Task":
        """Next-token prediction. A batch is a tensor of token ids `(samples, length)`, or a dict with `input_ids`.

        The loss is the mean over predicted tokens; a dict's `labels` (default: the ids themselves, where
        `attention_mask` allows) say which, `ignore` marks those that do not count.
        """

        def targets(batch: Batch) -> Tensor:
            return _next_tokens(batch, ignore)

        def loss(outputs: Tensor, batch: Batch) -> Tensor:
            return F.cross_entropy(
                outputs[:, :-1].flatten(0, 1), targets(batch).flatten(), ignore_index=ignore
            )

        def sample(outputs: Tensor, batch: Batch, generator: torch.Generator | None) -> Batch:
            drawn = draw_labels(outputs[:, :-1], dim=2, generator=generator)
            labels = torch.cat(
                [targets(batch)[:, :1], torch.where(targets(batch) == ignore, ignore, drawn)], 1
            )
            return {**_token_dict(batch), "labels": labels}

        def metrics(outputs: Tensor, batch: Batch) -> dict[str, float]:
            return {"correct": float((outputs[:, :-1].argmax(2) == targets(batch)).sum())}

        def rows(outputs: Tensor, batch: Batch) -> Rows:
            return outputs[:, :-1].flatten(0, 1), targets(batch).flatten() != ignore

        def inputs(batch: Batch) -> Inputs:
            if isinstance(batch, Mapping):
                return (), {k: v for k, v in batch.items() if k != "labels"}
            return (batch[0] if isinstance(batch, (tuple, list)) else batch,), {}

        return cls(
            inputs=inputs,
            outputs=find_logits,
            loss=loss,
            count=lambda batch: int((targets(batch) != ignore).sum()),
            split=split_batch,
            sample=sample,
            metrics=metrics,
            rows=rows,
        )

    @classmethod
    def hugging_face(cls) -> "Task":
        """Batches that are dicts with `labels`, as transformers' classifiers take them; the loss is cross-entropy."""
        return cls(
            inputs=lambda batch: ((), {k: v for k, v in batch.items() if k != "labels"}),
            outputs=find_logits,
            loss=lambda outputs, batch: F.cross_entropy(outputs, _labels(batch)),
            count=lambda batch: _count(_labels(batch)),
            split=split_batch,
            sample=lambda outputs, batch, generator: {
                **batch,
                "labels": _draw_again(outputs, batch, generator),
            },
            metrics=lambda outputs, batch: {
                "correct": float((outputs.argmax(1) == _labels(batch)).sum())
            },
            rows=_class_rows,
        )

    def smoothed(self, amount: float) -> "Task":
        """The same task whose loss wants a part of every prediction spread over all classes (label smoothing).

        Raises:
            ConfigError: the task has no `rows`.
        """
        if not amount:
            return self
        rows = self._rows("Smoothed labels")

        def loss(outputs: Tensor, batch: Batch) -> Tensor:
            logits, counted = rows(outputs, batch)
            spread = mean_over_rows(-logits.log_softmax(1).mean(1), counted)
            return (1 - amount) * self.loss(outputs, batch) + amount * spread

        return replace(self, loss=loss)

    def distillation(
        self, teacher: nn.Module, *, weight: float = 1.0, temperature: float = 1.0
    ) -> "Task":
        """The same task with a teacher's predictions in the place of a part of the labels.

        The loss is (1 − w) · loss + w · T² · KL(teacher ‖ student), both softmax at temperature T. With w = 1 no labels
        are needed. As T grows the second part becomes half the variance over classes of what the logits differ by: that
        is what an infinite temperature stands for.

        Args:
            teacher: asked for every batch, in eval mode and without gradients.
            weight: w.
            temperature: T, `math.inf` for the limit.

        Raises:
            ConfigError: the task has no `rows`, or a number that nobody can mean.

        >>> from torch import nn
        >>> net, batch = nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 1]))
        >>> task = Task.classification().distillation(net)
        >>> task.loss(net(batch[0]), batch).item()
        0.0
        """
        if not (0 <= weight <= 1 and temperature > 0):
            raise ConfigError(
                f"A teacher's weight is {weight} and its temperature {temperature}; the weight lies in [0, 1], the "
                "temperature above 0."
            )
        rows = self._rows("Distillation")

        def loss(outputs: Tensor, batch: Batch) -> Tensor:
            args, kwargs = tree_map_only(Tensor, Tensor.clone, self.inputs(batch))
            with torch.no_grad(), in_eval_mode(teacher):
                raw = self.outputs(teacher(*args, **kwargs))
            (theirs, counted), (ours, _) = rows(raw, batch), rows(outputs, batch)
            apart = mean_over_rows(_divergence(theirs.float(), ours.float(), temperature), counted)
            hard = self.loss(outputs, batch) * (1 - weight) if weight < 1 else 0.0
            return hard + weight * apart

        return replace(self, loss=loss)

    def _rows(self, what: str) -> Callable[[Tensor, Batch], Rows]:
        if self.rows is None:
            raise ConfigError(
                f"{what} was asked for, and the task does not say which logits make up a prediction. Give it `rows`: "
                "dataclasses.replace(task, rows=lambda outputs, batch: (logits, None))."
            )
        return self.rows


def _divergence(theirs: Tensor, ours: Tensor, temperature: float) -> Tensor:
    """T² KL of softmaxes at temperature T, of each row of logits."""
    if math.isinf(temperature):
        return 0.5 * (theirs - ours).var(1, correction=0)
    if temperature > LOSSY:
        theirs, ours = theirs.double(), ours.double()
    log_p, log_q = ((z / temperature).log_softmax(1) for z in (theirs, ours))
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(1)


def mean_over_rows(values: Tensor, counted: Tensor | None) -> Tensor:
    """The mean over rows that count, without waiting for the device to say how many those are."""
    if counted is None:
        return values.mean()
    return torch.where(counted.bool(), values, 0.0).sum() / counted.sum().clamp(min=1)


def _relabelled(batch: Batch, labels: Tensor) -> Batch:
    """A batch of `classification` with other labels."""
    return {**batch, "labels": labels} if isinstance(batch, Mapping) else (batch[0], labels)


def find_logits(raw: Any) -> Tensor:
    """The output tensor inside what a model returned: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(raw, Tensor):
        return raw
    if isinstance(raw, Mapping) and isinstance(raw.get("logits"), Tensor):
        return raw["logits"]
    if isinstance(logits := getattr(raw, "logits", None), Tensor):
        return logits
    if isinstance(raw, (tuple, list)) and raw and isinstance(raw[0], Tensor):
        return raw[0]
    raise DataError(
        f"Looked for logits in the model's output and found a {type(raw).__name__} without any. "
        "Give the task an `outputs` function that takes the tensor out of it: dataclasses.replace(task, outputs=...)."
    )


def split_batch(batch: Batch, n: int) -> Iterator[Batch]:
    """Cut every tensor of a nested batch along its first dimension into pieces of at most `n`."""
    if any(tensor.layout != torch.strided for tensor in tensors_in(batch)):
        raise DataError(
            "A batch holds a tensor that is not dense (sparse, or nested), which cannot be cut into samples. Give "
            "dense ones: tensor.to_dense()."
        )
    size = batch_size(batch)
    for start in range(0, size, n):
        yield _slice(batch, slice(start, min(start + n, size)), size)


def batch_size(batch: Batch) -> int:
    """Length of the first dimension of the first tensor in a nested batch."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    raise DataError(
        "A batch holds no tensor with a batch dimension. Batches are (inputs, labels) pairs or dicts of tensors."
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of nested tuples, lists and mappings, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)


def check_derivable(batch: Batch) -> None:
    """Refuse a batch that was made under `torch.inference_mode()`.

    Raises:
        DataError: it was.
    """
    if any(own.is_inference() for own in tensors_in(batch)):
        raise DataError(
            "A batch was made under torch.inference_mode(), where tensors take part in no derivative. Make the batches "
            "outside of it, or clone them there."
        )


def draw_labels(logits: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
    """One label per position from softmax(logits) over `dim`."""
    moved = logits.detach().movedim(dim, -1).float()
    drawn = torch.multinomial(moved.flatten(0, -2).softmax(-1), 1, generator=generator)
    return drawn.view(moved.shape[:-1])


def _slice(value: Any, part: slice, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[part] if value.dim() and len(value) == size else value
    if isinstance(value, Mapping):
        return {key: _slice(item, part, size) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_slice(item, part, size) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_slice(item, part, size) for item in value)
    return value


def _pair_inputs(batch: Batch) -> Inputs:
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if isinstance(batch, Mapping):  # the task takes the loss, so the model need not see the labels
        return (), {name: value for name, value in batch.items() if name != "labels"}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _find_labels(batch: Batch) -> Tensor | None:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1]
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


def _class_rows(outputs: Tensor, batch: Batch) -> Rows:
    labels = _find_labels(batch)
    by_index = labels is not None and not labels.is_floating_point()
    counted = (labels != IGNORED).flatten() if labels is not None and by_index else None
    return outputs.movedim(1, -1).reshape(-1, outputs.shape[1]), counted


def _labels(batch: Batch) -> Tensor:
    labels = _find_labels(batch)
    if labels is None:
        raise DataError(
            f"A loss needs labels and found none in a batch of type {type(batch).__name__}. "
            "Batches are (inputs, labels) pairs, or dicts with a tensor 'labels'."
        )
    return labels


def _count(labels: Tensor) -> int:
    """What cross-entropy's mean runs over: class indices that are not ignored, or rows of probabilities."""
    return len(labels) if labels.is_floating_point() else int((labels != IGNORED).sum())


def _draw_again(outputs: Tensor, batch: Batch, generator: torch.Generator | None) -> Tensor:
    """Drawn labels; where the batch has labels and ignores one, it stays ignored."""
    drawn, labels = draw_labels(outputs, dim=1, generator=generator), _find_labels(batch)
    if labels is None or labels.shape != drawn.shape:
        return drawn
    return torch.where(labels == IGNORED, IGNORED, drawn)


def _token_dict(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    return {"input_ids": batch[0] if isinstance(batch, (tuple, list)) else batch}


def _next_tokens(batch: Batch, ignore: int) -> Tensor:
    tokens = _token_dict(batch)
    labels = tokens.get("labels")
    if labels is None:
        labels = tokens["input_ids"]
        if (mask := tokens.get("attention_mask")) is not None:
            labels = labels.masked_fill(mask == 0, ignore)
    return labels[:, 1:]
