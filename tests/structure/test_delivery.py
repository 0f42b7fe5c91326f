"""Cut networks come in the user's own class where its code can run, and trying that harms nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import TraceError
from apoptosis.structure import cut, trace, zero
from oracles.building import Net


def test_attention_without_key_heads_is_an_error_and_not_the_end_of_the_process() -> None:
    """torch 2.13 divides by their number; Phi-3's code gets there when it is tried at sizes it cannot run."""

    def attend(_: Net, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, :0], x[:, :1], enable_gqa=True)

    with pytest.raises(TraceError, match="attention without heads"):
        trace(Net(attend), torch.zeros(2, 4, 3, 5))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_behind_a_cut_embedding_keeps_its_class(
    kind: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(0)
    net = Net(
        lambda m, ids: m.head(m.cells(m.embed(ids))[0]),
        embed=nn.Embedding(9, 6),
        cells=kind(6, 5, batch_first=True),
        head=nn.Linear(5, 2),
    ).double()
    ids = torch.randint(9, (2, 4))
    structure = trace(net, ids)
    plan = structure.plan({"embed": [0, 2, 5], "cells.weight_ih_l0": [1, 2]})
    assert plan.delivery == "module", plan.delivery_because
    small = cut(net, plan)
    assert (small.cells.input_size, small.cells.hidden_size) == (3, 2)
    for batch in (ids, torch.randint(9, (3, 7))):
        torch.testing.assert_close(small(batch), zero(net, plan)(batch))
