import torch
from torch.testing import assert_close

from apoptosis.models import digits_cnn


def test_logits_have_one_column_per_class():
    assert digits_cnn(num_classes=7)(torch.randn(3, 1, 8, 8)).shape == (3, 7)


def test_width_sets_the_channels():
    model = digits_cnn(width=4)
    convs = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [4, 4, 8, 8]


def test_the_shortcut_carries_the_stem_past_the_side_branch():
    model = digits_cnn().eval()
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        model.side.norm.weight.zero_()
        model.side.norm.bias.zero_()
        through = model.top(model.down(model.stem(x))).mean((2, 3))
        assert_close(model(x), model.head(through))
        assert model(x).abs().sum() > 0


def test_weights_depend_on_the_seed_alone():
    before = torch.get_rng_state()
    same, again, other = (digits_cnn(seed=s).stem.conv.weight for s in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert torch.equal(torch.get_rng_state(), before)
