"""Bad input: a clear error of the right class, and the model as it was; never a silent no-op."""

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import ConfigError, ModelError, PlanMismatchError, TraceError
from oracles.building import Net, built
from oracles.shrinking import hard_coded, small_case
from oracles.untouched import Snapshot


@pytest.fixture
def mlp() -> nn.Module:
    return small_case("mlp").model()


@pytest.fixture
def structure(mlp: nn.Module) -> ap.Structure:
    return ap.trace(mlp, small_case("mlp").inputs())


def refused(
    model: nn.Module, error: type[Exception], match: str, act: Callable[[], Any]
) -> Exception:
    """The act raises that error, and the model is as it was."""
    before = Snapshot(model)
    with pytest.raises(error, match=match) as caught:
        act()
    before.assert_unchanged()
    return caught.value


@pytest.mark.parametrize(
    ("inputs", "cause"),
    [
        (torch.zeros(2, 5, dtype=torch.float64), r"\(2, 5\).*RuntimeError: mat1 and mat2"),
        (torch.zeros(2, 4), r"\(2, 4\).*RuntimeError: .*dtype"),
        ((), r"no tensors.*TypeError: .*missing 1 required positional argument"),
        ({"inputs": torch.zeros(2, 4)}, r"TypeError: .*unexpected keyword argument 'inputs'"),
        ("text", r"no tensors.*TypeError"),
        (None, r"no tensors.*TypeError"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), r"\(2, 4\), \(2, 4\).*TypeError: .*positional"),
    ],
    ids=["shape", "dtype", "none at all", "keyword", "text", "None", "too many"],
)
def test_inputs_that_the_model_does_not_run_on(mlp, inputs, cause) -> None:
    match = f"Sequential did not run on the example inputs .*{cause}.*what you would call the model"
    error = refused(mlp, TraceError, match, lambda: ap.trace(mlp, inputs))
    assert isinstance(error.__cause__, Exception)


def test_a_failing_forward_is_named_by_its_line() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        raise ValueError("no such thing")
        return y

    model = built(lambda: Net(forward, a=nn.Linear(4, 3)))
    line = forward.__code__.co_firstlineno + 2
    match = rf"ValueError: no such thing At .*test_bad_inputs.py:{line} in forward"
    refused(model, TraceError, match, lambda: ap.trace(model, torch.zeros(2, 4).double()))


def test_something_that_is_no_module() -> None:
    with pytest.raises(ModelError, match="function.*torch.nn.Module"):
        ap.trace(torch.relu, torch.zeros(2, 4))


def test_a_model_that_cannot_be_copied(mlp) -> None:
    mlp.lock = threading.Lock()
    match = "cannot be copied.*lock.*__deepcopy__"
    refused(mlp, ModelError, match, lambda: ap.trace(mlp, small_case("mlp").inputs()))


def test_a_model_that_became_uncopyable_after_the_plan(mlp, structure) -> None:
    plan = structure.plan({"0": [0]})
    mlp.lock = threading.Lock()
    refused(mlp, ModelError, "cannot be copied", lambda: ap.cut(mlp, plan))
    refused(mlp, ModelError, "cannot be copied", lambda: ap.zero(mlp, plan))


@pytest.mark.parametrize("act", [ap.cut, ap.zero], ids=["cut", "zero"])
class TestPlansOfOtherModels:
    def test_other_names(self, act, structure) -> None:
        other = small_case("residual").model()
        plan = structure.plan({"0": [0, 1]})
        match = "cuts '0.weight', which Residual does not have.*another model"
        refused(other, PlanMismatchError, match, lambda: act(other, plan))

    def test_other_shapes(self, act, structure) -> None:
        other = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6))
        plan = structure.plan({"0": [0, 1]})
        match = r"made for '0.weight' of shape \(8, 4\); this model's has \(9, 4\)"
        refused(other, PlanMismatchError, match, lambda: act(other, plan))

    def test_twice(self, act, mlp, structure) -> None:
        plan = structure.plan({"0": [0, 1]})
        small = ap.cut(mlp, plan)
        match = r"has shape \(2, 4\) already.*has been applied.*structure.after"
        refused(small, PlanMismatchError, match, lambda: act(small, plan))

    def test_tied_then_loosened(self, act) -> None:
        case = small_case("tied")
        model = case.model()
        plan = ap.trace(model, case.inputs()).plan({"words": [0, 3]})
        loose = case.model()
        loose.head.weight = nn.Parameter(loose.words.weight.detach().clone())
        match = "words.weight and head.weight were one tensor.*several now"
        refused(loose, PlanMismatchError, match, lambda: act(loose, plan))


def test_costs_of_a_plan_for_another_network(structure) -> None:
    plan = structure.plan({"0": [0, 1]})
    for ask in (
        structure.after(plan).macs,
        structure.after(plan).params,
        structure.after(plan).after,
    ):
        with pytest.raises(PlanMismatchError, match="made for another network"):
            ask(plan)


@pytest.mark.parametrize(
    ("units", "match"),
    [
        ([0, 8], "has units 0 … 7; 8 is none of them"),
        ([-1, 0], "has units 0 … 7; -1 is none of them"),
        ([3, 3, 4], "named twice"),
        ([], "would keep 0 of 8 units; at least 1 must stay"),
        (np.array([0, 99]), "99 is none"),
        (np.array([], dtype=np.int64), "would keep 0 of 8"),
        (np.array([1, -2]), "-2 is none"),
    ],
    ids=[
        "too large",
        "negative",
        "twice",
        "none",
        "array too large",
        "array none",
        "array negative",
    ],
)
def test_units_that_are_none(mlp, structure, units, match) -> None:
    refused(
        mlp, PlanMismatchError, f"'0' .*{match}|'0'.*{match}", lambda: structure.plan({"0": units})
    )


@pytest.mark.parametrize(
    "units",
    [
        [True, 2, 5],
        [torch.tensor(True), 2, 5],
        {True, False},
        np.ones((1, 8), dtype=bool),
        [0.5, 2.7],
        np.array([0.0, 2.5]),
        torch.tensor([0.0, 2.5]),
        ["0", "1"],
        "01",
        None,
        3,
        np.array([[0, 1], [2, 3]]),
        [[0, 1]],
    ],
    ids=[
        *("a boolean among numbers", "a boolean tensor among numbers", "a set of booleans"),
        *("a mask of two dimensions", "fractions", "array of fractions", "tensor of fractions"),
        *("texts", "text", "None", "a number", "matrix", "nested"),
    ],
)
def test_units_that_are_no_indices(mlp, structure, units) -> None:
    """True read as index 1, or 2.7 as 2, would cut something nobody asked for."""
    match = "Group '0'.*indices of the units to keep"
    refused(mlp, PlanMismatchError, match, lambda: structure.plan({"0": units}))


@pytest.mark.parametrize(
    "units",
    [
        [5, 2, 0],
        (0, 2, 5),
        {0, 2, 5},
        iter([0, 2, 5]),
        np.arange(6)[::-1][[0, 3, 5]],
        np.array([0, 9, 2, 9, 5, 9], dtype=np.int16)[::2],
        np.array([0, 2, 5], dtype=np.uint8),
        torch.tensor([0, 2, 5]),
        [np.int64(0), np.int32(2), torch.tensor(5)],
    ],
    ids=[
        *("unsorted", "tuple", "set", "iterator", "reversed view", "strided", "unsigned"),
        *("tensor", "scalars"),
    ],
)
def test_indices_in_any_form_mean_the_same(structure, units) -> None:
    assert structure.plan({"0": units}).kept["0"].tolist() == [0, 2, 5]


MASK = [True, False, True, False, False, True, False, False]
MASKS = {
    "list": list,
    "iterator": iter,
    "array": np.array,
    "tensor": torch.tensor,
    "scalars": lambda mask: [torch.tensor(item) for item in mask],
}


@pytest.mark.parametrize("form", MASKS)
def test_a_mask_says_of_each_unit_whether_it_stays(structure, form) -> None:
    assert structure.plan({"0": MASKS[form](MASK)}).kept["0"].tolist() == [0, 2, 5]


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("length", [1, 7, 9])
def test_a_mask_of_another_length_is_refused(mlp, structure, form, length) -> None:
    mask = MASKS[form]([*MASK, True][:length])
    match = f"'0' has 8 units; the mask given for it has {length} entries"
    refused(mlp, PlanMismatchError, match, lambda: structure.plan({"0": mask}))


def test_masks_of_nothing_and_of_everything(mlp, structure) -> None:
    none, empty = np.zeros(8, dtype=bool), torch.zeros(0, dtype=torch.bool)
    refused(mlp, PlanMismatchError, "keep 0 of 8", lambda: structure.plan({"0": none}))
    refused(mlp, PlanMismatchError, "has 0 entries", lambda: structure.plan({"0": empty}))
    assert list(structure.plan({"0": ~none, "2": [1]}).kept) == ["2"]


@pytest.mark.parametrize("kept", [[("0", [1])], "0", None, 3, {"0"}], ids=str)
@pytest.mark.parametrize("ask", ["plan", "macs"])
def test_what_is_no_mapping_from_groups(mlp, structure, ask, kept) -> None:
    if ask == "macs" and kept is None:
        return  # nothing is cut
    match = "is no mapping. Give a dictionary from names of groups"
    refused(mlp, ConfigError, match, lambda: getattr(structure, ask)(kept))


@pytest.mark.parametrize("ask", ["plan", "macs", "params"])
def test_groups_are_named_by_texts(mlp, structure, ask) -> None:
    given: Any = {0: [1] if ask == "plan" else 1}
    match = "named by texts; 0 is int. `structure.groups` lists them"
    refused(mlp, PlanMismatchError, match, lambda: getattr(structure, ask)(given))


@pytest.mark.parametrize("ask", ["plan", "macs", "params"])
def test_an_unknown_group_is_answered_with_near_names(mlp, ask) -> None:
    model = small_case("residual").model()
    structure = ap.trace(model, small_case("residual").inputs())
    match = r"no group 'block.0.conv1'. Did you mean 'blocks.0.conv1' or"
    value: Any = [0] if ask == "plan" else 1
    act = getattr(structure, ask)
    refused(model, PlanMismatchError, match, lambda: act({"block.0.conv1": value}))
    with pytest.raises(PlanMismatchError, match=match):
        structure["block.0.conv1"]
    with pytest.raises(PlanMismatchError, match=match):
        structure.unit_cost("block.0.conv1")


@pytest.mark.parametrize("num", [0, -1, 9], ids=str)
def test_counts_that_a_group_cannot_have(structure, num) -> None:
    with pytest.raises(PlanMismatchError, match=f"'0' .*{num}.*8"):
        structure.macs({"0": num})


@pytest.mark.parametrize("num", [2.5, 2.0, "2", True, None, [2]], ids=repr)
@pytest.mark.parametrize("ask", ["macs", "params"])
def test_counts_are_whole_numbers(structure, ask, num) -> None:
    with pytest.raises(PlanMismatchError, match=r"'0' cannot keep .* a count is a whole number"):
        getattr(structure, ask)({"0": num})


@pytest.mark.parametrize("num", [np.int32(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_a_count_may_be_numpys_or_torchs(structure, num) -> None:
    assert structure.macs({"0": num}) == structure.macs({"0": 2})
    assert type(structure.macs({"0": num})) is int


@pytest.mark.parametrize("kept", [{}, {"0": range(8)}, {"0": range(8), "2": range(6)}], ids=str)
def test_a_plan_that_removes_nothing(mlp, structure, kept) -> None:
    match = r"removes nothing. There are 2 groups: 0 \(hidden, 8\), 2 \(hidden, 6\)"
    refused(mlp, ConfigError, match, lambda: structure.plan(kept))


def test_a_model_in_which_nothing_can_shrink_says_why() -> None:
    model = nn.Linear(4, 3)
    structure = ap.trace(model, torch.zeros(2, 4))
    assert structure.groups == ()
    why = r"Nothing in this model can shrink\. .*weight: it is an (in|out)put of the model"
    refused(model, ConfigError, why, lambda: structure.plan({}))
    refused(model, ConfigError, why, structure.choose)


def test_a_model_without_parameters_says_so() -> None:
    structure = ap.trace(nn.ReLU(), torch.zeros(2, 4))
    with pytest.raises(
        ConfigError, match=r"Nothing in this model can shrink\. It has no parameters\."
    ):
        structure.plan({})


def test_an_unknown_kind_is_answered_with_the_kinds(structure) -> None:
    with pytest.raises(
        ConfigError, match=r"no kind 'neuron'. The kinds are rank, kv_head, .*hidden"
    ):
        structure.choose(kinds=["neuron"])


@pytest.mark.parametrize(
    "options",
    [{"kinds": ["head"]}, {"names": ["!*"]}, {"kinds": []}],
    ids=str,
)
def test_a_choice_without_matches(structure, options) -> None:
    with pytest.raises(
        ConfigError, match=r"No group is chosen by .*There are 2 groups: 0 \(hidden"
    ):
        structure.choose(**options)


@pytest.mark.parametrize("pattern", ["layer*", "!layer*"])
def test_a_pattern_that_fits_nothing_protects_nothing_and_is_refused(structure, pattern) -> None:
    with pytest.raises(ConfigError, match=r"'layer\*' fits no group\. The groups are 0, [^,]*\.$"):
        structure.choose(names=[pattern])


def test_a_layer_of_a_group_with_another_name_is_answered_with_the_group() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match=r"'1' fits no group\. 1\.weight belongs to '0'"):
        ap.trace(net, torch.zeros(1, 4)).choose(names=["!1"])


@pytest.mark.parametrize("option", ["kinds", "names"])
def test_one_text_where_a_list_belongs(structure, option) -> None:
    """Read as a list of letters, it would choose everything or complain about the kind 'h'."""
    with pytest.raises(ConfigError, match=rf"{option}=\['hidden'\]"):
        structure.choose(**{option: "hidden"})


def test_iterators_are_read_once(structure) -> None:
    chosen = structure.choose(kinds=iter(["hidden"]), names=iter(["*", "!2"]))
    assert [group.name for group in chosen] == ["0"]


def test_a_compiled_model_is_pointed_to_the_original(mlp) -> None:
    compiled = torch.compile(mlp, backend="eager")
    match = "compiled.*_orig_mod.*trace the model, cut it, and compile"
    refused(mlp, ModelError, match, lambda: ap.trace(compiled, small_case("mlp").inputs()))


def test_a_compiled_part_is_named() -> None:
    part = torch.compile(nn.Linear(4, 6), backend="eager")
    model = nn.Sequential(part, nn.ReLU(), nn.Linear(6, 3))
    refused(
        model,
        ModelError,
        "'0' of the model is compiled",
        lambda: ap.trace(model, torch.zeros(2, 4)),
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_a_scripted_model_is_refused_for_its_copies_are_made_elsewhere() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    with pytest.raises(ModelError, match="Scripted modules copy themselves"):
        ap.trace(scripted, torch.zeros(2, 4))


class CopiesItself(nn.Sequential):
    """A class whose copies hold tensors of their own: a cut would change nothing, silently."""

    def __deepcopy__(self, memo: Any) -> nn.Module:
        with torch.random.fork_rng():
            made = CopiesItself(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        made.load_state_dict(self.state_dict())
        return made


def test_a_model_whose_copies_are_not_its_parts_is_refused() -> None:
    model = CopiesItself(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    match = "CopiesItself does not hold the tensor given for '0.weight'.*__deepcopy__"
    refused(model, ModelError, match, lambda: ap.trace(model, torch.zeros(2, 4)))


def test_a_graph_module_is_cut_as_any_other(mlp) -> None:
    graph = torch.fx.symbolic_trace(mlp)
    x = small_case("mlp").inputs()
    plan = ap.trace(graph, x).plan({"0": [0, 3]})
    assert plan.delivery == "module"
    torch.testing.assert_close(ap.cut(graph, plan)(x), ap.zero(graph, plan)(x))


def test_a_model_compiled_in_place_is_traced_as_it_is(mlp) -> None:
    mlp.compile(backend="eager")
    assert [g.name for g in ap.trace(mlp, small_case("mlp").inputs()).groups] == ["0", "2"]


def test_a_wrapped_model_is_cut_inside_its_wrapper(mlp) -> None:
    wrapped = nn.DataParallel(mlp)
    x = small_case("mlp").inputs()
    plan = ap.trace(wrapped, x).plan({"module.0": [0, 3]})
    small = ap.cut(wrapped, plan)
    assert isinstance(small, nn.DataParallel)
    torch.testing.assert_close(small(x), ap.zero(mlp, ap.trace(mlp, x).plan({"0": [0, 3]}))(x))


def test_a_program_from_a_file_needs_inputs() -> None:
    model = hard_coded()
    x = small_case("hard coded").inputs()
    plan = ap.Plan.from_json(ap.trace(model, x).plan({"a": [0, 2]}).to_json())
    refused(model, PlanMismatchError, "Pass `example_inputs`", lambda: ap.cut(model, plan))
    assert ap.cut(model, plan, example_inputs=x)(x).shape == (2, 3)


def test_an_optimiser_of_another_model(mlp, structure) -> None:
    plan = structure.plan({"0": [0, 1]})
    small = ap.cut(mlp, plan)
    other = torch.optim.SGD(small_case("residual").model().parameters(), 0.1)
    match = r"trains \d+ tensors that are not the model's, the first of shape \(6, 2, 3, 3\)"
    refused(mlp, PlanMismatchError, match, lambda: ap.cut_optimizer(other, mlp, small, plan))
    of_small = torch.optim.SGD(small.parameters(), 0.1)
    match = "are not the model's"
    refused(mlp, PlanMismatchError, match, lambda: ap.cut_optimizer(of_small, mlp, small, plan))


def test_an_optimiser_for_a_model_that_is_not_the_cut_one(mlp, structure) -> None:
    plan = structure.plan({"0": [0, 1]})
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1)
    match = re.escape("'0.weight' of the cut model has shape (8, 4); the plan makes it (2, 4)")
    refused(mlp, PlanMismatchError, match, lambda: ap.cut_optimizer(optimizer, mlp, mlp, plan))
    other = small_case("residual").model()
    match = "the cut model has no '0.weight'"
    refused(mlp, PlanMismatchError, match, lambda: ap.cut_optimizer(optimizer, mlp, other, plan))
