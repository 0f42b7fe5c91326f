"""The axis rule of fused attention."""

from math import sqrt

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr, times
from apoptosis.structure.facts import ActivationProduct
from apoptosis.structure.flows import Through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "products"


def _attention_samples() -> list[Sample]:
    q, k, v = tensor(2, 4, 3, 6), tensor(2, 4, 5, 6), tensor(2, 4, 5, 7)
    few, heads = tensor(2, 2, 5, 6), tensor(2, 2, 5, 7)
    return [
        sample(q, k, v, free="2 4 3 6 7"),
        sample(q, k, v, tensor(4, 3, 5), free="2 4 3 6 7"),
        sample(q, k, v, tensor(2, 1, 1, 5) > 0.1, free="2 4 3 6 7"),
        sample(q, k, v, None, 0.0, True, free="2 4 6 7"),
        sample(q, few, heads, enable_gqa=True, free="2 2 2 3 6 7"),
        sample(q[0], k[0], v[0], scale=0.3, free="4 3 6 7"),
        sample(q[0, 0], k[0, 0], v[0, 0], free="3 6 7"),
    ]


@axis_rule("scaled_dot_product_attention.default", family=FAMILY, samples=_attention_samples)
def attention(step: Step) -> None:
    """… h q e, … h k e, … h k v → … h q v; with GQA the keys and values have h / r heads."""
    q, k, v, mask, _dropout, causal, scale, gqa = step.args
    batch = _attention_batch(step, q, k, v, gqa=gqa)
    (queries, e), (keys, f) = step.axes(q)[-2:], step.axes(k)[-2:]
    step.equal(e, f)
    step.equal(keys, step.axes(v)[-2])
    step.pin(keys, "softmax runs over the keys")
    if causal:
        step.pin(queries, "which keys a query sees depends on its place", quiet=True)
    if mask is not None:
        for expr, own in zip([*batch, queries, keys][-mask.ndim :], step.axes(mask), strict=True):
            if algebra.size_of(own) != 1:
                step.equal(expr, own)
    wide = step.axes(v)[-1]
    step.contract(e, (q, q.ndim - 1), (k, k.ndim - 1))
    if scale is None:
        step.facts.frozen["scale"] = 1 / sqrt(q.shape[-1])
    for last in (e, wide):
        step.cost(*batch, queries, keys, last)
    shared = tuple(batch[1:]) if len(batch) > 1 else tuple(batch[: q.ndim - 2])
    step.facts.product = ActivationProduct((q, k), (e,), shared, (keys,))
    step.kind(e, "qk_dim")
    step.kind(wide, "v_dim")
    for expr in shared:
        step.kind(expr, "head")
    lead = tuple(range(v.ndim - 2)) if v.ndim == q.ndim else tuple([None] * (q.ndim - 2))
    step.out([*batch, queries, wide], Through(v, (*lead, None, v.ndim - 1)))


def _attention_batch(step: Step, q: Value, k: Value, v: Value, *, gqa: bool) -> list[Expr]:
    """Batch and head axes of the result."""
    if not gqa or q.shape[-3] == k.shape[-3]:
        if not q.ndim == k.ndim == v.ndim:
            raise Declined("queries, keys and values differ in their number of dimensions")
        operands = [step.axes(x)[:-2] for x in (q, k, v)]
        result: list[Expr] = []
        for exprs in zip(*operands, strict=True):
            large = [expr for expr in exprs if algebra.size_of(expr) != 1] or [exprs[0]]
            for other in large[1:]:
                step.equal(large[0], other)
            result.append(algebra.resolve(large[0]))
        return result
    step.equal(step.axes(k)[-3], step.axes(v)[-3])
    repeat = step.fresh(q.shape[-3] // k.shape[-3], origin="repeat")
    step.equal(step.axes(q)[-3], times(step.axes(k)[-3], repeat))
    _equate_batch(step, q, k)
    _equate_batch(step, q, v)
    return [*step.axes(q)[:-3], algebra.resolve(step.axes(q)[-3])]


def _equate_batch(step: Step, q: Value, k: Value) -> None:
    """Equate the axes before the heads."""
    for a, b in zip(step.axes(q)[:-3], step.axes(k)[:-3], strict=True):
        step.equal(a, b)
