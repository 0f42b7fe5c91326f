"""Models of timm, torchvision and transformers as their authors wrote them, every group cut.

`FLOORS` says how many groups each had, and how many of their cuts ran as the model's own code, when last looked at.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.errors import PlanMismatchError
from apoptosis.structure import Plan, Structure, cut, trace, zero
from apoptosis.structure.arrangement import rearranged, tensors_in
from oracles.kept_statistics import twin_with_kept_statistics
from oracles.library import LIBRARY_CASES, LibraryCase, float64_everywhere

TOLERANCE = (
    1e-10  # relative, float64: a cut sums fewer numbers in another order, through many layers
)

FLOORS = {
    "timm resnet18": (13, 13),
    "timm resnet50": (13, 13),
    "timm densenet121": (15, 15),
    "timm mobilenetv3_small_050": (26, 26),
    "timm efficientnet_b0": (40, 40),
    "timm convnext_atto": (8, 8),
    "timm vit_tiny_patch16_224": (7, 7),
    "timm swin_tiny_patch4_window7_224": (14, 14),
    "timm mixer": (5, 5),
    "torchvision resnet18": (8, 8),
    "torchvision resnet50": (13, 13),
    "torchvision densenet": (15, 15),
    "torchvision mobilenet_v3": (8, 8),
    "torchvision efficientnet": (8, 8),
    "torchvision convnext": (4, 4),
    "torchvision vit": (7, 7),
    "torchvision swin": (14, 4),
    "torchvision swin_v2": (22, 12),
    "transformers ViT": (9, 9),
    "transformers BERT": (10, 10),
    "transformers BERT sdpa": (10, 10),
    "transformers GPT-2": (9, 9),
    "transformers Llama": (10, 10),
    "transformers Llama eager": (10, 10),
    "transformers Qwen2": (9, 7),
    "transformers Qwen3": (10, 10),
    "transformers Mixtral": (10, 9),
    "transformers T5": (19, 19),
    "transformers T5 gated": (11, 11),
}

REFUSED = {"transformers Mixtral": {"model.embed_tokens"}}
"""Inexact, and Python chooses experts by value: there is neither a program nor a twin to decide by."""

NO_PROGRAM = {*REFUSED, "transformers BERT", "transformers BERT sdpa"}
"""Python looks at the inputs' values: at a mask, or at which experts are chosen."""


def marked(case: LibraryCase) -> Any:
    return pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else [])


every_case = pytest.mark.parametrize("case", [marked(case) for case in LIBRARY_CASES])


@every_case
def test_every_group_cut_by_one_unit_equals_its_twin(case: LibraryCase) -> None:
    with loaded(case) as own:
        acting, module = 0, 0
        for group in own.structure.groups:
            if group.size <= max(group.smallest, 1):
                continue
            kept = one_unit_less(own.structure, group.name)
            if group.name in REFUSED.get(case.id, ()):
                with pytest.raises(PlanMismatchError, match="Python looks at a value"):
                    own.structure.plan(kept)
                continue
            plan = own.structure.plan(kept)
            module += plan.delivery == "module"
            assert (plan.delivery == "module") == (not plan.delivery_because)
            if all(own.structure[name].exact for name in plan.kept):
                acting += own.same_as_twin(plan)
            else:
                own.same_as_twin_with_kept_statistics(plan)
        least = FLOORS[case.id]
        assert len(own.structure.groups) >= least[0]
        assert module >= least[1], "cuts that the model's own code could run"
        assert acting, "some cut changes the output"


@every_case
def test_exact_groups_cut_at_once_equal_their_twin_in_both_deliveries_at_another_batch_size(
    case: LibraryCase,
) -> None:
    with loaded(case) as own:
        plan = own.structure.plan(joint(own.structure, tied=case.id in NO_PROGRAM))
        twin = zero(own.model, plan)
        cuts = [cut(own.model, plan)]
        if case.id not in NO_PROGRAM:
            cuts.append(own.structure.program(own.model, own.as_program(plan)))
        for inputs in (own.inputs, rearranged(own.inputs, lambda t: torch.cat([t, t.flip(0), t]))):
            expected = run(twin, inputs)
            for small in cuts:
                assert_close(run(small, inputs), expected)


@every_case
def test_parameters_are_counted_as_torch_counts_them(case: LibraryCase) -> None:
    with loaded(case) as own:
        assert own.structure.params() == sum(p.numel() for p in own.model.parameters())


@dataclass(frozen=True)
class Loaded:
    """A case's model with weights of a size that lets every layer matter, and what it was traced with."""

    model: nn.Module
    inputs: Any

    @cached_property
    def structure(self) -> Structure:
        return trace(self.model, self.inputs)

    @cached_property
    def output(self) -> list[Tensor]:
        return run(self.model, self.inputs)

    def same_as_twin(self, plan: Plan) -> bool:
        """Compare; say whether the cut does anything to the output."""
        expected = run(zero(self.model, plan), self.inputs)
        assert_close(run(cut(self.model, plan), self.inputs), expected)
        return any(not torch.equal(a, b) for a, b in zip(expected, self.output, strict=True))

    def same_as_twin_with_kept_statistics(self, plan: Plan) -> None:
        twin, num_norms = twin_with_kept_statistics(self.model, plan)
        expected = run(twin, self.inputs)
        assert num_norms, "an inexact group of these models goes through a norm"
        assert_close(run(cut(self.model, plan), self.inputs), expected)
        plain = run(zero(self.model, plan), self.inputs)
        assert distance(plain, expected) > 1e-6, "a group called inexact is"

    def as_program(self, plan: Plan) -> Plan:
        """The same plan without what only a module needs."""
        return replace(plan, delivery="program", scalings=(), attentions=(), attributes=())


@contextmanager
def loaded(case: LibraryCase) -> Iterator[Loaded]:
    own = load(case)
    with float64_everywhere():
        yield own


@cache
def load(case: LibraryCase) -> Loaded:
    model = case.make_model().eval()
    batch = case.make_batch()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                new = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(new * 1.4 / sqrt(parameter[0].numel()))
    return Loaded(model, batch[0] if isinstance(batch, tuple) else batch)


def joint(structure: Structure, *, tied: bool) -> dict[str, list[int]]:
    """Some units of every exact group; with `tied`, only of those that no tie binds."""
    pick = random.Random(1)
    bound = {name for tie in structure.ties for name, _ in tie.members} if tied else set()
    groups = [
        g for g in structure.groups if g.exact and g.size > g.smallest and g.name not in bound
    ]
    return {
        g.name: sorted(pick.sample(range(g.size), pick.randint(g.smallest, g.size - 1)))
        for g in groups
    }


def one_unit_less(structure: Structure, name: str) -> dict[str, list[int]]:
    """All but one unit of a group, and as many fewer of those tied to it."""
    tied, todo = {name}, [name]
    while todo:
        here = todo.pop()
        for tie in structure.ties:
            members = {member for member, _ in tie.members}
            if here in members:
                todo += members - tied
                tied |= members
    share = gcd(*(structure[other].size for other in tied))
    if share == 1 or any(structure[o].size * (share - 1) // share < 1 for o in tied):
        tied, share = {name}, structure[name].size
    pick = random.Random(name)
    sizes = {other: structure[other].size for other in tied}
    return {o: sorted(pick.sample(range(n), n - n // share)) for o, n in sizes.items()}


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return [t for t in tensors_in(found) if t.is_floating_point()]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [t.shape for t in found] == [t.shape for t in expected]
    for a, b in zip(found, expected, strict=True):
        assert bool(b.isfinite().all())
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE * float(b.abs().max()))
