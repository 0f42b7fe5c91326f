"""One network of the zoo, cut by Torch-Pruning and checked in the same way.

Plain use: magnitude of groups, ranked globally, the output layer ignored, no hints about heads. It takes a ratio of
channels; the one that leaves about the wanted share of MACs is searched for, while time allows. Its twin is the
original network with every entry zeroed that is gone, found by value, since all weights differ.
"""

import copy
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from zoo_checks import call, difference, float_outputs, recount_macs, round_trips, trains
from zoo_models import BATCH, OTHER_BATCH, SHARE, Entry, build

__all__ = ["LIMIT_S", "measure"]

LIMIT_S = 90
FIRST_RATIO = 0.25
NEAR_ENOUGH = 0.02
TRIALS = 5
TOLERANCE = 1e-6  # it is not asked for more


class _TooLong(Exception):  # noqa: N818 - a signal, caught here
    """The limit has passed."""


def measure(entry: Entry, seed: int) -> dict[str, Any]:
    """What became of the network: `=mask`, `differs (norm)`, `wrong`, `error`, `timeout`, `no-op`."""
    record: dict[str, Any] = {"id": entry.id, "status": "error", "checks": {}, "note": ""}
    model = build(entry, seed)
    if entry.library == "transformers":
        model.config.use_cache = False  # a cache among the outputs is more than it can take
    inputs = entry.inputs(BATCH)
    with entry.in_float64():
        start = time.process_time()
        small = _pruned(model, inputs, record)
        record["seconds"] = time.process_time() - start
        if small is not None:
            _check(entry, model, small, inputs, record)
    return record


def _pruned(model: nn.Module, inputs: Any, record: dict[str, Any]) -> nn.Module | None:
    """The best of the search that fits into the time limit; None, with the reason, if there is none."""
    signal.signal(signal.SIGPROF, _raise_too_long)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # of CPU time: the machine may be busy
    found: nn.Module | None = None
    try:
        found = _searched(model, inputs, record)
    except _TooLong:
        record |= {
            "status": "timeout",
            "note": f"{record['stage']} takes over {LIMIT_S} s of CPU time",
        }
        found = record.pop("found", None)
    except Exception as error:  # noqa: BLE001 - the table says what happened
        record["note"] = f"{record['stage']}: {type(error).__name__}: {error}"
        found = record.pop("found", None)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    record.pop("found", None)
    return found


def _raise_too_long(*_: Any) -> None:
    raise _TooLong


def _searched(model: nn.Module, inputs: Any, record: dict[str, Any]) -> nn.Module:
    record["stage"] = "count"
    dense = recount_macs(model, inputs)
    ratio, nearest = FIRST_RATIO, float("inf")
    start = time.process_time()
    for trial in range(1, TRIALS + 1):
        small = _prune_once(model, inputs, ratio, record)
        record["stage"] = "forward"
        share = recount_macs(small, inputs) / dense
        if abs(share - SHARE) < nearest:
            nearest = abs(share - SHARE)
            record |= {"found": small, "ratio": ratio, "share": share}
        spent = time.process_time() - start
        if nearest <= NEAR_ENOUGH or share == 1.0 or spent * (1 + 2 / trial) > LIMIT_S:
            break
        # MACs go about with the square of the width.
        ratio = min(max(1 - (1 - ratio) * (SHARE / max(share, 0.01)) ** 0.5, 0.01), 0.95)
    return record["found"]


def _prune_once(model: nn.Module, inputs: Any, ratio: float, record: dict[str, Any]) -> nn.Module:
    import torch_pruning as tp

    small = copy.deepcopy(model)
    record["stage"] = "build"
    pruner = tp.pruner.MagnitudePruner(
        small,
        inputs,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=ratio,
        ignored_layers=_output_layers(small, inputs),
    )
    record["stage"] = "prune"
    pruner.step()
    return small


def _output_layers(model: nn.Module, inputs: Any) -> list[nn.Module]:
    """Layers whose output is an output of the model; if there is none, the last layer that runs."""
    made: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        leaf = next(module.children(), None) is None
        if leaf and isinstance(output, Tensor) and next(module.parameters(), None) is not None:
            made.append((module, output))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        results = float_outputs(call(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
    places = {result.untyped_storage().data_ptr() for result in results}
    found = [m for m, output in made if output.untyped_storage().data_ptr() in places]
    return found or [module for module, _ in made[-1:]]


def _check(
    entry: Entry, model: nn.Module, small: nn.Module, inputs: Any, record: dict[str, Any]
) -> None:
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    record["params_share"] = after / before
    if before == after:
        record |= {"status": "no-op", "note": "nothing was removed, nothing was said"}
        return
    twin = _twin(model, small)
    if twin is None:
        record |= {"status": "wrong", "note": "entries that stay cannot be told"}
        return

    def equal(batch: Any) -> str:
        found = difference(call(small, batch), call(twin, batch))
        record["error"] = max(found, record.get("error", 0.0))
        return "" if found <= TOLERANCE else f"differs by {found:.1e}"

    for name, check in {
        "equal": lambda: equal(inputs),
        "state_dict": lambda: round_trips(small, inputs),
        "train": lambda: trains(small, inputs),
        "batch": lambda: equal(entry.inputs(OTHER_BATCH)),
        "macs": lambda: _own_count(small, inputs, record),
        "flags": lambda: _ties(model, small),
    }.items():
        try:
            record["checks"][name] = check()
        except Exception as error:  # noqa: BLE001 - the table says what happened
            record["checks"][name] = f"{type(error).__name__}: {error}"
    if record["checks"]["equal"] == "":
        record["status"] = "=mask"
    elif "Error" in record["checks"]["equal"]:
        record |= {"status": "error", "note": f"forward: {record['checks']['equal']}"}
    else:
        record["status"] = "differs (norm)" if _norms_cut(model, small) else "wrong"


def _own_count(small: nn.Module, inputs: Any, record: dict[str, Any]) -> str:
    import torch_pruning as tp

    own = tp.utils.count_ops_and_params(copy.deepcopy(small), inputs)[0] * BATCH
    record["own_macs_ratio"] = own / recount_macs(small, inputs)
    far = abs(record["own_macs_ratio"] - 1) > 0.01
    return f"{record['own_macs_ratio']:.2f} times the recount" if far else ""


def _ties(model: nn.Module, small: nn.Module) -> str:
    before, after = (len(list(m.parameters())) for m in (model, small))
    return "" if before == after else "a tie of two parameters is broken"


def _norms_cut(model: nn.Module, small: nn.Module) -> bool:
    """Whether a norm whose statistic runs over channels has lost some: then removal is no masking."""
    new = dict(small.named_parameters())
    return any(
        new[f"{path}.{name}"].shape != p.shape
        for path, module in model.named_modules()
        if "Norm" in type(module).__name__ and "Batch" not in type(module).__name__
        for name, p in module.named_parameters(recurse=False)
        if f"{path}.{name}" in new
    )


def _twin(model: nn.Module, small: nn.Module) -> nn.Module | None:
    """The original with zeros where an entry is gone."""
    twin = copy.deepcopy(model)
    new = dict(small.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in twin.named_parameters(remove_duplicate=False):
            if name not in new or new[name].shape == parameter.shape:
                continue
            kept = _kept(dict(model.named_parameters(remove_duplicate=False))[name], new[name])
            if kept is None:
                return None
            parameter.mul_(kept)
    return twin


def _kept(old: Tensor, new: Tensor) -> Tensor | None:
    """A mask of the entries of `old` that are in `new`."""
    if old.ndim == new.ndim and new.numel():
        places = _places(old, new)
        if places is not None:
            mask = torch.zeros_like(old)
            mask[torch.meshgrid(*places, indexing="ij")] = 1.0
            return mask
    kept = torch.isin(old, new)
    return kept.to(old.dtype) if int(kept.sum()) == new.numel() else None


def _places(old: Tensor, new: Tensor) -> list[Tensor] | None:
    """Indices along each dimension, from the lines through the first entry, if the whole tensor agrees."""
    corner = (old == new.flatten()[0]).nonzero()
    if len(corner) != 1:
        return None
    places: list[Tensor] = []
    for dim in range(old.ndim):
        line = old[tuple(slice(None) if d == dim else int(c) for d, c in enumerate(corner[0]))]
        own = new[tuple(slice(None) if d == dim else 0 for d in range(new.ndim))]
        order = line.argsort()
        found = torch.searchsorted(line[order], own.contiguous()).clamp(max=len(line) - 1)
        places.append(order[found])
    same = old[torch.meshgrid(*places, indexing="ij")]
    return places if torch.equal(same, new) else None
