"""What a unit of an axis is, read off the use of the axis.

Attention is recognised by what it does, fused or written out: a product of two activations that ends in a softmax sums
over a `qk_dim`; what both factors share is a `head`; what the probabilities then multiply has a `v_dim`. Where keys and
values have fewer heads, repeated for several queries, a head is a `kv_head` with its queries, and the repeated axis the
`query_head` within each. What is a rank says `adapters`.
"""

from apoptosis.structure.adapters import rank_axes
from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis, Expr, resolve
from apoptosis.structure.facts import ActivationProduct
from apoptosis.structure.program import Call, Value, values_in

__all__ = ["KINDS", "RANK", "kinds_of"]

RANK = "rank"

KINDS = {
    RANK: "a dimension of a low-rank adapter (LoRA) beside a layer; small by choice, so cut only on request",
    "kv_head": "a key-value head with all its queries (GQA)",
    "query_head": "one query head in every key-value group (GQA)",
    "head": "an attention head",
    "head_dim": "one dimension of queries, keys and values, in every head",
    "qk_dim": "one dimension of queries and keys, in every head",
    "v_dim": "one dimension of values, in every head",
    "stream": "a channel of a residual stream: whatever additions share",
    "channel": "an output channel of a convolution",
    "hidden": "a hidden unit",
}
"""Every kind, in the order in which one outweighs another."""


def kinds_of(analysis: Analysis) -> dict[Axis, str]:
    """The kind of every axis that may shrink."""
    kinds = _Kinds(analysis)
    for call in analysis.calls():
        for expr, kind in analysis.facts[call].kinds:
            kinds.note(expr, kind)
        kinds.follow_attention(call)
        if kinds.is_residual(call):
            for own in zip(*(analysis.axes[v] for v in values_in(call.arguments)), strict=True):
                for axis in set(own[0].axes()) & set(own[1].axes()):
                    kinds.note(Expr.of(axis), "stream")
    for axis in rank_axes(analysis):
        kinds.note(Expr.of(axis), RANK)
    return {axis: _outweighing(found) for axis, found in kinds.found.items()}


class _Kinds:
    """What was seen of each axis, and which values hold scores and probabilities of attention."""

    def __init__(self, analysis: Analysis) -> None:
        self.found: dict[Axis, set[str]] = {}
        self._analysis = analysis
        self._scores: dict[Value, ActivationProduct] = {}
        self._probabilities: set[Value] = set()
        self._made_by: dict[Value, frozenset[Call]] = {}

    def note(self, expr: Expr, kind: str) -> None:
        """One use of every free axis in an expression."""
        axes = [axis for axis in expr.axes() if axis.pin is None]
        repeated = kind == "head" and any(axis.origin == "repeat" for axis in axes)
        for axis in axes:
            own = kind
            if repeated:
                own = "query_head" if axis.origin == "repeat" else "kv_head"
            self.found.setdefault(axis, set()).add(own)

    def is_residual(self, call: Call) -> bool:
        """An addition of two activations that different layers made (x + x³ inside a GELU is none)."""
        values = list(values_in(call.arguments))
        makers = [self._made_by.get(value, frozenset()) for value in values]
        new_layer = bool(self._analysis.facts[call].costs) or call.name.startswith("embedding")
        made_by = frozenset({call}) if new_layer else frozenset().union(*makers)
        self._made_by |= dict.fromkeys(call.outputs, made_by)
        if call.name not in ("add.Tensor", "add_.Tensor") or len(values) != 2:
            return False
        a, b = values
        return not (a.fixed or b.fixed) and a.shape == b.shape and makers[0] != makers[1]

    def _note_scores(self, scores: Value, probabilities: Value) -> None:
        origin = self._scores.get(scores)
        if origin is None:
            return
        for expr in origin.contracted:
            self.note(resolve(expr), "qk_dim")
        for expr in origin.shared:
            self.note(resolve(expr), "head")
        self._probabilities.add(probabilities)

    def follow_attention(self, call: Call) -> None:
        """Scores, softmax, probabilities times values; what keeps the shape passes either on."""
        product = self._analysis.facts[call].product
        operands = list(values_in(call.arguments))
        if product is not None:
            if product.operands[0] in self._probabilities:
                for expr in product.own:
                    self.note(resolve(expr), "v_dim")
            self._scores[call.outputs[0]] = product
        elif call.name.startswith("softmax"):
            self._note_scores(operands[0], call.outputs[0])
        elif operands and call.outputs and call.outputs[0].shape == operands[0].shape:
            for value in operands:
                if value in self._scores:
                    self._scores[call.outputs[0]] = self._scores[value]
                if value in self._probabilities:
                    self._probabilities.add(call.outputs[0])


def _outweighing(kinds: set[str]) -> str:
    if {"qk_dim", "v_dim"} <= kinds:
        kinds = kinds | {"head_dim"}
    return next(kind for kind in KINDS if kind in kinds)
