import numpy as np
import pytest
import torch

from apoptosis.data import Augmentation, Split
from apoptosis.errors import ConfigError

OPTIONS = [
    Augmentation(),
    Augmentation(pad=0),
    Augmentation(pad=2, flip=False),
    Augmentation(pad=3, cutout=4),
    Augmentation(pad=0, flip=False, cutout=3),
    Augmentation(pad=0, flip=False),
    Augmentation(pad=9, cutout=50),
]


def one_by_one(augmentation, images, moves):
    """The same with numpy, image by image, in the order of the words: pad, crop, mirror, hole."""
    pad, half = augmentation.pad, augmentation.cutout // 2
    made = []
    for place, image in enumerate(images.numpy()):
        _, height, width = image.shape
        padded = np.zeros((len(image), height + 2 * pad, width + 2 * pad), image.dtype)
        padded[:, pad : pad + height, pad : pad + width] = image
        top, left = int(moves.top[place]), int(moves.left[place])
        crop = padded[:, top : top + height, left : left + width].copy()
        if moves.mirrored[place]:
            crop = crop[:, :, ::-1].copy()
        if augmentation.cutout:
            row, column = divmod(int(moves.hole[place]), width)
            for y in range(row - half, row - half + augmentation.cutout):
                for x in range(column - half, column - half + augmentation.cutout):
                    if 0 <= y < height and 0 <= x < width:
                        crop[:, y, x] = 0
        made.append(crop)
    return torch.from_numpy(np.stack(made))


@pytest.mark.parametrize("augmentation", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(37, 3, 8, 8), (5, 1, 6, 9)])
def test_a_whole_batch_is_what_image_by_image_gives(augmentation, dtype, shape):
    images = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = images.clone()
    made = augmentation.apply(images, torch.Generator().manual_seed(7))
    moves = augmentation.draw(shape[0], *shape[2:], torch.Generator().manual_seed(7))
    assert made.dtype == dtype
    assert torch.equal(made, one_by_one(augmentation, images, moves))
    assert torch.equal(images, before)


def test_the_oracle_tells_a_wrong_offset():
    images = torch.randint(1, 256, (9, 3, 8, 8), dtype=torch.uint8)
    moves = Augmentation().draw(9, 8, 8, torch.Generator().manual_seed(7))
    other = Augmentation().draw(9, 8, 8, torch.Generator().manual_seed(8))
    right, wrong = (one_by_one(Augmentation(), images, drawn) for drawn in (moves, other))
    assert not torch.equal(right, wrong)


def test_offsets_reach_both_ends_and_half_of_the_images_are_mirrored():
    moves = Augmentation(pad=2).draw(5000, 8, 8, torch.Generator().manual_seed(0))
    for offsets in (moves.top, moves.left):
        assert offsets.bincount().tolist() == pytest.approx([1000] * 5, abs=150)
    assert 2300 < int(moves.mirrored.sum()) < 2700
    assert Augmentation(flip=False).draw(99, 8, 8, torch.Generator()).mirrored.sum() == 0
    assert moves.hole.min() == 0
    assert moves.hole.max() == 63


def test_what_moves_in_is_black_before_the_normalisation():
    white = Split(
        torch.full((64, 3, 4, 4), 255, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64),
        mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0),
    )  # fmt: skip
    augmentation = Augmentation(pad=3)
    (images, _), *_ = white.batches(64, shuffle_seed=0, augmentation=augmentation)
    assert [channel.unique().tolist() for channel in images.unbind(1)] == [
        [-1.0, 1.0],
        [-1.0, 3.0],
        [0.0, 1.0],
    ]


@pytest.mark.parametrize("wrong", [{"pad": -1}, {"cutout": -2}])
def test_negative_numbers_of_pixels_are_refused(wrong):
    with pytest.raises(ConfigError, match="numbers of pixels"):
        Augmentation(**wrong)


def test_without_a_seed_there_is_nothing_to_draw_from():
    split = Split(torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="Give shuffle_seed, or no augmentation"):
        split.batches(2, augmentation=Augmentation())
    with pytest.raises(ConfigError, match="augmented by Augmentation; str was given"):
        split.batches(2, shuffle_seed=0, augmentation="flip")
