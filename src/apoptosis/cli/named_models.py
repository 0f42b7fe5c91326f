"""A model that a person named, and what is known of it besides; networks of checkpoints, named by their folder.

A checkpoint says which model it was made from (`settings["subject"]["model"]`), so its folder is enough where that is a
network of this library or of an installed one. Of others the name is typed too (`origins`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from apoptosis.checkpoint import load_outcome
from apoptosis.cli.names import quoted
from apoptosis.cli.origins import UntypedNameError, origin_of
from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.masks import MaskPlan
from apoptosis.records import Outcome
from apoptosis.structure import Plan

__all__ = ["NamedModel", "joined", "saved_model"]


@dataclass(frozen=True)
class NamedModel:
    """A model, and what is known of it besides.

    Attributes:
        model: as it was made.
        example_inputs: to run it on; None where none are known.
        imports: what Python must import to make it again, in one line or two.
        maker: the Python expression of a function that makes it again.
        has_random_weights: it comes from a library and nobody trained it.
        name: what was typed; of a checkpoint, the model that its plan starts from.
        saved: what the checkpoint holds, where it comes from one.
        folder: of that checkpoint.
    """

    model: nn.Module
    example_inputs: Any
    imports: str
    maker: str
    has_random_weights: bool
    name: str = ""
    saved: Outcome[Plan | MaskPlan] | None = None
    folder: Path | None = None


def saved_model(
    name: str, make: Callable[[str], NamedModel], dense: Iterable[str] = ()
) -> NamedModel:
    """The network of a checkpoint.

    Args:
        name: its folder.
        make: makes the model that it was made from, by name.
        dense: names of models that were typed beside it; others that are a person's own are not made.

    Raises:
        CheckpointError: it does not say from which, or that one cannot be made.
    """  # noqa: DOC501 - the refusal of a name nobody typed comes through
    origin = origin_of(name, dense)
    try:
        made = make(origin)
    except UntypedNameError:
        raise
    except ApoptosisError as error:
        raise CheckpointError(
            f"The checkpoint {name} was made from the model {origin}, which cannot be made here. {error}"
        ) from error
    folder = Path(name).expanduser()
    outcome = load_outcome(folder, made.model)
    inputs = made.example_inputs if outcome.example_inputs is None else outcome.example_inputs
    return replace(
        made,
        model=outcome.model,
        example_inputs=inputs,
        has_random_weights=False,
        name=origin,
        saved=outcome,
        folder=folder,
    )


def joined(named: NamedModel, outcome: Outcome[Any]) -> tuple[Outcome[Any], NamedModel]:
    """What was made of a checkpoint's network, as made of the network that the checkpoint itself was made from.

    Two cuts are one, and masks that were there are among those that are there now. Masks of a cut network stand on the
    cut: the checkpoint of that is then where the network comes from, and the second result says so.
    """
    before = named.saved
    if before is None or outcome.plan is before.plan:  # trained only
        return outcome, named
    if isinstance(before.plan, Plan) and isinstance(outcome.plan, Plan):
        return replace(outcome, plan=before.plan.then(outcome.plan)), named
    if isinstance(before.plan, MaskPlan) or not before.plan.tensors:
        return outcome, named
    place = quoted(str(named.folder))
    return outcome, replace(
        named,
        name=str(named.folder),
        maker=f"lambda: ap.load({place}, dense={_parenthesised(named.maker)})",
    )


def _parenthesised(maker: str) -> str:
    return f"({maker})" if maker.startswith("lambda") else maker
