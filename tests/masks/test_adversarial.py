"""Masks under use that their authors did not have in mind. Each test is a defect that was found by a reviewer.

Where a defect can be mended in two ways, by doing what was asked or by refusing it, both pass: what must not happen is
that masks stop holding, or are forgotten, and nobody says so.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from apoptosis.errors import ApoptosisError, BudgetError, ConfigError, ModelError
from apoptosis.masks import (
    Mask,
    MaskPlan,
    check_fits,
    identity_masks,
    import_masks,
    mask,
    mask_,
    mask_optimizer_,
    maskable,
    masks_of,
    release_,
)
from apoptosis.planning import Sparsity, make_masks
from apoptosis.planning.sparsity import num_of
from apoptosis.structure import cut, trace
from apoptosis.workflow import sparsify
from oracles.masked_networks import random_masks


def network(*, classes: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes)
    )


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net[2].weight = net[0].weight
    return net


def batches(classes: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=generator)
    return [(x, torch.randint(0, classes, (20,), generator=generator))]


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 8) + torch.eye(3, 8)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def holds_or_is_not_claimed(model: nn.Module, masks: MaskPlan) -> bool:
    return masks_of(model) is None or masks.holds(model)


# Masks that stop holding while `masks_of` says that they are kept


def test_weights_that_were_tied_and_are_loaded_apart_are_masked_both_or_none_is_claimed() -> None:
    masks = random_masks(tied(), 0.5)
    net = mask(tied(), masks)
    net.load_state_dict({n: t.clone() for n, t in tied().state_dict().items()}, assign=True)
    train(net)
    gone = ~masks.kept("0.weight")
    both = not net[0].weight[gone].any() and not net[2].weight[gone].any()
    assert both or masks_of(net) is None


def test_masks_are_not_claimed_once_the_second_of_tied_weights_is_replaced() -> None:
    net = mask(tied(), random_masks(tied(), 0.5))
    net[2].weight = nn.Parameter(torch.ones(8, 8))
    assert masks_of(net).masks["0.weight"].names == ("0.weight",)


def test_gradients_that_were_there_before_the_masks_bring_nothing_back() -> None:
    net, masks = network(), random_masks(network(), 0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_of(net).backward()
    mask_(net, masks)
    optimizer.step()
    assert masks.holds(net)


def step_in_backward(net: nn.Module) -> None:
    """As torch's tutorial has it: each parameter is updated as soon as it has its gradient."""
    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in net.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def test_an_optimiser_inside_the_backward_pass_sees_masked_gradients() -> None:
    net, masks = network(), random_masks(network(), 0.5)
    step_in_backward(net)
    mask_(net, masks)
    loss_of(net).backward()
    assert masks.holds(net)


def test_an_optimiser_inside_the_backward_pass_sees_masked_gradients_after_a_reload() -> None:
    masks = random_masks(network(), 0.5)
    net = mask(network(), masks)
    step_in_backward(net)
    loss_of(net).backward()
    assert masks.holds(net)
    net.load_state_dict(net.state_dict())
    loss_of(net).backward()
    assert masks.holds(net)


def test_releasing_a_shallow_copy_does_not_release_the_original_in_silence() -> None:
    masks = random_masks(network(), 0.5)
    net = mask(network(), masks)
    release_(copy.copy(net))
    train(net)
    assert holds_or_is_not_claimed(net, masks)


def test_a_masked_optimiser_masks_groups_that_come_later() -> None:
    masks = random_masks(network(), 0.5)
    net = mask(network(), masks)
    optimizer = torch.optim.Muon([net[0].weight], lr=0.1)
    mask_optimizer_(optimizer, net)
    optimizer.add_param_group({"params": [net[2].weight]})
    train(net, optimizer)
    assert masks.holds(net)


def test_a_sparse_gradient_stays_one() -> None:
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    masks = random_masks(net, 0.5, ("0.weight",))
    net = mask(net, masks)
    optimizer = torch.optim.SparseAdam(net.parameters())
    net(torch.tensor([1, 2, 2])).sum().backward()
    optimizer.step()
    assert masks.holds(net)


# Masks that are forgotten


def as_part() -> nn.Module:
    return nn.Sequential(mask(network(), random_masks(network(), 0.3)), nn.Linear(4, 4))


def compiled() -> nn.Module:
    return torch.compile(mask(network(), random_masks(network(), 0.3)), backend="eager")  # pyright: ignore[reportReturnType]


def with_another_head() -> nn.Module:
    net = mask(network(), random_masks(network(), 0.3))
    net[4] = nn.Linear(16, 4)
    return net


def in_parallel() -> nn.Module:
    return nn.DataParallel(mask(network(), random_masks(network(), 0.3)))


@pytest.mark.parametrize("make", [as_part, compiled, with_another_head, in_parallel])
def test_masks_that_a_part_of_the_model_keeps_count_or_it_is_refused(
    make: Callable[[], nn.Module],
) -> None:
    """`sparsify`: "Masks it keeps already stay, and count." Else zeros are kept as weights, and trained again later."""
    net = make()
    try:
        outcome = sparsify(net, batches(), Sparsity(keep=0.5), criterion="random", stages=1)
    except ApoptosisError:
        return
    got = outcome.spent[0]
    assert got.left == outcome.plan.num_kept, f"{got}, and the plan says {outcome.plan}"


def without_the_first() -> nn.Module:
    net = mask(network(), random_masks(network(), 0.5, ("4.weight",)))
    return cut(net, trace(net, torch.zeros(1, 8)).plan({"0": list(range(8))}))


def head_replaced() -> nn.Module:
    net = mask(network(), random_masks(network(), 0.5, ("0.weight", "2.weight")))
    net[4] = nn.Linear(16, 10)
    return net


@pytest.mark.parametrize("make", [without_the_first, head_replaced])
def test_masks_of_a_model_are_for_that_model(make: Callable[[], nn.Module]) -> None:
    """Where layers that are not masked have changed, the masks of the others still hold, and can be used."""
    net = make()
    masks = masks_of(net)
    assert masks is not None
    check_fits(net, masks)


# Masks of torch.nn.utils.prune


@pytest.mark.parametrize("both", [False, True])
def test_imported_masks_of_tied_weights_give_the_same_outputs_or_are_refused(*, both: bool) -> None:
    net = tied()
    torch_prune.l1_unstructured(net[0], "weight", 0.5)
    if both:
        torch_prune.random_unstructured(net[2], "weight", 0.5)
    x = torch.ones(3, 8) + torch.eye(3, 8)
    expected = net(x)
    try:
        plain = import_masks(net)
    except ModelError:
        return
    torch.testing.assert_close(plain(x), expected)


# Records, counts and patterns


def test_history_tells_what_went_of_layers_that_had_no_masks_before() -> None:
    net = mask(network(), random_masks(network(), 0.5, ("0.weight",)))
    outcome = sparsify(net, batches(), Sparsity(keep=0.3), criterion="magnitude", stages=1)
    kept, total = outcome.plan.counts()["2.weight"]
    assert outcome.history[0].removed.get("2.weight") == total - kept


def test_a_share_of_very_many_weights_is_exact() -> None:
    assert num_of(0.29, 97_903_400) == 28_391_986


def test_fewer_weights_still_fit_a_pattern() -> None:
    net = nn.Linear(8, 4)
    values = {"weight": torch.rand(4, 8, generator=torch.Generator().manual_seed(0))}
    half = make_masks(net, values, Sparsity(pattern="2:4"))
    fewer = make_masks(net, values, Sparsity(keep=0.4), start=half)
    assert fewer.masks["weight"].pattern == half.masks["weight"].pattern


def test_names_that_can_be_read_once_mean_the_same_every_time() -> None:
    sparsity = Sparsity(keep=0.5, names=(name for name in ["0.weight"]))  # pyright: ignore[reportArgumentType]
    assert list(sparsity.layers(network())) == list(sparsity.layers(network())) == ["0.weight"]


def test_a_share_may_be_fixed_by_any_name_of_a_tied_weight() -> None:
    sparsity = Sparsity(keep=0.5, names=("2.weight",), shares={"2.weight": 0.5})
    assert list(sparsity.layers(tied())) == ["0.weight"]


# Refusals


def test_stages_do_not_change_the_share_that_a_refusal_speaks_of() -> None:
    with pytest.raises(BudgetError, match=r"0\.001 of the weights"):
        sparsify(network(), batches(), Sparsity(keep=0.001), criterion="magnitude", stages=3)


@pytest.mark.parametrize("stages", [1, 3])
def test_the_share_that_a_refusal_names_works(stages: int) -> None:
    def asked(keep: float) -> Sparsity:
        return Sparsity(keep=keep, shares={"*": 0.9})

    with pytest.raises(BudgetError) as refused:
        sparsify(network(), batches(), asked(0.5), criterion="magnitude", stages=stages)
    advised = float(str(refused.value).split("ask for keep=")[1].split(",")[0])
    sparsify(network(), batches(), asked(advised), criterion="magnitude", stages=stages)


def test_leaving_out_every_layer_is_no_advice() -> None:
    with pytest.raises(ConfigError) as refused:
        Sparsity(pattern="2:3").layers(network())
    everything = ", ".join(f"'!{name}'" for name in maskable(network()))
    assert everything not in str(refused.value)


def test_norms_that_are_not_there_are_refused_in_the_words_that_asked_for_them() -> None:
    with pytest.raises(ModelError, match="batch_norm='frozen'|batch_norm="):
        sparsify(network(), batches(), Sparsity(keep=0.5), batch_norm="re-estimate")


def test_weights_without_a_shape_yet_are_refused() -> None:
    with pytest.raises(ModelError, match="once"):
        maskable(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4)))


def test_a_scripted_model_is_refused_or_masked() -> None:
    net = torch.jit.script(network())
    with pytest.raises(ModelError, match="scripted"):
        maskable(net)
    with pytest.raises(ModelError):
        mask(net, random_masks(network(), 0.5))


def test_a_mask_of_what_is_not_trained_is_refused() -> None:
    """Running statistics are written, not trained: no mask would hold."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    gone = Mask.of(["1.running_mean"], torch.zeros(8, dtype=torch.bool))
    with pytest.raises(ApoptosisError):
        mask(net, MaskPlan({"1.running_mean": gone}, identity_masks(net).fingerprint))


def test_masks_under_a_name_that_is_not_theirs_are_refused_and_the_model_is_as_it_was() -> None:
    net, masks = network(), random_masks(network(), 0.5)
    mask_(net, masks)
    wrong = MaskPlan({"other": masks.masks["0.weight"]}, masks.fingerprint)
    with pytest.raises(ApoptosisError):
        mask_(net, wrong)
    assert masks_of(net).same_as(masks)


# Time


def test_a_reload_masks_each_weight_a_few_times_whatever_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not all of them again for each layer: time would grow with the square of their number."""
    num = 30
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num)])
    mask_(net, random_masks(net, 0.5))
    unpacked, kept = list[Mask](), Mask.kept

    def counted(own: Mask) -> Tensor:
        unpacked.append(own)
        return kept(own)

    monkeypatch.setattr(Mask, "kept", counted)
    net.load_state_dict(net.state_dict())
    assert len(unpacked) <= 3 * num
