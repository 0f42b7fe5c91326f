"""Configurations that libraries save beside a network's weights: set where one can say the cut, else refused.

transformers writes a configuration in `save_pretrained` (so does its `Trainer`) and builds the network from it in
`from_pretrained`, at the widths that stand there. After a cut the numbers are looked for with which the network's own
class builds one of the cut shapes: candidates stand in the same proportion to a size that is wrong as before, and every
one is tried by building (weights on the meta device). What was found is taken only if the network built from it does
what the cut one does: the same attributes and buffers where the new numbers change any, the same outputs on an example.
Else `save_pretrained` of the cut network says why it will not write a folder that nobody could load.

No library is imported: a network takes part that has `save_pretrained` and a `config`.
"""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.modes import in_eval_mode
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example
from apoptosis.structure.twins import TOLERANCE, compare, distance, redrawn

__all__ = ["Refusal", "settle_configurations_"]

MOST_BUILT = 40
"""Networks that are built in search of a configuration; each takes about as long as a small forward pass."""
SAVE = "save_pretrained"

Key: TypeAlias = tuple[str | int, ...]
Number: TypeAlias = int | float


class Refusal:
    """Stands in the place of a method that would do what is wrong after a cut, and says so when it is called."""

    def __init__(self, error: type[ApoptosisError], because: str) -> None:
        """`error` is raised, with `because`."""
        self.error = error
        self.because = because

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise self.error(self.because)


def settle_configurations_(model: nn.Module, example: Example | None) -> None:
    """Make what a cut network saves by itself what it is, or let it refuse.

    Args:
        model: the cut network, the only one that has its configuration objects.
        example: what to call it with, to see that nothing else changes with the numbers.
    """
    done: list[str] = []
    for path, module in model.named_modules():
        if not callable(getattr(type(module), SAVE, None)):
            continue
        if any(path == own or path.startswith(f"{own}." if own else "") for own in done):
            continue
        done.append(path)
        for part in module.modules():
            if isinstance(vars(part).get(SAVE), Refusal):
                del vars(part)[SAVE]
        if because := _why_not_settled_(module, _call_of(model, module, example)):
            _refuse_to_save_(module, because)


def _refuse_to_save_(module: nn.Module, because: str) -> None:
    refusal = Refusal(
        CheckpointError,
        f"`{SAVE}` was called on a cut {type(module).__name__}, and `from_pretrained` could not load what it would "
        f"write: {because}. Save it with `ap.save(folder, outcome)` and load it with `ap.load(folder, dense)`. Widths "
        'that one number can say, `Selection(widths="uniform", kinds=("hidden",))`, are written to its configuration.',
    )
    for part in module.modules():
        if callable(getattr(type(part), SAVE, None)):
            vars(part)[SAVE] = refusal


def _why_not_settled_(module: Any, call: Example | None) -> str:
    """Set the configuration; why not, where that cannot be."""
    config = getattr(module, "config", None)
    if not (callable(getattr(config, "to_dict", None)) and hasattr(type(config), "from_dict")):
        return "it writes down how the dense network was made"
    wanted, at_first = _shapes(module), _built(module, config)
    if isinstance(at_first, str):
        return f"{type(config).__name__} does not build it ({at_first})"
    wrong = _wrong(at_first, wanted)
    if not wrong:
        return ""
    if any(own.built == 0 for own in wrong):
        return f"{type(config).__name__} builds a network of other tensors ({wrong[0].tensor})"
    if because := _uneven(config, wrong):
        return because
    if call is None or any(p.is_meta for p in module.parameters()):
        return (
            "the numbers of its configuration would have to change, and without `example_inputs` to `cut` nobody can "
            "try whether anything else depends on them"
        )
    why = ""
    for changes, fresh in _Search(module, config, wanted).solutions({}, wrong):
        if not (because := _why_not_taken_(module, (at_first, fresh), changes, call)):
            return ""
        why = why or f"its configuration would have to say {_told(changes)}, and {because}"
    own = min(wrong, key=lambda one: one.tensor)
    return why or (
        f"no numbers of its {type(config).__name__} were found that build it; {own.tensor} has {own.wanted} in the "
        f"place of {own.built}, and {len({w.tensor for w in wrong}) - 1} more tensors have other sizes"
    )


# ---------------------------------------------------------------------------------------------------- building


class _WeightsOnMeta(TorchFunctionMode):
    """Memory that waits for weights is made on the meta device, where initialising takes no time; the rest is real."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def _built(module: nn.Module, config: Any) -> nn.Module | str:
    """A network as `from_pretrained` would build it from what is written of a configuration; or why there is none."""
    try:
        with _quietly(), _WeightsOnMeta():
            return type(module)(_reread(config)).eval()
    except Exception as error:  # noqa: BLE001 - a library may raise anything at numbers it was not written for
        return _told_of(error)


def _reread(config: Any) -> Any:
    """What comes back of a configuration that was written, with the choices beside it that are not written."""
    found = type(config).from_dict(config.to_dict())
    for own, other in zip(_nodes(config), _nodes(found), strict=True):
        for key, value in vars(own).items():
            if key.startswith("_") and key.endswith("_internal"):
                vars(other)[key] = value
    return found


def _nodes(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    inside = [item for item in vars(config).values() if callable(getattr(item, "to_dict", None))]
    return [config, *(node for item in inside for node in _nodes(item))]


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    state = module.state_dict(keep_vars=True)
    return {name: tuple(t.shape) for name, t in state.items() if isinstance(t, Tensor)}


# ------------------------------------------------------------------------------------------------- the numbers


@dataclass(frozen=True)
class _Wrong:
    """A size that a built network has and the cut one has not; sizes of 0 where one of them has no such tensor."""

    tensor: str
    dim: int
    built: int
    wanted: int

    @property
    def place(self) -> tuple[str, int]:
        """Tensor and dimension."""
        return self.tensor, self.dim


def _wrong(built: nn.Module, wanted: Mapping[str, tuple[int, ...]]) -> list[_Wrong]:
    found, wrong = _shapes(built), list[_Wrong]()
    for name in sorted(found.keys() | wanted.keys()):
        own, other = found.get(name, ()), wanted.get(name, ())
        if len(own) != len(other):
            wrong.append(_Wrong(name, 0, 0, 0))
        sizes = enumerate(zip(own, other, strict=False))
        wrong += [_Wrong(name, dim, a, b) for dim, (a, b) in sizes if a != b]
    return wrong


@dataclass
class _Search:
    """Numbers with which the wanted shapes are built, found by building."""

    module: nn.Module
    config: Any
    wanted: Mapping[str, tuple[int, ...]]
    left: int = MOST_BUILT

    def solutions(
        self, changes: Mapping[Key, Number], wrong: list[_Wrong]
    ) -> Iterator[tuple[Mapping[Key, Number], nn.Module]]:
        """Every change that brings all sizes right, by one number after the other, each of which brings some right.

        Numbers that have nothing to do with each other are tried together first.
        """
        better: list[tuple[Mapping[Key, Number], list[_Wrong]]] = []
        for key, number in _candidates(self.config, wrong):
            if key in changes:
                continue
            more = {**changes, key: number}
            built, still = self._tried(more)
            if built is not None and not still:
                yield more, built
            elif built is not None and len(still) < len(wrong):
                better.append((more, still))
        better.sort(key=lambda own: len(own[1]))
        together = _together(changes, wrong, better)
        if len(together) > len(changes) + 1:
            built, still = self._tried(together)
            if built is not None and not still:
                yield together, built
            elif built is not None and len(still) < len(wrong):
                yield from self.solutions(together, still)
        for more, still in better:
            yield from self.solutions(more, still)

    def _tried(self, changes: Mapping[Key, Number]) -> tuple[nn.Module | None, list[_Wrong]]:
        if not self.left:
            return None, []
        self.left -= 1
        built = _built(self.module, _with(self.config, changes))
        if isinstance(built, str) or not _says(built, changes):
            return None, []
        still = _wrong(built, self.wanted)
        return (None, []) if any(own.built == 0 for own in still) else (built, still)


def _together(
    changes: Mapping[Key, Number],
    wrong: list[_Wrong],
    better: list[tuple[Mapping[Key, Number], list[_Wrong]]],
) -> Mapping[Key, Number]:
    """Changes of different numbers that bring different sizes right."""
    found, fixed = dict(changes), set[tuple[str, int]]()
    for more, still in better:
        own = {one.place for one in wrong} - {one.place for one in still}
        if not own & fixed and not (more.keys() - changes.keys()) & found.keys():
            found, fixed = {**found, **more}, fixed | own
    return found


def _uneven(config: Any, wrong: list[_Wrong]) -> str:
    """Why no number can say it: repeated layers have several widths, and the configuration has none for each layer."""
    if any(isinstance(key[-1], int) for key, _ in _numbers(config)):
        return ""
    widths: dict[tuple[str, int, int], dict[int, str]] = {}
    for own in sorted(wrong, key=lambda one: one.tensor):
        layer = re.sub(r"(?<![^.])\d+(?![^.])", "*", own.tensor)
        place = (layer, own.dim, own.built)
        widths.setdefault(place, {}).setdefault(own.wanted, own.tensor)
    for (*_, built), names in widths.items():
        if len(names) > 1:
            (one, first), (other, second) = list(names.items())[:2]
            return (
                f"{first} has {one} and {second} {other} in the place of {built}, and its configuration has one number "
                "for both"
            )
    return ""


def _candidates(config: Any, wrong: list[_Wrong]) -> Iterator[tuple[Key, Number]]:
    """Numbers of a configuration that a wrong size is a multiple or a part of, scaled alike; equal ones first."""
    sizes = dict.fromkeys((own.built, own.wanted) for own in wrong)
    for equal in (True, False):
        for key, number in _numbers(config):
            for built, wanted in sizes:
                if (number == built) is equal and (built % number == 0 or number % built == 0):
                    new = number * wanted / built
                    yield key, int(new) if new == int(new) else new


def _numbers(config: Any, path: Key = ()) -> Iterator[tuple[Key, int]]:
    """Every positive whole number of a configuration, with where it stands."""
    items = enumerate(config) if isinstance(config, list) else vars(config).items()
    for name, item in items:
        key = (*path, name)
        inside = callable(getattr(item, "to_dict", None)) or isinstance(item, list)
        if type(item) is int and item > 0:
            yield key, item
        elif inside and isinstance(name, str) and not name.startswith("_"):
            yield from _numbers(item, key)


def _with(config: Any, changes: Mapping[Key, Number]) -> Any:
    """A copy that says other numbers."""
    made = copy.deepcopy(config)
    _set_(made, changes)
    return made


def _set_(config: Any, changes: Mapping[Key, Number]) -> None:
    for (*path, last), number in changes.items():
        holder = config
        for key in path:
            holder = getattr(holder, str(key))
        if isinstance(last, int):
            holder[last] = number
        else:
            vars(holder)[last] = number


def _says(built: Any, changes: Mapping[Key, Number]) -> bool:
    """True if the numbers have survived being written and read."""
    found = dict[Key, Any](_numbers(built.config))
    return all(found.get(key, number) == number for key, number in changes.items())


def _told(changes: Mapping[Key, Number]) -> str:
    return ", ".join(f"{'.'.join(map(str, key))} = {number}" for key, number in changes.items())


# ------------------------------------------------------------------------------------------ nothing else changes


def _mirrored(
    module: nn.Module, at_first: nn.Module, fresh: nn.Module
) -> dict[tuple[nn.Module, str], int] | str:
    """Whole numbers of modules that follow from those of the configuration; or what else is not as it would be."""
    mirrored: dict[tuple[nn.Module, str], int] = {}
    parts, others = dict(at_first.named_modules()), dict(fresh.named_modules())
    for path, part in module.named_modules():
        if not type(parts.get(path)) is type(part) is type(others.get(path)):
            return f"{path or 'the network'}, a {type(part).__name__}, is not built from it"
        before, after = vars(parts[path]), vars(others[path])
        for name, own in vars(part).items():
            new, old = after.get(name), before.get(name)
            if type(own) not in (int, float) or type(new) not in (int, float) or own == new:
                continue
            if isinstance(new, int) and own == old:
                mirrored[part, name] = new
            elif type(own) is int or old != new:
                return f"{path}.{name} would be {new:.6g} and is {own:.6g}".lstrip(".")
    buffers = dict(module.named_buffers())
    old, new = dict(at_first.named_buffers()), dict(fresh.named_buffers())
    for name in sorted(buffers.keys() & new.keys() - fresh.state_dict().keys()):
        if buffers[name].shape != new[name].shape:
            return f"{name} would have shape {tuple(new[name].shape)}"
        changed = name not in old or not _alike(old[name], new[name])
        if changed and not _alike(buffers[name], new[name]):
            return f"{name} would hold other numbers"
    return mirrored


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equal but for the rounding of a number type."""
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    return torch.allclose(a.cpu().double(), b.cpu().double(), rtol=1e-2, atol=1e-6)


def _why_not_taken_(
    module: Any,
    built: tuple[nn.Module, nn.Module],
    changes: Mapping[Key, Number],
    call: Example,
) -> str:
    """Set the numbers if both the cut network and the one built from them compute what the cut network did."""
    at_first, fresh = built
    mirrored = _mirrored(module, at_first, fresh)
    if isinstance(mirrored, str):
        return mirrored
    held = [(part, vars(part)["config"]) for part in module.modules() if "config" in vars(part)]
    before = [(node, _copied(vars(node))) for node in _nodes(module.config)]
    numbers = {at: vars(at[0])[at[1]] for at in mirrored}
    try:
        calls = [call, redrawn(call, torch.Generator().manual_seed(0))]  # an example may be zeros
        expected = [_outputs(module, own) for own in calls]
        _set_(module.config, changes)
        _share_(module, module.config)
        for (part, name), number in mirrored.items():
            vars(part)[name] = number
        found = [_outputs(module, own) for own in calls]
        same = all(distance(*pair) <= TOLERANCE for pair in zip(found, expected, strict=True))
        fresh.load_state_dict(module.state_dict(), assign=True, strict=False)
        _lend_buffers_(fresh, module)
        if same and compare(fresh, module, calls) <= TOLERANCE:
            return ""
        because = "it computes something else then"
    except Exception as error:  # noqa: BLE001 - a library may raise anything
        because = _told_of(error)
    for part, config in held:
        vars(part)["config"] = config
    for node, own in before:
        vars(node).clear()
        vars(node).update(own)
    for (part, name), number in numbers.items():
        vars(part)[name] = number
    return because


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """With lists and dicts of their own; configurations inside stay the same objects."""
    return {
        key: copy.copy(item) if isinstance(item, (list, dict)) else item
        for key, item in attributes.items()
    }


def _outputs(module: nn.Module, call: Example) -> Any:
    with random_state_put_back(module), torch.no_grad(), in_eval_mode(module):
        torch.manual_seed(0)
        return call.map(Tensor.clone).run(module)


def _share_(module: nn.Module, config: Any) -> None:
    """One configuration for all that had it before a cut gave some a copy of their own."""
    kinds = [type(node) for node in _nodes(config)]
    for part in module.modules():
        own = vars(part).get("config")
        if own is not None and kinds.count(type(own)) == 1:
            vars(part)["config"] = next(n for n in _nodes(config) if type(n) is type(own))


def _lend_buffers_(fresh: nn.Module, module: nn.Module) -> None:
    """Buffers that are not saved: they have been compared, but for their number type and device."""
    parts = dict(module.named_modules())
    for path, part in fresh.named_modules():
        for name in part._buffers:
            if name in parts[path]._buffers:
                part._buffers[name] = parts[path]._buffers[name]


def _call_of(model: nn.Module, module: nn.Module, example: Example | None) -> Example | None:
    """How the model calls one of its modules on the example."""
    if example is None or module is model:
        return example
    calls: list[Example] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Example(args, kwargs))

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        _outputs(model, example)
    except Exception:  # noqa: BLE001 - what cannot be called cannot be tried
        return None
    finally:
        hook.remove()
    return calls[0] if calls else None


def _told_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
