"""`Pattern`: of every M weights in a row along a layer's inputs, at most N are not zero."""

import re
from dataclasses import dataclass

from apoptosis.errors import ConfigError

__all__ = ["Pattern"]


@dataclass(frozen=True)
class Pattern:
    """N of M, such as the 2:4 that GPUs compute twice as fast on paper.

    >>> Pattern.parse("2:4")
    Pattern(n=2, m=4)
    >>> str(Pattern(4, 8))
    '4:8'
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.n, self.m))
        if not whole or not 0 < self.n < self.m:
            raise ConfigError(
                f"The pattern {self.n}:{self.m} was asked for; N of M weights stay, whole numbers with 0 < N < M: 2:4."
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def density(self) -> float:
        """The share that stays."""
        return self.n / self.m

    @staticmethod
    def parse(text: str) -> "Pattern":
        """Read `N:M`.

        Raises:
            ConfigError: it is something else.
        """
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text) if isinstance(text, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if found is None:
            raise ConfigError(
                f"The pattern {text!r} was asked for; it is written N:M, N weights of every M: 2:4."
            )
        return Pattern(int(found[1]), int(found[2]))
