"""`align_heads`: turn every attention head into its principal axes, so that few of its dimensions carry nearly all.

A trained head has no reason to prefer the coordinates it came in: what its queries and keys agree on, and what its
values hand on, is spread over all dimensions. The same network in the coordinates of `bases` has the dimensions in the
order of what they carry, the least ones last, and those can go at little cost. Nothing else changes: the new network
computes what the old one did, to rounding, and any criterion, budget and repair can follow.

Moments are of what passes: queries and keys at the outputs of the modules that make them, mixed values at the input of
the module that reads them. That reader's side is the second moment of its columns, all of its outputs counting alike.
(Weighing outputs by the curvature of the loss made it worse, and so did nothing for scores to take the mean of the keys
off, which a softmax does not see: experiments/LOG.md.)

Every turn is tried on a few samples; one that changes what the network computes is taken back.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.alignment.bases import principal_turn
from apoptosis.alignment.bonds import Bond, NoBondError, Slot, possible_bonds
from apoptosis.errors import DataError, NonFiniteError
from apoptosis.masks import masks_of
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.structure import Group, Structure, copy_with, model_tensors
from apoptosis.task import Batch, Task, tensors_in

__all__ = ["Aligned", "align_heads"]

SAMPLES = 4
"""That every turn is tried on."""

SAME = 1e-3
"""How far outputs may be from those before, of the largest: float32 adds up to 1e-5, another network is elsewhere."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """The network in new coordinates.

    Attributes:
        model: computes what the given one does.
        energies: by name of each group that was turned, (units,): the share of E (a' b')² that each dimension carries
            in all heads, falling.
        left_alone: by name of each other group of dimensions, why not.
    """

    model: nn.Module
    energies: dict[str, Tensor]
    left_alone: dict[str, str]


def align_heads(
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    groups: Iterable[Group] | None = None,
) -> Aligned:
    """The same network with the dimensions of its attention heads in the order of what they carry.

    Args:
        model: the one that `structure` describes; nothing of it changes.
        structure: its groups; those of heads tell which entries belong to one head.
        batches: data, labelled or not, read once; not at all where there is nothing to turn.
        task: what a batch is; classification unless said.
        groups: those to turn; all unless given.

    Returns:
        A copy, or the model itself where nothing was turned.

    Raises:
        DataError: there are no samples.
        NonFiniteError: NaN or infinity passes a head.

    >>> from apoptosis.models import ViTOptions, vit
    >>> from apoptosis.structure import trace
    >>> images = torch.randn(8, 3, 8, 8)
    >>> net = vit(ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=2, num_classes=3))
    >>> found = align_heads(net, trace(net, images[:1]), [images])
    >>> sorted(found.energies), found.left_alone
    (['blocks.0.attn.qkv:qk_dim', 'blocks.0.attn.qkv:v_dim'], {})
    """
    task = task or Task.classification()
    left_alone: dict[str, str] = {}
    ways: dict[str, list[tuple[Bond, ...]]] = {}
    for group in structure.groups if groups is None else groups:
        if group.kind.endswith("_dim"):
            try:
                bonds = list(possible_bonds(structure, group))
                _check_can_turn(model, group)
            except NoBondError as why:
                left_alone[group.name] = str(why)
            else:
                ways[group.name] = bonds
    if not ways:
        return Aligned(model, {}, left_alone)
    turned = copy_with(model, {})
    energies: dict[str, Tensor] = {}
    with _quietly(turned):
        slots = dict.fromkeys(s for bonds in ways.values() for way in bonds for s in _watched(way))
        moments, samples = _moments(turned, slots, batches, task)
        trial = _Trial(turned, task, samples)
        for name, bonds in track(ways.items(), "aligning heads"):
            for way in bonds:
                if (found := _turned(trial, way, moments)) is not None:
                    energies[name] = found
                    break
            else:
                left_alone[name] = "its coordinates mean something to the network"
    return Aligned(turned if energies else model, energies, left_alone)


def _check_can_turn(model: nn.Module, group: Group) -> None:
    """Refuse what turning would break, or what trying could not show to be right.

    Raises:
        NoBondError: it says why.
    """
    held, masked = model_tensors(model), masks_of(model)
    masks = set() if masked is None else set(masked.masks)
    for own in group.slices:
        tensor = held[own.tensor]
        if own.tensor in masks:
            raise NoBondError(
                f"{own.tensor} is masked, and mixing its entries would fill the zeros"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise NoBondError(
                f"{own.tensor} has numbers of {tensor.dtype}, which would be rounded again; convert to float32 first"
            )


def _turned(trial: "_Trial", way: tuple[Bond, ...], moments: "_Moments") -> Tensor | None:
    """Turn all bonds of a group in place; None, and nothing turned, where that changes what the network computes."""
    energies: list[Tensor] = []
    with trial.changing(way) as change:
        for bond in way:
            turns, found = zip(
                *map(principal_turn, *_sides(trial.held, bond, moments)), strict=True
            )
            turn = torch.stack(turns)
            _turn_(trial.held, bond.left, turn)
            for slot in bond.right:
                _turn_(trial.held, slot, torch.linalg.inv(turn).mT)
            energies.append(torch.stack(found).sum(0).cpu())
        change.is_kept = trial.is_same()
    shares = [own / own.sum().clamp_min(torch.finfo(own.dtype).tiny) for own in energies]
    return torch.stack(shares).mean(0) if change.is_kept else None


def _sides(held: dict[str, Tensor], bond: Bond, moments: "_Moments") -> tuple[Tensor, Tensor]:
    """C_a and C_b of every head."""
    right = bond.right
    if right[0].side == "output":
        return moments.of(bond.left), torch.stack([moments.of(own) for own in right]).sum(0)
    columns = [rows @ rows.mT for rows in (_rows(held, own, *own.places[0]) for own in right)]
    return (
        torch.stack([moments.of(own) for own in right]).sum(0),
        torch.stack(columns).sum(0),
    )


def _watched(way: tuple[Bond, ...]) -> Iterator[Slot]:
    """Slots whose activations count."""
    for bond in way:
        if bond.right[0].side == "output":
            yield bond.left
        yield from bond.right


def _rows(held: dict[str, Tensor], slot: Slot, name: str, dim: int) -> Tensor:
    """What a parameter has for a slot, (heads, units, the rest), in float64."""
    lines = held[name].detach().movedim(dim, 0)
    lines = lines.reshape(len(lines), -1)
    return lines[torch.from_numpy(slot.entries).to(lines.device)].double()


def _turn_(held: dict[str, Tensor], slot: Slot, turn: Tensor) -> None:
    for name, dim in slot.places:
        rows = turn @ _rows(held, slot, name, dim)
        lines = held[name].movedim(dim, 0)
        where = torch.from_numpy(slot.entries).flatten().to(lines.device)
        lines[where] = rows.flatten(0, 1).view(-1, *lines.shape[1:]).to(lines)


class _Moments:
    """Second moments of slots, (heads, units, units) in float64, summed over all that passes."""

    def __init__(self) -> None:
        self._sums: dict[Slot, Tensor | float] = {}

    def add(self, slot: Slot, passed: Tensor) -> None:
        entries = torch.from_numpy(slot.entries).to(passed.device)
        lines = passed.detach().movedim(slot.dim, -1).flatten(0, -2)[:, entries].double()
        products = torch.einsum("phu,phv->huv", lines, lines)
        self._sums[slot] = self._sums.get(slot, 0.0) + products

    def of(self, slot: Slot) -> Tensor:
        found = self._sums[slot]
        assert isinstance(found, Tensor), "a sum of at least one product"
        return found

    def check_finite(self) -> None:
        for slot in self._sums:
            if not bool(self.of(slot).isfinite().all()):
                raise NonFiniteError(
                    f"NaN or infinity passes layer {slot.module!r}. Look for bad values in the data, or for a network "
                    "that overflows its number type."
                )


def _moments(
    model: nn.Module, slots: Iterable[Slot], batches: Iterable[Batch], task: Task
) -> tuple[_Moments, Batch]:
    """What passes the slots, and a few samples of it."""
    found, samples = _Moments(), None
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(_seeing(model.get_submodule(slot.module), slot, found))
        for batch in track(batches, "what heads carry"):
            if any(tensor.numel() for tensor in tensors_in(batch)):
                samples = next(iter(task.split(batch, SAMPLES))) if samples is None else samples
                _run(model, batch, task)
    if samples is None:
        raise DataError(
            "Attention heads were to be aligned and saw no samples: the batches are empty or were used up by an "
            "earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    found.check_finite()
    return found, samples


@contextmanager
def _seeing(module: nn.Module, slot: Slot, moments: _Moments) -> Iterator[None]:
    """Add up what the first tensor of each call shows of a slot."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        moments.add(slot, next(tensors_in((args, kwargs))))

    def after(_: nn.Module, _args: Any, output: Any) -> None:
        moments.add(slot, next(tensors_in(output)))

    if slot.side == "input":
        hook = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = module.register_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


@dataclass
class _Change:
    """Of parameters: what they were, and whether they stay as they are."""

    before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    is_kept: bool = False


class _Trial:
    """A network that is turned in place, and what it computed before, on a few samples."""

    def __init__(self, model: nn.Module, task: Task, samples: Batch) -> None:
        self.held = model_tensors(model)
        self._model, self._task, self._samples = model, task, samples
        self._wanted = self._outputs()

    def _outputs(self) -> Tensor:
        return self._task.outputs(_run(self._model, self._samples, self._task)).double()

    def is_same(self) -> bool:
        """Whether the network still computes what it did."""
        found = self._outputs()
        room = SAME * float(self._wanted.abs().max())
        return bool((found - self._wanted).abs().max() <= room)  # NaN is not

    @contextmanager
    def changing(self, way: tuple[Bond, ...]) -> Iterator[_Change]:
        """Parameters are put back unless the change is kept."""
        names = {name for bond in way for s in (bond.left, *bond.right) for name, _ in s.places}
        change = _Change({name: self.held[name].detach().clone() for name in names})
        try:
            yield change
        finally:
            if not change.is_kept:
                for name, before in change.before.items():
                    self.held[name].copy_(before)


def _run(model: nn.Module, batch: Batch, task: Task) -> Any:
    """One forward, on copies of the batch's inputs."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, task.inputs(batch))
    return model(*args, **kwargs)


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients, compiled parts or products in TF32; random numbers go on as they would."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with ExitStack() as stack:
        stack.enter_context(in_eval_mode(model))
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_exact_products())
        yield


@contextmanager
def _exact_products() -> Iterator[None]:
    """What TF32 rounds off is more than a right turn changes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
