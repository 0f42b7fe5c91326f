"""Ways of writing a model: in place, tied, reparametrised, checkpointed, dict inputs, partly cut off."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from apoptosis.task import Task
from oracles.building import CLASSES, Net, images, rows, sequences
from oracles.case import Case, case

__all__ = ["PROGRAM_CASES"]

WIDTH = 6


def perceptron(middle: Callable[[Tensor], Tensor], width: int = WIDTH) -> nn.Module:
    """Layer → `middle` → layer."""
    return Net(
        lambda m, x: m.head(middle(m.stem(x))),
        stem=nn.Linear(4, WIDTH),
        head=nn.Linear(width, CLASSES),
    )


def add_in_place(x: Tensor) -> Tensor:
    """`+=` with something made from the tensor itself."""
    y = x.clone()
    y += x.tanh()
    y *= 0.5
    y -= x.exp() * 0.1
    return y


def multiply_in_place(x: Tensor) -> Tensor:
    """`*=` and `/=` with tensors."""
    y = x.tanh() + 0
    y *= x.sigmoid()
    y /= 2 + x.square()
    return y


def activate_in_place(x: Tensor) -> Tensor:
    """Activations that overwrite their input."""
    x = F.silu(x, inplace=True)  # right after a layer
    x = F.relu_(x + 0.2)
    x = F.leaky_relu_(x - 0.4, 0.2)
    return (3 * x).sigmoid_()


def fill_buffer(x: Tensor) -> Tensor:
    """Index assignment into zeros."""
    y = torch.zeros(len(x), 8, dtype=x.dtype)
    y[:, :3] = x[:, :3].tanh()
    y[:, 3:6] = x[:, 3:] * 2
    y[:, [6, 7]] = x[:, :2] * x[:, 1:3]
    return y


def write_through_views(x: Tensor) -> Tensor:
    """A view changed in place changes its base."""
    y = x.clone()
    y.view(-1, 2, 3)[:, 0].mul_(2).add_(x[:, :3].tanh())
    part = y[:, 3:]
    part += x[:, :3].exp()
    y.t()[0] = 0.5
    return y


def change_base_under_view(x: Tensor) -> Tensor:
    """A base changed in place changes its views."""
    y = x + 0
    part = y[:, 1:4]
    y.mul_(x.sigmoid())
    return torch.cat([part.tanh(), y], 1)[:, :WIDTH]


def masked_fill_in_place(x: Tensor) -> Tensor:
    """Masked and index writes."""
    y = x * 1
    y.masked_fill_(x > 0.8, 0.1)
    y.index_fill_(1, torch.tensor([1]), 0.3)
    y[x < -1] = 0.2
    return y.tanh()


def scatter_in_place(x: Tensor) -> Tensor:
    """Scatters into a buffer."""
    y = torch.zeros_like(x)
    y.scatter_(1, torch.tensor([[3, 1]]).expand(len(x), -1), x[:, :2].tanh())
    y.index_add_(1, torch.tensor([0, 0, 5]), x[:, 3:])
    y.index_copy_(1, torch.tensor([4]), x[:, :1].exp())
    return y


def copy_in_place(x: Tensor) -> Tensor:
    """copy_, zero_, and out-of-order overwriting."""
    y = torch.empty_like(x)
    y.copy_(x.tanh())
    y[:, 0].zero_()
    y[:, 1:3].copy_(x[:, 3:5])
    y[:, 5].fill_(0.4)
    return y


def add_products_in_place(x: Tensor) -> Tensor:
    """addcmul_, lerp_, baddbmm_ and clamp_."""
    y = x.clone().addcmul_(x, x.tanh(), value=0.3)
    y.lerp_(x.sigmoid(), 0.2)
    z = y[:, :4].reshape(-1, 2, 2)
    z = z.baddbmm(x[:, :4].view(-1, 2, 2), x[:, 2:].reshape(-1, 2, 2))
    return torch.cat([z.flatten(1), y.clamp_(-1, 1)[:, :2]], 1)


def functions_with_out(x: Tensor) -> Tensor:
    """`add_` of a list of pieces, as accumulation loops do."""
    total = torch.zeros(len(x), dtype=x.dtype)
    for i in range(3):
        total = total + x[:, i] * x[:, i + 3]
    pieces = [x[:, i : i + 1] for i in range(5)]
    return torch.cat([*pieces, total[:, None]], 1)


def tied_layers() -> nn.Module:
    """One module called three times."""
    return Net(
        lambda m, x: m.head(torch.tanh(m.same(F.relu(m.same(torch.tanh(m.same(x))))))),
        same=nn.Linear(4, 4),
        head=nn.Linear(4, CLASSES),
    )


def tied_by_attribute() -> nn.Module:
    """Two modules that share a weight under two names."""
    net = Net(
        lambda m, x: m.head(m.b(F.gelu(m.a(x)))),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        head=nn.Linear(4, CLASSES),
    )
    net.b.weight = net.a.weight
    return net


def bare_parameters() -> nn.Module:
    """Parameters of no module, used by functions and operators."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.linear(x, m.a, m.bias) * m.scale + m.shift
        x = torch.matmul(torch.tanh(x), m.b) / m.temperature.exp()
        return x @ m.c.t() + (m.a * m.b).sum()

    return Net(
        forward,
        a=nn.Parameter(torch.randn(4, 4) / 2),
        bias=nn.Parameter(torch.randn(4)),
        scale=nn.Parameter(torch.randn(4)),
        shift=nn.Parameter(torch.randn(1)),
        b=nn.Parameter(torch.randn(4, 4) / 2),
        temperature=nn.Parameter(torch.tensor(0.3)),
        c=nn.Parameter(torch.randn(CLASSES, 4)),
    )


def parameter_lists() -> nn.Module:
    """Parameters in a list and a dict, stacked and sliced in the forward."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weight = torch.stack(list(m.rows))
        x = torch.tanh(x @ weight.T) * m.named["gain"]
        return x @ torch.cat([m.named["left"], m.named["right"]], 1)[:4, :CLASSES]

    return Net(
        forward,
        rows=nn.ParameterList(torch.randn(4) for _ in range(4)),
        named=nn.ParameterDict(
            {"gain": torch.randn(4), "left": torch.randn(5, 2), "right": torch.randn(5, 2)}
        ),
    )


def reparametrised(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A wrapped layer between two others."""
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), wrap(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, CLASSES)
    )


def standardised_weight() -> nn.Module:
    """A conv whose weight is standardised in the forward, as BiT and NFNets do."""

    def forward(m: Net, x: Tensor) -> Tensor:
        mean = m.conv.weight.mean((1, 2, 3), keepdim=True)
        weight = (m.conv.weight - mean) / (m.conv.weight.std((1, 2, 3), keepdim=True) + 1e-3)
        return m.head(F.relu(F.conv2d(x, weight * m.gain, m.conv.bias)).mean((2, 3)))

    return Net(
        forward,
        conv=nn.Conv2d(2, 4, 3),
        gain=nn.Parameter(torch.ones(4, 1, 1, 1)),
        head=nn.Linear(4, CLASSES),
    )


def standardised_by_batch_norm() -> nn.Module:
    """timm's way: the weight is standardised by a call of train-mode batch_norm on it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            m.conv.weight.reshape(1, 4, -1), None, None, training=True, momentum=0.0, eps=1e-6
        )
        return m.head(F.relu(F.conv2d(x, weight.view_as(m.conv.weight), m.conv.bias)).mean((2, 3)))

    return Net(forward, conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, CLASSES))


def generated_weight() -> nn.Module:
    """A weight that is itself computed from the input."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weight = m.make(x).view(-1, 4, 4)
        return m.head(torch.bmm(weight, torch.tanh(m.stem(x))[:, :, None]).squeeze(2))

    return Net(forward, make=nn.Linear(4, 16), stem=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))


def checkpointed(*, reentrant: bool | None) -> nn.Module:
    """Two blocks, the second one checkpointed unless None."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        for block in m.blocks:
            if reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
        return m.head(x)

    return Net(
        forward,
        stem=nn.Linear(4, 4),
        blocks=nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
            for _ in range(2)
        ),
        head=nn.Linear(4, CLASSES),
    )


def with_dropout() -> nn.Module:
    """Dropouts of several kinds, in train mode."""
    return Net(
        lambda m, x: m.head(
            F.dropout(F.relu(m.body(m.drop(F.gelu(m.stem(x))))), 0.3, m.training).mean((2, 3))
        ),
        stem=nn.Conv2d(2, 4, 3),
        drop=nn.Dropout2d(0.4),
        body=nn.Conv2d(4, 4, 1),
        head=nn.Linear(4, CLASSES),
    )


def drop_path() -> nn.Module:
    """Stochastic depth as timm writes it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        keep = x.new_empty((len(x), 1)).bernoulli_(0.7).div_(0.7)
        return m.head(x + m.body(x).tanh() * keep)

    return Net(forward, stem=nn.Linear(4, 4), body=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))


def partly_detached() -> nn.Module:
    """A branch without gradient, by no_grad and by detach."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.tanh(m.stem(x))
        with torch.no_grad():
            gate = torch.sigmoid(m.gate(x))
        return m.head(x * gate + m.side(x.detach()))

    return Net(
        forward,
        stem=nn.Linear(4, 4),
        gate=nn.Linear(4, 4),
        side=nn.Linear(4, 4),
        head=nn.Linear(4, CLASSES),
    )


def argmax_routed() -> nn.Module:
    """Integers, comparisons and one-hots made from activations carry no derivative."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        best = F.one_hot(x.argmax(1), WIDTH).to(x.dtype)
        return m.head(x.tanh() * (1 + best) + (x > 0).double() * x.sigmoid())

    return Net(forward, stem=nn.Linear(4, WIDTH), head=nn.Linear(WIDTH, CLASSES))


def unused_and_frozen() -> nn.Module:
    """A frozen layer, a frozen bias, and a layer whose output nobody uses."""

    def forward(m: Net, x: Tensor) -> Tensor:
        m.unused(x)
        return m.head(torch.tanh(m.body(torch.tanh(m.stem(x)))))

    net = Net(
        forward,
        stem=nn.Linear(4, 4),
        body=nn.Linear(4, 4),
        unused=nn.Linear(4, 2),
        head=nn.Linear(4, CLASSES),
    )
    net.body.requires_grad_(requires_grad=False)
    net.head.bias.requires_grad = False
    return net


def frozen_norm() -> nn.Module:
    """Norm weights that are not trained, under trained biases."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )
    net[1].weight.requires_grad = False
    net[3].weight.requires_grad = False
    return net


@dataclass
class Answer:
    """What transformers' models return."""

    logits: Tensor
    hidden: Tensor | None = None


def answering() -> nn.Module:
    """Keyword inputs, an object with `.logits` as output."""

    def forward(m: Net, *, left: Tensor, right: Tensor) -> Answer:
        hidden = torch.tanh(m.left(left)) * m.right(right)
        return Answer(logits=m.head(hidden), hidden=hidden)

    return Net(forward, left=nn.Linear(4, 4), right=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))


def two_inputs() -> tuple[dict[str, Tensor], Tensor]:
    """A dict of keyword inputs, and labels."""
    (left, labels), (right, _) = rows(seed=6), rows(seed=7)
    return {"left": left, "right": right}, labels


def labelled_dict() -> dict[str, Tensor]:
    """One flat dict, labels among the inputs."""
    inputs, labels = two_inputs()
    return {**inputs, "labels": labels}


def segmenter() -> nn.Module:
    """A label per pixel."""
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, CLASSES, 1))


def pixels() -> tuple[Tensor, Tensor]:
    """Images with a label per pixel."""
    x, _ = images()
    return x, torch.arange(3 * 36).view(3, 6, 6) % CLASSES


def regression() -> tuple[Tensor, Tensor]:
    """Vectors with real targets."""
    x, _ = rows()
    return x, rows(width=CLASSES, seed=8)[0]


def _in_place() -> list[Case]:
    programs = {
        "add": add_in_place,
        "multiply": multiply_in_place,
        "activate": activate_in_place,
        "write-through-views": write_through_views,
        "change-base-under-view": change_base_under_view,
        "masked-fill": masked_fill_in_place,
        "scatter": scatter_in_place,
        "copy": copy_in_place,
        "products": add_products_in_place,
        "accumulate": functions_with_out,
    }
    return [
        *(
            case(f"in-place-{name}", partial(perceptron, program), rows)
            for name, program in programs.items()
        ),
        case("in-place-fill-buffer", partial(perceptron, fill_buffer, 8), rows),
    ]


def _parametrised() -> list[Case]:
    weight_norm = {"brute_force": False}  # torch's double backward of _weight_norm is wrong
    return [
        case("tied-layers", tied_layers, rows),
        case("tied-by-attribute", tied_by_attribute, rows),
        case("bare-parameters", bare_parameters, rows),
        case("parameter-lists", parameter_lists, rows),
        case(
            "weight-norm",
            partial(reparametrised, parametrizations.weight_norm),
            rows,
            **weight_norm,
        ),
        case("weight-norm-old", partial(reparametrised, old_weight_norm), rows, **weight_norm),
        case("spectral-norm", partial(reparametrised, parametrizations.spectral_norm), rows),
        case(
            "orthogonal",
            partial(
                reparametrised, partial(parametrizations.orthogonal, orthogonal_map="matrix_exp")
            ),
            rows,
        ),
        case("standardised-weight", standardised_weight, images),
        case("standardised-by-batch-norm", standardised_by_batch_norm, images),
        case("generated-weight", generated_weight, rows),
    ]


def _flows() -> list[Case]:
    plain = partial(checkpointed, reentrant=None)
    return [
        case("checkpoint", partial(checkpointed, reentrant=False), rows, plain=plain),
        case("checkpoint-reentrant", partial(checkpointed, reentrant=True), rows, plain=plain),
        case("dropout", with_dropout, images, train=True, splits=False),
        case("drop-path", drop_path, rows, train=True, splits=False),
        case("detached", partly_detached, rows, differences=False),
        case("argmax", argmax_routed, rows),
        case("unused-and-frozen", unused_and_frozen, rows),
        case("frozen-norm", frozen_norm, images),
    ]


def _interfaces() -> list[Case]:
    def task(loss: Callable[..., Tensor], **options: Any) -> Task:
        return Task.classification(partial(loss, **options))

    return [
        case("dict-inputs", answering, two_inputs),
        case("hugging-face", answering, labelled_dict, task=Task.hugging_face()),
        case("pixels", segmenter, pixels),
        case("mse", partial(perceptron, torch.tanh), regression, task=task(F.mse_loss)),
        case(
            "label-smoothing",
            partial(perceptron, torch.tanh),
            rows,
            task=task(F.cross_entropy, label_smoothing=0.2),
        ),
        case("huber", partial(perceptron, torch.tanh), regression, task=task(F.smooth_l1_loss)),
        case(
            "linear-loss",
            partial(perceptron, torch.tanh),
            regression,
            task=Task.classification(lambda z, y: (z * y).sum(1).mean()),
        ),
        case("linear-model", lambda: nn.Linear(4, CLASSES), rows),
        case(
            "sequence-outputs",
            lambda: Net(
                lambda m, x: m.head(m.stem(x).tanh()).mean(1),
                stem=nn.Linear(6, 4),
                head=nn.Linear(4, CLASSES),
            ),
            sequences,
        ),
    ]


PROGRAM_CASES = [*_in_place(), *_parametrised(), *_flows(), *_interfaces()]
