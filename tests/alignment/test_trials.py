"""Right turns are told from wrong ones, whatever hides the difference in the network as it was trained."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.alignment import align_heads, trials
from apoptosis.alignment.bonds import possible_bonds
from apoptosis.structure import Example, trace
from apoptosis.task import Task
from oracles.building import built
from oracles.shrinking import FusedAttention, SeparateAttention, Transformer
from oracles.untouched import Snapshot

QUERIES, VALUES = "parts.0.q:qk_dim", "parts.0.v:v_dim"
INF = float("inf")


def tokens(num: int = 6, length: int = 4, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, length, 5, generator=generator).double()


class Acting(SeparateAttention):
    """Something without parameters acts on queries, keys or values."""

    def __init__(self, act: Callable[[Tensor], Tensor], on: str) -> None:
        super().__init__(8, 2, 2)
        self.act, self.on = act, on

    def forward(self, x: Tensor) -> Tensor:
        made = {name: self.split(getattr(self, name)(x)) for name in "qkv"}
        for name in self.on:
            made[name] = self.act(made[name])
        weights = torch.softmax(made["q"] @ made["k"].mT * self.scale, -1)
        return self.o((weights @ made["v"]).transpose(1, 2).flatten(2))


class FusedCosine(FusedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Wrapped(nn.Module):
    """A network whose outputs something is done to."""

    def __init__(self, net: nn.Module, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.after = net, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.net(x))


class Scaled(nn.Module):
    """A layer scale, near zero as it is in training's beginning."""

    def __init__(self, inner: nn.Module, size: float) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.full((8,), size))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.inner(x)


@dataclass(frozen=True)
class Part:
    id: str
    make: Callable[[], nn.Module]
    turned: tuple[str, ...]


PARTS = [
    Part("nothing", lambda: Acting(lambda x: x, "q"), ("q:qk_dim", "v:v_dim")),
    Part("tanh of queries", lambda: Acting(torch.tanh, "q"), ("v:v_dim",)),
    Part("relu of values", lambda: Acting(torch.relu, "v"), ("q:qk_dim",)),
    Part("cosines", lambda: Acting(lambda x: F.normalize(x, dim=-1), "qk"), ("v:v_dim",)),
    Part("queries clipped where few are", lambda: Acting(lambda x: x.clamp(-9, 9), "q"), ("v:v_dim",)),
    Part("keys clipped where few are", lambda: Acting(lambda x: x.clamp(-9, 9), "k"), ("v:v_dim",)),
    Part("values clipped where few are", lambda: Acting(lambda x: x.clamp(-9, 9), "v"), ("q:qk_dim",)),
    Part("fused", lambda: FusedAttention(8, 2), ("qkv:head_dim",)),
    Part("fused cosines", lambda: FusedCosine(8, 2), ()),
]  # fmt: skip


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda y: y.masked_fill(torch.tensor([False, False, True]), value)


HIDING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda net: net,
    **{f"a logit of {own}": lambda net, own=own: Wrapped(net, filled(own)) for own in (-1e4, -1e9, -INF)},
    "−1e12 added to a logit": lambda net: Wrapped(
        net, lambda y: y + torch.tensor([0.0, 0.0, -1e12]).to(y)
    ),
    "moves barred by what is seen": lambda net: Wrapped(
        net, lambda y: y.masked_fill(y > y.mean(1, keepdim=True), -1e9)
    ),
}  # fmt: skip


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("part", PARTS, ids=lambda own: own.id)
def test_what_is_turned_is_what_may_be(part: Part, hiding: str):
    net = built(lambda: Transformer(part.make()))
    model = HIDING[hiding](net)
    prefix = "" if model is net else "net."
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert set(found.energies) == {f"{prefix}parts.0.{name}" for name in part.turned}
    assert set(found.left_alone.values()) <= {"its coordinates mean something to the network"}
    other = tokens(length=7, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(found.model(other), model(other), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("part", PARTS[:3], ids=lambda own: own.id)
@pytest.mark.parametrize("size", [1e-5, 1e-12, 0.0])
def test_a_layer_scale_near_zero_hides_nothing(part: Part, size: float):
    model = built(lambda: Transformer(Scaled(part.make(), 1.0)))
    with torch.no_grad():
        model.parts[0].gain.fill_(size)
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert set(found.energies) == {f"parts.0.inner.{name}" for name in part.turned}


@pytest.mark.parametrize("part", PARTS[:2], ids=lambda own: own.id)
def test_batches_of_one_position_decide_nothing(part: Part):
    """Whatever the scores, a softmax over one of them is 1."""
    model = built(lambda: Transformer(part.make()))
    structure, short = trace(model, tokens(2)), tokens(length=1)
    for batches in ([short, tokens()], [tokens(), short]):
        found = align_heads(model, structure, batches)
        assert set(found.energies) == {f"parts.0.{name}" for name in part.turned}
    found = align_heads(model, structure, [short])
    assert set(found.energies) == {VALUES}
    assert found.left_alone == {QUERIES: trials.HIDDEN}


@pytest.mark.parametrize("part", PARTS[-2:], ids=lambda own: own.id)
def test_nor_where_values_alone_show_something(part: Part):
    """Queries, keys and values are one group, and any of them may be the values."""
    model = built(lambda: Transformer(part.make()))
    found = align_heads(model, trace(model, tokens(2)), [tokens(length=1)])
    assert found.left_alone == {"parts.0.qkv:head_dim": trials.HIDDEN}


@pytest.mark.parametrize("inputs", [torch.zeros(6, 4, 5).double(), tokens(1, 1).expand(6, 4, 5)])
def test_inputs_that_are_all_alike_hide_nothing(inputs: Tensor):
    for part in PARTS[:2]:
        model = built(lambda own=part: Transformer(own.make()))
        found = align_heads(model, trace(model, tokens(2)), [inputs])
        assert set(found.energies) == {f"parts.0.{name}" for name in part.turned}


class Dropping(Acting):
    """Functional dropout that nobody switches off."""

    def __init__(self, on: str = "") -> None:
        super().__init__(lambda x: F.dropout(x, 0.3, training=True), on)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.on else F.dropout(x, 0.3, training=True))


def test_dropout_that_is_never_off_does_no_harm():
    model = built(lambda: Transformer(Dropping()))
    before = Snapshot(model)
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    before.assert_unchanged()
    assert set(found.energies) == {QUERIES, VALUES}
    on_queries = built(lambda: Transformer(Dropping("q")))
    found = align_heads(on_queries, trace(on_queries, tokens(2)), [tokens()])
    assert set(found.energies) == {VALUES}


class Counting(nn.Module):
    """What it computes depends on how often it ran, as told by two kinds of buffers and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        self.num += 1
        return x * (1 + self.written) * (1 + self.replaced) * self.num


def test_what_a_network_counts_does_no_harm():
    model = Wrapped(built(lambda: Transformer(PARTS[0].make())), Counting())
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert len(found.energies) == 2


def test_one_huge_entry_says_nothing_of_the_others():
    """A move that is barred after one turn and not after another."""
    assert trials._typical(torch.tensor([1.0, 2.0, 1e9, INF, torch.nan])) == 2
    assert trials._typical(torch.tensor([INF, torch.nan])) == 0


def test_a_network_that_is_another_in_every_run_is_left_alone():
    own = random.Random(0)
    model = Wrapped(built(lambda: Transformer(PARTS[0].make())), lambda y: y * own.random())
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert found.model is model
    assert set(found.left_alone.values()) == {trials.RANDOM}


def test_a_network_that_does_not_run_in_float64_is_left_alone():
    class Single(SeparateAttention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ torch.eye(8)

    model = built(lambda: Transformer(Single(8, 2, 2))).float()
    found = align_heads(model, trace(model, tokens(2).float()), [tokens().float()])
    assert found.model is model
    (why,) = set(found.left_alone.values())
    assert why.startswith("a copy in float64 with random weights does not run (RuntimeError: ")


def test_code_that_casts_to_float32_is_no_wrong_turn():
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().to(x)

    model = built(lambda: Transformer(Cast(), PARTS[0].make(), Cast(), PARTS[0].make()))
    found = align_heads(model, trace(model, tokens(2)), [tokens()])
    assert len(found.energies) == 4


@pytest.mark.parametrize("name", [QUERIES, VALUES])
def test_wrong_turns_are_caught(name: str, monkeypatch):
    """One side turned and the other not, or not as it should be; and all of it put back."""
    model = built(lambda: Transformer(PARTS[0].make()))
    structure = trace(model, tokens(2))
    (way,) = possible_bonds(structure, structure[name])
    trial = trials.Trial(model, Task.classification(), Example((tokens(2),), {}))
    before = {key: own.clone() for key, own in trial._held.items()}
    assert trial.first_right([way]) is way

    def half(held, bond, turn):
        trials.turn_slot_(held, bond.left, turn)

    def both_alike(held, bond, turn):
        for slot in (bond.left, *bond.right):
            trials.turn_slot_(held, slot, turn)

    def nearly(held, bond, turn):
        right(held, bond, turn)
        trials.turn_slot_(held, bond.left, 1.001 * torch.eye(turn.shape[-1]).to(turn))

    right = trials.turn_
    for wrong in (half, both_alike, nearly):
        monkeypatch.setattr(trials, "turn_", wrong)
        with pytest.raises(trials.NoBondError, match=trials.MEANT):
            trial.first_right([way])
        assert all(torch.equal(own, before[key]) for key, own in trial._held.items())
