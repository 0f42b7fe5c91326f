"""One tiny network around every operation: layer → operation → layer, so that both derivatives of it matter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.building import CLASSES, Net, images, rows
from oracles.case import Case, case

__all__ = ["OPERATION_CASES"]

WIDTH = 6
NARROW = 8

# (N, 6) → (N, ...)
ON_VECTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": lambda x: F.relu6(3 * x),
    "leaky-relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": partial(F.softshrink, lambd=0.1),
    "hardshrink": partial(F.hardshrink, lambd=0.1),
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, 0.5),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: torch.log(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 0.1),
    "sin-cos": lambda x: torch.cat([x.sin(), x.cos()], 1),
    "arctan": torch.atan,
    "erf": torch.erf,
    "abs": torch.abs,
    "neg": torch.neg,
    "reciprocal": lambda x: torch.reciprocal(2 + x.tanh()),
    "square": torch.square,
    "times-itself": lambda x: x * x,
    "power": lambda x: x.pow(3),
    "power-tensor-exponent": lambda x: (x.abs() + 0.5) ** (0.3 * x[:, :1]),
    "number-to-the-power": lambda x: 2.0**x,
    "softmax": lambda x: x.softmax(1),
    "softmax-dtype": lambda x: F.softmax(x, dim=-1, dtype=torch.float64),
    "log-softmax": lambda x: F.log_softmax(x, dim=1),
    "softmin": lambda x: F.softmin(x, dim=1),
    "logsumexp": lambda x: torch.logsumexp(x.view(-1, 2, 3), 2),
    "glu": F.glu,
    "normalize": F.normalize,
    "norm": lambda x: x.view(-1, 2, 3).norm(dim=2),
    "vector-norm": lambda x: torch.linalg.vector_norm(x.view(-1, 2, 3), ord=3, dim=2),
    "var": lambda x: x.view(-1, 2, 3).var(2),
    "std": lambda x: x.view(-1, 2, 3).std(2, unbiased=False),
    "var-mean": lambda x: torch.cat(torch.var_mean(x.view(-1, 2, 3), dim=2), 1),
    "sum": lambda x: x.view(-1, 2, 3).sum(1),
    "mean": lambda x: x.view(-1, 2, 3).mean(-1),
    "prod": lambda x: x.view(-1, 2, 3).prod(2),
    "amax": lambda x: x.view(-1, 2, 3).amax(1),
    "max-dim": lambda x: x.view(-1, 2, 3).max(1).values,
    "min-dim": lambda x: torch.min(x.view(-1, 2, 3), dim=1)[0],
    "median": lambda x: x.view(-1, 2, 3).median(2).values,
    "sort": lambda x: x.sort(1, descending=True).values,
    "topk": lambda x: x.topk(3, dim=1).values,
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp-min": lambda x: x.clamp(min=0.1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x.pow(2)),
    "maximum": lambda x: torch.maximum(x[:, :3], x[:, 3:]),
    "masked-fill": lambda x: x.masked_fill(torch.tensor([True, False, False] * 2), 0.5) * x,
    "minus-mean": lambda x: x - x.mean(1, keepdim=True),
    "chunk": lambda x: torch.cat([a * 2 - b for a, b in [x.chunk(2, 1)]]).tanh(),
    "split": lambda x: torch.cat([part.tanh() for part in x.split([1, 2, 3], 1)][::-1], 1),
    "unbind": lambda x: torch.stack([part.exp() for part in x.unbind(1)], 1),
    "stack": lambda x: torch.stack([x, x.tanh()], 2).flatten(1),
    "cat": lambda x: torch.cat([x, x.sigmoid(), torch.ones(len(x), 2, dtype=x.dtype)], 1),
    "index": lambda x: x[:, [0, 2, 2, 5]].tanh(),
    "slices": lambda x: x[:, ::2].tanh() + x[..., 1::2],
    "boolean-index": lambda x: x[:, torch.tensor([True, False, True, True, False, True])].tanh(),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 3, 3, 1]]).expand(len(x), -1)).tanh(),
    "index-select": lambda x: x.index_select(1, torch.tensor([5, 0, 1])).tanh(),
    "take-along-dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "scatter": lambda x: torch.zeros_like(x).scatter(
        1, torch.tensor([[2, 0, 1]]).expand(len(x), -1), x[:, :3].tanh()
    ),
    "scatter-add": lambda x: torch.zeros_like(x).scatter_add(
        1, torch.tensor([[1, 1, 0, 5, 2, 1]]).expand(len(x), -1), x
    ),
    "index-add": lambda x: torch.zeros_like(x).index_add(
        1, torch.tensor([1, 1, 2]), x[:, :3].tanh()
    ),
    "flip-roll": lambda x: x.flip(1).tanh() + x.roll(1, 1),
    "repeat-expand": lambda x: x.repeat(1, 2).tanh() + x[:, :1].expand(-1, 12),
    "repeat-interleave": lambda x: x.repeat_interleave(2, 1).tanh(),
    "tile": lambda x: torch.tile(x, (1, 2)).tanh(),
    "permute-reshape": lambda x: x.reshape(-1, 2, 3).permute(0, 2, 1).reshape(-1, 6).tanh(),
    "movedim-squeeze": lambda x: x[:, None].movedim(1, 2).squeeze(2).tanh(),
    "view-as": lambda x: x.view(-1, 2, 3).tanh().view_as(x),
    "tril": lambda x: torch.tril(x[:, :, None] * x[:, None, :]).flatten(1),
    "diagonal": lambda x: (x[:, :, None] * x.tanh()[:, None, :]).diagonal(dim1=1, dim2=2),
    "unfold": lambda x: x.unfold(1, 3, 2).flatten(1).tanh(),
    "pad-constant": lambda x: F.pad(x, (1, 2), value=0.7).tanh(),
    "rearrange-by-t": lambda x: x.t().tanh().T,
    "copy-and-clone": lambda x: x.clone().contiguous().tanh() + x.detach().clone(),
    "to-dtype": lambda x: x.to(torch.float64).double().type_as(x).tanh(),
    "scalar-arithmetic": lambda x: (1 - x) * 2 / 3 + (3 / (4 + x.tanh())),
    "division": lambda x: x[:, :3] / (1.5 + x[:, 3:].square()),
    "sinc": torch.sinc,
    "lgamma": lambda x: torch.lgamma(2 + x.tanh()),
    "logit": lambda x: torch.logit(x.sigmoid() * 0.9),
    "atan2": lambda x: torch.atan2(x[:, :3], x[:, 3:]),
    "hypot": lambda x: torch.hypot(x[:, :3], x[:, 3:]),
    "logaddexp": lambda x: torch.logaddexp(x[:, :3], x[:, 3:]),
    "lerp": lambda x: torch.lerp(x[:, :3], x[:, 3:], x[:, :3].sigmoid()),
    "lerp-number": lambda x: torch.lerp(x[:, :3], x[:, 3:].tanh(), 0.3),
    "addcmul": lambda x: torch.addcmul(x[:, :3], x[:, 3:], x[:, :3].tanh(), value=0.4),
    "addcdiv": lambda x: torch.addcdiv(x[:, :3], x[:, 3:], 2 + x[:, :3].tanh(), value=0.4),
    "outer": lambda x: torch.stack([torch.outer(row[:3], row[3:]) for row in x]).flatten(1),
    "dot": lambda x: torch.stack([torch.dot(row[:3], row[3:]) for row in x])[:, None],
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:].tanh()),
    "kron": lambda x: torch.stack([torch.kron(row[:2], row[2:]) for row in x]),
    "cdist": lambda x: torch.cdist(x.view(-1, 3, 2), x.tanh().view(-1, 3, 2)).flatten(1),
    "pairwise-distance": lambda x: F.pairwise_distance(x[:, :3], x[:, 3:], keepdim=True),
    "cosine-similarity": lambda x: F.cosine_similarity(
        x.view(-1, 3, 2), x.tanh().view(-1, 3, 2), dim=2
    ),
    "bmm": lambda x: torch.bmm(x.view(-1, 2, 3), x.tanh().view(-1, 3, 2)).flatten(1),
    "baddbmm": lambda x: torch.baddbmm(
        x[:, :4].view(-1, 2, 2), x.view(-1, 2, 3), x.view(-1, 3, 2), beta=0.5, alpha=2
    ).flatten(1),
    "matmul-broadcast": lambda x: (x.view(-1, 1, 2, 3) @ x.tanh().view(-1, 3, 2)[:1]).flatten(1),
    "einsum": lambda x: torch.einsum(
        "nij,nkj,nk->ni", x.view(-1, 3, 2), x.view(-1, 3, 2), x[:, :3]
    ),
    "einsum-trace": lambda x: torch.einsum("nii,nj->nj", x[:, :4].view(-1, 2, 2), x),
    "matrix-inverse": lambda x: torch.linalg.inv(
        x[:, :4].view(-1, 2, 2) + 4 * torch.eye(2, dtype=x.dtype)
    ).flatten(1),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "complex-rotation": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(-1, 3, 2))
        * torch.polar(torch.ones(3, dtype=x.dtype), torch.arange(3.0).double())
    ).flatten(1),
    "straight-through": lambda x: x + (x.round() - x).detach(),
    "nan-to-num": torch.nan_to_num,
    "rrelu": F.rrelu,
}

# what finite differences see otherwise than autograd does
SEEN_THROUGH = {"copy-and-clone", "straight-through"}
# what torch has no double backward of
ONCE = {"hardsigmoid", "cdist"}

# (N, 6), (N, 6) → (N, ...) with both from layers of their own
ON_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b * 2,
    "add-alpha": lambda a, b: torch.add(a, b, alpha=0.3).tanh(),
    "sub": lambda a, b: torch.sub(a, b).tanh(),
    "rsub": lambda a, b: torch.rsub(a, b).exp(),
    "mul": lambda a, b: a * b,
    "mul-broadcast": lambda a, b: a[:, :1] * b,
    "div": lambda a, b: a / (2 + b.tanh()),
    "pow": lambda a, b: a.exp() ** b.tanh(),
    "matmul": lambda a, b: (a.view(-1, 2, 3) @ b.view(-1, 3, 2)).flatten(1),
    "matmul-vector": lambda a, b: a.view(-1, 2, 3) @ b.sum(0)[:3],
    "einsum": lambda a, b: torch.einsum("ni,nj->nij", a, b).flatten(1),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=([1], [1])) @ a,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a.tanh(), b.exp()),
    "masked-where-number": lambda a, b: torch.where(a > b, a.tanh() * b, 0.0),
    "masked-scatter": lambda a, b: a.masked_scatter(
        torch.tensor([[True, False, True] * 2]), b.tanh().contiguous()
    ),
    "cat-dim-0": lambda a, b: torch.cat([a, b], 0).tanh().view(2, -1, 6).sum(0),
    "smooth-l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "mse": lambda a, b: F.mse_loss(a, b, reduction="none"),
    "addmm": lambda a, b: torch.addmm(a[:, :3], a[:, 3:], b[:3, 3:].tanh(), beta=0.5, alpha=1.5),
    "product-with-view-of-itself": lambda a, b: a.view(-1, 2, 3).flatten(1) * a * b,
}
COUPLED = {"matmul-vector", "tensordot", "addmm"}  # samples see each other

# (N, 4, 6, 6) → (N, ...)
ON_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "max-pool": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max-pool-indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "max-pool-ceil": lambda x: F.max_pool2d(x, 4, ceil_mode=True, dilation=1),
    "avg-pool": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False).tanh(),
    "adaptive-avg-pool": lambda x: F.adaptive_avg_pool2d(x, (2, 3)).tanh(),
    "adaptive-max-pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "lp-pool": lambda x: F.lp_pool2d(x.abs() + 0.1, 2.0, 2),
    "pool-1d": lambda x: F.max_pool1d(x.flatten(2), 3) + F.avg_pool1d(x.flatten(2), 3).tanh(),
    "pool-3d": lambda x: F.max_pool3d(x[:, None], 2) + F.avg_pool3d(x[:, None], 2).tanh(),
    "interpolate-nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest").tanh(),
    "interpolate-bilinear": lambda x: F.interpolate(
        x, size=(4, 5), mode="bilinear", align_corners=False
    ).tanh(),
    "interpolate-bicubic": lambda x: F.interpolate(
        x, size=(4, 5), mode="bicubic", align_corners=True
    ).tanh(),
    "pixel-shuffle": lambda x: F.pixel_shuffle(x, 2).tanh(),
    "pixel-unshuffle": lambda x: F.pixel_unshuffle(x, 2).tanh(),
    "channel-shuffle": lambda x: F.channel_shuffle(x, 2).tanh(),
    "pad-constant": lambda x: F.pad(x, (1, 0, 2, 1), value=0.3).tanh(),
    "pad-reflect": lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect").tanh(),
    "pad-replicate": lambda x: F.pad(x, (1, 1, 2, 0), mode="replicate").tanh(),
    "pad-circular": lambda x: F.pad(x, (1, 1, 2, 0), mode="circular").tanh(),
    "unfold": lambda x: F.unfold(x, 3, stride=3).tanh(),
    "fold": lambda x: F.fold(F.unfold(x, 2, stride=2).tanh(), (6, 6), 2, stride=2),
    "local-response-norm": lambda x: F.local_response_norm(x, 2, alpha=0.5),
    "grid-sample": lambda x: F.grid_sample(
        x, x[:, :2, :3, :3].tanh().permute(0, 2, 3, 1), align_corners=False
    ),
    "channel-dropout-eval": lambda x: F.dropout2d(x, 0.5, training=False).tanh(),
    "instance-norm-function": lambda x: F.instance_norm(x),
    "layer-norm-function": lambda x: F.layer_norm(x, x.shape[1:]),
    "group-norm-function": lambda x: F.group_norm(x, 2),
    "rms-norm-function": lambda x: F.rms_norm(x, (6,)),
    "window-partition": lambda x: (
        x.view(-1, 4, 2, 3, 2, 3)
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(-1, 9, 4)
        .softmax(1)
        .view(-1, 144)
    ),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last).tanh(),
    "spatial-softmax": lambda x: x.flatten(2).softmax(2),
}

# modules with parameters of their own: (N, 6) → (N, ...)
MODULES_ON_VECTORS: dict[str, Callable[[], nn.Module]] = {
    "prelu": lambda: nn.PReLU(WIDTH),
    "prelu-shared": nn.PReLU,
    "layer-norm": lambda: nn.LayerNorm(WIDTH),
    "layer-norm-plain": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "layer-norm-no-bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "rms-norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "batch-norm-1d": lambda: nn.BatchNorm1d(WIDTH),
    "group-norm-1d": lambda: nn.GroupNorm(2, WIDTH),
    "linear-no-bias": lambda: nn.Linear(WIDTH, 4, bias=False),
    "unflatten": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Linear(3, 2), nn.Flatten(), nn.Tanh()
    ),
    "maxout": lambda: Net(
        lambda m, x: m.wide(x).view(-1, 3, 2).max(2)[0], wide=nn.Linear(WIDTH, 6)
    ),
    "adaptive-softmax-head": lambda: Net(
        lambda m, x: m.soft.log_prob(x),
        soft=nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 6, [3], div_value=2),
    ),
}

# (N, 4, 6, 6) → (N, ...)
MODULES_ON_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm2d(4),
    "batch-norm-plain": lambda: nn.BatchNorm2d(4, affine=False),
    "batch-norm-no-statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "group-norm": lambda: nn.GroupNorm(2, 4),
    "instance-norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance-norm-statistics": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer-norm-images": lambda: nn.LayerNorm([4, 6, 6]),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "grouped-strided-dilated": lambda: nn.Conv2d(
        4, 6, 2, groups=2, stride=2, dilation=2, padding=1
    ),
    "conv-same-padding": lambda: nn.Conv2d(4, 2, 3, padding="same"),
    "conv-reflect-padding": lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 2, 2, stride=2, padding=1),
    "transposed-grouped": lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2, output_padding=1),
    "conv-1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 2, 5, stride=3)),
    "conv-3d": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv3d(1, 2, 3), nn.Flatten()),
    "transposed-1d": lambda: nn.Sequential(
        nn.Flatten(2), nn.AvgPool1d(6), nn.ConvTranspose1d(4, 2, 3)
    ),
    "prelu-channels": lambda: nn.PReLU(4),
    "upsample": lambda: nn.Sequential(
        nn.Upsample(scale_factor=0.5, mode="nearest"), nn.Conv2d(4, 2, 1)
    ),
}


def _around(
    wide: Callable[[], dict[str, nn.Module]],
    function: Callable[[Net, Tensor], Tensor],
    example: Tensor,
) -> nn.Module:
    """Stem, operation, a constant matrix that makes what comes out of them narrow (few parameters), and a head."""
    net = Net(lambda m, x: m.head(function(m, x).flatten(1) @ m.narrow), **wide()).double()
    with torch.no_grad():
        num_features = function(net, example).flatten(1).shape[1]
    narrow = (
        torch.eye(num_features)
        if num_features <= NARROW
        else torch.randn(num_features, NARROW) / NARROW
    )
    net.register_buffer("narrow", narrow)
    net.head = nn.Linear(narrow.shape[1], CLASSES)
    return net


def _vectors(
    operation: Callable[[Tensor], Tensor] | None = None,
    module: Callable[[], nn.Module] | None = None,
) -> nn.Module:
    parts = lambda: {"stem": nn.Linear(4, WIDTH)} | ({"op": module()} if module else {})  # noqa: E731
    return _around(parts, lambda m, x: (operation or m.op)(m.stem(x)), rows()[0])


def _pairs(operation: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return _around(
        lambda: {"left": nn.Linear(4, WIDTH), "right": nn.Linear(4, WIDTH)},
        lambda m, x: operation(m.left(x), m.right(x)),
        rows()[0],
    )


def _images(
    operation: Callable[[Tensor], Tensor] | None = None,
    module: Callable[[], nn.Module] | None = None,
) -> nn.Module:
    parts = lambda: {"stem": nn.Conv2d(2, 4, 3, padding=1)} | ({"op": module()} if module else {})  # noqa: E731
    return _around(parts, lambda m, x: (operation or m.op)(m.stem(x)), images()[0])


def _trained_norms() -> list[Case]:
    """Norms that look at the whole batch, in train mode."""
    options: dict[str, Any] = {"train": True, "splits": False}
    return [
        case(
            "train-batch-norm",
            partial(_images, module=lambda: nn.BatchNorm2d(4)),
            images,
            **options,
        ),
        case(
            "train-batch-norm-1d",
            partial(_vectors, module=lambda: nn.BatchNorm1d(WIDTH)),
            rows,
            **options,
        ),
        case(
            "train-batch-norm-plain",
            partial(_images, module=lambda: nn.BatchNorm2d(4, affine=False)),
            images,
            **options,
        ),
        case(
            "train-batch-norm-cumulative",
            partial(_images, module=lambda: nn.BatchNorm2d(4, momentum=None)),
            images,
            **options,
        ),
    ]


OPERATION_CASES = [
    *(
        case(
            f"op-{name}",
            partial(_vectors, op),
            rows,
            brute_force=name not in ONCE,
            differences=name not in SEEN_THROUGH,
        )
        for name, op in ON_VECTORS.items()
    ),
    *(
        case(f"pair-{name}", partial(_pairs, op), rows, splits=name not in COUPLED)
        for name, op in ON_PAIRS.items()
    ),
    *(case(f"image-{name}", partial(_images, op), images) for name, op in ON_IMAGES.items()),
    *(
        case(f"module-{name}", partial(_vectors, module=op), rows)
        for name, op in MODULES_ON_VECTORS.items()
    ),
    *(
        case(
            f"module-{name}",
            partial(_images, module=op),
            images,
            splits=name != "batch-norm-no-statistics",
        )
        for name, op in MODULES_ON_IMAGES.items()
    ),
    *_trained_norms(),
]
