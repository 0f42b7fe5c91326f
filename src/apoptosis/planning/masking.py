"""`make_masks`: which single weights go. Exact counts, equal values in order of their place, nothing comes back."""

from collections.abc import Iterator, Mapping
from math import ceil, floor

import torch
from torch import Tensor, nn

from apoptosis.criteria import Scores
from apoptosis.errors import BudgetError, ConfigError, NonFiniteError, PlanMismatchError
from apoptosis.masks import Layer, Mask, MaskPlan, Pattern, check_fits, identity_masks
from apoptosis.planning.sparsity import Sparsity, num_of
from apoptosis.planning.thresholds import threshold

__all__ = ["check_not_emptied", "check_shares", "make_masks"]


def make_masks(
    model: nn.Module,
    values: Mapping[str, Tensor] | Scores,
    sparsity: Sparsity,
    *,
    start: MaskPlan | None = None,
) -> MaskPlan:
    """Masks that keep the largest values, exactly as many as asked for.

    Args:
        model: whose weights they are; read for names and shapes alone.
        values: what ranks the weights, by name, or scores; their sizes count, not their signs.
        sparsity: how many stay, or in which pattern.
        start: masks of before; what they removed stays removed, and is not ranked.

    Returns:
        Masks of every weight that `sparsity` is about, and those of `start`.

    Raises:
        BudgetError: a layer would lose its last weight, and `allow_empty` is not set.
        ConfigError: a name fits nothing, or M does not divide a layer's inputs.
        NonFiniteError: a value is NaN or infinite.
        PlanMismatchError: values or masks are of another model.

    >>> net = nn.Linear(4, 1)
    >>> masks = make_masks(net, {"weight": torch.tensor([[3.0, -4.0, 1.0, 1.0]])}, Sparsity(keep=0.75))
    >>> masks.kept("weight")
    tensor([[ True,  True,  True, False]])
    """
    if not isinstance(sparsity, Sparsity):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"The sparsity is {sparsity!r}; say what share of the weights may stay: Sparsity(keep=0.1)."
        )
    layers = sparsity.layers(model)
    before = identity_masks(model, sparsity.names)
    if start is not None:
        check_fits(model, start)
        before = before.then(start)
    by_name = values.values if isinstance(values, Scores) else values
    chosen = _Chosen(layers, _ranked(layers, by_name), before)
    if isinstance(sparsity.pattern, Pattern):
        made = {name: chosen.by_pattern(name, sparsity.pattern) for name in layers}
    else:
        made = {}
        for names, num in _shares(sparsity, layers):
            made |= chosen.by_count(names, num)
    plan = MaskPlan(dict(before.masks) | made, before.fingerprint)
    check_not_emptied(before, plan, sparsity)
    return plan


class _Chosen:
    """The values of weights that may go, and what is left of them."""

    def __init__(
        self, layers: Mapping[str, Layer], values: Mapping[str, Tensor], before: MaskPlan
    ) -> None:
        self._layers, self._values, self._before = layers, values, before

    def by_count(self, names: list[str], num: int) -> dict[str, Mask]:
        """The `num` largest of these tensors together, or all that are left of them."""
        alive = _Alive(self, names)
        num_left = sum(self._before.masks[name].num_kept for name in names)
        if num >= num_left:
            return {name: self._before.masks[name] for name in names}
        if num == 0:
            return {
                name: self._left(name, torch.zeros(self._layers[name].shape, dtype=torch.bool))
                for name in names
            }
        cut, made = threshold(alive, num), dict[str, Mask]()
        for name in names:
            kept, cut = cut.kept(self._values[name], self.alive(name))
            made[name] = self._left(name, kept)
        return made

    def by_pattern(self, name: str, pattern: Pattern) -> Mask:
        """Of every M in a row the N largest, or all that are left of them."""
        layer, alive = self._layers[name], self.alive(name)
        values = self._values[name].masked_fill(~alive, -1.0)
        rows = values.movedim(layer.dim, -1).unflatten(-1, (-1, pattern.m))
        first = rows.argsort(dim=-1, descending=True, stable=True)[..., : pattern.n]
        kept = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, first, True)  # noqa: FBT003 - the value to write
        kept = kept.flatten(-2).movedim(-1, layer.dim) & alive
        return self._left(name, kept, pattern)

    def _left(self, name: str, kept: Tensor, pattern: Pattern | None = None) -> Mask:
        """A mask of what is left; it fits the pattern of before as well, and tells the stricter one."""
        layer, before = self._layers[name], self._before.masks[name]
        if before.pattern is not None and (
            pattern is None or before.pattern.density < pattern.density
        ):
            return Mask.of(layer.names, kept, before.pattern, before.dim)
        return Mask.of(layer.names, kept, pattern, None if pattern is None else layer.dim)

    def alive(self, name: str) -> Tensor:
        """True where a weight has not gone yet."""
        return self._before.kept(name).to(self._values[name].device)

    def values_left(self, name: str) -> Tensor:
        """Those of weights that have not gone yet."""
        whole = self._before.masks[name].num_kept == self._before.masks[name].numel
        return self._values[name] if whole else self._values[name][self.alive(name)]


class _Alive:
    """The values that are left of some tensors, one after the other, as often as wanted."""

    def __init__(self, chosen: _Chosen, names: list[str]) -> None:
        self._chosen, self._names = chosen, names

    def __iter__(self) -> Iterator[Tensor]:
        return (self._chosen.values_left(name) for name in self._names)


def check_shares(sparsity: Sparsity, layers: Mapping[str, Layer]) -> None:
    """Refuse a share of all weights that those fixed for some layers do not allow.

    Raises:
        BudgetError: they do not.
    """
    if not isinstance(sparsity.pattern, Pattern):
        _shares(sparsity, layers)


def _shares(sparsity: Sparsity, layers: Mapping[str, Layer]) -> list[tuple[list[str], int]]:
    """Tensors that are ranked together, and how many of their weights stay."""
    assert sparsity.keep is not None, "without a pattern there is a share"
    numel = {name: int(torch.Size(own.shape).numel()) for name, own in layers.items()}
    fixed = {name: sparsity.share(own) for name, own in layers.items()}
    if sparsity.scope == "layer":
        shares = {n: sparsity.keep if own is None else own for n, own in fixed.items()}
        return [([name], num_of(share, numel[name])) for name, share in shares.items()]
    alone = {name: num_of(share, numel[name]) for name, share in fixed.items() if share is not None}
    together = [name for name in layers if name not in alone]
    total = max(1, num_of(sparsity.keep, sum(numel.values())))
    left = total - sum(alone.values())
    most = sum(numel[name] for name in together)
    if alone and not 0 <= left <= most:
        lowest, highest = sum(alone.values()), sum(alone.values()) + most
        every = sum(numel.values())
        near = _nearest(total, lowest, highest, every)
        raise BudgetError(
            f"keep={sparsity.keep:g} leaves {total:,} of {every:,} weights. Under the shares that are fixed for "
            f"{len(alone)} of the layers, {lowest:,} to {highest:,} can stay: ask for keep={near}, or for other shares."
        )
    return [([name], num) for name, num in alone.items()] + ([(together, left)] if together else [])


def _ranked(layers: Mapping[str, Layer], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sizes of values, checked, in one number type."""
    found = {name: _sizes(name, own, values) for name, own in layers.items()}
    double = any(own.dtype == torch.float64 for own in found.values())
    return {name: own.double() for name, own in found.items()} if double else found


def _sizes(name: str, layer: Layer, values: Mapping[str, Tensor]) -> Tensor:
    found = values.get(name)
    if found is None or tuple(found.shape) != layer.shape:
        what = "there are none" if found is None else f"theirs has shape {tuple(found.shape)}"
        raise PlanMismatchError(
            f"Values were to rank the weights of {name!r}, of shape {layer.shape}, and {what}. They are of another "
            "network: score this one."
        )
    if not found.is_floating_point():
        raise ConfigError(
            f"The values that rank {name!r} are {found.dtype}; they are floating-point numbers, such as scores."
        )
    wide = found.dtype in (torch.float32, torch.float64)
    sizes = found.detach().abs().to(found.dtype if wide else torch.float32)
    finite = sizes.isfinite()
    if not finite.all():
        num = int((~finite).sum())
        raise NonFiniteError(
            f"{num:,} of the {sizes.numel():,} values that rank {name!r} are NaN or infinite, so its weights cannot be "
            "ranked. Look at the loss of the network on these data; 16-bit numbers may have overflowed: score in "
            "float32."
        )
    return sizes.contiguous()


def check_not_emptied(before: MaskPlan, after: MaskPlan, sparsity: Sparsity) -> None:
    """Refuse masks under which a layer loses its last weight, in terms of what was asked for in the end.

    Raises:
        BudgetError: one does, and `allow_empty` is not set.
    """
    made = {name: own for name, own in after.masks.items() if own.numel}
    had = {name: own.num_kept for name, own in before.masks.items()}
    empty = [n for n, own in made.items() if not own.num_kept and had.get(n, own.numel)]
    if not empty or sparsity.allow_empty:
        return
    listed = ", ".join(f"{name} ({made[name].numel:,} weights)" for name in empty[:6])
    more = f" and {len(empty) - 6} more" if len(empty) > 6 else ""
    smallest = min(own.numel for own in made.values())
    share = "" if num_of(sparsity.density, smallest) else f", keep={_up(1 / smallest):g}"
    evenly = (
        f"keep a share of every layer (scope='layer'{share}); "
        if sparsity.scope == "global"
        else ""
    )
    enough = _up(max(sparsity.density, 1 / made[empty[0]].numel))
    these = f"keep a share of these (shares={{'{empty[0]}': {enough:g}}}); "
    raise BudgetError(
        f"Keeping {sparsity.density:.3g} of the weights would leave none of {listed}{more}, and the network would give "
        f"the same whatever comes in there. Keep more; {evenly}{these}or insist: allow_empty=True."
    )


def _up(share: float) -> float:
    return min(1.0, ceil(share * 1e4) / 1e4)


def _nearest(asked: int, lowest: int, highest: int, every: int) -> str:
    """The nearest share that can be met, in few digits where these lead there."""
    number = lowest if asked < lowest else highest
    exact = number / every
    found = (round_(exact * 1e4) / 1e4 for round_ in (ceil, floor))
    short = [share for share in found if lowest <= num_of(share, every) <= highest]
    return f"{short[0] if short else exact!r}"
