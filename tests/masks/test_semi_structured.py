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
        semi_structured(nn.Linear(64, 64), torch.ones(8, 64))
    with pytest.raises(ConfigError, match="2:4"):
        semi_structured(masked(nn.Linear(64, 64), Sparsity(keep=0.5)), torch.ones(8, 64))
    with pytest.raises(ConfigError, match="nn.Linear"):
        semi_structured(masked(nn.Conv2d(4, 4, 3)), torch.ones(1, 4, 8, 8))


def test_the_cpu_has_no_kernels() -> None:
    with pytest.raises(ModelError, match=r'to\("cuda", torch.float16\)'):
        semi_structured(masked(nn.Linear(64, 64)), torch.ones(8, 64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:.*(prototype stage|is deprecated).*:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [4096, 4099])
def test_compressed_layers_compute_what_the_zeros_do(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 12)
    )
    zeros = masked(net.to("cuda", dtype))
    x = torch.randn(rows, 256, device="cuda", dtype=dtype)
    fast, gains = semi_structured(zeros, x, replayed=True)
    assert gains.keys() == {"0.weight", "2.weight"}, "12 rows: no kernel, left as it is"
    for name, gain in gains.items():
        compressed = type(fast.get_parameter(name).data) is not torch.Tensor
        assert compressed == (gain > 1)
    if dtype is torch.bfloat16:
        assert gains["2.weight"] > 1, "sixteen million weights"
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), zeros(x), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(fast(x[:8]), zeros(x[:8]), rtol=2e-2, atol=2e-2)
    assert masks_of(zeros) is not None, "the given model is untouched"
    assert all(type(p.data) is torch.Tensor for p in zeros.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:.*(prototype stage|is deprecated).*:UserWarning")
def test_what_does_not_gain_stays_dense() -> None:
    zeros = masked(nn.Linear(256, 256).to("cuda", torch.float16))
    fast, gains = semi_structured(zeros, torch.ones(8, 256, device="cuda", dtype=torch.float16))
    assert gains["weight"] < 1
    assert type(fast.weight.data) is torch.Tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sizes_without_kernels_are_refused() -> None:
    with pytest.raises(ModelError, match="multiples of"):
        semi_structured(masked(nn.Linear(12, 12).to("cuda", torch.float16)), torch.ones(8, 12))
