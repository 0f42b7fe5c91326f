"""Costs: known numbers of known networks, recounted parameters, and the same answer by every way of asking."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import apoptosis as ap
from oracles.library import define_torchvision_ops
from oracles.shrinking import SMALL_CASES, SmallCase, small_case

every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)

KNOWN = {
    "vit_b_16": (17.56e9, 86_567_656),
    "resnet50": (4.09e9, 25_557_032),
    "swin_t": (4.49e9, 28_288_354),
    "densenet121": (2.83e9, 7_978_856),
    "mobilenet_v3_small": (0.0565e9, 2_542_856),
}
"""MACs at 224 × 224 as the models' authors and torchvision give them, and numbers of parameters."""


@pytest.mark.parametrize("name", KNOWN)
def test_known_networks_cost_what_is_known(name: str) -> None:
    define_torchvision_ops()
    from torchvision import models

    with torch.device("meta"):
        model = models.get_model(name, weights=None)
        structure = ap.trace(model, torch.zeros(1, 3, 224, 224))
    macs, params = KNOWN[name]
    assert structure.macs() == pytest.approx(macs, rel=5e-3)
    assert structure.params() == params == sum(p.numel() for p in model.parameters())


def counted(model: nn.Module, x: Any) -> int:
    """By torch, as the model runs."""
    torch.backends.mha.set_fastpath_enabled(False)  # what it fuses is not counted
    try:
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops() // 2


UNSEEN = {"recurrent", "experts"}
"""torch's counter sees neither recurrent cells nor what einsum multiplies entry by entry."""


@pytest.mark.parametrize(
    "case", [case for case in SMALL_CASES if case.id not in UNSEEN], ids=lambda case: case.id
)
def test_macs_are_what_torch_counts_before_and_after_a_cut(case: SmallCase) -> None:
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    assert structure.macs() == counted(model, x)
    for group in structure.groups:
        if group.size > 2:
            plan = structure.plan({group.name: range(group.size - 1)})
            small = ap.cut(model, plan)
            assert structure.macs(plan) == counted(small, x), group.name
            assert structure.params(plan) == sum(p.numel() for p in small.parameters())


def test_a_recurrent_layer_costs_its_two_products_at_every_step() -> None:
    case = small_case("recurrent")
    structure = ap.trace(case.model(), case.inputs(2))
    gates = 4 * 6 * (5 + 6)  # four gates of six units read five inputs and six of their own
    assert structure.macs() == 2 * 4 * gates + 2 * 6 * 3


@every_case
def test_every_way_of_asking_gives_the_same_answer(case: SmallCase) -> None:
    structure = ap.trace(case.model(), case.inputs())
    kept = {g.name: range(g.size - 1) for g in structure.groups if g.size > 1}
    counts = {name: len(own) for name, own in kept.items()}
    plan = structure.plan(kept)
    read = ap.Plan.from_json(plan.to_json())
    for ask in (ap.Structure.macs, ap.Structure.params):
        answers = {ask(structure, plan), ask(structure, counts), ask(structure, read)}
        answers.add(ask(structure.after(plan)))
        assert len(answers) == 1
        assert answers.pop() < ask(structure)


@every_case
def test_a_unit_costs_the_difference_it_makes(case: SmallCase) -> None:
    structure = ap.trace(case.model(), case.inputs())
    for group in structure.groups:
        if group.size > 1:
            fewer = {group.name: group.size - 1}
            macs, params = structure.unit_cost(group.name)
            assert macs == structure.macs() - structure.macs(fewer)
            assert params == structure.params() - structure.params(fewer)
            assert macs > 0
            assert params > 0
    plan = structure.plan({g.name: range(g.size - 1) for g in structure.groups if g.size > 2})
    after = structure.after(plan)
    for group in after.groups:
        if group.size > 1:
            assert after.unit_cost(group.name)[0] == after.macs() - after.macs(
                {group.name: group.size - 1}
            )


@pytest.mark.parametrize("num", [1, 2, 5])
def test_macs_are_those_of_the_example_batch(num: int) -> None:
    case = small_case("fused")
    model = case.model()
    assert ap.trace(model, case.inputs(num)).macs() == num * counted(model, case.inputs(1))


GROUPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5), 9 * 6 * 2 * 9),
    "strided, dilated": (lambda: nn.Conv2d(2, 3, 3, 2, 1, 2), (1, 2, 9, 9), 16 * 3 * 2 * 9),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), (1, 2, 5, 5), 25 * 2 * 3 * 9),
    "one dimension": (lambda: nn.Conv1d(2, 3, 3), (1, 2, 7), 5 * 3 * 2 * 3),
    "linear": (lambda: nn.Linear(4, 3), (2, 5, 4), 2 * 5 * 4 * 3),
}


@pytest.mark.parametrize("name", GROUPED)
def test_products_cost_as_on_paper(name: str) -> None:
    make, shape, macs = GROUPED[name]
    assert ap.trace(make(), torch.zeros(shape)).macs() == macs


def test_tied_parameters_count_once() -> None:
    model = small_case("tied").model()
    structure = ap.trace(model, small_case("tied").inputs())
    assert structure.params() == 7 * 6 + 9 * 6 + 9 + 6 * 9 + 6


@every_case
def test_modules_share_the_whole_cost_among_them(case: SmallCase) -> None:
    structure = ap.trace(case.model(), case.inputs())
    plan = structure.plan({g.name: range(g.size - 1) for g in structure.groups if g.size > 2})
    for asked in (None, plan, {name: len(own) for name, own in plan.kept.items()}):
        assert sum(structure.macs_by_module(asked).values()) == structure.macs(asked)
    assert structure.after(plan).macs_by_module() == structure.macs_by_module(plan)


def test_a_module_costs_as_on_paper_before_and_after_a_cut() -> None:
    """Convolutions and linear layers by closed form, from what hooks see go in and out of the cut model."""
    from apoptosis.models import digits_cnn

    model, x = digits_cnn().eval(), torch.zeros(1, 1, 8, 8)
    structure = ap.trace(model, x)
    plan = structure.plan({"stem.conv": range(11), "top.conv": range(5)})
    small = ap.cut(model, plan)
    for network, found in (
        (model, structure.macs_by_module()),
        (small, structure.macs_by_module(plan)),
    ):
        expected: dict[str, int] = {}

        def note(layer: nn.Module, _: Any, output: torch.Tensor, *, into=expected, of=network):
            name = next(path for path, own in of.named_modules() if own is layer)
            into[name] = output.numel() * layer.weight[0].numel()

        hooks = [
            layer.register_forward_hook(note)
            for layer in network.modules()
            if isinstance(layer, (nn.Conv2d, nn.Linear))
        ]
        network(x)
        for hook in hooks:
            hook.remove()
        assert list(found.items()) == list(expected.items())


class Product(nn.Module):
    """Computes something of its own, beside a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.layer(x))
        return y @ y.T


def test_what_the_model_computes_itself_stands_under_no_name() -> None:
    found = ap.trace(Product(), torch.zeros(3, 4)).macs_by_module()
    assert found == {"layer": 2 * 3 * 4 * 4, "": 3 * 3 * 4}
