"""The sub-command `evaluate`: its options. No torch here: help answers at once."""

from typing import Annotated

import typer

from apoptosis.cli.option_groups import Group, spread
from apoptosis.cli.options import MODEL_HELP, JsonOption
from apoptosis.cli.refusals import errors_shown
from apoptosis.cli.subject_options import DataOptions

__all__ = ["evaluate"]


@spread
def evaluate(
    context: typer.Context,
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)
    ],
    *,
    data: Annotated[DataOptions, Group(without=("samples",))],
    as_json: JsonOption = False,
) -> None:
    """Judge models on data: loss, accuracy, MACs, parameters, size of the file, time per batch; one row each.

    Data that are held out judge where there are any. Examples:

      apoptosis evaluate runs/half --data digits

      apoptosis evaluate runs/dense runs/half runs/sparse --data digits

      apoptosis evaluate my_nets.py:make --weights dense.safetensors --data my_data.py:batches --json
    """
    with errors_shown(context):
        from apoptosis.cli.evaluate import EvaluateOptions, run_evaluate

        run_evaluate(EvaluateOptions(data=data, models=tuple(model), as_json=as_json))
