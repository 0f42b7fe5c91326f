"""One block on its way to new weights, all of its layers at once: small steps on what its sum lacks.

With x what the small network, mended up to here, sends into the block, z(θ) what becomes of the last layer's outputs
and z_dense what that is in the dense network,

    least  Σ ‖z_dense − z(θ)‖²       over the weights and biases θ of all layers inside,

as far as a ReLU behind z shows it (`targets`). The layers inside are free to make something else of what they have, if
the block as a whole comes nearer; fitted one by one they cannot. No closed form: Adam, on a few samples at a time. Its
unknowns are θ in units of each layer's own size as the norms behind it let it be heard, so that one rate suits all.

Some of the samples are held out. What was found is taken as far as it holds on them: as a whole, half, a quarter of the
way, or not at all.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from apoptosis.curvature.linear_maps import as_matrix, output_dim
from apoptosis.errors import NonFiniteError
from apoptosis.masks import masks_of
from apoptosis.passing import passing
from apoptosis.repair.blocks import Block, within
from apoptosis.repair.fits import LayerFit
from apoptosis.repair.memory import is_full
from apoptosis.repair.networks import Both, Networks
from apoptosis.repair.reaching import Passed, Watched, reach
from apoptosis.repair.survey import Layer
from apoptosis.repair.targets import Target
from apoptosis.structure import Norm
from apoptosis.task import tensors_in
from apoptosis.training.schedules import one_cycle

__all__ = ["Descent", "fit_block_"]

BETAS = (0.9, 0.99)
HELD_OUT = 8
"""Every so many pieces one; none of fewer than half as many."""
PARTS = (1.0, 0.5, 0.25)
TINY = 1e-10
"""Of what is wanted: a block that misses less has nothing to mend."""


@dataclass(frozen=True)
class Descent:
    """How often each sample comes, how long steps are (in a layer's root mean square weights), who draws the order."""

    epochs: int
    learning_rate: float
    seed: int


def fit_block_(
    block: Block, networks: Networks, pieces: Sequence[Both], descent: Descent
) -> LayerFit | None:
    """Change the layers of a block; None if it is left alone, with the reason noted where there is one.

    Raises:
        NonFiniteError: NaN or infinity passes it.
        RuntimeError: memory has no room for its steps.
    """
    sides = _Sides.of(block, networks)
    unknowns = _unknowns(block, networks)
    samples = [sides.sample(*both) for both in pieces if _has_samples(both)]
    if not samples:
        return None
    try:
        for name in sides.leaking(unknowns, samples[0]):
            del unknowns[name]
        found = _descended(sides, unknowns, samples, descent)
    except RuntimeError as error:
        if is_full(error):
            raise
        # of the model's own code, or of torch: nobody has run it with gradients yet
        why = str(error).partition("\n")[0]
        networks.left_alone[block.path] = f"it cannot be run with gradients ({why})"
        return None
    if found is not None:
        module = networks.mended.get_submodule(block.path)
        with torch.no_grad():
            for name, value in found.values.items():
                module.get_parameter(name).copy_(value)
    return found and LayerFit(block.path, found.before, found.after)


@dataclass(frozen=True, eq=False)
class _Unknown:
    """A parameter: where it starts, and the unit it is sought in, 0 where it stays as it is."""

    start: Tensor
    unit: Tensor

    def at(self, u: Tensor) -> Tensor:
        """Its value, so many units from the start."""
        return self.start + (self.unit * u).to(self.start.dtype)


@dataclass(frozen=True, eq=False)
class _Sample:
    """What the block is called with, what its end is added to if that is known by then, and what the sum should be."""

    given: Passed
    wanted: Tensor


@dataclass(frozen=True, eq=False)
class _Found:
    values: dict[str, Tensor]
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class _Sides:
    """A block in the small network and in the dense one; `shift` is a bias that z is shifted by."""

    block: Block
    small: nn.Module
    dense: nn.Module
    end: Target
    shift: str | None

    @staticmethod
    def of(block: Block, networks: Networks) -> "_Sides":
        """With the numbers that both hold now."""
        end = Target.of(block.end, networks.dense, networks.mended)
        small, dense = (own.get_submodule(block.path) for own in (networks.mended, networks.dense))
        return _Sides(block, small, dense, end, _shift(block, block.end, small))

    def sample(self, ours: Passed, theirs: Passed) -> _Sample:
        """Of what both are about to be called with."""
        made = self._reach(self.dense, {}, theirs, self.block.end.target)
        return _Sample(ours, _sum(self.end.theirs, *self.end.of_dense(made)))

    def missing(self, values: Mapping[str, Tensor], sample: _Sample) -> Tensor:
        """What z lacks with these weights, as far as it will be seen."""
        made = self._reach(self.small, values, sample.given, self.block.end.path)
        z = _sum(self.end.ours, *self.end.of_small(made))
        if self.shift is not None and self.shift in values:
            before = self.small.get_parameter(self.shift).detach()
            z = z + (values[self.shift] - before).to(z.dtype)[:, None]
        return self.end.as_far_as_seen(sample.wanted, z) - z

    def wanted(self, sample: _Sample) -> Tensor:
        """What there is to be seen of z in the dense network."""
        return self.end.seen(sample.wanted)

    def leaking(self, unknowns: Mapping[str, _Unknown], sample: _Sample) -> list[str]:
        """Parameters that change more than z of what the block gives: these are not free."""
        values = {name: own.start.clone().requires_grad_() for name, own in unknowns.items()}
        watched = self._watched(self.small, self.block.end.path)
        with torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(_cut_off(watched.module, "output"))
            if watched.spot is not None:
                stack.enter_context(_cut_off(*watched.spot))
            given = _called(self.small, values, sample.given)
            loose = [own.sum() for own in tensors_in(given) if own.requires_grad]
            if not loose:
                return []
            slopes = torch.autograd.grad(
                torch.stack([own.double() for own in loose]).sum(),
                list(values.values()),
                allow_unused=True,
            )
        found: dict[str, Any] = dict(zip(values, slopes, strict=True))
        return [name for name, slope in found.items() if slope is not None and slope.any()]

    def _reach(
        self, side: nn.Module, values: Mapping[str, Tensor], given: Passed, end: str
    ) -> Passed:
        """Call one of the two as far as its end."""
        watched = {end: self._watched(side, end)}
        seen = reach(partial(_called, side, values, given), watched)[end]
        return seen if watched[end].spot else replace(seen, other=given.other)

    def _watched(self, side: nn.Module, end: str) -> Watched:
        spot, path = self.block.spot_inside, self.block.path
        inside = spot and (side.get_submodule(within(path, spot.module)), spot.side)
        return Watched(side.get_submodule(within(path, end)), inside)


def _called(side: nn.Module, values: Mapping[str, Tensor], given: Passed) -> Any:
    """On copies, for a forward may write to what it is given."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, given.given)
    return functional_call(side, dict(values), args, kwargs)


def _sum(affine: tuple[Tensor, Tensor], made: Tensor, *others: Tensor) -> Tensor:
    """z = a ⊙ y + c + other, (samples, outputs, places), in single precision or better."""
    dtype = torch.promote_types(made.dtype, torch.float32)
    a, c = (own.flatten()[:, None].to(dtype) for own in affine)
    z = torch.addcmul(c, a, made.to(dtype))
    return z + others[0].to(dtype) if others else z


def _unknowns(block: Block, networks: Networks) -> dict[str, _Unknown]:
    """Weights and biases of all layers, by their names in the block.

    The unit of a layer is the root mean square of what its weights amount to behind its norm: a ⊙ W.
    """
    masks, small = masks_of(networks.mended), networks.mended.get_submodule(block.path)
    found: dict[str, _Unknown] = {}
    for layer in block.layers:
        target = Target.of(layer, networks.dense, networks.mended)
        module: Any = target.module
        name, kept = f"{layer.path}.weight".removeprefix("."), None
        if masks is not None and name in masks.masks:
            kept = masks.masks[name].kept().to(module.weight.device)
        heard = target.ours[0] * as_matrix(module, module.weight.detach()).double()
        size = heard.square().mean().sqrt()
        of_rows = target.as_weights(size.expand_as(target.ours[0])).abs().flatten()
        sides = [1] * module.weight.ndim
        sides[output_dim(module)] = -1
        unit = of_rows.view(sides).expand_as(module.weight)
        found[within(block.path, name)] = _unknown(
            module.weight, unit if kept is None else unit * kept
        )
        if module.bias is not None:
            bias = f"{layer.path}.bias".removeprefix(".")
            found[within(block.path, bias)] = _unknown(module.bias, of_rows)
        elif (shift := _shift(block, layer, small)) is not None:
            own = small.get_parameter(shift)
            found[shift] = _unknown(own, size.expand_as(own))
    return found


def _unknown(parameter: Tensor, unit: Tensor) -> _Unknown:
    start = parameter.detach().clone()
    return _Unknown(start, unit.to(torch.promote_types(start.dtype, torch.float32)))


def _shift(block: Block, layer: Layer, small: nn.Module) -> str | None:
    """The bias of the norm that is last on the road of a layer without one, where the block has it as a parameter."""
    maps = layer.outlet.maps if layer.outlet is not None else ()
    name = maps[-1].bias if maps and isinstance(maps[-1], Norm) else None
    if name is None or not block.holds(name):
        return None
    own = within(block.path, name)
    return (
        own if own in dict(small.named_parameters()) else None
    )  # frozen norms keep theirs as buffers


def _descended(
    sides: _Sides, unknowns: Mapping[str, _Unknown], samples: Sequence[_Sample], descent: Descent
) -> _Found | None:
    """Better values, on samples that they were not sought on; None if there is nothing to mend."""
    held = samples[HELD_OUT // 2 - 1 :: HELD_OUT]
    seen = [own for own in samples if own not in held] or list(samples)
    judges = held or seen

    def missed(values: Mapping[str, Tensor]) -> float:
        return sum(_squares(sides.missing(values, own)) for own in judges)

    values = {name: own.start for name, own in unknowns.items()}
    wanted = sum(_squares(sides.wanted(own)) for own in judges)
    after = before = missed(values)
    if not math.isfinite(before + wanted):
        raise NonFiniteError(
            f"Block {sides.block.path!r} was to be fitted, and NaN or infinity passes it in the dense or the small "
            "network. Look for bad values in the data, or for a network that overflows its number type."
        )
    if before <= TINY * wanted:
        return None
    way = _descend(sides, unknowns, seen, descent)
    for part in PARTS:
        further = {name: own.at(part * way[name]) for name, own in unknowns.items()}
        if (found := missed(further)) < before:
            values, after = further, found
            break
    return _Found(values, before / (wanted or 1.0), after / (wanted or 1.0))


def _descend(
    sides: _Sides, unknowns: Mapping[str, _Unknown], samples: Sequence[_Sample], descent: Descent
) -> dict[str, Tensor]:
    """The way that steps take, each on one of the samples, in the units of the unknowns."""
    us = {name: torch.zeros_like(own.unit).requires_grad_() for name, own in unknowns.items()}
    generator = torch.Generator().manual_seed(descent.seed)
    optimizer = torch.optim.Adam(us.values(), descent.learning_rate, BETAS)
    num_steps = descent.epochs * len(samples)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: one_cycle(n / num_steps))
    for _ in range(descent.epochs):
        for which in torch.randperm(len(samples), generator=generator).tolist():
            with torch.enable_grad():
                values = {name: own.at(us[name]) for name, own in unknowns.items()}
                loss = sides.missing(values, samples[which]).square().mean()
            slopes = torch.autograd.grad(loss, list(us.values()), allow_unused=True)
            for own, slope in zip(us.values(), slopes, strict=True):
                own.grad = slope
            optimizer.step()
            schedule.step()
    return {name: own.detach() for name, own in us.items()}


def _cut_off(module: nn.Module, side: str) -> AbstractContextManager[None]:
    """Let no gradient pass what goes into a module, or comes out of it."""
    return passing(module, side, partial(tree_map_only, Tensor, Tensor.detach))


def _has_samples(both: Both) -> bool:
    return any(own.numel() for own in tensors_in(both[0].given))


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
