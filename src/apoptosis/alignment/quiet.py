"""Running a network for what it computes alone: whatever it notes on the way is gone afterwards."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from apoptosis.curvature.containment import contained
from apoptosis.curvature.gradient import buffers_restored
from apoptosis.modes import in_eval_mode
from apoptosis.structure import random_state_put_back

__all__ = ["quietly"]


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients or compiled parts; attributes, buffers and random numbers are put back."""
    with ExitStack() as stack:
        stack.enter_context(random_state_put_back(model))
        stack.enter_context(contained(model))
        stack.enter_context(buffers_restored(model))
        stack.enter_context(in_eval_mode(model))
        stack.enter_context(torch.no_grad())
        yield
