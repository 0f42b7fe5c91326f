"""Torch-Pruning's own importances on its own groups: the public narrow ResNet32 at 70 % and 50 % of its MACs.

Claim tested: how much loss and accuracy its criteria keep, without any training, at MACs counted by our counter.
Hardware: one CPU thread, or what `--device` names. Trials: three draws of 2,000 training images (see cifar.py);
figures are on test images 5,000-9,999. Every finished row is written at once, and a second call goes on from there:

    OMP_NUM_THREADS=1 python experiments/narrow_peers.py --groups both

`--groups internal` lets it cut the channels inside blocks (conv1 of each); `all` leaves the choice to it. It takes
zeros around channels (option A) for an operation that keeps channels in place, so that its stream is misaligned after
a cut: `check` measures this against the masked twin. In both settings the output layer is ignored.

Importances, each with the normaliser that scores of a group are divided by:

- `l1`, `l2`: magnitudes of groups, `mean` (default) and, for l2, `max` (what its CIFAR recipe uses).
- `taylor`: Σ|w g| with the mean gradient g over the draw, over convolutions alone: for batch norms it asks whether the
  handler is that of group norms, and leaves them out.
- `hessian`: Σ w² E[g²], squared gradients of single samples in eval mode, labels of the data. Its own accumulation
  keeps only the last sample (a dictionary asked by name and filled by parameter); this is the mended one.
  `hessian-last` is what it computes as delivered.
- `obdc`: as `hessian` on a layer's own filters, labels drawn from the network. It fails as delivered (see `check`);
  this one is mended.

One step, or ten of `iterative_steps` with new scores before each. The channel ratio is bisected until MACs are just at
or below the budget; with ten steps the first nine follow its linear schedule to the one-step ratio, and the last one's
ratio is bisected.
"""

import argparse
import copy
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning as tp
from cifar import DRAW_SIZE, DRAWS, Cifar, load_cifar, public_network
from torch import Tensor, nn

import apoptosis
from apoptosis.repair import batch_norm

SHARES = (0.7, 0.5)
STEPS = 10
SAMPLE_BATCH = 50
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """One line of the table, without the budget."""

    importance: str
    normalizer: str | None = "mean"
    widths: str = "global"
    steps: int = 1
    groups: str = "internal"

    @property
    def takes_data(self) -> bool:
        return self.importance not in ("l1", "l2")


def settings(groups: str) -> list[Setting]:
    """What matters most comes first."""
    one_step = [
        Setting("hessian"),
        Setting("hessian", None),
        Setting("taylor"),
        Setting("taylor", None),
        Setting("l2"),
        Setting("l1"),
    ]
    ten_steps = [Setting(i, n, steps=STEPS) for i in ("hessian", "taylor") for n in (None, "mean")]
    further = [
        Setting("l2", "max"),
        *(Setting(i, widths="uniform") for i in ("hessian", "taylor", "l2", "l1")),
        Setting("hessian-last"),
        Setting("obdc"),
    ]
    chosen = {"internal": ("internal",), "all": ("all",), "both": ("internal", "all")}[groups]
    order = [(one_step, g) for g in chosen] + [
        (rows, g) for g in chosen for rows in (ten_steps, further)
    ]
    return [replace(s, groups=g) for rows, g in order for s in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Scores


class MendedHessian(tp.importance.GroupHessianImportance):
    """The key that is asked for is the key that is stored."""

    def accumulate_grad(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                old = self._accu_grad.get(parameter, 0)
                self._accu_grad[parameter] = old + parameter.grad.detach().square()
                self._counter[parameter] = self._counter.get(parameter, 0) + 1


class MendedOBDC(tp.importance.OBDCImportance):
    """Hooks on all layers: as delivered it iterates over None, and asks for layers that it has not hooked."""

    def _prepare_model(self, model: nn.Module, pruner: Any) -> None:  # noqa: ARG002 - its signature
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                self.modules.append(layer)
                layer.register_forward_pre_hook(self._save_input)
                layer.register_full_backward_hook(self._save_grad_output)


def importance(setting: Setting) -> Any:
    name, normalizer = setting.importance, setting.normalizer
    if name in ("l1", "l2"):
        return tp.importance.GroupMagnitudeImportance(p=int(name[1]), normalizer=normalizer)
    if name == "taylor":
        return tp.importance.GroupTaylorImportance(normalizer=normalizer)
    if name == "obdc":
        return MendedOBDC(normalizer=normalizer, num_classes=10)
    return MendedHessian(normalizer=normalizer)


def gradients(model: nn.Module, name: str, x: Tensor, y: Tensor) -> Gradients:
    """What the importance expects in `.grad`: the mean gradient, or the mean of squared gradients of samples."""
    if name == "taylor":
        return _mean_gradients(model, x, y)
    if name == "hessian":
        return squared_gradients(model, x, y)
    if name == "hessian-last":
        return squared_gradients(model, x[-1:], y[-1:])
    return {}


def _mean_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Gradients:
    model.zero_grad()
    for images, labels in _parts(x, y, 250):
        (F.cross_entropy(model(images), labels, reduction="sum") / len(x)).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def squared_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Gradients:
    """Mean over samples of each one's squared gradient; in eval mode samples do not mix: one pass does for all."""
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def watch(path: str) -> Callable[..., None]:
        def on_forward(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            given = args[0].detach()

            def on_backward(grad: Tensor) -> None:
                for name, found in _of_samples(module, given, grad.detach()).items():
                    sums[f"{path}.{name}"] += found.square().sum(0)

            output.register_hook(on_backward)

        return on_forward

    handles = [
        module.register_forward_hook(watch(path))
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
    ]
    for images, labels in _parts(x, y, SAMPLE_BATCH):
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        torch.autograd.grad(loss, list(model.parameters()))
    for handle in handles:
        handle.remove()
    return {name: total / len(x) for name, total in sums.items()}


def _of_samples(module: nn.Module, x: Tensor, grad: Tensor) -> Gradients:
    """Gradients of each sample, `(samples, *parameter)`."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)
        return {
            "weight": (grad.flatten(2) @ patches.transpose(1, 2)).view(-1, *module.weight.shape)
        }
    if isinstance(module, nn.BatchNorm2d):
        scale = (module.running_var + module.eps).rsqrt().view(-1, 1, 1)
        normal = (x - module.running_mean.view(-1, 1, 1)) * scale
        return {"weight": (grad * normal).sum((2, 3)), "bias": grad.sum((2, 3))}
    return {"weight": grad.unsqueeze(2) * x.unsqueeze(1), "bias": grad}


def _parts(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(x.split(size), y.split(size), strict=True)


# ---------------------------------------------------------------------------------------------------------------------
# Cutting


def pruner(model: nn.Module, setting: Setting, ratios: list[float]) -> Any:
    """`ratios` of channels to be gone after each step, the first for none."""
    ignored = [model.linear]
    if setting.groups == "internal":
        ignored += [m for n, m in model.named_modules() if n == "conv1" or n.endswith(".conv2")]
    return tp.pruner.BasePruner(
        model,
        model.conv1.weight.new_zeros(1, 3, 32, 32),
        importance=importance(setting),
        global_pruning=setting.widths == "global",
        iterative_steps=setting.steps,
        iterative_pruning_ratio_scheduler=lambda *_: ratios,
        ignored_layers=ignored,
    )


class Run:
    """Steps of one pruner: all but the last as given, the last tried with any ratio."""

    def __init__(
        self, dense: nn.Module, setting: Setting, draw: tuple[Tensor, Tensor], first: Gradients
    ):
        self.setting, self.draw = setting, draw
        self.dense, self.first = dense, first
        self.fisher: Gradients = {}

    def before_last(self, ratio: float) -> tuple[nn.Module, Any, Gradients]:
        """Model, pruner and scores when one step is left; `ratio` is where the linear schedule would end."""
        model = copy.deepcopy(self.dense)
        steps = self.setting.steps
        made = pruner(model, self.setting, [ratio * k / steps for k in range(steps + 1)])
        scores = self.first
        for _ in range(steps - 1):
            self._give(model, made, scores)
            made.step()
            scores = gradients(model, self.setting.importance, *self.draw)
        return model, made, scores

    def last(self, state: tuple[nn.Module, Any, Gradients], ratio: float) -> nn.Module:
        """A copy of the model after a last step to this ratio."""
        model, before, scores = state
        model = copy.deepcopy(model)
        made = pruner(model, self.setting, [ratio] * (self.setting.steps + 1))
        made._scope_initial_channels = dict(
            before._scope_initial_channels
        )  # ratios are of the dense network
        made.current_step = self.setting.steps - 1
        self._give(model, made, scores)
        made.step()
        return model

    def _give(self, model: nn.Module, made: Any, scores: Gradients) -> None:
        for name, parameter in model.named_parameters():
            parameter.grad = scores[name].clone() if name in scores else None
        if self.setting.importance == "obdc":
            held = self.fisher = self.fisher or _fisher(self.dense, self.draw)
            made.importance.modules = [model.get_submodule(n) for n in held]
            made.importance.Fisher = {model.get_submodule(n): f.clone() for n, f in held.items()}
            made.importance.steps = 1
            for parameter in model.parameters():  # it is asked for, and not used
                parameter.grad = torch.zeros_like(parameter)


def _fisher(dense: nn.Module, draw: tuple[Tensor, Tensor]) -> Gradients:
    """OBDC's own sums over the draw, with labels drawn from the network, as its recipe does."""
    model, scorer = copy.deepcopy(dense), MendedOBDC(num_classes=10)
    torch.manual_seed(0)
    scorer._prepare_model(model, None)
    for images, _ in _parts(*draw, SAMPLE_BATCH):
        logits = model(images)
        labels = torch.multinomial(logits.detach().softmax(1).cpu(), 1)[:, 0].to(images.device)
        F.cross_entropy(logits, labels).backward()
        scorer.step()
    names = {module: name for name, module in model.named_modules()}
    return {names[m]: fisher / scorer.steps for m, fisher in scorer.Fisher.items()}


def quick_macs(model: nn.Module) -> int:
    """Products of convolutions and linear layers for one image; our counter is asked at the end, and has to agree."""
    total = 0

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        total += weight.numel() * (output[0].numel() // weight.shape[0])

    handles = [
        m.register_forward_hook(count)
        for m in model.modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32, device=next(model.parameters()).device))
    for handle in handles:
        handle.remove()
    return total


def our_macs(model: nn.Module) -> int:
    example = torch.zeros(2, 3, 32, 32, device=next(model.parameters()).device)
    return apoptosis.trace(model, example).macs() // 2


def cut_to(run: Run, share: float, guess: float) -> tuple[nn.Module, float]:
    """The largest network tried that is within the budget, and its ratio."""
    goal = share * quick_macs(run.dense)
    state = run.before_last(guess)
    low, high = guess * (1 - 1 / run.setting.steps), 0.98
    best: tuple[int, nn.Module, float] | None = None
    while high - low > 5e-4:
        middle = (low + high) / 2
        small = run.last(state, middle)
        macs = quick_macs(small)
        if macs <= goal:
            high = middle
            if best is None or macs > best[0]:
                best = macs, small, middle
        else:
            low = middle
    assert best is not None, "nothing within the budget"
    return best[1], best[2]


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def figures(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    loss = right = 0.0
    with torch.no_grad():
        for images, labels in _parts(x, y, 100 if x.device.type == "cpu" else 5000):
            logits = model(images)
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += float((logits.argmax(1) == labels).sum())
    return {"loss": loss / len(x), "accuracy": 100 * right / len(x)}


class Book:
    """Rows as they come, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"rows": {}, "check": {}}
        )

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.held, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(as_table(self.held))


def key(setting: Setting, share: float, draw: int | None, measured: bool) -> str:
    return json.dumps([*vars(setting).values(), share, draw, measured])


class Bench:
    """The network, the data, and scores of the dense network, which many rows share."""

    def __init__(self, book: Book, dense: nn.Module, data: Cifar) -> None:
        self.book, self.dense, self.data = book, dense, data
        self.test = tuple(t[5000:] for t in data.test)
        self.scores: dict[tuple[str, int], Gradients] = {}
        if "dense" not in book.held:
            book.held["dense"] = {"macs": our_macs(dense), **figures(dense, *self.test)}
        assert book.held["dense"]["macs"] == quick_macs(dense), "two counters"
        print("dense", book.held["dense"], flush=True)

    def measure(self, setting: Setting, number: int, share: float) -> None:
        rows = self.book.held["rows"]
        plain = key(setting, share, number if setting.takes_data else None, False)
        mended = key(setting, share, number, True)
        if plain in rows and mended in rows:
            return
        start = time.monotonic()
        small, ratio = self._cut(setting, number, share)
        macs = our_macs(small)
        assert macs == quick_macs(small), "two counters"
        row = {
            "ratio": ratio,
            "share": macs / self.book.held["dense"]["macs"],
            "widths": [m.out_channels for m in small.modules() if isinstance(m, nn.Conv2d)],
        }
        if plain not in rows:
            rows[plain] = {**row, **figures(small, *self.test)}
        again = batch_norm(
            self.dense, small, None, self.data.draw(number, 250)
        )  # no plan: it is for messages alone
        rows[mended] = {**row, **figures(again, *self.test)}
        self.book.write()
        shown = (
            f"{rows[plain]['accuracy']:.2f} {rows[mended]['accuracy']:.2f} % at {row['share']:.4f}"
        )
        print(mended, shown, f"{time.monotonic() - start:.0f} s", flush=True)

    def _cut(self, setting: Setting, number: int, share: float) -> tuple[nn.Module, float]:
        part = slice(DRAW_SIZE * number, DRAW_SIZE * (number + 1))
        draw = (self.data.train[0][part], self.data.train[1][part])
        which = (setting.importance, number)
        if which not in self.scores:
            self.scores[which] = gradients(self.dense, setting.importance, *draw)
        guess = 0.0
        if setting.steps > 1:
            one_step = replace(setting, steps=1)
            guess = cut_to(Run(self.dense, one_step, draw, self.scores[which]), share, 0.0)[1]
        return cut_to(Run(self.dense, setting, draw, self.scores[which]), share, guess)


def as_table(held: dict[str, Any]) -> str:
    meta, dense = held["meta"], held["dense"]
    lines = [
        "# Torch-Pruning's importances on the public narrow ResNet32, CIFAR-10",
        "",
        f"`{meta['command']}` · commit {', '.join(meta['commits'])} · {meta['device']} · {meta['versions']}",
        "",
        "Three draws (0, 1, 2: rows of the permutation of seed 0) of 2,000 training images for scores and for batch "
        "norms; loss and accuracy (%) on test images 5,000-9,999, mean ± s.d. over draws; no training. "
        f"Dense: {dense['macs'] / 1e6:.2f} MMACs, loss {dense['loss']:.4f}, {dense['accuracy']:.2f} %. "
        "MACs: asked and got (least and most over draws), by our counter. n: draws measured so far. "
        "Rows with n < 3 have been measured on the first draws only. "
        '"BN": batch norms measured anew on the draw by `repair.batch_norm`. Magnitudes alone have no draw. '
        "Settings are explained in experiments/narrow_peers.py.",
        "",
        "| groups | widths | importance | normaliser | steps | MACs asked | got "
        "| loss | accuracy | loss, BN | accuracy, BN | n |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    gathered: dict[tuple[Any, ...], dict[bool, list[Any]]] = {}
    for name, row in held["rows"].items():
        *which, _draw, measured = json.loads(name)
        gathered.setdefault(tuple(which), {False: [], True: []})[measured].append(row)

    def spread(rows: list[Any], what: str, digits: int) -> str:
        values = [row[what] for row in rows]
        if not values:
            return "–"
        sd = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{mean(values):.{digits}f}{sd}"

    def place(item: tuple[tuple[Any, ...], Any]) -> Any:
        importance, normalizer, widths, steps, groups, share = item[0]
        return (groups != "internal", -share, widths, steps, importance, str(normalizer))

    for which, parts in sorted(gathered.items(), key=place):
        importance, normalizer, widths, steps, groups, share = which
        got = [100 * row["share"] for rows in parts.values() for row in rows]
        low, high = f"{min(got):.2f}", f"{max(got):.2f}"
        cells = [
            groups,
            widths,
            importance,
            normalizer or "none",
            steps,
            f"{100 * share:.0f} %",
            low if low == high else f"{low}–{high}",
            spread(parts[False], "loss", 3),
            spread(parts[False], "accuracy", 2),
            spread(parts[True], "loss", 3),
            spread(parts[True], "accuracy", 2),
            len(parts[True]),
        ]
        lines.append(f"| {' | '.join(str(c) for c in cells)} |")
    if held["check"]:
        lines += ["", "## Checks", ""] + [f"- {k}: {v}" for k, v in held["check"].items()]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check(dense: nn.Module, data: Cifar) -> dict[str, str]:
    """Whether the peer does what it is taken to do here."""
    x, y = (t[:8] for t in data.train)
    found: dict[str, str] = {}
    for name, kind in {
        "as delivered": tp.importance.GroupHessianImportance,
        "mended": MendedHessian,
    }.items():
        model, scorer = copy.deepcopy(dense), kind()
        for loss in F.cross_entropy(model(x), y, reduction="none"):
            model.zero_grad()
            loss.backward(retain_graph=True)
            scorer.accumulate_grad(model)
        got = {n: scorer._accu_grad[p] / scorer._counter[p] for n, p in model.named_parameters()}
        far = [
            max(_relative(got[n], v) for n, v in squared_gradients(dense, a, b).items())
            for a, b in ((x, y), (x[-1:], y[-1:]))
        ]
        found[f"Hessian {name}, 8 samples"] = (
            f"differs from the mean of all squares by {far[0]:.0e}, from those of the last sample by {far[1]:.0e}"
        )
    found["OBDC as delivered"] = _obdc(dense, x, y)
    for groups in ("internal", "all"):
        found[f"groups, {groups}"] = "; ".join(_groups(dense, groups))
        found[f"pruned against masked twin, {groups}, l2, ratio 0.2"] = _against_twin(
            dense, groups, x
        )
    found["shortcut"] = _shortcut_coupling(dense)
    return found


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def _plain(groups: str) -> Setting:
    return Setting("l2", groups=groups)


def _obdc(dense: nn.Module, x: Tensor, y: Tensor) -> str:
    model = copy.deepcopy(dense)
    made = pruner(model, _plain("internal"), [0.0, 0.2])
    made.importance = tp.importance.OBDCImportance(num_classes=10)
    try:
        made.importance._prepare_model(model, made)
        F.cross_entropy(model(x), y).backward()
        made.importance.step()
        made.step()
    except Exception as error:  # noqa: BLE001 - the table says what happened
        return f"{type(error).__name__}: {error}"
    return "runs"


def _groups(dense: nn.Module, groups: str) -> list[str]:
    model = copy.deepcopy(dense)
    made = pruner(model, _plain(groups), [0.0, 0.2])
    names = {module: name for name, module in model.named_modules()}
    found = made.DG.get_all_groups(made.ignored_layers, made.root_module_types)
    return [
        f"{names[group[0].dep.target.module]} ({len(group[0].idxs)} channels, "
        f"{sum(dep.target.module in names for dep, _ in group)} layers)"
        for group in found
    ]


def _against_twin(dense: nn.Module, groups: str, x: Tensor) -> str:
    """In float64; the twin has zeros wherever the pruner removes something."""
    dense = copy.deepcopy(dense).double()
    small, twin = copy.deepcopy(dense), copy.deepcopy(dense)
    names = {module: name for name, module in small.named_modules()}
    made = pruner(small, _plain(groups), [0.0, 0.2])
    with torch.no_grad():
        for group in made.step(interactive=True):
            for dep, places in group:
                if dep.target.module in names:
                    _zero_(
                        twin.get_submodule(names[dep.target.module]), dep.handler.__name__, places
                    )
            group.prune()
        far = _relative(small(x.double()), twin(x.double()))
    return f"relative difference {far:.1e}"


def _zero_(module: nn.Module, handler: str, places: list[int]) -> None:
    if "in_channels" in handler and not isinstance(module, nn.BatchNorm2d):
        module.weight[:, places] = 0
        return
    module.weight[places] = 0
    if module.bias is not None:
        module.bias[places] = 0


def _shortcut_coupling(dense: nn.Module) -> str:
    """Which channel of stage 2 goes with channel 3 of stage 1: it is 3 + 8."""
    model = copy.deepcopy(dense)
    made = pruner(model, _plain("all"), [0.0, 0.2])
    group = made.DG.get_pruning_group(model.conv1, tp.prune_conv_out_channels, [3])
    places = {
        name: next((list(i) for d, i in group if d.target.module is model.get_submodule(name)), [])
        for name in ("layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2")
    }
    return (
        f"removing channel 3 of the stem removes {places}; option A moves it to 3 + 8 in stage 2 and "
        "3 + 24 in stage 3"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--groups", choices=("internal", "all", "both"), default="both")
    ask.add_argument("--only", default="", help="importances, separated by commas")
    ask.add_argument("--steps", type=int, choices=(1, STEPS), help="only rows of so many steps")
    ask.add_argument("--draws", type=int, nargs="+", choices=DRAWS, default=DRAWS)
    ask.add_argument("--normalizer", help="only rows with this one: mean, max or none")
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--data", default="data/carry/draws.npz")
    ask.add_argument("--weights", default="../shared/data/weights")
    ask.add_argument("--out", type=Path, default=Path("experiments/results/narrow_peers.json"))
    ask.add_argument("--minutes", type=float, default=1e9, help="start no row after so long")
    ask.add_argument("--check", action="store_true", help="only the checks")
    told = ask.parse_args()
    until = time.monotonic() + 60 * told.minutes
    torch.set_num_threads(1)
    book = Book(told.out)
    data = load_cifar(told.data, told.device)
    dense = public_network(32, told.weights, told.device)
    on_gpu = told.device.startswith("cuda")
    name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, 1 thread"
    commit = subprocess.run(  # noqa: S603
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    now = commit.stdout.strip() or "unknown"
    seen = book.held.get("meta", {}).get("commits", [])
    book.held["meta"] = {
        "command": "bash experiments/runs/narrow_peers.sh",
        "commits": [*[c for c in seen if c != now], now],
        "device": f"{name}, float32",
        "versions": f"torch {torch.__version__}, torch-pruning {version('torch-pruning')}, "
        f"Python {sys.version.split()[0]}",
        "draws": list(DRAWS),
        "draw_size": DRAW_SIZE,
        "draw_seed": 0,
        "images_judged": 5000,
    }
    if not book.held["check"] or told.check:
        book.held["check"] = check(dense, data)
    for title, text in book.held["check"].items():
        print(f"{title}: {text}")
    if told.check:
        return
    todo = [s for s in settings(told.groups) if told.steps in (None, s.steps)]
    todo = [s for s in todo if not told.only or s.importance in told.only.split(",")]
    todo = [s for s in todo if told.normalizer in (None, s.normalizer or "none")]
    bench = Bench(book, dense, data)
    for setting, number, share in itertools.product(todo, told.draws, SHARES):
        if time.monotonic() > until:
            print("time is up; call again to go on")
            break
        bench.measure(setting, number, share)
    book.write()


if __name__ == "__main__":
    main()
