"""`Sparsity`: how many single weights may stay, or in which pattern, and where."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import ceil, prod
from numbers import Real
from typing import Any

from torch import nn

from apoptosis.errors import ConfigError
from apoptosis.masks import Layer, Pattern, as_patterns, maskable
from apoptosis.planning.divisibility import check_divides

__all__ = ["Sparsity"]

SCOPES = ("global", "layer")
_ROUNDING = Fraction(1, 10**9)
"""0.125^(1/3) may be 0.4999…; a share of weights is rounded down, but not for that."""


@dataclass(frozen=True)
class Sparsity:
    """What may stay of the weights of layers (`masks.maskable`): a share `keep`, or N of every M.

    Attributes:
        keep: the share of all these weights that stays, above 0 and at most 1. Papers' sparsity is 1 − keep.
        pattern: `"2:4"`: of every M weights in a row along a layer's inputs, N stay.
        scope: `global` ranks the weights of all layers together; `layer` keeps the same share of each.
        shares: share kept of each weight that fits a pattern of names; the others make up for it.
        names: only weights whose names fit; `!pattern` leaves out. Biases, norms and embeddings only if named.
        allow_empty: a layer may lose its last weight.
    """

    keep: float | None = None
    _: KW_ONLY
    pattern: Pattern | str | None = None
    scope: str = "global"
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    names: tuple[str, ...] = ("*",)
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.pattern is None):
            raise ConfigError(
                f"keep={self.keep!r} and pattern={self.pattern!s} were asked for; it is one of the two: "
                'Sparsity(keep=0.1), or Sparsity(pattern="2:4"), which keeps half.'
            )
        if self.keep is not None and not _is_share(self.keep):
            raise ConfigError(
                f"keep={self.keep!r} was asked for; the share of weights that stays is above 0 and at most 1. To "
                "remove 90 % of them, keep 0.1."
            )
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", Pattern.parse(self.pattern))
        elif not isinstance(self.pattern, Pattern | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f'pattern={self.pattern!r} was asked for; it is written "2:4".')
        if self.scope not in SCOPES:
            raise ConfigError(f"scope={self.scope!r} was asked for; there are {', '.join(SCOPES)}.")
        self._check_shares()
        object.__setattr__(self, "names", as_patterns(self.names))

    @property
    def density(self) -> float:
        """The share of weights that is asked to stay."""
        if isinstance(self.pattern, Pattern):
            return self.pattern.density
        assert self.keep is not None, "one of the two is given"
        return self.keep

    def layers(self, model: nn.Module) -> dict[str, Layer]:
        """The weights it is about.

        Raises:
            ConfigError: a pattern of names fits nothing, or M does not divide the inputs of a layer.
        """
        layers = maskable(model, self.names)
        for pattern in self.shares:
            if not any(_fits(own, pattern) for own in layers.values()):
                raise ConfigError(
                    f"shares names {pattern!r}, which fits no weight that may go. There are {_some(list(layers))}."
                )
        if isinstance(self.pattern, Pattern):
            check_divides(self.pattern, layers)
        return layers

    def share(self, layer: Layer) -> float | None:
        """The share fixed for a tensor; the last pattern that fits counts."""
        found = [share for pattern, share in self.shares.items() if _fits(layer, pattern)]
        return found[-1] if found else None

    def on_the_way(self, progress: float, layers: Mapping[str, Layer]) -> "Sparsity | None":
        """What holds at a point on the way: every share s is s^progress; None where nothing is to go yet."""
        if not isinstance(self.pattern, Pattern):
            assert self.keep is not None, "one of the two is given"
            shares = {pattern: share**progress for pattern, share in self.shares.items()}
            there = replace(self, shares=shares)
            keep = self.keep**progress
            return replace(there, keep=keep if progress == 1 else min(keep, there.most(layers)))
        full = self.pattern
        n = ceil(full.m * full.density**progress - float(_ROUNDING))
        return replace(self, pattern=Pattern(n, full.m)) if n < full.m else None

    def most(self, layers: Mapping[str, Layer]) -> float:
        """The largest share of all weights that can stay under the shares fixed for some."""
        sizes = {name: prod(own.shape) for name, own in layers.items()}
        fixed = {name: self.share(own) for name, own in layers.items()}
        stay = [n if (s := fixed[name]) is None else num_of(s, n) for name, n in sizes.items()]
        return sum(stay) / max(1, sum(sizes.values()))

    def _check_shares(self) -> None:
        if not isinstance(self.shares, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"shares={self.shares!r} was asked for; it is a dictionary from patterns of names to shares."
            )
        if self.shares and self.pattern is not None:
            raise ConfigError(
                f"shares={dict(self.shares)!r} and the pattern {self.pattern} were asked for; a pattern fixes the "
                "share of every layer. Leave layers out by name: names=['!fc.weight']."
            )
        for pattern, share in self.shares.items():
            if not isinstance(pattern, str) or not _is_share(share):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"shares={{{pattern!r}: {share!r}}} was asked for; patterns of names are texts, and a share that "
                    "stays is above 0 and at most 1."
                )


def num_of(share: float, total: int) -> int:
    """A share of a number of weights, rounded down. 0.29 means 29 hundredths; its binary form is a little below."""
    return min(total, int(Fraction(repr(float(share))) * total + _ROUNDING))


def _fits(layer: Layer, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in layer.names)


def _is_share(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0 < float(value) <= 1


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
