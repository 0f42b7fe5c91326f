"""What only training uses is tied in as well, and what no run uses is listed."""

import torch
from torch import Tensor, nn

import apoptosis as ap


class WithHelper(nn.Module):
    """A head beside the main one that only training reads."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.helper = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.norm(self.body(x)).relu()
        if self.training and self.fails:
            raise RuntimeError("no training here")
        return (self.head(x), self.helper(x)) if self.training else self.head(x)


def test_a_head_that_runs_in_training_alone_is_cut_along() -> None:
    model = WithHelper().eval()
    structure = ap.trace(model, torch.randn(3, 4))
    assert ("helper.weight", 1) in {(s.tensor, s.dim) for s in structure["body"].slices}
    assert structure.unused == ()
    small = ap.cut(model, structure.plan({"body": range(5)}))
    assert small.helper.in_features == 5
    main, beside = small.train()(torch.randn(3, 4))
    (main.sum() + beside.sum()).backward()


def test_its_costs_are_those_of_inference() -> None:
    structure = ap.trace(WithHelper().eval(), torch.randn(1, 4))
    assert structure.macs() == 4 * 8 + 8 * 2
    assert structure.params() == sum(p.numel() for p in WithHelper().parameters())


def test_statistics_of_the_given_model_do_not_move() -> None:
    model = WithHelper().eval()
    before = model.norm.running_mean.clone()
    ap.trace(model, torch.randn(3, 4))
    assert model.norm.running_mean.equal(before)


def test_what_no_run_reads_is_listed_and_left_alone() -> None:
    model = WithHelper(fails=True).eval()
    structure = ap.trace(model, torch.randn(3, 4))
    assert structure.unused == ("helper.bias", "helper.weight")
    assert ap.cut(model, structure.plan({"body": range(5)})).helper.in_features == 8
