"""What a cut keeps of a model, and what an optimiser becomes."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import apoptosis as ap
from apoptosis.structure import CutProgram
from oracles.building import built
from oracles.shrinking import SMALL_CASES, SmallCase, small_case
from oracles.untouched import Snapshot

every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


def planned(case: SmallCase) -> tuple[nn.Module, Tensor, ap.Plan]:
    """A model and a plan that halves everything exact whose number is free."""
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    bound = {name for tie in structure.ties for name, _ in tie.members}
    kept = {
        g.name: range(0, g.size, 2)
        for g in structure.groups
        if g.exact and g.size > 1 and g.name not in bound
    }
    return model, x, structure.plan(kept)


def cut_case(case: SmallCase) -> tuple[nn.Module, nn.Module, Tensor, ap.Plan]:
    model, x, plan = planned(case)
    return model, ap.cut(model, plan), x, plan


@every_case
def test_cut_equals_zeroed_and_the_model_is_as_it_was(case: SmallCase) -> None:
    model, x, plan = planned(case)
    before, output = Snapshot(model), model(x)
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    before.assert_unchanged()
    assert plan.delivery == case.delivery
    assert (
        isinstance(small, CutProgram) if case.delivery == "program" else type(small) is type(model)
    )
    for inputs in (x, case.inputs(5, seed=1)):
        torch.testing.assert_close(small(inputs), twin(inputs), rtol=1e-12, atol=1e-13)
    assert not torch.equal(twin(x), output)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


@every_case
def test_zeroed_entries_are_those_the_plan_does_not_keep(case: SmallCase) -> None:
    model, _, plan = planned(case)
    twin, held = ap.zero(model, plan).state_dict(), model.state_dict()
    for cut in plan.tensors:
        for name in cut.names:
            index = torch.meshgrid(
                *(torch.as_tensor(cut.kept.get(d, range(n))) for d, n in enumerate(cut.shape)),
                indexing="ij",
            )
            expected = torch.zeros_like(held[name])
            expected[index] = held[name][index]
            assert torch.equal(twin[name], expected)
    untouched = set(held) - {name for cut in plan.tensors for name in cut.names}
    assert all(torch.equal(twin[name], held[name]) for name in untouched)


@every_case
def test_names_dtypes_and_flags_are_kept(case: SmallCase) -> None:
    model, x = case.model(), case.inputs()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    structure = ap.trace(model, x)
    group = next(g for g in structure.groups if g.exact and g.size > 1)
    small = ap.cut(model, structure.plan({group.name: [0]}))
    assert list(small.state_dict()) == list(model.state_dict())
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    assert {n: p.requires_grad for n, p in small.named_parameters()} == wanted
    kinds = {n: (t.dtype, t.device) for n, t in model.state_dict().items()}
    assert {n: (t.dtype, t.device) for n, t in small.state_dict().items()} == kinds
    assert not any(p.grad_fn for p in small.parameters())


@every_case
def test_a_cut_model_is_copied_saved_and_loaded(case: SmallCase) -> None:
    _, small, x, _ = cut_case(case)
    expected = small(x)
    copied = copy.deepcopy(small)
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1.0)
    assert torch.equal(small(x), expected), "the copy has tensors of its own"
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    copied.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(copied(x), expected)


@every_case
def test_a_cut_model_trains(case: SmallCase) -> None:
    _, small, x, _ = cut_case(case)
    small.train()
    optimizer = torch.optim.SGD(small.parameters(), 0.05)
    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = small(x).square().mean()
        loss.backward()
        assert all(p.grad is not None for p in small.parameters() if p.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] != losses[0]
    assert all(torch.isfinite(p).all() for p in small.parameters())


@pytest.mark.parametrize("id", ["mlp", "encoder", "hard coded"])
def test_a_cut_model_compiles(id: str) -> None:
    _, small, x, _ = cut_case(small_case(id))
    torch._dynamo.reset()
    compiled = torch.compile(small, backend="eager")
    for inputs in (x, small_case(id).inputs(5, seed=1)):
        torch.testing.assert_close(compiled(inputs), small(inputs), rtol=1e-12, atol=1e-13)


def test_a_cut_has_no_graph_and_no_gradients_of_the_model() -> None:
    case = small_case("mlp")
    model, x, plan = planned(case)
    model(x).sum().backward()
    small = ap.cut(model, plan)
    assert all(p.is_leaf for p in small.parameters())
    cut_names = {name for cut in plan.tensors for name in cut.names}
    assert all(p.grad is None for n, p in small.named_parameters() if n in cut_names)


def test_ties_stay_ties() -> None:
    case = small_case("tied")
    model, small, _, plan = cut_case(case)
    assert small.head.weight is small.words.weight
    assert small.head.weight.shape == (7, 3)
    twin = ap.zero(model, plan)
    assert twin.head.weight is twin.words.weight
    assert (small.head.in_features, small.words.embedding_dim) == (3, 3)
    structure = ap.trace(model, case.inputs())
    program = structure.program(model, plan)
    assert program.head.weight is program.words.weight


def test_hooks_of_modules_are_kept() -> None:
    case = small_case("mlp")
    model = case.model()
    seen: list[int] = []
    model[0].register_forward_hook(lambda *seen_now: seen.append(seen_now[2].shape[1]))
    plan = ap.trace(model, case.inputs()).plan({"0": [0, 1, 2]})
    seen.clear()
    ap.cut(model, plan)(case.inputs())
    assert seen == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_cut_as_it_is(dtype: torch.dtype) -> None:
    case = small_case("residual")
    model, x = case.model().to(dtype), case.inputs().to(dtype)
    plan = ap.trace(model, x).plan({"stem.0": [0, 2, 5]})
    small = ap.cut(model, plan)
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert torch.equal(small.stem[0].weight, model.stem[0].weight[[0, 2, 5]])


def test_buffers_are_cut_and_integer_ones_are_not_zeroed() -> None:
    case = small_case("residual")
    model, x = case.model(), case.inputs()
    model.stem[1].num_batches_tracked.fill_(7)
    plan = ap.trace(model, x).plan({"stem.0": [1, 4]})
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    assert torch.equal(small.stem[1].running_var, model.stem[1].running_var[[1, 4]])
    assert int(small.stem[1].num_batches_tracked) == 7
    assert int(twin.stem[1].num_batches_tracked) == 7
    assert float(twin.stem[1].running_var[0]) == 0


def test_the_memory_format_is_kept() -> None:
    case = small_case("residual")
    model, x = case.model().to(memory_format=torch.channels_last), case.inputs()
    plan = ap.trace(model, x).plan({"stem.0": [1, 4], "blocks.0.conv1": [0, 2]})
    for small in (ap.cut(model, plan), ap.zero(model, plan)):
        weights = [p for p in small.parameters() if p.ndim == 4]
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    plain = ap.cut(case.model(), plan)
    assert all(p.is_contiguous() for p in plain.parameters())


def test_state_cut_twice_is_state_cut_once() -> None:
    case = small_case("mlp")
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    first = structure.plan({"0": [0, 1, 4]})
    second = structure.after(first).plan({"0": [1], "2": [0, 5]})
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    small = ap.cut(model, first)
    own = ap.cut_optimizer(optimizer, model, small, first)
    smallest = ap.cut(small, second)
    twice = ap.cut_optimizer(own, small, smallest, second)
    both = first.then(second)
    at_once = ap.cut(model, both)
    once = ap.cut_optimizer(optimizer, model, at_once, both)
    for a, b in zip(smallest.parameters(), at_once.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(twice.state[a][key], once.state[b][key])


def test_a_module_under_two_names_stays_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
            self.first = self.second = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(self.a(x)).relu()).tanh())

    model, x = built(Shared), torch.randn(2, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    plan = structure.plan({"a": [0, 1, 2]})
    small, program = ap.cut(model, plan), structure.program(model, plan)
    assert small.first is small.second
    assert list(small.state_dict()) == list(program.state_dict()) == list(model.state_dict())
    for net in (small, program):
        torch.testing.assert_close(net(x), ap.zero(model, plan)(x), rtol=1e-12, atol=1e-13)


def test_a_model_in_train_mode_is_cut_in_train_mode() -> None:
    for id in ("residual", "hard coded"):
        case = small_case(id)
        model = case.model().train()
        structure = ap.trace(model, case.inputs())
        small = ap.cut(model, structure.plan({structure.groups[0].name: [0, 1]}))
        assert model.training
        assert small.training


@pytest.mark.parametrize("new_style", [True, False], ids=["parametrization", "hook"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weight_normed_layers_are_cut_exactly(new_style: bool) -> None:
    norm = parametrizations.weight_norm if new_style else nn.utils.weight_norm
    model = built(lambda: nn.Sequential(norm(nn.Linear(4, 6)), nn.Tanh(), norm(nn.Linear(6, 2))))
    x = torch.randn(3, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    plan = structure.plan({structure.groups[0].name: [0, 2, 5]})
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    found, expected = small(x), twin(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert not torch.equal(expected, model(x))


# ------------------------------------------------------------------------------------------------------- optimisers


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD plain": lambda p: torch.optim.SGD(p, 0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
}
"""All act on each entry alone: one step of the cut model is the slice of one step of the whole one."""


def entries(cut: Any, tensor: Tensor) -> Tensor:
    for dim, kept in cut.kept.items():
        tensor = tensor.index_select(dim, torch.as_tensor(kept))
    return tensor


def sliced(plan: ap.Plan, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By hand: each tensor at the kept indices."""
    cuts = {name: cut for cut in plan.tensors for name in cut.names}
    for name, tensor in tensors.items():
        yield name, entries(cuts[name], tensor) if name in cuts else tensor


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("id", ["residual", "tied"])
def test_a_step_after_the_cut_is_the_slice_of_the_whole_step(name: str, id: str) -> None:
    case = small_case(id)
    model, x, plan = planned(case)
    optimizer = OPTIMISERS[name](model.parameters())
    for seed in range(2):
        step(model, optimizer, seed)
    small = ap.cut(model, plan)
    before = Snapshot(model)
    own = ap.cut_optimizer(optimizer, model, small, plan)
    before.assert_unchanged()
    assert type(own) is type(optimizer)
    assert {id_ for g in own.param_groups for id_ in map(id_of, g["params"])} == {
        id_of(p) for p in small.parameters()
    }
    grads = gradients(model, 5)
    for key, grad in sliced(plan, grads):
        small.get_parameter(key).grad = grad.clone()
    for key, grad in grads.items():
        model.get_parameter(key).grad = grad.clone()
    own.step()
    optimizer.step()
    whole = {key: p.detach() for key, p in model.named_parameters()}
    for key, expected in sliced(plan, whole):
        torch.testing.assert_close(
            small.get_parameter(key).detach(), expected, rtol=1e-14, atol=1e-15, msg=key
        )


def id_of(parameter: Tensor) -> int:
    return id(parameter)


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for name, grad in gradients(model, seed).items():
        model.get_parameter(name).grad = grad
    optimizer.step()


def test_factored_state_is_cut_in_the_dimensions_it_has() -> None:
    model, _, plan = planned(small_case("mlp"))
    optimizer = torch.optim.Adafactor(model.parameters(), 0.01)
    step(model, optimizer, 0)
    small = ap.cut(model, plan)
    own = ap.cut_optimizer(optimizer, model, small, plan)
    kept = {cut.names[0]: cut.kept for cut in plan.tensors}
    state, whole = own.state[small[2].weight], optimizer.state[model[2].weight]
    rows, columns = kept["2.weight"][0], kept["2.weight"][1]
    assert torch.equal(state["row_var"], whole["row_var"][rows])
    assert torch.equal(state["col_var"], whole["col_var"][:, columns])
    assert float(state["step"]) == 1
    step(small, own, 1)
    assert all(torch.isfinite(p).all() for p in small.parameters())


def test_parameter_groups_keep_their_options_and_members() -> None:
    model, _, plan = planned(small_case("residual"))
    convs = [p for n, p in model.named_parameters() if p.ndim == 4]
    rest = [p for n, p in model.named_parameters() if p.ndim != 4]
    optimizer = torch.optim.AdamW(
        [{"params": convs, "lr": 0.3}, {"params": rest, "weight_decay": 0}]
    )
    small = ap.cut(model, plan)
    own = ap.cut_optimizer(optimizer, model, small, plan)
    assert [g["lr"] for g in own.param_groups] == [0.3, 0.001]
    assert [g["weight_decay"] for g in own.param_groups] == [0.01, 0]
    assert [p.ndim == 4 for p in own.param_groups[0]["params"]] == [True] * len(convs)
    found = [p for g in own.param_groups for p in g["params"]]
    assert {id(p) for p in found} == {id(p) for p in small.parameters()}
    own.param_groups[0]["lr"] = 9.0
    assert optimizer.param_groups[0]["lr"] == 0.3, "options are its own"


def test_a_scheduler_of_the_cut_optimiser_drives_it_alone() -> None:
    model, _, plan = planned(small_case("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), 0.4)
    small = ap.cut(model, plan)
    own = ap.cut_optimizer(optimizer, model, small, plan)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    own.step()
    schedule.step()
    assert own.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["lr"] == 0.4


def test_an_optimiser_of_some_parameters_stays_one_of_those() -> None:
    model, _, plan = planned(small_case("mlp"))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)
    step(model, optimizer, 0)
    small = ap.cut(model, plan)
    own = ap.cut_optimizer(optimizer, model, small, plan)
    assert [id(p) for p in own.param_groups[0]["params"]] == [id(p) for p in small[2].parameters()]
    assert set(own.state) == set(small[2].parameters())


def test_the_optimiser_of_a_program_is_cut_as_well() -> None:
    model, x, plan = planned(small_case("hard coded"))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    step(model, optimizer, 0)
    small = ap.cut(model, plan)
    own = ap.cut_optimizer(optimizer, model, small, plan)
    assert {id(p) for p in own.param_groups[0]["params"]} == {id(p) for p in small.parameters()}
    small.train()
    small(x).sum().backward()
    before = small.a.weight.detach().clone()
    own.step()
    assert not torch.equal(small.a.weight, before)


def test_state_that_no_slice_fits_is_refused() -> None:
    model, _, plan = planned(small_case("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model[2].weight]["odd"] = torch.zeros(3, 5)
    small = ap.cut(model, plan)
    with pytest.raises(
        ap.errors.PlanMismatchError, match=r"state of shape \(3, 5\).*cannot be cut"
    ):
        ap.cut_optimizer(optimizer, model, small, plan)
    optimizer.state[model[2].weight]["odd"] = torch.zeros(48)
    with pytest.raises(ap.errors.PlanMismatchError, match=r"state of shape \(48,\).*cannot be cut"):
        ap.cut_optimizer(optimizer, model, small, plan)
