"""Random numbers go on after a run as if nothing had happened: torch's, numpy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

__all__ = ["random_state_put_back", "state_outside_torch"]


@contextmanager
def random_state_put_back(model: nn.Module) -> Iterator[None]:
    """Whatever is drawn inside the block, on the CPU or on the devices of the model, is drawn again afterwards."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    python, others = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one user code draws from
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(others)  # noqa: NPY002


def state_outside_torch() -> tuple[object, ...]:
    """Python's and numpy's, to be compared."""
    _, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the one user code draws from
    return random.getstate(), np.asarray(keys).tobytes(), *rest
