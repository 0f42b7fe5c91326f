import sys

import numpy as np
import pytest
import torch

from apoptosis.data import CentreCrop, ResizedCrop, image_zip
from apoptosis.data.image_views import as_bytes, decode
from apoptosis.errors import ConfigError, DataError
from oracles.image_fakes import encoded, picture
from oracles.library import define_torchvision_ops

define_torchvision_ops()
from torchvision import transforms  # noqa: E402 — some builds lack the operators that its import asks for

SIZES = [(40, 30), (31, 57), (32, 32), (200, 33), (5, 7), (33, 33)]


@pytest.mark.parametrize("size", SIZES)
def test_the_middle_is_what_torchvision_takes(size):
    wanted = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(24)])(
        picture(1, size)
    )
    made = CentreCrop(resize=32, size=24).apply(picture(1, size))
    assert np.array_equal(as_bytes(made), np.asarray(wanted).transpose(2, 0, 1))


@pytest.mark.parametrize("size", SIZES)
def test_a_piece_is_what_torchvision_makes_of_the_same_box(size):
    crop, generator = ResizedCrop(flip=False), torch.Generator().manual_seed(3)
    left, top, right, bottom = crop.draw(*size, torch.Generator().manual_seed(3))
    wanted = transforms.functional.resized_crop(
        picture(2, size), top, left, bottom - top, right - left, [24, 24],
    )  # fmt: skip
    assert np.array_equal(np.asarray(crop.apply(picture(2, size), 24, generator)), wanted)


def test_pieces_have_the_areas_and_shapes_asked_for_and_lie_everywhere():
    crop = ResizedCrop(area=(0.2, 0.5), shape=(0.5, 2.0))
    generator = torch.Generator().manual_seed(0)
    boxes = np.array([crop.draw(100, 80, generator) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert right.max() == 100
    assert bottom.max() == 80
    area, shape = (right - left) * (bottom - top) / 8000, (right - left) / (bottom - top)
    assert area.min() == pytest.approx(0.2, abs=0.02)
    assert area.max() == pytest.approx(0.5, abs=0.02)
    assert shape.min() == pytest.approx(0.5, abs=0.1)
    assert shape.max() == pytest.approx(2.0, abs=0.1)
    assert np.median(shape) == pytest.approx(1.0, abs=0.1), "as often wide as high"


def test_the_middle_square_is_taken_where_no_piece_fits():
    long = ResizedCrop(area=(1.0, 1.0), shape=(1.0, 1.0))
    assert long.draw(100, 10, torch.Generator()) == (45, 0, 55, 10)


def test_half_of_the_pieces_are_mirrored():
    half = picture(0, (2, 1))
    half.putpixel((0, 0), (255, 255, 255))
    whole = {"area": (1.0, 1.0), "shape": (2.0, 2.0)}
    generator = torch.Generator().manual_seed(0)
    sides = [
        np.asarray(ResizedCrop(**whole).apply(half, 2, generator))[0, 0, 0] for _ in range(400)
    ]
    assert 150 < sum(side == 255 for side in sides) < 250
    plain = ResizedCrop(**whole, flip=False)
    assert all(np.asarray(plain.apply(half, 2, generator))[0, 0, 0] == 255 for _ in range(50))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_pictures_of_every_kind_become_colour(mode, tmp_path):
    path = tmp_path / ("p.tif" if mode in ("CMYK", "I;16") else "p.png")
    grey = picture(3).convert("L")
    (grey.convert("I").convert("I;16") if mode == "I;16" else grey.convert(mode)).save(path)
    assert decode(path.read_bytes(), "p").mode == "RGB"


@pytest.mark.parametrize("form", ["png", "jpeg", "bmp", "webp"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_a_picture_that_was_cut_off_is_named(form, share):
    content = encoded(1, form=form)
    with pytest.raises(DataError, match="cat.x cannot be decoded .*take it out of the data"):
        decode(content[: int(share * len(content))], "cat.x")


@pytest.mark.parametrize("size", [0, 300])
def test_a_square_that_is_none_is_refused(size):
    with pytest.raises(ConfigError, match="shorter side is made 256"):
        CentreCrop(size=size)


@pytest.mark.parametrize("wrong", [{"area": (0.0, 1.0)}, {"area": (0.5, 2)}, {"shape": (2, 1)}])
def test_areas_and_shapes_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError, match="Give the least first"):
        ResizedCrop(**wrong)


def test_without_pillow_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="pip install pillow"):
        image_zip("any.zip")
