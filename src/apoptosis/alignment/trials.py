"""Whether a turn leaves what a network computes as it is: tried on a twin with random weights, in float64.

Trained weights cannot tell. A layer scale near zero, an activation that is nearly linear where the data are, or one
logit that is masked by a huge number hide a wrong turn, and rounding in float32 looks like one. On a twin both show:

- M is random, none that data would lead to, and is tried 64 times as large and as small: what clips or saturates shows.
- What M and M⁻ᵀ on the two sides change is held against what M changes on the left alone. Both pass through the same
  network, so however little of a head comes through, it does so for both. Where the left alone changes nothing there is
  nothing to see: a softmax over one position is 1 whatever the scores are.
- Entries are compared one by one, and infinite ones must stay so. What one side changes is the median over those that
  it changes at all: a huge one says nothing of the others.
- Groups are turned together first: most networks pass, and a run for each of them is a run of the whole network.
- What a run draws or counts is put back after it, so that dropout which is never off does no harm.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from apoptosis.alignment.bonds import Bond, NoBondError, Slot, Way
from apoptosis.alignment.quiet import quietly
from apoptosis.alignment.turning import turn_, turn_slot_
from apoptosis.structure import Example, as_double, model_tensors, randomised, redrawn
from apoptosis.task import Task

__all__ = ["Trial"]

SAME = 1e-4
"""What a turn may change, of what its left side alone changes.

Measured on forty architectures, right ones change at most 1e-13, or 3e-6 where code casts to float32 on its way. Wrong
ones change 0.3 and more, and still 9e-4 after 48 layers where nothing was wrong but x + |x|/1000 in the place of x.
Where code casts to 16 bits a right one makes 1e-4 to 3e-2, and is refused.
"""

SEEN = 1e-9
"""How much of an entry must change to be more than rounding."""

SIZES = (64.0, 1 / 64)
"""Of turns; powers of two, which round nothing."""

MOST = 2**20
"""Entries of the outputs that are compared: those of language models fill memory."""

MEANT = "its coordinates mean something to the network"
HIDDEN = "the data do not show whether its coordinates mean something to the network"
RANDOM = "two runs of the network on the same data differ"


class Trial:
    """A twin of a network; every turn is put back after it was tried.

    Args:
        model: the network, which stays as it is.
        task: how to find the outputs.
        example: real inputs, for their shape and whatever else code may look at.
    """

    def __init__(self, model: nn.Module, task: Task, example: Example) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._twin = randomised(model, self._generator)
        self._held, self._task = model_tensors(self._twin), task
        example = as_double(example)
        self._examples = (example, redrawn(example, self._generator))
        self._wanted: dict[int, Tensor] = {}
        self._alone: dict[tuple[int, Slot], float] = {}

    def first_right(self, ways: Sequence[Way]) -> Way:
        """The first way whose turns leave the outputs as they are.

        Raises:
            NoBondError: none does, or that cannot be told; it says why.
        """
        for number in range(len(self._examples)):  # real inputs may be all alike, or zeros
            verdicts: set[str] = set()
            for way in ways:
                if not (verdict := self._verdict(way, number)):
                    return way
                verdicts.add(verdict)
            if HIDDEN not in verdicts:
                raise NoBondError(MEANT)
        raise NoBondError(HIDDEN)

    def right_together(self, ways: Mapping[str, Way]) -> frozenset[str]:
        """Names of those ways whose turns, made all at once, leave the outputs as they are; none where they do not.

        What is random does not cancel: where all together pass, each does. Others are to be tried one by one.
        """
        try:
            alone = {
                name: [self._moved_alone(bond.left, 0) for bond in way]
                for name, way in ways.items()
            }
            seen = [name for name, own in alone.items() if own and all(own)]
            if not seen:
                return frozenset()
            bonds = [bond for name in seen for bond in ways[name]]
            room = SAME * min(min(alone[name]) for name in seen)
            right = all(self._leaves_all(bonds, size, 0, room) for size in SIZES)
        except NoBondError:
            return frozenset()
        return frozenset(seen if right else ())

    def _verdict(self, way: Way, number: int) -> str:
        """Why a way is not to be taken; nothing where it is right."""
        alone = [self._moved_alone(bond.left, number) for bond in way]
        if not any(alone):
            return HIDDEN
        room = SAME * min(own for own in alone if own)
        if not all(self._leaves_all(way, size, number, room) for size in SIZES):
            return MEANT
        return "" if all(alone) else HIDDEN

    def _leaves_all(self, bonds: Iterable[Bond], size: float, number: int, room: float) -> bool:
        """True if outputs are the same once bonds were turned."""
        bonds = list(bonds)
        with self._put_back(slot for bond in bonds for slot in (bond.left, *bond.right)):
            for bond in bonds:
                turn_(self._held, bond, size * self._random_turn(bond.left))
            return _same(self._outputs(number), self._before(number), room)

    def _before(self, number: int) -> Tensor:
        """What the twin computes."""
        if number not in self._wanted:
            wanted = self._outputs(number)
            if not _same(self._outputs(number), wanted, SEEN * _typical(wanted.abs())):
                raise NoBondError(RANDOM)
            self._wanted[number] = wanted
        return self._wanted[number]

    def _moved_alone(self, slot: Slot, number: int) -> float:
        """How far outputs typically go when one side is turned and the other is not; 0 where nothing is seen."""
        if (number, slot) not in self._alone:
            wanted = self._before(number)
            with self._put_back([slot]):
                turn_slot_(self._held, slot, self._random_turn(slot))
                moved = (self._outputs(number) - wanted).abs()
            self._alone[number, slot] = _typical(moved[moved > SEEN * wanted.abs()])
        return self._alone[number, slot]

    def _random_turn(self, slot: Slot) -> Tensor:
        """(heads, units, units), not orthogonal: cosines are the same after those. Stretches by a half up to two."""
        heads, units = slot.entries.shape
        noise = torch.randn(2, heads, units, units, generator=self._generator, dtype=torch.float64)
        left, right = torch.linalg.qr(noise).Q
        return left * torch.logspace(-1, 1, units, base=2.0, dtype=torch.float64) @ right

    @contextmanager
    def _put_back(self, slots: Iterable[Slot]) -> Iterator[None]:
        before = {
            name: self._held[name].detach().clone() for slot in slots for name, _ in slot.places
        }
        with torch.no_grad():
            try:
                yield
            finally:
                for name, own in before.items():
                    self._held[name].copy_(own)

    def _outputs(self, number: int) -> Tensor:
        """(entries,) in float64.

        Raises:
            NoBondError: the twin does not run; whatever its code raises is as good a reason as any.
        """
        example = self._examples[number].map(Tensor.clone)
        with quietly(self._twin):
            try:
                raw = self._task.outputs(example.run(self._twin))
            except Exception as error:
                line = str(error).strip().partition("\n")[0]
                raise NoBondError(
                    f"a copy in float64 with random weights does not run ({type(error).__name__}: {line})"
                ) from error
        entries = raw.detach().flatten()
        return entries[:: -(-len(entries) // MOST) or 1].to(torch.float64, copy=True)


def _same(found: Tensor, wanted: Tensor, room: float) -> bool:
    """Whether each entry is where it was, or as infinite."""
    if found.shape != wanted.shape or not torch.equal(found.isfinite(), wanted.isfinite()):
        return False
    finite = wanted.isfinite()
    found, wanted = found[finite], wanted[finite]
    return bool(((found - wanted).abs() <= room).all())


def _typical(sizes: Tensor) -> float:
    """The median of what is finite."""
    sizes = sizes[sizes.isfinite()]
    return float(sizes.median()) if len(sizes) else 0.0
