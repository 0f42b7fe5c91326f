"""Networks of the second zoo as people write them themselves, for which there is no library.

Among them what makes pruning hard: loops over time, sums over a set, branches on sizes and the mode, routing by values.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_second_networks import Network, first_output

__all__ = ["WRITTEN"]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class PointNet(nn.Module):
    """A set of points: shared layers, the greatest over the set, and a turn of the points learnt by such a network."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix = nn.Linear(16, 9)
        self.local = nn.Sequential(nn.Conv1d(3, 24, 1), nn.BatchNorm1d(24), nn.ReLU())
        self.wide = nn.Sequential(nn.Conv1d(24, 48, 1), nn.BatchNorm1d(48), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(points).amax(2)).view(-1, 3, 3)
        turned = torch.bmm(matrix + torch.eye(3).to(matrix), points)
        return self.head(self.wide(self.local(turned)).amax(2))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, residuals and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.gates = nn.ModuleList(nn.Conv1d(24, 48, 2, dilation=2**i) for i in range(4))
        self.residual = nn.ModuleList(nn.Conv1d(24, 24, 1) for _ in range(4))
        self.skip = nn.ModuleList(nn.Conv1d(24, 32, 1) for _ in range(4))
        self.out = nn.Conv1d(32, 32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        total: Tensor | float = 0.0
        for i, (gate, residual, skip) in enumerate(
            zip(self.gates, self.residual, self.skip, strict=True)
        ):
            filtered, gated = gate(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            h = filtered.tanh() * gated.sigmoid()
            x, total = x + residual(h), total + skip(h)
        return self.out(F.relu(total))


class ConvLSTM(nn.Module):
    """A cell with convolutions, called in a loop over the pictures of a film."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 12
        self.cell = nn.Conv2d(3 + 12, 4 * 12, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, film: Tensor) -> Tensor:
        h = c = film.new_zeros(len(film), self.width, *film.shape[-2:])
        for t in range(film.shape[1]):
            i, f, g, o = self.cell(torch.cat([film[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h.mean((2, 3)))


class Translator(nn.Module):
    """Recurrent cells with attention over what was read, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.reader = nn.GRU(24, 32, batch_first=True)
        self.cell = nn.LSTMCell(24 + 32, 32)
        self.head = nn.Linear(64, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, _ = self.reader(self.embed(source))
        words = self.embed(target)
        h, c = read[:, -1], torch.zeros_like(read[:, -1])
        steps = []
        for t in range(target.shape[1]):
            weights = torch.einsum("bd,bld->bl", h, read).softmax(1)
            context = torch.einsum("bl,bld->bd", weights, read)
            h, c = self.cell(torch.cat([words[:, t], context], 1), (h, c))
            steps.append(self.head(torch.cat([h, context], 1)))
        return torch.stack(steps, 2)


class Recommender(nn.Module):
    """DLRM: numbers and categories, and products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 16) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        parts = [dense] + [table(categories[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(parts, 1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([dense, products[:, rows, columns]], 1))


class Radiance(nn.Module):
    """NeRF: waves of a place, a skip in the middle, a head that sees the direction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(27, 48), nn.Linear(48, 48)])
        self.second = nn.ModuleList([nn.Linear(48 + 27, 48), nn.Linear(48, 48)])
        self.density, self.feature = nn.Linear(48, 1), nn.Linear(48, 48)
        self.colour = nn.Sequential(nn.Linear(48 + 3, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, place: Tensor, direction: Tensor) -> Tensor:
        waves = [place] + [f(2.0**i * place) for i in range(4) for f in (torch.sin, torch.cos)]
        h = coded = torch.cat(waves, -1)
        for layer in self.first:
            h = layer(h).relu()
        h = torch.cat([h, coded], -1)
        for layer in self.second:
            h = layer(h).relu()
        colour = self.colour(torch.cat([self.feature(h), direction], -1)).sigmoid()
        return torch.cat([colour, self.density(h).relu()], -1)


class Generator(nn.Module):
    """DCGAN: transposed convolutions from a vector to a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 32 * 4 * 4)
        self.up = nn.Sequential(
            *(nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 24, 4, 2, 1, bias=False)),
            *(nn.BatchNorm2d(24), nn.ReLU(), nn.ConvTranspose2d(24, 3, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.up(self.start(z).view(len(z), 32, 4, 4))


class Auxiliary(nn.Module):
    """GoogLeNet's way: a second head that only training asks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.more = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.side, self.head = nn.Linear(16, 5), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Any:
        early = self.body(x)
        out = self.head(self.more(early).mean((2, 3)))
        return (out, self.side(early.mean((2, 3)))) if self.training else out


class BySize(nn.Module):
    """Small pictures are averaged, great ones pooled; a head width is written into a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1)
        self.mix, self.head = nn.Conv1d(24, 32, 1), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu().view(len(x), 24, -1)
        h = self.mix(h).relu()
        return self.head(h.mean(2) if h.shape[2] < 100 else h.amax(2))


class Experts(nn.Module):
    """The best expert of each sample, by a loop that skips experts nobody asked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(12, 24), nn.Linear(24, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24)) for _ in range(4)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).tanh()
        share, chosen = self.gate(h).softmax(1).max(1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * share[rows, None])
        return self.head(h + out)


class Memory(nn.Module):
    """A transformer from torch itself, both sides, with a causal mask and positions added."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.places = nn.Parameter(torch.zeros(1, 32, 32))
        self.body = nn.Transformer(32, 4, 1, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read = self.embed(source) + self.places[:, : source.shape[1]]
        words = self.embed(target) + self.places[:, : target.shape[1]]
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.body(read, words, tgt_mask=ahead)).transpose(1, 2)


class Codebook(nn.Module):
    """VQ-VAE: the nearest of learnt codes, with the gradient passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 12, 3, 1, 1))
        self.codes = nn.Embedding(16, 12)
        self.up = nn.Sequential(
            nn.Conv2d(12, 24, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(24, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.down(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(z.flatten(0, 2), self.codes.weight).argmin(1)
        found = self.codes(nearest).view_as(z)
        return self.up((z + (found - z).detach()).permute(0, 3, 1, 2))


def _own(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[int], Any],
    other: Callable[[int], Any] | None,
    kind: str = "classes",
) -> Network:
    read = first_output if kind == "values" else None
    return Network("own", name, make, inputs, family="own code", other=other, kind=kind, read=read)


def _words(length: int, most: int = 50) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, most, (batch, length))


def _both(first: Callable[[int], Any], second: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda batch: (first(batch), second(batch))


def _shaped(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: _normal(batch, *shape)


WRITTEN = (
    _own("PointNet", PointNet, _shaped(3, 20), _shaped(3, 33)),
    _own("WaveNet", WaveNet, _words(24, 32), _words(37, 32)),
    _own("ConvLSTM", ConvLSTM, _shaped(3, 3, 8, 8), _shaped(4, 3, 12, 12)),
    _own(
        "attending LSTM cell", Translator, _both(_words(9), _words(5)), _both(_words(12), _words(7))
    ),
    _own("DLRM", Recommender, _both(_shaped(7), _words(3, 20)), None),
    _own(
        "NeRF",
        Radiance,
        _both(_shaped(3), _shaped(3)),
        _both(_shaped(4, 3), _shaped(4, 3)),
        "values",
    ),
    _own("DCGAN", Generator, _shaped(16), None, "values"),
    _own("auxiliary head", Auxiliary, _shaped(3, 12, 12), _shaped(3, 20, 20)),
    _own("branch on sizes", BySize, _shaped(3, 8, 8), _shaped(3, 12, 12)),
    _own("best of experts", Experts, _shaped(12), None),
    _own("nn.Transformer", Memory, _both(_words(9), _words(5)), _both(_words(12), _words(7))),
    _own("VQ-VAE", Codebook, _shaped(3, 16, 16), _shaped(3, 24, 24), "values"),
)
