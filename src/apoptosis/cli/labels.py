"""Labels and the outputs of a model, compared before anything is run on them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apoptosis.cli.named_data import NamedData
from apoptosis.errors import ApoptosisError, DataError
from apoptosis.task import Batch, Task

__all__ = ["check_labels_fit"]

IGNORED = -100
"""The label that torch's losses pass over."""


def check_labels_fit(names: str, data: NamedData, outputs: Tensor, batch: Batch) -> None:
    """Refuse labels for which the model has no output.

    Args:
        names: model and data, and that they do not fit, for the error.
        data: where the batch comes from; what is known of all their labels is looked at as well.
        outputs: of the model for the batch.
        batch: with its labels, if any.

    Raises:
        DataError: a label is too large, or negative.
    """
    if outputs.dim() != 2:
        return
    known, num_outputs = _labels(data, batch), outputs.shape[1]
    failure = f"{names}: the loss of outputs of shape {tuple(outputs.shape)} cannot be taken with these labels."
    if max(known, default=0) >= num_outputs and _fails(data.task, outputs, batch, num_outputs):
        raise DataError(
            f"{failure} Labels go up to {max(known)}, and the model has outputs for {num_outputs} classes, 0 … "
            f"{num_outputs - 1}. Give data with as many classes as the model was made for, or another model."
        )
    least = min((label for label in known if label != IGNORED), default=0)
    if least < 0 and _fails(data.task, outputs, batch, least):
        raise DataError(
            f"{failure} Labels go down to {least}, and classes are counted from 0 to {num_outputs - 1}. Give "
            "every sample the number of its class."
        )


def _labels(data: NamedData, batch: Batch) -> set[int]:
    """Those of the batch, and the largest that the data are known to have."""
    labels: Any = None
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        labels = batch[1]
    known: set[int] = set() if data.num_classes is None else {data.num_classes - 1}
    if isinstance(labels, Tensor) and labels.dtype == torch.int64:
        known |= set(labels.unique().tolist())
    return known


def _fails(task: Task, outputs: Tensor, batch: Batch, label: int) -> bool:
    """Whether the loss minds: one of a person's own may have targets that are no classes.

    It is tried on the CPU: on a GPU a label out of range ends the process's use of it.
    """
    held = tree_map_only(Tensor, lambda tensor: tensor.cpu(), batch)
    if isinstance(held, (tuple, list)) and isinstance(held[1], Tensor) and held[1].dim() == 1:
        # One such label is enough, and it need not be in this batch.
        held = (held[0], torch.full_like(held[1], label))
    try:
        task.loss(outputs.cpu(), held)
    except ApoptosisError:
        return False
    except Exception:  # noqa: BLE001 — whatever it is, it is told in words
        return True
    return False
