"""Small files that ask for much: refused in words that name the file and the limit, in little memory and time."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image

from apoptosis.data import cifar_files, find_data_set, image_files
from apoptosis.data.image_files import Folder
from apoptosis.data.image_views import CentreCrop, ResizedCrop, decode
from apoptosis.data.safe_pickles import read_pickle
from apoptosis.errors import DataError
from oracles.cifar_fakes import arrays, pickles, write_folder, write_tar
from oracles.image_fakes import encoded, write_classes, write_zip
from oracles.limits import little


def png(width: int, height: int) -> bytes:
    """Grey, all zero; any size in few bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(width + 1)) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (2, 100_000)])
@pytest.mark.parametrize("view", [CentreCrop(), CentreCrop(1024, 1024)], ids=["usual", "large"])
def test_a_thin_picture_is_not_made_enormous(size, view):
    picture = decode(png(*size), "thin.png")
    with little():
        assert view.apply(picture).size == (view.size, view.size)
        made = ResizedCrop().apply(picture, view.size, torch.Generator().manual_seed(0))
    assert made.size == (view.size, view.size)


@pytest.mark.parametrize("size", [(4, 400), (400, 4), (3, 101), (7, 120)])
def test_the_middle_of_a_thin_picture_is_the_one_of_the_whole(size):
    """The oracle resizes all of it, as is done with other pictures."""
    width, height = size
    down, across = np.mgrid[:height, :width]
    smooth = 128 + 100 * np.sin(down / 3) * np.cos(across / 3)
    picture = Image.fromarray(np.repeat(smooth[:, :, None], 3, 2).astype(np.uint8))
    view = CentreCrop(32, 24)
    scale = view.resize / min(size)
    whole = picture.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
    left, top = (round((side - view.size) / 2) for side in whole.size)
    expected = whole.crop((left, top, left + view.size, top + view.size))
    found = np.asarray(view.apply(picture), np.int64)
    # Half a pixel of the result at most.
    assert np.abs(found - np.asarray(expected, np.int64)).max() <= 12


@pytest.mark.parametrize("size", [(30, 40), (40, 640), (16, 255), (100, 100)])
def test_other_pictures_are_cut_as_ever(size):
    picture = Image.effect_noise(size, 80).convert("RGB")
    scale = (256 * size[0] // min(size), 256 * size[1] // min(size))
    whole = picture.resize(scale, Image.Resampling.BILINEAR)
    left, top = (round((side - 224) / 2) for side in scale)
    expected = whole.crop((left, top, left + 224, top + 224))
    assert np.array_equal(np.asarray(CentreCrop().apply(picture)), np.asarray(expected))


@pytest.mark.parametrize("side", [9_500, 30_000])
@pytest.mark.parametrize("kind", ["ignore", "error"])
def test_a_picture_of_too_many_pixels_is_not_decoded(side, kind):
    content = bytearray(png(1, side))
    content[16:20] = side.to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    with warnings.catch_warnings(), little(2**28):
        warnings.simplefilter(kind)
        with pytest.raises(DataError, match=r"a/b.png .* more than 89,478,485 pixels"):
            decode(bytes(content), "a/b.png")


def test_only_formats_that_are_named_are_decoded():
    """Others run programs: Pillow hands EPS to Ghostscript."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    with pytest.raises(DataError, match="cannot identify"):
        decode(eps, "a.png")


# -- pickles ----------------------------------------------------------------------------------------------------------

PICKLES = {
    "bytes": b"B\xff\xff\xff\xff.",
    "more bytes": b"\x8e" + (2**40).to_bytes(8, "little") + b".",
    "text": b"\x8d" + (2**40).to_bytes(8, "little") + b".",
    "old text": b"T\xff\xff\xff\x7f.",
    "unicode": b"X\xff\xff\xff\xff.",
    "an array of bytes": b"\x96" + (2**40).to_bytes(8, "little") + b".",
    "a place far away": b"Nr\xff\xff\xff\xff.",
    "a place in words": b"Np4294967295\n.",
    "a frame": b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N.",
    "a long number": b"\x8b\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_pickle_asks_for_what_it_holds(content):
    with little(2**28), pytest.raises(DataError, match="f is no whole pickle"):
        read_pickle(content, "f")


@pytest.mark.parametrize("protocol", range(6))
def test_whole_pickles_are_read(protocol):
    found = read_pickle(pickle.dumps({b"labels": list(range(300))}, protocol), "f")
    assert found[b"labels"] == list(range(300))


def test_a_refusal_does_not_write_out_what_it_refuses():
    """A shape of tuples in tuples: 2⁴⁰ zeros as text."""
    shape = b"I0\n" + b"".join(b"2\x86" for _ in range(40))
    array = b"cnumpy\nndarray\n)R(I1\n(" + shape + b"tcnumpy\ndtype\n(S'u1'\ntRI00\nS'x'\ntb"
    with little(2**28), pytest.raises(DataError, match="array"):
        read_pickle(b"(S'data'\n" + array + b"d.", "f")


def test_a_file_of_cifar_has_a_limit(tmp_path):
    folder = write_folder(tmp_path, "cifar10", pickles("cifar10", arrays("cifar10")))
    with (folder / "data_batch_3").open("r+b") as file:
        file.truncate(2**35)
    with little(), pytest.raises(DataError, match=r"data_batch_3 .*34,359,738,368 .*268,435,456"):
        find_data_set(str(folder))


# -- tar --------------------------------------------------------------------------------------------------------------


def tar_with(path, *members: tuple[str, int, bytes]):
    """Members of zeros: name, size, type."""
    with gzip.open(path, "wb", 9) as out:
        for name, size, kind in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = size, kind
            out.write(member.tobuf())
            for start in range(0, size, 2**24):
                out.write(bytes(min(2**24, size - start)))
            out.write(bytes(-size % 512))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cifar-10-batches-py/data_batch_1", tarfile.REGTYPE), ("other", tarfile.REGTYPE)]
    + [("x", tarfile.GNUTYPE_LONGNAME), ("x", tarfile.XHDTYPE)],
)
@pytest.mark.parametrize("prefix", ["", "cifar10:"])
def test_a_tar_file_unpacks_to_what_cifar_has(tmp_path, monkeypatch, name, kind, prefix):
    """With a smaller limit, for speed."""
    monkeypatch.setattr(cifar_files, "CIFAR", 2**22)
    path = tar_with(tmp_path / "c.tar.gz", (name, 2**26, kind))
    assert path.stat().st_size < 10**5
    with little(2**25), pytest.raises(DataError, match=r"c\.tar\.gz.* (4,194,304|67,108,864) "):
        find_data_set(f"{prefix}{path}")


def test_a_tar_file_that_says_more_than_it_has(tmp_path):
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.size = 2**60
    path = tmp_path / "c.tar.gz"
    with gzip.open(path, "wb") as out:
        out.write(member.tobuf(tarfile.GNU_FORMAT))
    with (
        little(2**28),
        pytest.raises(DataError, match="data_batch_1 has 1,152,921,504,606,846,976"),
    ):
        find_data_set(f"cifar10:{path}")


def test_a_whole_tar_file_is_read(tmp_path):
    path = write_tar(tmp_path / "c.tar.gz", "cifar10", pickles("cifar10", arrays("cifar10")))
    assert len(find_data_set(str(path)).test) == 8


# -- npz and zip ------------------------------------------------------------------------------------------------------


def npz_with(path, shape, content=b"", header=None):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held:
        for name, own in arrays("cifar10").items():
            out = io.BytesIO()
            np.lib.format.write_array(out, own)
            data = out.getvalue()
            if name == "x_train":
                out = io.BytesIO()
                about = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(out, about)
                data = out.getvalue() + content
            held.writestr(f"{name}.npy", data)
    return path


@pytest.mark.parametrize("shape", [(10**9, 32, 32, 3), (10**6, 32, 32, 3), (2**62, 2**62), (5, 5)])
def test_an_array_is_as_large_as_its_header_says(tmp_path, shape):
    path = npz_with(tmp_path / "c.npz", shape, b"abc")
    for typed in (f"cifar10:{path}", str(path)):
        with little(2**28), pytest.raises(DataError, match=r"c\.npz.*x_train"):
            find_data_set(typed)


def test_an_array_is_not_unpacked_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar_files, "ARRAYS", 2**22)
    rows = 2**26 // 3072
    path = npz_with(tmp_path / "c.npz", (rows, 32, 32, 3), bytes(rows * 3072))
    assert path.stat().st_size < 2**17
    with little(2**25), pytest.raises(DataError, match=r"c\.npz.*x_train.*4,194,304"):
        find_data_set(f"cifar10:{path}")


@pytest.mark.parametrize(("more", "said"), [(-1, "names no image"), (1, "labels.csv.*2,097,152")])
def test_labels_are_a_table_of_a_readable_size(tmp_path, monkeypatch, more, said):
    monkeypatch.setattr(image_files, "IMAGE", 2**21)
    path = write_zip(tmp_path / "i.zip", 12, table="")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as held:
        held.writestr("labels.csv", b"\n" * (2**21 + more))
    with little(2**26), pytest.raises(DataError, match=said):
        find_data_set(str(path))


# -- what is no plain file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c.npz", "c.tar.gz", "i.zip", "plain"])
@pytest.mark.parametrize("prefix", ["", "cifar10:", "whole:"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_pipes_and_devices_are_not_read(tmp_path, name, prefix, kind):
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with little(2**28), pytest.raises(DataError, match="is a (pipe|device)"):
        find_data_set(f"{prefix}{path}")


def test_a_pipe_among_images_is_not_waited_for(tmp_path):
    root = write_classes(tmp_path / "root", {"a": 12, "b": 12})
    (root / "a" / "000.png").unlink()
    os.mkfifo(root / "a" / "000.png")
    data = find_data_set(str(root))
    batches = chain(*(part.batches(4) for part in (data.train, data.validation, data.test)))
    with little(), pytest.raises(DataError, match="000.png is a pipe"):
        list(batches)


def test_a_huge_image_file_is_not_read(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(0))
    os.truncate(tmp_path / "a.png", 2**36)
    with little(), Folder(tmp_path).opened() as read, pytest.raises(DataError, match="67,108,864"):
        read("a.png")


def test_a_pipe_among_files_of_cifar_is_not_waited_for(tmp_path):
    folder = write_folder(tmp_path, "cifar10", pickles("cifar10", arrays("cifar10")))
    (folder / "test_batch").unlink()
    os.mkfifo(folder / "test_batch")
    with little(), pytest.raises(DataError, match="test_batch is a pipe"):
        find_data_set(str(folder))
