"""One network of the second zoo: two random plans in four situations, then two prunings on batches of its own.

A check is a text: nothing where all is well, else one of `WRONG` (without a word), `raw` (an error that is not ours),
`refused` (in our words), `hang`, `n/a` (the dense network cannot do it either, or there is nothing to compare with).

For each plan, in float64, the cut network against the dense one with the removed units zeroed (1e-6, relative to the
greatest number of each output; what casts to float32 on its way leaves 1e-7, a wrong cut a percent):

- `equal`: at the inputs it was traced with; `batch`: at another batch size; `size`: at inputs of another size;
- `train`: outputs in train mode, and in eval mode after that pass, which moved the statistics of batch norms;
- `gradient`: of a loss in train mode, for all that is left; `saved`: state read back into a copy of other weights.

The first plan cuts exact groups to 60 % of the MACs, the second a random half of them to 75 %, or as near as they
come. Where there are none but inexact ones, the twin is one whose statistics see kept units alone
(`tests/oracles/kept_sums.py`), in eval mode.

`magnitude` and `default` prune in float32 to 70 % of the MACs on two batches of four samples. What comes out must run
on these batches, give finite numbers and meet the budget; the first must also equal its zeroed twin on them (1e-3).
Each has 90 s of the processor. A network all of whose groups are fixed is refused by all checks.
"""

import copy
import math
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import apoptosis as ap
from apoptosis.errors import ApoptosisError
from apoptosis.structure import Plan, Structure, cut, trace, zero
from apoptosis.structure.recording import Example
from oracles.kept_sums import outputs_with_kept_sums
from zoo_checks import call, difference, float_outputs, round_trips, run
from zoo_models import BATCH, OTHER_BATCH
from zoo_plans import bundles_of, kept_units, random_counts
from zoo_second_networks import Network, built

__all__ = ["PLAN_CHECKS", "PRUNINGS", "STAGES", "joined", "measure", "names_of", "warm_up"]

Record = dict[str, Any]
SHARES = (0.6, 0.75)
BUDGET = 0.7
TOLERANCE = 1e-6
FLOAT32_TOLERANCE = 1e-3
LEAST_EFFECT = 1e-4  # of a cut; below it, being equal to the twin would say nothing
LIMIT_S = 90.0
PLAN_CHECKS = ("equal", "batch", "size", "train", "gradient", "saved")
PRUNINGS = ("magnitude", "default")
STAGES = ("plans", *PRUNINGS)


class LateError(BaseException):
    """The time of a check is over. Not an `Exception`: what is measured may catch those."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Interrupt when this much time of the processor is gone."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise LateError(f"over {seconds:.0f} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@cache
def warm_up() -> None:
    """Let torch and the library load what they load on first use, before time is measured."""
    batches = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    ap.prune(
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), batches, ap.Budget(flops=0.5)
    )


def measure(network: Network, seed: int, stage: str) -> Record:
    """What one stage finds of one network: its checks, by name, and facts."""
    record: Record = {"checks": {}, "errors": {}}
    try:
        model = built(network, seed)
    except ImportError as error:
        return record | {"skipped": str(error)}
    record["params"] = sum(p.numel() for p in model.parameters())
    if stage == "plans":
        _plans_checked(network, model, seed, record)
    else:
        start = time.process_time()
        record["checks"][stage] = _checked(lambda: _pruned(network, stage, seed), LIMIT_S)
        record[f"{stage}_s"] = time.process_time() - start
    return record


def names_of(stage: str) -> list[str]:
    """The checks of a stage."""
    return [f"{name} {n}" for n in (1, 2) for name in PLAN_CHECKS] if stage == "plans" else [stage]


def joined(network: Network, parts: list[Record]) -> Record:
    """The whole record, with the worst that any check says as its status."""
    record: Record = {"id": network.id, "family": network.family, "checks": {}, "errors": {}}
    for part in parts:
        inner = {key: record[key] | part.get(key, {}) for key in ("checks", "errors")}
        record |= part | inner
    words = {text.partition(":")[0] for text in record["checks"].values()}
    worst = next((word for word in ("WRONG", "raw", "hang", "refused") if word in words), "pass")
    worst = worst if parts else "not measured"
    return record | {"status": "skipped" if "skipped" in record else worst}


def _checked(check: Callable[[], str], seconds: float) -> str:
    try:
        with _within(seconds):
            return check()
    except LateError as error:
        return f"hang: {error}"
    except ApoptosisError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - the table says what happened
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"raw: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


# -- random plans -----------------------------------------------------------------------------------------------------


@dataclass
class _Case:
    """A plan, and what it is compared with."""

    network: Network
    model: nn.Module
    structure: Structure
    plan: Plan
    small: nn.Module
    errors: dict[str, float]
    """The distance that each check found."""

    @property
    def exact(self) -> bool:
        return all(self.structure[name].exact for name in self.plan.kept)


def _plans_checked(network: Network, model: nn.Module, seed: int, record: Record) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed + 1)
    inputs = network.inputs(BATCH)
    with network.in_float64():
        found: list[Structure] = []

        def traced() -> str:
            start = time.process_time()
            found.append(trace(model, inputs))
            record["trace_s"] = time.process_time() - start
            return ""

        text = _checked(traced, LIMIT_S)
        for number, share in enumerate(SHARES, 1):
            names = [f"{name} {number}" for name in PLAN_CHECKS]
            if text:
                record["checks"] |= dict.fromkeys(names, text)
                continue
            case = _planned(network, model, found[0], (share, number), rng, record)
            if isinstance(case, str):
                record["checks"] |= dict.fromkeys(names, case)
                continue
            for name in PLAN_CHECKS:
                key = f"{name} {number}"
                record["checks"][key] = _checked(
                    lambda n=name, c=case: _CHECKS[n](c, inputs), LIMIT_S
                )
                if name in case.errors:
                    record["errors"][key] = case.errors[name]


def _planned(
    network: Network,
    model: nn.Module,
    structure: Structure,
    wanted: tuple[float, int],
    rng: random.Random,
    record: Record,
) -> "_Case | str":
    """The case, or why there is none."""
    share, number = wanted
    cases: list[_Case] = []

    def make() -> str:
        bundles = bundles_of(structure)
        chosen = [bundle for bundle in bundles if bundle.exact] or bundles
        if number == 2:
            chosen = rng.sample(chosen, math.ceil(len(chosen) / 2))
        if not chosen:
            return "refused: nothing can be cut"
        counts, reached = random_counts(structure, chosen, share, rng)
        if not counts:
            return "refused: nothing can be cut"
        plan = structure.plan(kept_units(structure, counts, rng))
        record[f"plan {number}"] = {
            "share": reached,
            "groups": len(plan.kept),
            "delivery": plan.delivery,
            "because": plan.delivery_because,
        }
        cases.append(_Case(network, model, structure, plan, cut(model, plan), {}))
        return ""

    return _checked(make, LIMIT_S) or cases[0]


def _traced_inputs(case: _Case, inputs: Any) -> str:
    return _compared(case, inputs, "equal")


def _other_batch(case: _Case, _: Any) -> str:
    return _compared(case, case.network.inputs(OTHER_BATCH), "batch")


def _other_size(case: _Case, _: Any) -> str:
    if case.network.other is None:
        return "n/a: the architecture takes one size"
    return _compared(case, case.network.other(BATCH), "size")


def _compared(case: _Case, inputs: Any, name: str) -> str:
    dense = _outcome(case.model, inputs)
    if isinstance(dense, str):
        return dense
    found = _run_alike(case.small, inputs)
    try:
        expected = _expected(case, inputs)
    except Exception as error:
        if case.exact:
            raise
        return f"n/a: no oracle for this inexact cut: {type(error).__name__}: {error}"
    if name == "equal" and difference(dense, expected) < LEAST_EFFECT:
        return "n/a: what was cut does not show in the outputs"
    return _told(case, name, difference(found, expected))


def _expected(case: _Case, inputs: Any) -> Any:
    if case.exact:
        return _run_alike(zero(case.model, case.plan), inputs)
    again = trace(case.model, inputs)  # the twin of an inexact cut has the sizes of its run
    plan = again.plan(case.plan.kept)
    return outputs_with_kept_sums(again, case.model, plan, Example.of(inputs))


def _told(case: _Case, name: str, error: float) -> str:
    case.errors[name] = max(error, case.errors.get(name, 0.0))
    return "" if error <= TOLERANCE else f"WRONG: differs by {error:.1e}"


def _outcome(model: nn.Module, inputs: Any) -> Any:
    """What the dense network gives, or that it cannot be called like this."""
    try:
        result = _run_alike(copy.deepcopy(model), inputs)
    except Exception as error:  # noqa: BLE001 - whatever the architecture says
        return f"n/a: the dense network does not run: {type(error).__name__}: {error}"
    finite = all(bool(t.isfinite().any()) for t in float_outputs(result))
    return result if float_outputs(result) and finite else "n/a: the dense network gives no numbers"


def _run_alike(model: nn.Module, inputs: Any) -> Any:
    """Run it without gradients, with the same random numbers as any other network."""
    torch.manual_seed(0)
    return call(model, tree_map_only(Tensor, Tensor.clone, inputs))


def _in_training(case: _Case, inputs: Any) -> str:
    """Outputs in train mode, then in eval mode."""
    if not case.exact:
        return "n/a: inexact cuts have an oracle in eval mode alone"
    dense = _outcome(copy.deepcopy(case.model).train(), inputs)
    if isinstance(dense, str):
        return dense
    small, twin = copy.deepcopy(case.small).train(), zero(case.model, case.plan).train()
    worst = difference(_run_alike(small, inputs), _run_alike(twin, inputs))
    worst = max(
        worst, difference(_run_alike(small.eval(), inputs), _run_alike(twin.eval(), inputs))
    )
    return _told(case, "train", worst)


def _gradient(case: _Case, inputs: Any) -> str:
    """What a loss in train mode sends back, to what is left."""
    if not case.exact:
        return "n/a: inexact cuts have an oracle in eval mode alone"
    if case.plan.scalings:
        return "n/a: some weights are scaled by the cut, so gradients are as well"
    try:
        _sent_back(copy.deepcopy(case.model), inputs)
    except Exception as error:  # noqa: BLE001 - whatever the architecture says
        return f"n/a: the dense network does not train: {type(error).__name__}: {error}"
    found = _sent_back(copy.deepcopy(case.small), inputs)
    expected = _sent_back(zero(case.model, case.plan), inputs)
    worst = 0.0
    greatest = max(float(t.abs().max()) for t in expected.values())
    for name, theirs in expected.items():
        for change in case.plan.tensors:
            if name in change.names:
                for dim, places in change.kept.items():
                    theirs = theirs.index_select(dim, torch.as_tensor(places))  # noqa: PLW2901
        if found[name].shape != theirs.shape:
            return f"WRONG: the gradient of {name} has another shape"
        worst = max(worst, float((found[name] - theirs).abs().max()) / greatest)
    return _told(case, "gradient", worst if worst == worst else float("inf"))


def _sent_back(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    model.train()
    torch.manual_seed(0)
    outputs = float_outputs(run(model, tree_map_only(Tensor, Tensor.clone, inputs)))
    sum(t[t.isfinite()].square().mean() for t in outputs if t.requires_grad).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.numel()
    }


def _saved(case: _Case, inputs: Any) -> str:
    text = round_trips(case.small, inputs)
    return f"WRONG: {text}" if text else ""


_CHECKS: dict[str, Callable[[_Case, Any], str]] = {
    "equal": _traced_inputs,
    "batch": _other_batch,
    "size": _other_size,
    "train": _in_training,
    "gradient": _gradient,
    "saved": _saved,
}


# -- pruning on batches of its own ------------------------------------------------------------------------------------


def _pruned(network: Network, name: str, seed: int) -> str:
    model = _as_users_run_it(built(network, seed))
    torch.manual_seed(seed + 2)
    task, batches = _material(network, model)
    criterion = {} if name == "default" else {"criterion": name}
    outcome = ap.prune(model, batches, ap.Budget(flops=BUDGET), task, **criterion)
    got = next(spent.got for spent in outcome.spent if spent.what == "flops")
    if got > BUDGET:
        return f"WRONG: {got:.1%} of the MACs are left"
    for batch in batches:
        args, kwargs = task.inputs(batch)
        inputs = kwargs or args
        found = _run_alike(outcome.model, inputs)
        if not all(bool(t.isfinite().any()) for t in float_outputs(found)):
            return "WRONG: no finite number comes out"
        if name == "magnitude":
            twin = zero(outcome.dense, outcome.plan)
            if (error := difference(found, _run_alike(twin, inputs))) > FLOAT32_TOLERANCE:
                return f"WRONG: on its own batches it differs by {error:.1e}"
    return ""


def _as_users_run_it(model: nn.Module) -> nn.Module:
    """In float32, with transformers' fused products of experts, which have no float64."""
    can = getattr(model, "_can_set_experts_implementation", None)
    if can is not None and can():
        model.set_experts_implementation("grouped_mm")
    return model.float()


def _material(network: Network, model: nn.Module) -> tuple[ap.Task, list[Any]]:
    """A task and batches such as a user of this network has."""
    all_inputs = [_cast(network.inputs(4), torch.float32) for _ in range(2)]
    if network.kind == "text":
        return ap.Task.language_model(), all_inputs
    task = ap.Task.classification(*([F.mse_loss] if network.kind == "values" else []))
    if network.read is not None:
        task = replace(task, outputs=network.read)
    if network.whole:
        task = replace(task, split=lambda batch, _: iter([batch]))
    batches: list[Any] = []
    for inputs in all_inputs:
        out = task.outputs(_run_alike(model, inputs))
        some = torch.randint(out.shape[1], (out.shape[0], *out.shape[2:]))
        batches.append((inputs, torch.randn_like(out) if network.kind == "values" else some))
    return task, batches


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
