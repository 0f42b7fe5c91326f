import shutil

import numpy as np
import pytest

from apoptosis.data import find_data_set
from apoptosis.errors import DataError
from oracles.cifar_fakes import arrays, write
from oracles.image_fakes import write_classes, write_zip


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("place", [".", "data"])
@pytest.mark.parametrize("layout", ["npz", "folder", "tar"])
def test_cifar_is_found_here_and_in_data(tmp_path, kind, place, layout):
    (tmp_path / place).mkdir(exist_ok=True)
    path = write(tmp_path / place, kind, layout, arrays(kind))
    if layout == "tar":
        names = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
        path = path.rename(path.with_name(names[kind]))
    data = find_data_set(kind)
    assert data.name == kind
    assert [len(part) for part in data.parts().values()] == [18, 2, 8], "a tenth for validation"
    for name in (str(path), f"{kind}:{path}"):
        assert find_data_set(name, seed=0).train.labels.tolist() == data.train.labels.tolist()
    assert find_data_set(kind, seed=1).train.labels.tolist() != data.train.labels.tolist()


def test_the_npz_with_few_labels_is_cifar10_and_with_more_cifar100(tmp_path):
    held = arrays("cifar100")
    np.savez("a.npz", **held)
    assert find_data_set("a.npz").name == "cifar100"
    np.savez("a.npz", **{n: v % 10 if n[0] == "y" else v for n, v in held.items()})
    assert find_data_set("a.npz").name == "cifar10"
    shutil.copy("a.npz", "a")
    assert find_data_set("cifar10:a").name == "cifar10"


def test_images_are_known_by_their_content(tmp_path):
    write_classes(tmp_path / "pets", {"a": 5, "b": 5})
    assert find_data_set("pets").num_classes == 2
    write_zip(tmp_path / "z.zip")
    assert len(find_data_set("z.zip").test) == 2
    assert len(find_data_set("whole:z.zip").test) == 20


def test_the_digits_are_there():
    assert find_data_set("digits", seed=2).num_classes == 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "There are no data 'digit'. Did you mean 'digits'\\? Known are digits, cifar10"),
        ("cifar11", "Did you mean 'cifar1"),
        (
            "some/where",
            "There are no data 'some/where': there is no such file or folder. Known are",
        ),
        ("gone.npz", "There are no data 'gone.npz': there is no such file or folder. Known"),
        ("", "There are no data ''"),
        (
            "cifar10",
            "no cifar10.npz, cifar-10-batches-py, cifar-10-python.tar.gz here or in ./data",
        ),
        ("cifar100:here", "cifar100 was asked for at here, and nothing is there. Get https"),
        ("whole:here.zip", "The zip file here.zip does not exist"),
    ],
)
def test_unknown_names_are_refused_with_what_there_is(name, message):
    with pytest.raises(DataError, match=message):
        find_data_set(name)


def test_a_file_that_is_none_of_them_is_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"x.bin is neither an .npz or .tar.gz of CIFAR nor"):
        find_data_set("x.bin")
    (tmp_path / "x.npz").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"x.npz cannot be read as an .npz"):
        find_data_set("x.npz")
    path = write(tmp_path, "cifar10", "tar", arrays("cifar10"))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match="damaged|cannot be read"):
        find_data_set(str(path))


def test_a_folder_with_both_is_asked_which(tmp_path):
    for kind in ("cifar10", "cifar100"):
        write(tmp_path, kind, "folder", arrays(kind))
    with pytest.raises(DataError, match="has both CIFARs. Say which: cifar10:"):
        find_data_set(str(tmp_path))
    assert find_data_set(f"cifar100:{tmp_path}").name == "cifar100"
