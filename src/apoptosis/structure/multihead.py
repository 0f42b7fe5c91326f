"""`nn.MultiheadAttention` whose heads and widths need not fill the embedding.

torch's module derives the width of a head from that of the embedding, so no attribute of it can express a cut. After a
cut such a module becomes a `CutAttention`: the same parameters under the same names, the same arguments, a subclass, so
whoever asks `isinstance` is satisfied.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import ModelError
from apoptosis.structure.groups import Group

__all__ = ["AttentionShape", "CutAttention", "attention_shapes"]


@dataclass(frozen=True)
class AttentionShape:
    """What an attention module is after a cut; `scale` is the one it had before."""

    module: str
    heads: int
    qk_dim: int
    v_dim: int
    scale: float


def attention_shapes(
    model: nn.Module, groups: tuple[Group, ...], counts: dict[str, int], touched: set[str]
) -> tuple[AttentionShape, ...]:
    """The attention modules with tensors among `touched`, at the sizes that `counts` gives to groups."""
    found: list[AttentionShape] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if type(module) not in (nn.MultiheadAttention, CutAttention):
            continue  # a subclass has a forward of its own
        if not any(name.startswith(f"{path}." if path else "") for name in touched):
            continue
        shape = _shape_now(path, module)
        sizes = {"head": shape.heads, "qk_dim": shape.qk_dim, "v_dim": shape.v_dim}
        for group in groups:
            if any(t.rpartition(".")[0] == path and dim == 0 for t, dim, *_ in group.places):
                kinds = ("qk_dim", "v_dim") if group.kind == "head_dim" else (group.kind,)
                for kind in kinds:
                    if kind in sizes:
                        sizes[kind] = counts.get(group.name, group.size)
        found.append(
            AttentionShape(path, sizes["head"], sizes["qk_dim"], sizes["v_dim"], shape.scale)
        )
    return tuple(found)


def _shape_now(path: str, module: nn.MultiheadAttention) -> AttentionShape:
    if isinstance(module, CutAttention):
        return module.shape
    return AttentionShape(
        path, module.num_heads, module.head_dim, module.head_dim, 1 / sqrt(module.head_dim)
    )


class CutAttention(nn.MultiheadAttention):
    """Attention with its own number and widths of heads."""

    shape: AttentionShape

    @staticmethod
    def become_(module: nn.MultiheadAttention, shape: AttentionShape) -> None:
        """Turn a module whose tensors have been cut into one that runs them."""
        module.__class__ = CutAttention
        vars(module)["shape"] = shape
        module.num_heads, module.head_dim = shape.heads, shape.qk_dim
        module.embed_dim = module.out_proj.weight.shape[0]
        # torch's encoder layers have a fused path of their own, which this flag keeps them from taking.
        module._qkv_same_embed_dim = False

    def forward(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        if is_causal and attn_mask is None:  # as torch's: it is a hint about the mask, no mask
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.ndim == 3
        inputs = [query, key, value]
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = self._projected(inputs)
        mask = self._merged_mask(q, k, attn_mask, key_padding_mask)
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.shape.scale
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, self.dropout, self.training)
            mixed = weights @ v
        else:
            weights, drop = None, self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, mask, drop, scale=self.shape.scale)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projected(self, inputs: list[Tensor]) -> list[Tensor]:
        """Queries, keys and values as (batch, heads, length, width)."""
        shape = self.shape
        widths = (shape.qk_dim, shape.qk_dim, shape.v_dim)
        rows = [shape.heads * width for width in widths]
        fused: Tensor | None = self._parameters["in_proj_weight"]
        bias: Tensor | None = self._parameters["in_proj_bias"]
        if fused is not None:
            weights = list(fused.split(rows))
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        biases: Any = [None] * 3 if bias is None else bias.split(rows)
        made = [F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True)]
        for place, extra in ((1, self.bias_k), (2, self.bias_v)):
            if extra is not None:
                made[place] = torch.cat([made[place], extra.expand(len(made[place]), 1, -1)], dim=1)
        if self.add_zero_attn:
            made[1:] = [F.pad(x, (0, 0, 0, 1)) for x in made[1:]]
        split = zip(made, widths, strict=True)
        return [x.unflatten(-1, (shape.heads, width)).transpose(1, 2) for x, width in split]

    def _merged_mask(
        self, q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """Both masks as numbers to add to the scores, (batch, heads, queries, keys) or broadcast to that."""
        parts: list[Tensor] = []
        if mask is not None:
            if mask.ndim == 3:
                if mask.shape[0] != q.shape[0] * q.shape[1]:
                    raise ModelError(
                        f"A mask for {mask.shape[0] // q.shape[0]} heads does not fit attention that was cut to "
                        f"{q.shape[1]}. Pass one mask for all heads, of shape (queries, keys)."
                    )
                mask = mask.unflatten(0, (q.shape[0], q.shape[1]))
            parts.append(_as_numbers(mask, q))
        if padding is not None:
            parts.append(_as_numbers(padding[:, None, None, :], q))
        if not parts:
            return None
        merged = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return F.pad(merged, (0, k.shape[2] - merged.shape[-1]))  # keys that the module itself adds


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """A mask that is true where attention is forbidden, as minus infinity there."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
