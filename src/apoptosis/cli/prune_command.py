"""The sub-command `prune`: its options, in the panels of the two kinds of pruning. No torch here: help answers at once.

Defaults stand here as they are shown; a test compares them with those of the library.
"""

from pathlib import Path
from typing import Annotated

import typer

from apoptosis.cli.kinds import TUNING, UNITS, WEIGHTS, check_trains, is_about_weights
from apoptosis.cli.option_groups import Group, spread
from apoptosis.cli.options import (
    AGGREGATION_HELP,
    REPAIR_HELP,
    JsonOption,
    ResumeOption,
    Shares,
    plain_place,
    share,
    shares,
)
from apoptosis.cli.refusals import errors_shown
from apoptosis.cli.resuming import asked_of
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.training_options import PruneTuning

__all__ = ["prune"]


@spread
def prune(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    *,
    keep_flops: Annotated[
        Shares | None,
        typer.Option(
            help="Share of the MACs that may stay (papers say FLOPs): 0.5 keeps half; 0.6,0.3 goes in two rounds with "
            "training after each.",
            parser=shares,
            metavar="<float>,…",
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    keep_params: Annotated[
        Shares | None,
        typer.Option(
            help="Share of the parameters that may stay.",
            parser=shares,
            metavar="<float>,…",
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    keep_units: Annotated[
        Shares | None,
        typer.Option(
            help="Share of the units that may stay.",
            parser=shares,
            metavar="<float>,…",
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="How often the network is scored and cut; unless said, once for obs and 20 times for others.",
            min=1,
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    aggregation: Annotated[
        str | None,
        typer.Option(
            help=AGGREGATION_HELP,
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    align: Annotated[
        bool | None,
        typer.Option(
            "--align/--no-align",
            help="Turn attention heads into their principal axes first, the network computing the same; then their "
            "dimensions can go at little cost. Unless said, for obs.",
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    repair: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Mend the small network: {REPAIR_HELP} "
            "Unless said, refit and refit_blocks after obs; none for nothing.",
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    repair_between: Annotated[
        bool,
        typer.Option(
            "--repair-between",
            help="Mend it after every step too, so that the next one scores a network that works.",
            rich_help_panel=UNITS,
        ),
    ] = False,
    widths: Annotated[
        str,
        typer.Option(
            help="global ranks all units together, uniform cuts every group alike.",
            rich_help_panel=UNITS,
        ),
    ] = "global",
    per: Annotated[
        str,
        typer.Option(
            help="Rank by score per unit, or per cost that the unit saves.", rich_help_panel=UNITS
        ),
    ] = "cost",
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Cut only groups of this kind; may be repeated.",
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    round_to: Annotated[
        int | None,
        typer.Option(
            help="Widths become multiples of it; 8 suits GPUs in 16 bits.",
            min=1,
            show_default=False,
            rich_help_panel=UNITS,
        ),
    ] = None,
    floor: Annotated[
        int, typer.Option(help="Fewest units that a group keeps.", min=1, rich_help_panel=UNITS)
    ] = 1,
    cap: Annotated[
        float,
        typer.Option(
            help="Largest share of a group that may go.",
            parser=share,
            metavar="<float>",
            rich_help_panel=UNITS,
        ),
    ] = 1.0,
    unstructured: Annotated[  # noqa: ARG001 - `is_about_weights` reads it
        bool,
        typer.Option(
            "--unstructured",
            help="Zero single weights instead of cutting units; shapes stay.",
            rich_help_panel=WEIGHTS,
        ),
    ] = False,
    keep: Annotated[
        float | None,
        typer.Option(
            help="Share of the weights that may stay: 0.1 is what papers call a sparsity of 90 %.",
            parser=share,
            metavar="<float>",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="N:M, as 2:4: of every 4 weights in a row along a layer's inputs 2 stay. Implies --unstructured.",
            metavar="N:M",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            help="How often the network is scored and weights are zeroed; 20 unless said, 1 for criteria that read "
            "no data, at most M-N for a pattern.",
            min=1,
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    scope: Annotated[
        str,
        typer.Option(
            help="global ranks all weights together, layer keeps the same share of each layer.",
            rich_help_panel=WEIGHTS,
        ),
    ] = "global",
    saliency: Annotated[
        str | None,
        typer.Option(
            help="How scores rank weights: plain by size; normalised by size over the layer's largest; paper adds the "
            "weight's own size to that; balanced adds it to size over the layer's norm. The criterion's own unless "
            "said.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    batch_norm: Annotated[
        str,
        typer.Option(
            help="frozen leaves statistics as they were trained, re-estimate measures them anew after every stage.",
            rich_help_panel=WEIGHTS,
        ),
    ] = "frozen",
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty", help="A layer may lose its last weight.", rich_help_panel=WEIGHTS
        ),
    ] = False,
    tuning: Annotated[PruneTuning, Group(panel=TUNING)],
    subject: SubjectOptions,
    criterion: Annotated[
        str | None,
        typer.Option(
            help="What decides which units or weights go; `apoptosis criteria` lists them. Unless said, obs for units "
            "(oba where that cannot be used) and magnitude for weights.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Touch only what is so named: groups as 'layer1.*', weights as 'layer1.*.weight'; '!layer1.*' leaves "
            "out. May be repeated.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the result; runs/ and a free name of what was asked for unless said.",
            callback=plain_place,
            show_default=False,
        ),
    ] = None,
    resume: ResumeOption = False,  # noqa: ARG001 - `asked_of` reads it
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be done and what it costs; score and write nothing."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a model smaller until no more of it is left than was asked, and save it.

    Whole units go, and the network is smaller and faster: --keep-flops, --keep-params, --keep-units, one or more.

    Or single weights become zero, and the file is smaller: --unstructured --keep 0.1, or --pattern 2:4.

    Examples:
      apoptosis prune digits_cnn --data digits --keep-flops 0.5 --out runs/half

      apoptosis prune runs/dense --data digits --keep-flops 0.6,0.3 --epochs 5    trained after each round

      apoptosis prune my_nets.py:make --data my_data.py:batches --keep-params 0.3 --dry-run

      apoptosis prune resnet20 --weights dense.safetensors --data my_data.py:batches --keep-flops 0.5 --name '!stem*'

      apoptosis prune digits_cnn --data digits --unstructured --keep 0.1 --batch-norm re-estimate

      apoptosis prune digits_cnn --data digits --pattern 2:4 --name '!stem.*'    (4 does not divide its 1 input)
    """
    with errors_shown(context):
        about_weights = is_about_weights(context)
        check_trains(context, tuning.epochs)
        asked = asked_of(context)
        if about_weights:
            from apoptosis.cli.sparsify import run_sparsify
            from apoptosis.cli.sparsify_options import SparsifyOptions

            run_sparsify(
                SparsifyOptions(
                    subject=subject,
                    keep=keep,
                    pattern=pattern,
                    asked_criterion=criterion,
                    asked_stages=stages,
                    scope=scope,
                    saliency=saliency,
                    batch_norm=batch_norm,
                    allow_empty=allow_empty,
                    names=tuple(name or ()),
                    tuning=tuning,
                    asked=asked,
                    out=out,
                    dry_run=dry_run,
                    as_json=as_json,
                )
            )
            return

        from apoptosis.cli.prune import run_prune
        from apoptosis.cli.prune_options import PruneOptions

        run_prune(
            PruneOptions(
                subject=subject,
                keep_flops=keep_flops,
                keep_params=keep_params,
                keep_units=keep_units,
                asked_criterion=criterion,
                asked_steps=steps,
                aggregation=aggregation,
                align=align,
                asked_repair=tuple(repair) if repair else None,
                repair_between=repair_between,
                widths=widths,
                per=per,
                kinds=tuple(kind or ()),
                names=tuple(name or ()),
                round_to=round_to,
                floor=floor,
                cap=cap,
                tuning=tuning,
                asked=asked,
                out=out,
                dry_run=dry_run,
                as_json=as_json,
            )
        )
