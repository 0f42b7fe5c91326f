"""2:4 weights for the GPU's sparse tensor cores: refused in words where they cannot be, right where they can."""

import pytest
import torch
from torch import nn

from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks import mask, masks_of, semi_structured
from apoptosis.planning import Sparsity, make_masks


def masked(model: nn.Module, sparsity: Sparsity | None = None) -> nn.Module:
    values = {name: own.detach().float() for name, own in model.named_parameters()}
    return mask(model, make_masks(model, values, sparsity or Sparsity(pattern="2:4")))


def test_without_such_masks_there_is_nothing_to_compress() -> None:
    with pytest.raises(ConfigError, match='pattern="2:4"'):
        semi_structured(nn.Linear(64, 64))
    with pytest.raises(ConfigError, match="2:4"):
        semi_structured(masked(nn.Linear(64, 64), Sparsity(keep=0.5)))
    with pytest.raises(ConfigError, match="nn.Linear"):
        semi_structured(masked(nn.Conv2d(4, 4, 3)))


def test_the_cpu_has_no_kernels() -> None:
    with pytest.raises(ModelError, match=r'to\("cuda", torch.float16\)'):
        semi_structured(masked(nn.Linear(64, 64)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:.*prototype stage.*:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compressed_layers_compute_what_the_zeros_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 12))
    zeros = masked(net.to("cuda", dtype))
    fast = semi_structured(zeros)
    x = torch.randn(32, 128, device="cuda", dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), zeros(x), rtol=2e-2, atol=2e-2)
    assert type(fast[0].weight.data) is not torch.Tensor, "compressed"
    assert type(fast[3].weight.data) is torch.Tensor, "12 rows: no kernel, left as it is"
    assert masks_of(zeros) is not None, "the given model is untouched"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sizes_without_kernels_are_refused() -> None:
    with pytest.raises(ModelError, match="multiples of"):
        semi_structured(masked(nn.Linear(12, 12).to("cuda", torch.float16)))
