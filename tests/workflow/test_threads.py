"""Several threads: one network is worked on by one after the other, networks that share nothing side by side."""

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.errors import ConfigError
from apoptosis.modes import in_eval_mode
from apoptosis.training import FitOptions, evaluate, fit_
from apoptosis.turns import Holder, acting_for, alone

SECONDS = 60


class Net(nn.Module):
    """With a norm that somebody froze, and dropout: both show in which mode they are."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)
        self.mid, self.last = nn.Linear(12, 8), nn.Linear(8, 3)
        self.frozen = nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        return self.last(self.frozen(self.mid(x)).relu())


def make(seed=0):
    torch.manual_seed(seed)
    net = Net().train()
    net.frozen.eval()
    return net


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]


def state_of(net):
    """All that work on a network could leave in it."""
    found = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for path, module in net.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found[f"{path}: mode and hooks"] = torch.tensor([module.training, *hooks])
    for name, own in net.named_parameters():
        found[f"{name}: gradient"] = torch.tensor([own.requires_grad, own.grad is None])
    return found


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def numbers(model):
    return [module.training for module in model.modules()], dict(model.state_dict())


def pruned(**options):
    def go(net):
        budget = ap.Budget(flops=0.6)
        return numbers(ap.prune(net, batches(), budget, **options).model)

    return go


def scored(name):
    def go(net):
        structure = ap.trace(net, torch.zeros(2, 6))
        return ap.criteria.CRITERIA[name].units(net, structure, batches()).values

    return go


def cut_in_half(net):
    structure = ap.trace(net, torch.zeros(2, 6))
    return numbers(ap.cut(net, structure.plan({"first": [0, 2, 5]})))


def sparse(net):
    return numbers(
        ap.sparsify(net, batches(), ap.Sparsity(keep=0.5), batch_norm="re-estimate").model
    )


WORK = {
    "prune": pruned(criterion="taylor", steps=2, repair=["batch_norm"]),
    "the default": pruned(),
    "sparsify": sparse,
    "cut": cut_in_half,
    "evaluate": lambda net: evaluate(net, batches()).loss,
    "oba": scored("oba"),
    "obs": scored("obs"),
    "taylor-gate": scored("taylor-gate"),
    "verify": lambda net: ap.verify(ap.trace(net, torch.zeros(2, 6))).errors,
}


@pytest.fixture
def often():
    """Threads take over from each other as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*work):
    """All of it begun at one moment, each in a thread."""
    start = threading.Barrier(len(work))

    def go(one):
        start.wait(SECONDS)
        return one()

    with ThreadPoolExecutor(len(work)) as threads:
        futures = [threads.submit(go, one) for one in work]
        return [future.result(SECONDS) for future in futures]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", WORK)
def test_one_network_is_worked_on_by_one_after_the_other(name):
    net, work = make(), WORK[name]
    before, expected = state_of(net), work(make())
    for _ in range(3):
        for found in at_once(lambda: work(net), lambda: work(net)):
            same(found, expected)
        same(state_of(net), before)


@pytest.mark.usefixtures("often")
def test_work_of_different_kinds_on_one_network():
    net, names = make(), ["prune", "evaluate", "sparsify", "oba", "cut"]
    before, expected = state_of(net), {name: WORK[name](make()) for name in names}
    found = at_once(*(lambda own=name: WORK[own](net) for name in names))
    for name, own in zip(names, found, strict=True):
        same(own, expected[name])
    same(state_of(net), before)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", ["prune", "the default", "sparsify", "obs"])
def test_different_networks_stay_right(name):
    nets, work = [make(0), make(1)], WORK[name]
    expected = [work(copy.deepcopy(net)) for net in nets]
    found = at_once(*(lambda own=net: work(own) for net in nets))
    same(found, expected)


def test_different_networks_are_worked_on_side_by_side():
    """Each batch is there only once both threads have come to theirs."""
    meet = threading.Barrier(2)

    class Meeting(list):
        def __iter__(self):
            for batch in super().__iter__():
                meet.wait(SECONDS)
                yield batch

    data = Meeting(batches())
    at_once(lambda: evaluate(make(0), data), lambda: evaluate(make(1), data))
    budget = ap.Budget(flops=0.6)

    def mended(net):
        return ap.prune(net, data, budget, criterion="magnitude", steps=1, repair=["batch_norm"])

    at_once(lambda: mended(make(0)), lambda: mended(make(1)))


def test_a_network_in_another_is_the_same():
    net = make()
    around = nn.Sequential(nn.Identity(), net)
    tied = nn.Linear(6, 12)
    tied.weight = net.first.weight
    for other in (around, net.norm, tied):
        entered = threading.Event()

        def work(one=other, event=entered):
            with in_eval_mode(one):
                event.set()

        with in_eval_mode(net):
            thread = threading.Thread(target=work)
            thread.start()
            assert not entered.wait(0.05)
        thread.join(SECONDS)
        assert entered.is_set()


def test_a_thread_may_hold_what_it_holds():
    net = make()
    with alone(net), in_eval_mode(net):
        assert evaluate(net, batches()).count == 24
    with alone(net, net), alone(net.first):
        pass
    at_once(lambda: evaluate(net, batches()))


def test_two_networks_in_opposite_orders_end():
    one, other, both = make(0), make(1), threading.Barrier(2)

    def hold(first, second):
        with alone(first):
            both.wait(SECONDS)
            try:
                with alone(second):
                    return "held"
            except ConfigError as error:
                return str(error)

    found = sorted(at_once(lambda: hold(one, other), lambda: hold(other, one)))
    assert "copy.deepcopy" in found[0]
    assert found[1] == "held"


def test_three_threads_in_a_ring_end():
    nets, ready = [make(n) for n in range(3)], threading.Barrier(3)

    def hold(place):
        with alone(nets[place]):
            ready.wait(SECONDS)
            try:
                with alone(nets[(place + 1) % 3]):
                    return "held"
            except ConfigError:
                return "refused"

    assert sorted(at_once(*(lambda n=n: hold(n) for n in range(3)))) == ["held", "held", "refused"]


def test_a_thread_that_was_notified_and_has_not_run_yet_waits_for_nobody():
    """It waited for this thread, which has let go since and now waits in turn."""
    wanted, held, late = nn.Linear(2, 2), nn.Linear(2, 2), Holder()
    holds, order = threading.Event(), list[str]()

    def other():
        with acting_for(late), alone(held):
            late.wants = {id(wanted): wanted}  # nobody has it any more
            holds.set()
            threading.Event().wait(0.2)
            order.append("other")

    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(other)
        assert holds.wait(SECONDS)
        with alone(held):
            order.append("this")
        work.result(SECONDS)
    assert order == ["other", "this"]


def test_what_fails_lets_go():
    net = make()

    def fails():
        with pytest.raises(ap.errors.ApoptosisError):
            ap.prune(
                net, [(torch.zeros(2, 9), torch.zeros(2, dtype=torch.long))], ap.Budget(flops=0.5)
            )

    at_once(fails, fails, lambda: evaluate(net, batches()))
    same(state_of(net), state_of(make()))


def test_training_waits_for_whoever_scores():
    net, entered = make(), threading.Event()

    def train():
        fit_(net, batches(), options=FitOptions(epochs=1))
        entered.set()

    with in_eval_mode(net):
        thread = threading.Thread(target=train)
        thread.start()
        assert not entered.wait(0.1)
        assert not net.norm.training
    thread.join(SECONDS)
    assert entered.is_set()
