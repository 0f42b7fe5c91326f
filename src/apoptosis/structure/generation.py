"""`generate` of a cut network: libraries make caches and states from a configuration, at sizes of their own.

Forward may be exact and `generate` fail all the same (RWKV keeps the states of all layers in one tensor, of the width
of the stream). So two tokens are generated once; a network that cannot says why when it is asked to.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.errors import ModelError
from apoptosis.modes import in_eval_mode
from apoptosis.structure.configurations import Refusal
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example

__all__ = ["settle_generation_"]

GENERATE = "generate"


def settle_generation_(small: nn.Module, model: nn.Module, example: Example | None) -> None:
    """Let `generate` of a cut network refuse where it fails and that of the model it was cut from does not."""
    if isinstance(vars(small).get(GENERATE), Refusal):
        del vars(small)[GENERATE]
    words = _words(example)
    if words is None or not callable(getattr(type(small), GENERATE, None)):
        return
    if because := _failure(small, words):
        if not isinstance(vars(model).get(GENERATE), Refusal) and _failure(model, words):
            return
        vars(small)[GENERATE] = Refusal(
            ModelError,
            f"`{GENERATE}` was called on a cut {type(small).__name__}, which fails ({because}): a state or cache of it "
            "has a size that the cut has changed. Its forward pass is as planned. To generate, leave the groups whole "
            'that the state holds (`Selection(names=("!…",))`), or try `Selection(widths="uniform")`.',
        )


def _words(example: Example | None) -> Tensor | None:
    """A few tokens of the example's first text."""
    if example is None:
        return None
    given = (example.kwargs or {}).get("input_ids", next(iter(example.args), None))
    if not isinstance(given, Tensor) or given.dtype != torch.long or given.ndim != 2:
        return None
    return None if given.is_meta else given[:1, :2].clone()


def _failure(model: Any, words: Tensor) -> str:
    if any(parameter.is_meta for parameter in model.parameters()):
        return ""
    try:
        with random_state_put_back(model), torch.no_grad(), in_eval_mode(model), _quietly():
            model.generate(words, max_new_tokens=2, do_sample=False)
    except Exception as error:  # noqa: BLE001 - a library may raise anything
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return ""


@contextmanager
def _quietly() -> Iterator[None]:
    """Libraries remark on options that nobody has given here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
