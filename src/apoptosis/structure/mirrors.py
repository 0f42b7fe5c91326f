"""Attributes of torch's own modules that mirror the sizes of their tensors, and that no operation need ever read.

`Linear.out_features`, `BatchNorm2d.num_features`, `Conv1d.groups` of a convolution whose weight somebody else reads:
after a cut they are what torch's constructor would have set for such tensors, whether forward asks for them or not.
Attributes of the user's own classes follow where forward reads them (`attributes`); what they mean elsewhere nobody
can tell.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from apoptosis.structure.attributes import Attribute, leaves
from apoptosis.structure.axes import Axis, size_of
from apoptosis.structure.network import Network
from apoptosis.structure.plan import AttributeChange, Plan

__all__ = ["refresh_sizes", "unread_sizes"]


def refresh_sizes(module: nn.Module) -> None:
    """Let one of torch's own modules say what its tensors are."""
    for kind, sizes in _SIZES.items():
        if isinstance(module, kind):
            for name, read in sizes.items():
                found = read(module)
                if found is not None and found != getattr(module, name):
                    setattr(module, name, found)
            break


def unread_sizes(plan: Plan, network: Network, sizes: dict[Axis, int]) -> list[AttributeChange]:
    """Sizes that the tensors after the cut would not tell: the plan has to say them."""
    modules = dict(network.skeleton.named_modules()) if network.skeleton is not None else {}
    return [*_of_empty_norms(modules, network, sizes), *_of_unread_groups(modules, network, plan)]


def _of_empty_norms(
    modules: dict[str, nn.Module], network: Network, sizes: dict[Axis, int]
) -> list[AttributeChange]:
    """`num_features` of norms without tensors; torch compares it with the input and warns."""
    analysis, changes = network.run.analysis, dict[Attribute, AttributeChange]()
    for call in analysis.program.modules:
        module = modules.get(call.path)
        if not isinstance(module, nn.modules.batchnorm._NormBase) or call.input is None:
            continue
        if module.affine or module.track_running_stats:
            continue
        batched = call.input.ndim == 2 + int(type(module).__name__[-2])
        new = size_of(analysis.axes[call.input][1 if batched else 0], sizes)
        where = Attribute(call.path, "num_features")
        if new != module.num_features:
            changes[where] = AttributeChange(where, module.num_features, new)
    return list(changes.values())


def _of_unread_groups(
    modules: dict[str, nn.Module], network: Network, plan: Plan
) -> list[AttributeChange]:
    """`groups` of convolutions that were not called: their weights were read by somebody else.

    A weight stacks the rows of its groups, so those that are left are counted in the kept rows.
    """
    rows = {name: cut.kept[0] for cut in plan.tensors if 0 in cut.kept for name in cut.names}
    calls = network.run.analysis.calls()
    were_read = {leaf for call in calls for own in call.taints.values() for leaf in leaves(own)}
    changes: list[AttributeChange] = []
    for path, module in modules.items():
        where = Attribute(path, "groups")
        if not isinstance(module, nn.modules.conv._ConvNd) or where in were_read:
            continue
        prefix = f"{path}.weight" if path else "weight"
        names = [prefix, *(name for name in rows if name.startswith(f"{path}.parametrizations."))]
        kept = next((rows[name] for name in names if name in rows), None)
        if module.groups == 1 or kept is None:
            continue
        total = module.in_channels if module.transposed else module.out_channels
        left = len(np.unique(kept // (total // module.groups)))
        if left != module.groups and len(kept) % left == 0:
            changes.append(AttributeChange(where, module.groups, left))
    return changes


Read = Callable[[Any], Any]


def _size(dim: int, tensor: str = "weight", times: Read = lambda _: 1) -> Read:
    """The size of a tensor along a dimension; None, which sets nothing, where the module has no such tensor."""

    def read(module: Any) -> int | None:
        found = getattr(module, tensor, None)
        return None if found is None else found.shape[dim] * times(module)

    return read


def _num_features(module: Any) -> int | None:
    found = _size(0)(module)
    return _size(0, "running_mean")(module) if found is None else found


def _shape(module: Any) -> tuple[int, ...] | None:
    return None if module.weight is None else tuple(module.weight.shape)


def _hidden_size(module: Any) -> int:
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    return module.weight_ih_l0.shape[0] // gates


def _read_by_attention(which: str) -> Read:
    """torch fuses the three projections where they read the same."""

    def read(module: Any) -> int:
        apart = getattr(module, f"{which}_proj_weight")
        return (module.in_proj_weight if apart is None else apart).shape[1]

    return read


def _stream(module: nn.Module) -> int | None:
    norms = (own for own in module.modules() if isinstance(own, nn.LayerNorm))
    return next((own.weight.shape[0] for own in norms if own.elementwise_affine), None)


def _groups(module: Any) -> int:
    return module.groups


_SIZES: dict[type[nn.Module], dict[str, Read]] = {
    nn.Linear: {"out_features": _size(0), "in_features": _size(1)},
    nn.Bilinear: {
        "out_features": _size(0),
        "in1_features": _size(1),
        "in2_features": _size(2),
    },
    nn.Embedding: {"num_embeddings": _size(0), "embedding_dim": _size(1)},
    nn.EmbeddingBag: {"num_embeddings": _size(0), "embedding_dim": _size(1)},
    **{
        kind: {"out_channels": _size(0), "in_channels": _size(1, times=_groups)}
        for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    },
    **{
        kind: {"in_channels": _size(0), "out_channels": _size(1, times=_groups)}
        for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    },
    nn.modules.batchnorm._NormBase: {"num_features": _num_features},
    nn.GroupNorm: {"num_channels": _size(0)},
    nn.LayerNorm: {"normalized_shape": _shape},
    nn.RMSNorm: {"normalized_shape": _shape},
    nn.PReLU: {"num_parameters": _size(0)},
    nn.RNNBase: {
        "input_size": _size(1, "weight_ih_l0"),
        "hidden_size": _hidden_size,
        "proj_size": _size(0, "weight_hr_l0"),
    },
    nn.RNNCellBase: {"input_size": _size(1, "weight_ih"), "hidden_size": _size(1, "weight_hh")},
    nn.MultiheadAttention: {
        "embed_dim": lambda m: m.out_proj.weight.shape[0],
        "kdim": _read_by_attention("k"),
        "vdim": _read_by_attention("v"),
    },
    nn.Transformer: {"d_model": _stream},
    nn.AdaptiveLogSoftmaxWithLoss: {"in_features": lambda m: m.head.weight.shape[1]},
}
