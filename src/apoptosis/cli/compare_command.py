"""The sub-command `compare`: its options. No torch here: help answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from apoptosis.cli.option_groups import Group, spread
from apoptosis.cli.options import REPAIR_HELP, JsonOption, ResumeOption, Shares, plain_place, shares
from apoptosis.cli.refusals import errors_shown
from apoptosis.cli.resuming import asked_of
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.training_options import CompareTuning

__all__ = ["compare"]


@spread
def compare(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    *,
    subject: SubjectOptions,
    keep_flops: Annotated[
        Shares,
        typer.Option(
            help="Shares of the MACs that may stay, with commas between: 0.5,0.25.",
            parser=shares,
            metavar="<float>,…",
            show_default=False,
        ),
    ],
    criterion: Annotated[
        list[str] | None,
        typer.Option(
            help="Who takes part; may be repeated. `apoptosis criteria` lists them; all is every one. oba and taylor "
            "unless said.",
            show_default=False,
        ),
    ] = None,
    uniform: Annotated[
        bool,
        typer.Option("--uniform", help="Every criterion a second time, cutting every group alike."),
    ] = False,
    steps: Annotated[
        int, typer.Option(help="How often each network is scored and cut.", min=1)
    ] = 20,
    repair: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Mend each network after the cut: {REPAIR_HELP}",
            show_default=False,
        ),
    ] = None,
    tuning: Annotated[
        CompareTuning,
        Group(panel="Fine-tuning", without=("distil", "temperature", "training_batch_size")),
    ],
    seeds: Annotated[
        int, typer.Option(help="Do all of it so often, with seeds from --seed on.", min=1)
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables and plots; runs/ and a free name unless said.",
            callback=plain_place,
            show_default=False,
            file_okay=False,
        ),
    ] = None,
    resume: ResumeOption = False,  # noqa: ARG001 - `asked_of` reads it
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say how many networks and about how long, from one scoring each."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Which criterion keeps most? Prune one network by several, under conditions that are the same for all.

    The same dense network, samples to score on, steps, epochs and order of batches; only who goes differs. Two join
    every comparison: random, and magnitude-l2-uniform, the same share of every group by the norm of its weights.

    Figures are those of test data. Validation data, where there are any, choose: the epoch, and who stands first. For
    example:

      apoptosis compare digits_cnn --data digits --keep-flops 0.5,0.25 --epochs 3 --seeds 3

      apoptosis compare digits_cnn --data digits --keep-flops 0.5 --criterion oba --criterion obd-fisher --uniform

      apoptosis compare my_nets.py:make --weights dense.safetensors --data my_data.py:parts --keep-flops 0.5 --dry-run
    """
    with errors_shown(context):
        from apoptosis.cli.compare import ComparisonOptions, run_compare

        run_compare(
            ComparisonOptions(
                subject=subject,
                budgets=keep_flops.values,
                names=tuple(criterion or ()),
                uniform=uniform,
                steps=steps,
                repair=tuple(repair or ()),
                tuning=tuning,
                num_seeds=seeds,
                out=out,
                run=asked_of(context),
                dry_run=dry_run,
                as_json=as_json,
            )
        )
