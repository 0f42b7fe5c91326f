"""Every axis rule on its own samples: each free axis is cut, each claim of zeros tried, each cost counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from apoptosis.structure.analysis import FAMILIES
from apoptosis.structure.axes import size_of
from apoptosis.structure.program import Call
from apoptosis.structure.rules import RULES, find_rule, register
from apoptosis.structure.samples import sample, tensor
from oracles.axis_rules import (
    Trial,
    assert_costs_are_counted,
    assert_cut_is_right,
    assert_cuts_are_right,
    assert_free_axes_are_expected,
    assert_sums_are_declared,
    assert_zeros_are_zero,
    overload,
)

CASES = [
    pytest.param(Trial(rule.name, own), id=f"{rule.name}-{number}")
    for rule in RULES.values()
    for number, own in enumerate(rule.samples())
]
IN_PLACE = [
    (name, twin)
    for name in RULES
    for base, _, variant in [name.partition(".")]
    for twin in (f"{base}_.{variant}", f"__i{base[2:]}.{variant}")
    if variant
    in getattr(getattr(torch.ops.aten, twin.partition(".")[0], None), "overloads", list)()
]


@pytest.mark.parametrize("trial", CASES)
def test_as_many_axes_are_free_as_expected(trial: Trial) -> None:
    assert_free_axes_are_expected(trial)


@pytest.mark.parametrize("trial", CASES)
def test_the_operation_on_kept_parts_gives_the_kept_parts(trial: Trial) -> None:
    assert_cuts_are_right(trial)


@pytest.mark.parametrize("trial", CASES)
def test_nothing_is_summed_over_but_what_the_rule_declares(trial: Trial) -> None:
    assert_sums_are_declared(trial)


@pytest.mark.parametrize("trial", CASES)
def test_the_result_is_zero_where_the_rule_says_so(trial: Trial) -> None:
    assert_zeros_are_zero(trial)


@pytest.mark.parametrize("trial", CASES)
def test_the_costs_are_what_torch_counts(trial: Trial) -> None:
    assert_costs_are_counted(trial)


@pytest.mark.parametrize(("plain", "in_place"), IN_PLACE, ids=[twin for _, twin in IN_PLACE])
def test_the_in_place_form_has_the_same_entry(plain: str, in_place: str) -> None:
    assert find_rule(Call(overload(in_place), {}, (), None, "", "")) is RULES[plain]


def test_rows_times_the_matrices_of_their_experts() -> None:
    """The kernel wants multiples of 16 bytes, which is four numbers here, so whole blocks of them are cut."""
    offsets = torch.tensor([3, 4, 9], dtype=torch.int32)
    rows, matrices = tensor(9, 12).float(), tensor(3, 12, 16).float()
    trial = Trial("_grouped_mm.default", sample(rows, matrices, offsets, free="12 16"))
    assert_free_axes_are_expected(trial)
    assert_zeros_are_zero(trial)
    assert [size_of(expr) for expr in trial.facts.costs[0]] == [9, 12, 16]
    inner, columns = trial.free
    whole = {inner: np.arange(12), columns: np.arange(16)}
    for part in ({inner: np.arange(4, 12)}, {columns: np.r_[:4, 12:16]}, {inner: np.arange(4)}):
        assert_cut_is_right(trial, whole | part, rounding=1e-5)


def test_a_rule_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="'cat.default' has a rule already"):
        register(RULES["cat.default"])


def test_a_rule_needs_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        register(replace(RULES["cat.default"], name="unproved.default", samples=list))


def test_every_family_is_loaded() -> None:
    assert {rule.family for rule in RULES.values()} == set(FAMILIES)


def test_every_rule_says_what_it_does() -> None:
    assert all(rule.says for rule in RULES.values())


def test_names_are_those_of_overloads() -> None:
    for name in RULES:
        assert isinstance(overload(name), torch._ops.OpOverload)
