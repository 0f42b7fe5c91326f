"""Which entries are summed over together, where several queries read one key: turned all together, or not at all."""

import pytest
import torch
from torch import Tensor, nn

from apoptosis.alignment import align_heads
from apoptosis.alignment.bonds import NoBondError, possible_bonds
from apoptosis.structure import trace
from oracles.building import built
from oracles.shrinking import SeparateAttention, Transformer

WIDTH, HEADS, DIM = 8, 4, 2


def tokens(num: int = 6) -> Tensor:
    return torch.randn(num, 4, 5, generator=torch.Generator().manual_seed(0)).double()


class Shared(SeparateAttention):
    """Keys and values for several queries each, in the ways that code is written."""

    def __init__(self, kv_heads: int = 1) -> None:
        super().__init__(WIDTH, HEADS, kv_heads)
        self.kv_heads = kv_heads

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * self.scale, -1)


class Broadcast(Shared):
    """One key for all: its missing dimension of heads is read by all queries."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.k(x)[:, None], self.v(x)[:, None]
        mixed = self.scores(self.split(self.q(x)), k) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Expanded(Shared):
    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))
        k, v = (own(x)[:, None].expand(-1, HEADS, -1, -1) for own in (self.k, self.v))
        return self.o((self.scores(q, k) @ v).transpose(1, 2).flatten(2))


class Einsum(Shared):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (HEADS, DIM))
        weights = torch.softmax(torch.einsum("bnhd,bmd->bhnm", q, self.k(x)) * self.scale, -1)
        return self.o(torch.einsum("bhnm,bmd->bnhd", weights, self.v(x)).flatten(2))


class FiveDimensions(Shared):
    """(batch, keys, queries of each key, positions, dimensions)."""

    def forward(self, x: Tensor) -> Tensor:
        made = (own(x).unflatten(2, (self.kv_heads, -1, DIM)) for own in (self.q, self.k, self.v))
        q, k, v = (own.permute(0, 2, 3, 1, 4) for own in made)
        return self.o((self.scores(q, k) @ v).permute(0, 3, 1, 2, 4).flatten(2))


LAYOUTS = {
    "broadcast": (Broadcast, 1),
    "expanded": (Expanded, 1),
    "einsum": (Einsum, 1),
    "five dimensions": (FiveDimensions, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_key_is_turned_with_all_queries_that_read_it(layout: str):
    kind, kv_heads = LAYOUTS[layout]
    model = built(lambda: Transformer(kind(kv_heads)))
    with torch.no_grad():
        model.parts[0].q.weight[:DIM] *= (
            1e-3  # were the first query to decide, it would be badly off
        )
        model.parts[0].q.bias[:DIM] *= 1e-3
    structure = trace(model, tokens(2))
    for name in ("parts.0.q:qk_dim", "parts.0.v:v_dim"):
        ((bond,),) = possible_bonds(structure, structure[name])
        assert bond.left.entries.shape == (kv_heads, DIM)
        assert {slot.entries.shape for slot in bond.right} == {(kv_heads, DIM)}
        assert len(bond.right) == HEADS // kv_heads
    found = align_heads(model, structure, [tokens()])
    assert found.left_alone == {}
    with torch.no_grad():
        torch.testing.assert_close(found.model(tokens()), model(tokens()), rtol=1e-9, atol=1e-12)
        x = model.norms[0](model.embed(tokens()))
        q = found.model.parts[0].q(x).unflatten(2, (kv_heads, -1, DIM))
        k = found.model.parts[0].k(x).unflatten(2, (kv_heads, 1, DIM))
    carried = (q.square().sum((0, 1)) * k.square().sum((0, 1))).sum(1)  # of all queries of each key
    wanted = carried.sum(0)
    torch.testing.assert_close(
        found.energies["parts.0.q:qk_dim"], wanted / wanted.sum(), rtol=1e-6, atol=1e-9
    )


class Uneven(Shared):
    """Dimensions lie within heads in q, and heads within dimensions in k."""

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.split(self.q(x)), self.split(self.v(x))
        k = self.k(x).unflatten(2, (DIM, HEADS)).permute(0, 3, 1, 2)
        return self.o((self.scores(q, k) @ v).transpose(1, 2).flatten(2))


def test_entries_may_lie_in_any_order():
    model = built(lambda: Transformer(Uneven(HEADS)))
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert set(found.energies) == {"parts.0.q:qk_dim", "parts.0.v:v_dim"}
    with torch.no_grad():
        torch.testing.assert_close(found.model(tokens()), model(tokens()), rtol=1e-9, atol=1e-12)


def test_what_cannot_be_bound_says_why():
    """One module makes the queries of all heads and the one key: which of them is the key is not said."""
    model = built(lambda: Transformer(OneProjection()))
    structure = trace(model, tokens(2))
    name = next(g.name for g in structure.groups if g.kind in ("qk_dim", "head_dim"))
    with pytest.raises(NoBondError, match="a way that is not known"):
        list(possible_bonds(structure, structure[name]))


class OneProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made, self.o = nn.Linear(WIDTH, (HEADS + 2) * DIM), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.made(x).split([HEADS * DIM, DIM, DIM], -1)
        q = q.unflatten(2, (HEADS, DIM)).transpose(1, 2)
        mixed = torch.softmax(q @ k[:, None].mT, -1) @ v[:, None]
        return self.o(mixed.transpose(1, 2).flatten(2))
