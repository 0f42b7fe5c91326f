"""One network of the zoo, cut by this library at random and checked."""

import random
import time
import traceback
from typing import Any

import torch
from torch import nn

from apoptosis.errors import ApoptosisError
from apoptosis.structure import Plan, Structure, cut, trace, zero
from apoptosis.structure.recording import Example
from oracles.kept_sums import outputs_with_kept_sums
from zoo_checks import call, difference, recount_macs, round_trips, trains
from zoo_models import BATCH, OTHER_BATCH, SHARE, Entry, build
from zoo_plans import Bundle, bundles_of, kept_units, random_counts

__all__ = ["TOLERANCE", "measure"]

SHARE_SLACK = 0.01
TOLERANCE = 1e-10
MOST_SINGLE_CUTS = 40
SINGLE_CUTS_S = 30.0


def measure(entry: Entry, seed: int) -> dict[str, Any]:
    """Everything about one network, with its status: pass, refused, WRONG, crash."""
    record: dict[str, Any] = {"id": entry.id, "status": "crash", "checks": {}, "note": ""}
    try:
        model = build(entry, seed)
        inputs = entry.inputs(BATCH)
        with entry.in_float64():
            _measure(entry, model, inputs, seed, record)
        if record["status"] != "refused":
            record["status"] = _status(record)
    except ApoptosisError as error:
        record |= {"status": "refused", "note": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - the table says what happened
        record |= {"note": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return record


def _measure(
    entry: Entry, model: nn.Module, inputs: Any, seed: int, record: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    trace(nn.Linear(2, 2).double(), torch.zeros(1, 2).double())  # torch loads much on first use
    start = time.process_time()
    structure = trace(model, inputs)
    record["trace_s"] = time.process_time() - start
    bundles = bundles_of(structure)
    exact = [bundle for bundle in bundles if bundle.exact]
    record |= _facts(structure)
    counts, reached = random_counts(structure, exact, SHARE, rng) if exact else ({}, 1.0)
    if abs(reached - SHARE) > SHARE_SLACK:
        record["note"] = f"exact groups come as near as {100 * reached:.1f} %"
    if reached > SHARE + SHARE_SLACK and len(exact) < len(bundles):
        counts, reached = random_counts(structure, bundles, SHARE, rng)
        record["note"] += (
            ", so inexact ones are cut as well, against a twin whose statistics see kept units alone"
        )
    if not counts:
        record |= {"status": "refused", "note": "nothing can be cut"}
        return
    start = time.process_time()
    plan = structure.plan(kept_units(structure, counts, rng))
    record["plan_s"] = time.process_time() - start
    record |= {
        "share": reached,
        "params_share": structure.params(plan) / structure.params(),
        "delivery": plan.delivery,
        "delivery_because": plan.delivery_because,
    }
    _check(entry, model, inputs, (structure, plan), record)
    record |= _single_cuts(structure, exact, rng)


def _facts(structure: Structure) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for group in structure.groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + 1
    return {
        "macs": structure.macs(),
        "params": structure.params(),
        "groups": len(structure.groups),
        "exact_groups": sum(group.exact for group in structure.groups),
        "kinds": kinds,
        "ties": len(structure.ties),
        "pinned": len(structure.pinned),
    }


def _check(
    entry: Entry,
    model: nn.Module,
    inputs: Any,
    planned: tuple[Structure, Plan],
    record: dict[str, Any],
) -> None:
    structure, plan = planned
    checks = record["checks"]
    small, twin = cut(model, plan), zero(model, plan)
    expected = call(twin, inputs)
    record["effect"] = difference(call(model, inputs), expected)

    exact = record["exact"] = all(structure[name].exact for name in plan.kept)
    if not exact:
        expected = outputs_with_kept_sums(structure, model, plan, Example.of(inputs))

    def equal(batch: Any, wanted: Any) -> str:
        found = difference(call(small, batch), wanted)
        record["error"] = max(found, record.get("error", 0.0))
        return "" if found <= TOLERANCE else f"differs by {found:.1e}"

    def params() -> str:
        found = sum(p.numel() for p in small.parameters())
        return _equal_numbers(structure.params(plan), found)

    def macs() -> str:
        dense = _equal_numbers(structure.macs(), recount_macs(model, inputs))
        return (
            dense
            and f"dense: {dense}"
            or _equal_numbers(structure.macs(plan), recount_macs(small, inputs))
        )

    def other_batch() -> str:
        batch = entry.inputs(OTHER_BATCH)
        if exact:
            return equal(batch, call(twin, batch))
        again = trace(model, batch)  # the twin of an inexact cut has the sizes of its run
        return equal(
            batch, outputs_with_kept_sums(again, model, again.plan(plan.kept), Example.of(batch))
        )

    def flags() -> str:
        before = {name: p.requires_grad for name, p in model.named_parameters()}
        after = {name: p.requires_grad for name, p in small.named_parameters()}
        return "" if before == after else "names, ties or requires_grad of parameters changed"

    for name, check in {
        "equal": lambda: equal(inputs, expected),
        "params": params,
        "macs": macs,
        "state_dict": lambda: round_trips(small, inputs),
        "train": lambda: trains(small, inputs),
        "batch": other_batch,
        "flags": flags,
    }.items():
        try:
            checks[name] = check()
        except Exception as error:  # noqa: BLE001 - the table says what happened
            checks[name] = f"{type(error).__name__}: {error}"


def _equal_numbers(ours: int, recounted: int) -> str:
    return "" if ours == recounted else f"{ours} against {recounted} recounted"


def _single_cuts(structure: Structure, exact: list[Bundle], rng: random.Random) -> dict[str, Any]:
    """How many groups can be cut alone, with those tied to them, in the model's own class."""
    tried = rng.sample(exact, min(MOST_SINGLE_CUTS, len(exact)))
    own, reasons, num = 0, [], 0
    start = time.process_time()
    for bundle in tried:
        if time.process_time() - start > SINGLE_CUTS_S:
            break
        num += 1
        steps = rng.randrange(bundle.fewest, bundle.steps)
        plan = structure.plan(kept_units(structure, bundle.counts(steps), rng))
        own += plan.delivery == "module"
        if plan.delivery != "module":
            reasons.append(f"{bundle.groups[0].name}: {plan.delivery_because}")
    return {"single": own, "single_tried": num, "single_reasons": reasons}


def _status(record: dict[str, Any]) -> str:
    checks = record["checks"]
    wrong = [checks[name] for name in ("equal", "params", "macs", "state_dict", "batch", "flags")]
    if any(text and not _raised(text) for text in wrong):
        return "WRONG"
    if any(checks.values()):
        return "crash"
    return "pass"


def _raised(text: str) -> bool:
    return "Error: " in text
