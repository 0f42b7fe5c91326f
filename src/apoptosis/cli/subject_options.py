"""Which model, with which weights, on which data: options that most commands have. No torch here."""

from dataclasses import dataclass
from typing import Any

from apoptosis.cli.options import (
    BatchSizeOption,
    DataOption,
    DenseOption,
    DeviceOption,
    ModelArgument,
    SamplesOption,
    SeedOption,
    WeightsOption,
)

__all__ = ["DataOptions", "SubjectOptions"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data, on which device; and weights for a model."""

    data: DataOption
    weights: WeightsOption = None
    dense: DenseOption = None
    samples: SamplesOption = None
    batch_size: BatchSizeOption = None
    device: DeviceOption = "cpu"
    seed: SeedOption = 0

    def of(self, model: str) -> "SubjectOptions":
        """The same for a model."""
        return SubjectOptions(model=model, **vars(self))


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(DataOptions):
    """Which model, with which weights, on which data."""

    model: ModelArgument

    @property
    def inputs(self) -> dict[str, Any]:
        """What is read, by the option that names it; no result may take its place."""
        return {"MODEL": self.model, "--weights": self.weights, "--data": self.data}

    @property
    def is_new(self) -> bool:
        """The one model that is trained here: it takes seconds, and it is made for these data."""
        return self.model == "digits_cnn" and self.data == "digits" and self.weights is None
