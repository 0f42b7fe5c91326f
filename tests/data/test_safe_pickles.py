"""Hostile pickles: each would leave a mark if anything of it were run."""

import builtins
import os
import pickle
import subprocess

import numpy as np
import pytest

from apoptosis.data import cifar10
from apoptosis.data.safe_pickles import read_pickle
from apoptosis.errors import DataError
from oracles.cifar_fakes import arrays, pickles, write_folder, write_tar


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def hostile(mark: str) -> dict[str, Calls]:
    """Calls by the name that the error should have."""
    return {
        "system": Calls(os.system, f"touch {mark}"),
        "eval": Calls(eval, f"open({mark!r}, 'w')"),
        "exec": Calls(exec, f"open({mark!r}, 'w')"),
        "open": Calls(open, mark, "w"),
        "Popen": Calls(subprocess.Popen, ["touch", mark]),
        "__import__": Calls(builtins.__import__, "antigravity"),
        "save": Calls(np.save, mark, 1),
        "Calls": Calls(Calls, os.system, f"touch {mark}"),
    }


@pytest.mark.parametrize("name", hostile("x"))
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["whole", "value", "key", "nested"])
def test_a_name_that_arrays_do_not_need_ends_the_reading(tmp_path, name, protocol, place):
    mark = tmp_path / "mark"
    bad = hostile(str(mark))[name]
    held = {
        "whole": bad,
        "value": {b"data": bad},
        "key": {(1, bad): 1},
        "nested": {b"labels": [1, 2, (3, {b"x": [bad]})], b"data": np.zeros(3, np.uint8)},
    }[place]
    content = pickle.dumps(held, protocol)
    with pytest.raises(DataError, match=rf"f asks for [\w.]+\.{name}, .* nothing of it was run"):
        read_pickle(content, "f")
    assert not mark.exists()


def test_the_pickles_are_hostile(tmp_path):
    """Read the usual way, they do leave the mark: the tests above would see it."""
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(hostile(str(mark))["system"]))
    assert mark.exists()


def op(*lines: str) -> bytes:
    return "".join(lines).encode("latin1")


TRICKS = {
    "dotted name": op("\x80\x04\x8c\x05numpy\x8c\x0fcompat.os.system\x93."),
    "module inside numpy": op("cnumpy.core.multiarray\nos.system\n."),
    "numpy's own unpickler": op("cnumpy.core.multiarray\nscalar\n."),
    "numpy's tests run code": op("cnumpy.testing\nrundocs\n(S'x'\ntR."),
    "an instance by INST": op("(S'touch mark'\nios\nsystem\n."),
    "a codec that is no text": op("c_codecs\nencode\n(S'x'\nS'zip'\ntR."),
    "a codec by another name": op("c_codecs\ndecode\n."),
    "a registered extension": op("\x80\x02\x82\x01."),
    "a persistent id": op("Px\n."),
    "state of a name": op("c_codecs\nencode\n}S'__code__'\nI1\nsb."),
    "state of the array's name": op("cnumpy\nndarray\n}S'state'\nI1\nsb."),
    "state of the function's name": op("cnumpy.core.multiarray\n_reconstruct\n(N}S'x'\nI1\nstb."),
    "an array called": op("cnumpy\nndarray\n(I99\ntR."),
    "cut off": pickle.dumps({b"data": b"x" * 100})[:50],
    "a shape of endless digits": op(
        "(S'data'\ncnumpy\nndarray\n)R(I1\n(L"
        + "9" * 4000
        + "L\nL"
        + "9" * 4000
        + "L\ntcnumpy\ndtype\n(S'u1'\ntR"
        "I00\nS'x'\ntbd."
    ),
    "half a letter": pickle.dumps({"\ud800": 1}),
    "empty": b"",
    "text": b"hello",
    "a list": pickle.dumps([1, 2]),
    "stack": b"0000.",
    "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_are_refused(trick):
    with pytest.raises(DataError):
        read_pickle(TRICKS[trick], "f")


ARRAYS = {
    "objects": np.array([None, {}], object),
    "floats": np.zeros((2, 3072)),
    "wide numbers": np.zeros((2, 3072), np.int64),
    "records": np.zeros(3, [("a", "u1")]),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_of_anything_but_bytes_are_refused(case):
    with pytest.raises(DataError, match=r"unsigned bytes|without its bytes"):
        read_pickle(pickle.dumps({b"data": ARRAYS[case]}, 2), "f")


def test_an_array_that_claims_more_than_it_has_is_refused():
    content = pickle.dumps({b"data": np.zeros((2, 77), np.uint8)}, 2)
    assert content.count(b"KM") == 1, "two sizes, one byte each"
    with pytest.raises(DataError, match=r"154 bytes for an array of shape \(2, 78\)"):
        read_pickle(content.replace(b"KM", b"KN"), "f")


def test_state_leaves_nothing_behind():
    """What the tricks tried to set is not set: arrays are read as before."""
    for trick in TRICKS.values():
        with pytest.raises(DataError):
            read_pickle(trick, "f")
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    found = read_pickle(pickle.dumps({"data": array}, 2), "f")
    assert np.array_equal(found[b"data"], array)


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_bytes_are_read_from_every_protocol(protocol, order):
    array = np.asarray(np.random.default_rng(0).integers(0, 256, (4, 9)), np.uint8, order=order)
    found = read_pickle(pickle.dumps({b"data": array, "labels": [1, 2]}, protocol), "f")
    assert np.array_equal(found[b"data"], array)
    assert found[b"labels"] == [1, 2]


def test_a_file_of_python_2_is_read():
    """Names and bytes as Python 2 wrote them: text opcodes, numpy.core, protocol 2."""
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x06\x01\x02\x03\x04\xfe\xfftbU\x06labelsq\x08]q\t(K\x01K\x02eu."
    )
    found = read_pickle(content, "f")
    assert found[b"data"].tolist() == [[1, 2, 3], [4, 254, 255]]
    assert found[b"labels"] == [1, 2]


@pytest.mark.parametrize("write_files", [write_folder, write_tar])
def test_a_hostile_file_among_good_ones_is_named(tmp_path, write_files):
    mark = tmp_path / "mark"
    files = pickles("cifar10", arrays("cifar10"))
    files["data_batch_2"] = pickle.dumps({b"data": Calls(os.system, f"touch {mark}")}, 2)
    path = write_files(tmp_path / "c", "cifar10", files)
    with pytest.raises(DataError, match=r"data_batch_2 asks for (posix|nt).system"):
        cifar10(path)
    assert not mark.exists()
