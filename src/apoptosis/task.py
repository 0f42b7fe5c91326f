"""A task: how a batch goes into the model, and what the loss of what comes out is.

Everything that touches data takes `(model, batches, task)`. The task alone knows what a batch looks like, so scoring,
pruning and repair work for images, tokens and dictionaries alike:

- `inputs(batch) -> (args, kwargs)` for the model;
- `outputs(raw) -> tensor`: the logits inside whatever the model returns;
- `loss(outputs, batch) -> scalar`: the *mean* over the batch's samples (tokens for sequence losses);
- `count(batch)`: how many samples that mean ran over, so that results do not depend on how data are cut into batches;
- `split(batch, n) -> pieces` of at most n items along the batch dimension;
- `sample(outputs, batch, generator) -> batch`: the same batch with labels drawn from the model's own distribution;
- `metrics(outputs, batch) -> {name: sum over the batch}`, to be divided by `count`.

>>> task = Task.classification()
>>> batch = (torch.zeros(6, 2), torch.tensor([0, 1, 1, 0, 1, 0]))
>>> [task.count(piece) for piece in task.split(batch, 4)]
[4, 2]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from apoptosis.errors import DataError

__all__ = ["Batch", "Task"]

Batch: TypeAlias = Any
Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

IGNORED = -100  # the label that cross-entropy skips, torch's and transformers' convention


@dataclass(frozen=True)
class Task:
    """The seven questions of the module docstring, as functions."""

    inputs: Callable[[Batch], Inputs]
    outputs: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Batch], Tensor]
    count: Callable[[Batch], int]
    split: Callable[[Batch, int], Iterator[Batch]]
    sample: Callable[[Tensor, Batch, torch.Generator | None], Batch]
    metrics: Callable[[Tensor, Batch], dict[str, float]]

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
            sample=lambda outputs, batch, generator: (
                batch[0],
                _draw_again(outputs, batch, generator),
            ),
            metrics=lambda outputs, batch: {
                "correct": float((outputs.argmax(1) == _labels(batch)).sum())
            },
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
        )


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
