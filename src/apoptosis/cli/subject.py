"""What `prune` and `score` work on: a model and data that are known to fit each other.

Everything a person can have mistyped is looked at here, before the work begins.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.cli.data_sources import NamedData, Reading, find_data
from apoptosis.cli.labels import check_labels_fit
from apoptosis.cli.names import counted, sentence
from apoptosis.cli.sources import NamedModel, make_model
from apoptosis.cli.splits import split_seed
from apoptosis.cli.subject_options import DataOptions, SubjectOptions
from apoptosis.cli.weights import load_weights_
from apoptosis.errors import ApoptosisError, ConfigError, DataError
from apoptosis.modes import in_eval_mode
from apoptosis.soundness import check_numbers
from apoptosis.structure import Structure, trace
from apoptosis.task import Batch, Task, batch_size, tensors_in
from apoptosis.training import FitOptions, fit_
from apoptosis.workflow import Material, first_sample

__all__ = [
    "Subject",
    "SubjectOptions",
    "find_named_data",
    "find_subject",
    "material_of",
    "seeded",
    "train_if_new_",
]

EPOCHS = 6


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, and data on the same device."""

    named: NamedModel
    data: NamedData
    example_inputs: Any

    @property
    def model(self) -> nn.Module:
        """The network itself."""
        return self.named.model

    @cached_property
    def structure(self) -> Structure:
        """Traced on the first sample. Single weights can go without: models that cannot be traced have none."""
        return trace(self.model, self.example_inputs)

    @cached_property
    def counted_in(self) -> str:
        """What losses are means over: samples, or the tokens or positions within them."""
        batch = next(iter(self.data.scoring))
        try:
            num = self.data.task.count(batch)
        except ApoptosisError:  # no labels
            return "sample"
        if num <= batch_size(batch):
            return "sample"
        inputs = next(tensors_in(self.data.task.inputs(batch)))
        return "position" if inputs.is_floating_point() else "token"


@contextmanager
def seeded(options: DataOptions) -> Iterator[None]:
    """Random numbers inside the block depend on the seed alone; the state of before comes back."""
    device = _device(options.device)
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        yield


def find_subject(
    options: SubjectOptions,
    console: Console,
    *,
    traced: bool = True,
    trains: bool | None = None,
    data: NamedData | None = None,
) -> Subject:
    """Find model, weights and data, and try them on each other; what should be known is said on `console`.

    Args:
        options: what was typed.
        console: where a person is told.
        traced: refuse a model whose structure cannot be found.
        trains: the command trains this model, so nobody need be told that its weights are random. Unless said, that
            is what commands do with the network that is new.
        data: as they were found for another model before.

    Returns:
        All of it.

    Raises:
        ApoptosisError: one of them cannot be found, or they do not fit.
    """
    device = _device(options.device)
    named = make_model(options.model, options.dense or ())
    if options.weights is not None:
        load_weights_(named.model, options.weights)
    check_numbers(named.model, options.model, real=False)
    named.model.to(device).eval()
    data = data or find_named_data(options)
    for batches in (data.scoring, data.evaluation):
        if batches is not None:
            _check_fits(named, data, batches, options)
    example = first_sample(named.model, data.scoring, data.task)
    subject = Subject(named, data, example)
    if traced:
        _ = subject.structure
    if (own := split_seed(options)) != options.seed:
        _say(
            console,
            f"Note: {options.model} was made with the split of {options.data} by seed {own}, which is kept: what is "
            "judged on must be new to it.",
        )
    trains = options.is_new if trains is None else trains
    if named.has_random_weights and options.weights is None and not trains:
        _say(
            console,
            f"Note: {options.model} has random weights, so figures say little. Give trained ones: --weights FILE",
        )
    return subject


def find_named_data(options: DataOptions, training_batch_size: int | None = None) -> NamedData:
    """The data, on the device that was asked for."""
    reading = Reading(
        samples=options.samples,
        batch_size=options.batch_size,
        training_batch_size=training_batch_size,
        device=_device(options.device),
        seed=options.seed,
        split_seed=split_seed(options),
    )
    return find_data(options.data, reading)


def material_of(subject: Subject) -> Material:
    """Batches for each purpose of a run that trains.

    Raises:
        DataError: there are none to train on.
    """
    data = subject.data
    if data.training is None:
        raise DataError(
            "Training was asked for, and these data have nothing to train on. Give others, or leave out --epochs."
        )
    return Material(scoring=data.scoring, training=data.training, validation=data.validation)


def train_if_new_(
    subject: Subject, options: SubjectOptions, console: Console, journal: Journal | None = None
) -> None:
    """The built-in network of the digits has no trained weights: give it some. Others stay as they are."""
    if not options.is_new:
        return
    assert subject.data.training is not None, "the digits have training images"
    _say(
        console,
        f"Note: digits_cnn comes without trained weights; training it on the digits for "
        f"{counted(EPOCHS, 'epoch')} first.",
    )
    fit_(
        subject.model,
        subject.data.training,
        subject.data.task,
        FitOptions(epochs=EPOCHS, seed=options.seed),
        journal=None if journal is None else journal.part("new"),
    )


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _device(name: str) -> torch.device:
    unknown = ConfigError(
        f"--device {name} is none that commands run on. Say cpu, cuda, or cuda:1 for the second of several."
    )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):  # torch knows names of more than it can compute on here
        raise unknown
    num_found = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type == "cuda" and (device.index or 0) >= num_found:
        found = f"{num_found} CUDA devices, counted from 0" if num_found else "no CUDA device"
        raise ConfigError(
            f"--device {name} was asked for, and torch {torch.__version__} finds {found}. Use --device cpu, or install "
            "a build of torch for your GPU."
        )
    return device


def _check_fits(
    named: NamedModel, data: NamedData, batches: Iterable[Batch], options: SubjectOptions
) -> None:
    """Run the first batch, and take its loss where it has labels."""
    batch, task = next(iter(batches)), data.task
    model, names = named.model, f"{options.model} and {options.data} do not fit"
    args, kwargs = task.inputs(batch)
    shapes = _shapes((args, kwargs))
    known = (
        ""
        if named.example_inputs is None
        else f" (it is known to take {_shapes(named.example_inputs)})"
    )
    with in_eval_mode(model), torch.no_grad():
        raw = _tried(
            lambda: model(*args, **kwargs),
            f"{names}: the model does not run on a batch of inputs of shape {shapes}{known}",
            options,
        )
        outputs = task.outputs(raw)
        check_labels_fit(names, data, outputs, batch)
        tokens = (
            " (outputs for every position look like a language model's: let the data function return "
            "(batches, ap.Task.language_model()))"
            if outputs.dim() == 3
            else ""
        )
        _tried(
            lambda: _loss(task, outputs, batch),
            f"{names}: the loss of outputs of shape {tuple(outputs.shape)} cannot be taken with these labels{tokens}",
            options,
        )


def _loss(task: Task, outputs: torch.Tensor, batch: Batch) -> None:
    try:
        task.loss(outputs, batch)
    except ApoptosisError:
        return  # no labels: some criteria need none, the others will say so


def _tried(run: Callable[[], Any], failure: str, options: SubjectOptions) -> Any:
    try:
        return run()
    except ApoptosisError:
        raise
    except torch.OutOfMemoryError as error:
        raise DataError(
            f"A batch of {options.data} does not fit into the memory of {options.device}. Ask for smaller ones: "
            "--batch-size 16."
        ) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise DataError(
            f"{failure}. {type(error).__name__}: {sentence(lines[0][:300])} Give data of the shape that the model was "
            "made for, or another model."
        ) from error


def _shapes(inputs: Any) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors_in(inputs)) or "no tensors"
