"""Networks that are delivered as programs: known by a digest of their operations, and traced again to be loaded."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from apoptosis.checkpoint.dense import in_saved_types, with_numbers
from apoptosis.checkpoint.inputs import zeros_like_description
from apoptosis.checkpoint.record import SavedRun, same_versions
from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.structure import CutProgram, Plan, cut

__all__ = ["program_digest", "traced_again"]


def program_digest(model: nn.Module) -> str | None:
    """Names the operations of a rewritten program, wherever it runs; None for other modules."""
    if not isinstance(model, CutProgram):
        return None
    text = model._graph.python_code("self", verbose=False).src
    return hashlib.sha256(
        re.sub(r"device\(type='\w+'(, index=\d+)?\)", "", text).encode()
    ).hexdigest()


def traced_again(dense: nn.Module, plan: Plan, run: SavedRun, example_inputs: Any) -> nn.Module:
    """The program whose operations are those that were saved, if one of the ways to trace it leads there."""
    example = _example(dense, run) if example_inputs is None else example_inputs
    first: nn.Module | None = None
    failure: ApoptosisError | None = None
    for candidate in _candidates(dense, run):
        try:
            made = cut(candidate, plan, example_inputs=example)
        except ApoptosisError as error:
            failure = failure or error
            continue
        if program_digest(made) == run.program:
            return made
        first = first or made
    if first is None:
        assert failure is not None, "a candidate that gives no program has failed"
        raise failure
    if same_versions(run):  # others may write the same network with other operations
        traced_on = "zeros" if example_inputs is None else "these `example_inputs`"
        raise CheckpointError(
            f"The network was delivered as a program, and traced again on {traced_on} it does other operations than it "
            f"did. Its code has changed, or {type(dense).__name__} chooses its way by values: give the dense network "
            "with the weights it was pruned with, and `example_inputs` as they were passed to `trace`."
        )
    return first


def _candidates(dense: nn.Module, run: SavedRun) -> Iterator[nn.Module]:
    """Numbers may have changed their type before the trace or after it."""
    dense = with_numbers(dense)
    yield (cast := in_saved_types(dense, run))
    if cast is not dense:
        yield dense


def _example(dense: nn.Module, run: SavedRun) -> Any:
    if run.example == {"value": None}:
        raise CheckpointError(
            "The network was delivered as a program and saved without example inputs. Pass `example_inputs` to `load`, "
            "as they were passed to `trace`."
        )
    device = next((p.device for p in dense.parameters() if not p.is_meta), torch.device("cpu"))
    return zeros_like_description(run.example, device)
