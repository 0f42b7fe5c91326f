import pytest
import torch
from torch.testing import assert_close

from apoptosis.errors import ConfigError
from apoptosis.models import ViTOptions, cifar_vit, vit, vit_b16, vit_tiny16
from apoptosis.structure import cut, trace, zero
from oracles.library import CLASSES, timm_model
from oracles.public_files import public_weights

SMALL = ViTOptions(image_size=16, patch_size=4, width=24, depth=2, num_heads=3, num_classes=CLASSES)


def test_logits_are_those_of_timm():
    theirs = timm_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3
    )
    theirs.double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = vit(SMALL).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "theirs"), [(vit_b16, "vit_base_patch16_224"), (vit_tiny16, "vit_tiny_patch16_224")]
)
def test_parameters_are_named_and_shaped_as_in_timm(make, theirs):
    with torch.device("meta"):
        ours, other = make(num_classes=CLASSES).state_dict(), timm_model(theirs).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in other.items()}


def test_every_size_of_attention_is_cut_alone_and_exactly():
    model = vit(SMALL).eval()
    structure = trace(model, torch.zeros(1, 3, 16, 16))
    names = [f"blocks.0.attn.qkv:{kind}" for kind in ("head", "qk_dim", "v_dim")]
    assert [structure[name].size for name in names] == [3, 8, 8]
    plan = structure.plan(dict(zip(names, ([0, 2], range(3), range(2, 7)), strict=True)))
    assert plan.delivery == "module", plan.delivery_because
    small = cut(model, plan)
    attention = small.blocks[0].attn
    assert (attention.num_heads, attention.qk_dim, attention.v_dim) == (2, 3, 5)
    assert attention.qkv.out_features == 2 * (3 + 3 + 5)
    assert attention.scale == model.blocks[0].attn.scale
    x = torch.randn(2, 3, 16, 16)
    assert_close(small(x), zero(model, plan)(x))


def test_the_cifar_network_has_patches_of_four_pixels():
    model = cifar_vit(num_classes=7)
    assert model.pos_embed.shape == (1, 65, 192)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_the_hidden_width_can_be_chosen():
    options = ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=3, mlp_width=7)
    assert vit(options).blocks[0].mlp.fc1.out_features == 7


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="patches of 5"):
        ViTOptions(patch_size=5)
    with pytest.raises(ConfigError, match="shared by 7 heads"):
        ViTOptions(num_heads=7)


def test_public_weights_load():
    vit_tiny16().load_state_dict(public_weights("imagenet_vit_tiny_fp16"), strict=True)
