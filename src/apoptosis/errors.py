"""Every error the library raises on purpose.

    ApoptosisError
    ├── DataError            (ValueError)           batches that cannot be used: empty, on another device, malformed
    ├── ModelError           (ValueError)           a model that cannot be scored: frozen, or integer weights
    ├── DirectionError       (ValueError)           a direction whose names or shapes are not the model's
    ├── LossError            (ValueError)           a loss that is no scalar, or that cannot be differentiated as asked
    ├── NonFiniteError       (ArithmeticError)      NaN or infinity where a number was needed
    ├── LostTangentError     (NotImplementedError)  part of the model runs where its derivative cannot be followed
    ├── TraceError           (RuntimeError)         a model that does not run on its example inputs
    ├── PlanMismatchError    (ValueError)           a plan that does not fit the model or structure it is used with
    ├── BudgetError          (ValueError)           a budget that cannot be reached
    ├── CheckpointError      (ValueError)           files that are no checkpoint, damaged, or of another model
    └── ConfigError          (ValueError)           an option with a value nobody can mean

Each derives from a built-in as well, so that both habits of catching work. A message has three parts: what was asked,
what was found, what can be done about it.
"""

from collections.abc import Mapping
from types import MappingProxyType


class ApoptosisError(Exception):
    """Root of all errors raised on purpose by this library."""


class DataError(ApoptosisError, ValueError):
    """The batches cannot be used as they are."""


class ModelError(ApoptosisError, ValueError):
    """The model cannot be scored as it is."""


class DirectionError(ApoptosisError, ValueError):
    """The direction does not fit the model's parameters."""


class LossError(ApoptosisError, ValueError):
    """The task's loss is not a differentiable scalar."""


class NonFiniteError(ApoptosisError, ArithmeticError):
    """NaN or infinity where a number was needed."""


class LostTangentError(ApoptosisError, NotImplementedError):
    """An operation hides its derivative, so going on would give silently wrong scores."""


class ConfigError(ApoptosisError, ValueError):
    """An option has a value that nobody can mean."""


class TraceError(ApoptosisError, RuntimeError):
    """The model did not run on its example inputs, or cannot be followed."""


class PlanMismatchError(ApoptosisError, ValueError):
    """A plan does not fit the model or the structure it is used with."""


class BudgetError(ApoptosisError, ValueError):
    """A budget cannot be reached within the limits given; `reachable` has the shares that can be, where known."""

    reachable: Mapping[str, float] = MappingProxyType({})


class CheckpointError(ApoptosisError, ValueError):
    """Files are no checkpoint, are damaged, or belong to another model."""
