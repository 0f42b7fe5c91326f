import zipfile

import numpy as np
import pytest
import torch

from apoptosis.data import CentreCrop, ResizedCrop, image_folder, image_zip
from apoptosis.errors import ConfigError, DataError
from oracles.image_fakes import encoded, picture, write_classes, write_zip

VIEW = CentreCrop(resize=16, size=12)


def read(batches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def names(part) -> set[str]:
    return set(part.names)


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_folders_of_classes_are_split_by_the_seed(tmp_path):
    root = write_classes(tmp_path / "pets", {"dog": 12, "cat": 8})
    data = image_folder(root, view=VIEW)
    parts = data.parts()
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 16, "validation": 2, "test": 2,
    }  # fmt: skip
    assert len(set.union(*map(names, parts.values()))) == 20
    assert (data.name, data.num_classes, data.input_shape) == ("pets", 2, (1, 3, 12, 12))
    for part in parts.values():
        for name, label in zip(part.names, part.labels.tolist(), strict=True):
            assert name.startswith(("cat/", "dog/")[label]), "numbered in alphabetical order"
    assert names(image_folder(root).test) == names(data.test)
    assert names(image_folder(root, seed=1).test) != names(data.test)


@pytest.mark.parametrize("given", [("val", "test"), ("val",), ("test",), ()])
def test_parts_that_are_given_are_kept(tmp_path, given):
    for start, part in enumerate(("train", *given)):
        write_classes(tmp_path / part, {"a": 10, "b": 10}, 40 * start)
    data = image_folder(tmp_path, view=VIEW)
    if len(given) == 2:
        assert len(data.train) == 20
        assert all(name.startswith("val/") for name in data.validation.names)
    else:
        assert [len(data.train), len(data.validation)] == [18, 2]
        assert all(name.startswith("train/") for name in data.validation.names)
        assert not names(data.train) & names(data.validation)
    assert (data.test is None) == (not given)
    if given:
        assert all(name.startswith(f"{given[-1]}/") for name in data.test.names)
    assert set(data.train.first(10).labels.tolist()) == {0, 1}, "not one class after the other"


def test_other_files_are_passed_over(tmp_path):
    write_classes(tmp_path / "x", {"a": 3})
    for name in (".hidden.png", "Thumbs.db", "notes.txt"):
        (tmp_path / "x" / "a" / name).write_text("x")
    (tmp_path / "x" / ".git").mkdir()
    (tmp_path / "x" / "readme.md").write_text("x")
    data = image_folder(tmp_path / "x")
    assert (len(data.train), data.validation, data.test, data.num_classes) == (3, None, None, 1)


@pytest.mark.parametrize("heading", ["", "file,class_index\n", "\ufefffile name,label,word\n"])
def test_a_zip_file_is_split_by_the_seed_or_is_one_part(tmp_path, heading):
    lines = "".join(f"{number}.png,{number % 3}\r\n" for number in range(20))
    path = write_zip(tmp_path / "z.zip", 20, heading + lines)
    data = image_zip(path, view=VIEW)
    assert [len(part) for part in data.parts().values()] == [16, 2, 2]
    assert len(set.union(*map(names, data.parts().values()))) == 20
    whole = image_zip(path, view=VIEW, split=False)
    assert whole.validation is None
    assert whole.test.names == tuple(f"{number}.png" for number in range(20))
    assert names(whole.train) == names(whole.test)
    assert (data.name, data.num_classes) == ("z", 3)
    assert image_zip(path, num_classes=10).num_classes == 10


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_are_the_decoded_pictures_normalised(tmp_path, num_workers):
    path = write_zip(tmp_path / "z.zip", 7)
    part = image_zip(path, view=VIEW, split=False, num_workers=num_workers).test
    images, labels = read(part.batches(3))
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    mean, std = (np.array(v) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for number, image in enumerate(images):
        pixels = np.asarray(VIEW.apply(picture(number))) / 255
        assert np.allclose(image.permute(1, 2, 0), (pixels - mean) / std, atol=1e-5)
    assert [len(y) for _, y in part.batches(3)] == [3, 3, 1]
    assert len(part.batches(3)) == 3
    assert read(part.first(2).batches(5))[1].tolist() == [0, 1]


def augmented(path, *, size=3, num_workers=3, seed=4):
    part = image_zip(path, view=VIEW, split=False, num_workers=num_workers).train
    return part.batches(size, shuffle_seed=seed, augmentation=ResizedCrop())


def test_passes_that_were_interrupted_are_taken_up_bit_for_bit(tmp_path):
    path = write_zip(tmp_path / "z.zip", 8)
    unbroken = augmented(path)
    passes = [read(unbroken) for _ in range(3)]
    assert not same(passes[0], passes[1])
    for start in (2, 1):
        resumed = augmented(path)
        resumed.start_at(start)
        assert same(read(resumed), passes[start])
    broken = augmented(path)
    next(iter(broken))
    assert same(read(broken), passes[1]), "a pass that was not finished counts"
    assert same(read(augmented(path, num_workers=0)), passes[0])
    assert same(read(augmented(path, size=8)), passes[0]), "batches do not matter"
    assert not same(read(augmented(path, seed=5)), passes[0])


def test_the_order_of_passes_is_that_of_batches(tmp_path):
    part = image_zip(write_zip(tmp_path / "z.zip", 8), view=VIEW, split=False).test
    _, labels = read(part.batches(3, shuffle_seed=9))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(9))
    assert labels.tolist() == (order % 3).tolist()


def test_threads_end_with_the_loop(tmp_path):
    import threading

    batches = augmented(write_zip(tmp_path / "z.zip", 20))
    for _ in batches:
        break
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


def test_what_cannot_be_meant_is_refused(tmp_path):
    part = image_zip(write_zip(tmp_path / "z.zip", 8), split=False).train
    with pytest.raises(ConfigError, match="size=0"):
        part.batches(0)
    with pytest.raises(ConfigError, match="Give shuffle_seed, or no augmentation"):
        part.batches(2, augmentation=ResizedCrop())
    with pytest.raises(ConfigError, match="augmented by ResizedCrop; int was given"):
        part.batches(2, shuffle_seed=0, augmentation=4)
    with pytest.raises(DataError, match="without images"):
        part.first(0).batches(2)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_image_is_named(tmp_path, num_workers):
    root = write_classes(tmp_path / "x", {"a": 6})
    (root / "a" / "003.png").write_bytes(encoded(3)[:60])
    part = image_folder(root, num_workers=num_workers).train
    with pytest.raises(DataError, match=f"^{root / 'a'}/003.png cannot be decoded"):
        read(part.batches(2))
    (root / "a" / "003.png").unlink()
    with pytest.raises(DataError, match=r"a/003.png cannot be read"):
        read(part.batches(2))


def test_folders_without_classes_or_images_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        image_folder(tmp_path / "none")
    with pytest.raises(DataError, match="has no classes"):
        image_folder(tmp_path)
    write_classes(tmp_path / "train", {"a": 2, "b": 0})
    (tmp_path / "train" / "b" / "x.txt").write_text("x")
    with pytest.raises(DataError, match=r"b has no images; found x.txt. .*\.jpg"):
        image_folder(tmp_path)


def test_classes_that_training_has_not_are_refused(tmp_path):
    write_classes(tmp_path / "train", {"a": 2, "b": 2})
    write_classes(tmp_path / "val", {"a": 2, "c": 1})
    with pytest.raises(DataError, match="has classes that .*train has not: c"):
        image_folder(tmp_path)


TABLES = {
    "no table": ("", "has no labels.csv"),
    "empty": ("file,label\n", "names no image"),
    "words": ("f,l\n0.png,0\n1.png,cat\n", "line 3: '1.png,cat' is no file name and number"),
    "halves": ("0.png,0\n1.png,0.5\n", "line 2: '1.png,0.5'"),
    "one column": ("0.png,0\n1.png\n", "line 2: '1.png'"),
    "below 0": ("0.png,0\n1.png,-1\n", "line 2: label -1 is out of range"),
    "far too large": ("0.png,0\n1.png,99999999999\n", "line 2: label 99999999999 is out"),
    "digits of elsewhere": ("0.png,0\n1.png,\u0663\n", "line 2"),
    "a missing file": ("0.png,0\n\nx/y.png,1\n", "line 3: there is no 'x/y.png' in the zip"),
    "outside": ("../../etc/passwd,0\n", "no '../../etc/passwd' in the zip file"),
    "twice": ("0.png,0\n0.png,1\n", "line 2: '0.png' stands there twice"),
}


@pytest.mark.parametrize("case", TABLES)
def test_wrong_tables_are_refused_with_the_line(tmp_path, case):
    table, message = TABLES[case]
    with pytest.raises(DataError, match=message):
        image_zip(write_zip(tmp_path / "z.zip", 3, table))


def test_a_table_that_is_no_text_is_refused(tmp_path):
    path = write_zip(tmp_path / "z.zip", 3, "", **{"labels.csv": b"\xff\xfe\x00"})
    with pytest.raises(DataError, match="is no table"):
        image_zip(path)


def test_labels_above_the_classes_said_are_refused(tmp_path):
    with pytest.raises(DataError, match="labels of 2 classes are 0 … 1; .*label 2"):
        image_zip(write_zip(tmp_path / "z.zip"), num_classes=2)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_zip_file_that_was_cut_off_is_refused(tmp_path, share):
    path = write_zip(tmp_path / "z.zip")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"z.zip cannot be read as a zip file"):
        image_zip(path)


def test_a_damaged_member_is_named(tmp_path):
    path = write_zip(tmp_path / "z.zip", 4)
    content = bytearray(path.read_bytes())
    middle = content.index(b"2.png") + 200
    content[middle : middle + 4] = b"\0\0\0\0"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"z.zip: 2.png cannot be read"):
        read(image_zip(path, split=False).test.batches(4))


def test_names_that_lead_out_of_the_zip_file_lead_nowhere(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    path = inside / "z.zip"
    with zipfile.ZipFile(path, "w") as held:
        for name in ("../out.png", "/out.png"):
            held.writestr(name, encoded(1))
        held.writestr("labels.csv", "../out.png,0\n/out.png,1\n")
    _, labels = read(image_zip(path, view=VIEW, split=False).test.batches(2))
    assert labels.tolist() == [0, 1], "they are names in the zip file, as others are"
    assert sorted(place.name for place in tmp_path.rglob("*")) == ["inside", "z.zip"]
