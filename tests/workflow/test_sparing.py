"""Groups that nothing can run when they are cut stay whole, and the budget is met by others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.checkpoint import open_journal
from apoptosis.errors import BudgetError, PlanMismatchError
from apoptosis.workflow import choose_criterion

HALF = ap.Budget(flops=0.6)


class Masked(nn.Module):
    """Attention with the width of its heads written into it, that looks at its mask before it uses it."""

    def __init__(self, *, wide: int = 48) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, wide), nn.Linear(wide, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            own(x).view(len(x), -1, 2, 8).transpose(1, 2) for own in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / 8**0.5
        if not mask.all():
            scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head((x + self.down(self.up(x).relu())).mean(1))


def masked_task() -> ap.Task:
    return replace(
        ap.Task.classification(),
        inputs=lambda batch: ((batch["x"], batch["mask"]), {}),
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["y"]),
        count=lambda batch: len(batch["y"]),
        rows=lambda outputs, _batch: (outputs, None),
        sample=None,
    )


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(16, 5, dtype=torch.bool)
    mask[::2, 3:] = False
    return [
        {
            "x": torch.randn(16, 5, 16, generator=generator),
            "mask": mask,
            "y": torch.randint(0, 3, (16,), generator=generator),
        }
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "how",
    [{}, {"criterion": "magnitude", "steps": 3}, {"criterion": "oba", "steps": 2, "repair": []}],
    ids=["default", "magnitude", "oba"],
)
def test_a_model_that_looks_at_its_mask_is_pruned_elsewhere(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data, task = Masked().eval(), batches(), masked_task()
    structure = ap.trace(model, (data[0]["x"][:1], data[0]["mask"][:1]))
    heads = {group.name for group in structure.groups if group.kind in ("head", "qk_dim", "v_dim")}
    with pytest.raises(PlanMismatchError, match="looks at a value"):
        structure.plan({name: [0] for name in heads})
    outcome = ap.prune(model, data, HALF, task, align=False, **how)
    assert outcome.plan.delivery == "module"
    assert outcome.spent[0].got <= 0.6
    assert set(outcome.settings["spared"]["groups"]) <= heads
    assert "looks at a value" in outcome.settings["spared"]["groups_because"]
    outcome.model(*masked_task().inputs(data[0])[0])


def test_what_is_spared_is_spared_in_a_resumed_run_too(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, data, task = Masked().eval(), batches(), masked_task()
    how: dict[str, Any] = {"criterion": "magnitude", "steps": 2}
    whole = ap.prune(model, data, HALF, task, **how)
    with open_journal(tmp_path / "notes", {}) as journal:
        ap.prune(model, data, HALF, task, journal=journal, **how)
        again = ap.prune(model, data, HALF, task, journal=journal, **how)
    assert again.settings["spared"] == whole.settings["spared"]
    for own, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_groups_that_were_asked_for_are_not_spared() -> None:
    model, data = Masked().eval(), batches()
    selection = ap.Selection(kinds=("qk_dim", "v_dim", "hidden"))
    with pytest.raises(PlanMismatchError, match="Keep the groups that this concerns whole"):
        ap.prune(
            model,
            data,
            HALF,
            masked_task(),
            criterion="magnitude",
            selection=selection,
        )


def test_a_budget_out_of_reach_without_them_says_so() -> None:
    model, data = Masked(wide=8).eval(), batches()
    with pytest.raises(BudgetError, match=r"These groups cannot be cut \(.*looks at a value"):
        ap.prune(model, data, ap.Budget(flops=0.5), masked_task(), criterion="magnitude")


def backbone() -> nn.Module:
    """A large part that is not trained, and a small one that is."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    model[0].requires_grad_(requires_grad=False)
    model[2].requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize(("share", "criterion"), [(0.5, "oba"), (0.1, "taylor-gate")])
def test_a_frozen_backbone_is_pruned_by_default(share: float, criterion: str) -> None:
    model, task = backbone(), replace(ap.Task.classification(), rows=None)
    data = [(torch.randn(8, 3, 8, 8), torch.randint(0, 3, (8,)))]
    outcome = ap.prune(model, data, ap.Budget(flops=share), task, steps=2)
    assert outcome.spent[0].got <= share
    assert outcome.settings["criterion"] == criterion
    assert [p.requires_grad for p in outcome.model.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    structure = ap.trace(model, data[0][0][:1])
    trained = model.requires_grad_(requires_grad=True)
    found = choose_criterion(trained, structure, ap.Budget(flops=share), ap.Selection(), task)
    assert found == "oba"


def test_the_error_says_which_option_would_meet_the_budget() -> None:
    model = backbone()
    data = [(torch.randn(8, 3, 8, 8), torch.randint(0, 3, (8,)))]
    with pytest.raises(BudgetError, match='`criterion="taylor-gate"`, scores them'):
        ap.prune(model, data, ap.Budget(flops=0.1), criterion="magnitude")
    inexact = nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    rows = [(torch.randn(8, 8), torch.randint(0, 2, (8,)))]
    with pytest.raises(BudgetError) as refusal:
        ap.prune(inexact, rows, ap.Budget(flops=0.3), criterion="magnitude")
    option = str(refusal.value).split("`selection=")[1].split("`")[0]
    selection = eval(option, {"Selection": ap.Selection})  # noqa: S307 - as a reader would
    outcome = ap.prune(
        inexact, rows, ap.Budget(flops=0.3), criterion="magnitude", selection=selection
    )
    assert outcome.spent[0].got <= 0.3
