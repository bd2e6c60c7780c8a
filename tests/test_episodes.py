"""Few-shot data: archives, pickles and folders are read or refused with a reason; episodes are what they say."""

import contextlib
import csv
import io
import itertools
import os
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bilax.datasets import DataError, load_classes, unpickling
from bilax.datasets.cifar import load_cifar_fs
from bilax.datasets.classes import PARTS, Classes, decode, random_splits
from bilax.datasets.digits import load_digit_tasks
from bilax.datasets.episodes import Episodes, Sinusoids, crop_and_flip, distort
from bilax.datasets.folders import load_folder, read_folder
from bilax.datasets.imagenet import load_mini_imagenet, load_tiered_imagenet
from bilax.datasets.omniglot import (
    FULL,
    SMALL,
    VALIDATION_FULL,
    load_omniglot,
    read_omniglot,
    read_omniglot_runs,
)
from bilax.datasets.registry import load_own_test
from bilax.datasets.unpickling import read_pickle

DRAW = np.random.default_rng(0)


def png(array: np.ndarray, dtype: type = np.uint8) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array.astype(dtype)).save(buffer, "PNG")
    return buffer.getvalue()


def drawing() -> bytes:
    return png(np.where(DRAW.random((105, 105)) < 0.1, 0, 255))


def archive(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return path


def numbered(classes: int = 6, each: int = 8, size: int = 3) -> Classes:
    """Classes whose pictures tell in their pixels which class (first) and which picture (second) they are."""
    pictures = np.zeros((classes, each, size, size, 1), np.uint8)
    pictures[..., 0, 0, 0], pictures[..., 0, 1, 0] = np.arange(classes)[:, None], np.arange(each)
    return Classes(tuple(f"class{i}" for i in range(classes)), tuple(pictures), (size, size, 1))


# Omniglot


def one_shot_runs() -> dict[str, bytes]:
    entries = {}
    for run in ("run01", "run02"):
        lines = []
        for i, c in enumerate((3, 1, 2), start=1):
            entries |= {f"{run}/test/item{i:02}.png": drawing(), f"{run}/training/class{i:02}.png": drawing()}
            lines.append(f"{run}/test/item{i:02}.png {run}/training/class{c:02}.png\n")
        entries[f"{run}/class_labels.txt"] = "".join(lines).encode()
    return entries


def test_the_official_one_shot_runs_are_tasks(tmp_path):
    found = read_omniglot_runs(archive(tmp_path / "all_runs.zip", one_shot_runs()), size=14)
    assert len(found) == 2
    assert found[1].support.shape == found[1].query.shape == (3, 14, 14, 1)
    assert found[1].query_targets.tolist() == [2, 0, 1]
    assert found[1].support_targets.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run01/class_labels.txt": b"run01/test/item01.png run02/training/class01.png"}, "does not pair a test item"),
        ({"run01/class_labels.txt": b"run01/test/item09.png run01/training/class01.png"}, "does not name each picture"),
        (
            {"run02/class_labels.txt": b"run02/test/item01.png run02/training/class01.png"},
            "each picture of run02/test once",
        ),
        ({"run02/training/class04.png": drawing()}, "each picture of run02/training once"),
        ({"run01/class_labels.txt": b"../../etc/passwd run01/training/class01.png"}, "does not pair a test item"),
        ({"run02/test/item01.png": b"not a picture"}, "cannot be read as PNG"),
        ({"run02/class_labels.txt": b"\n"}, r"all_runs\.zip: run02/class_labels\.txt is empty"),
    ],
)
def test_bad_one_shot_runs_are_told(tmp_path, change, message):
    path = archive(tmp_path / "all_runs.zip", one_shot_runs() | change)
    with pytest.raises(DataError, match=message):
        read_omniglot_runs(path)


@pytest.mark.skipif("BILAX_DATA" not in os.environ, reason="BILAX_DATA is not set")
def test_the_real_one_shot_runs_are_there():
    found = load_own_test("omniglot")
    assert len(found) == 20
    assert all(sorted(task.query_targets.tolist()) == list(range(20)) for task in found)


def test_omniglot_is_read_by_alphabet_and_character_and_doubles_count_once(tmp_path):
    ink = np.full((105, 105), 255)
    ink[:, :52] = 0
    first = {"images_background_small1/": b"", "images_background_small1/Greek/character01/0394_01.png": png(ink)}
    second = {"Greek/character01/0394_01.png": png(ink), "Greek/character02/0395_01.png": drawing()}
    paths = [archive(tmp_path / "a.zip", first), archive(tmp_path / "b.zip", second)]
    found = read_omniglot(paths)
    assert found.names == ("Greek/character01", "Greek/character02")
    assert np.asarray(found.pictures[0]).shape == (1, 28, 28, 1)
    picture = np.asarray(found.pictures[0])[0, :, :, 0]
    assert picture[:, :12].min() > 250  # ink
    assert picture[:, 16:].max() < 5  # paper


def test_omniglots_splits_share_no_alphabet(tmp_path):
    names = [f"{a}/character0{i}/0{i}_01.png" for a in ("Greek", "Tagalog", "Early_Aramaic", "Latin") for i in (1, 2)]
    archive(tmp_path / SMALL[0], {name: drawing() for name in names[:4]})
    archive(tmp_path / SMALL[1], {name: drawing() for name in names[4:]})
    splits = load_omniglot(tmp_path, rotations=True)
    assert [split.groups() for split in splits] == [("Latin",), ("Early_Aramaic",), ("Greek", "Tagalog")]
    assert [len(split.names) for split in splits] == [8, 2, 4]
    upright, turned = (np.asarray(splits.train.pictures[i])[0] for i in (0, 1))
    assert splits.train.names[:2] == ("Latin/character01", "Latin/character01/90")
    np.testing.assert_array_equal(np.rot90(upright), turned)


def vinyals(folder: Path, lines: dict[str, str]) -> Path:
    for archived, name in zip(FULL, ("Greek", "Latin"), strict=True):
        archive(folder / archived, {f"{name}/character0{i}/0{i}_01.png": drawing() for i in (1, 2)})
    (folder / "splits-vinyals").mkdir()
    for part, text in lines.items():
        (folder / "splits-vinyals" / f"{part}.txt").write_text(text)
    return folder


LISTS = {
    "train": "Greek/character01/rot000\nGreek/character01/rot270\n",
    "val": "Greek/character02/rot090\n",
    "test": "Latin/character02/rot180\n",
}


def test_vinyals_lists_name_turned_characters_as_classes(tmp_path):
    splits = load_omniglot(vinyals(tmp_path, LISTS), split="vinyals")
    assert [part.names for part in splits] == [tuple(text.split()) for text in LISTS.values()]
    upright, turned = (np.asarray(pictures)[0] for pictures in splits.train.pictures)
    np.testing.assert_array_equal(np.rot90(upright, 3), turned)


@pytest.mark.parametrize(
    ("lists", "options", "reason"),
    [
        (LISTS | {"val": "Greek/character09/rot000"}, {}, "val.txt: line 1, 'Greek/character09/rot000', names no char"),
        (LISTS | {"test": "\n../x/rot000"}, {}, "test.txt: line 2"),
        (LISTS | {"test": ""}, {}, "test.txt: is empty"),
        ({"train": LISTS["train"]}, {}, "val.txt does not exist"),
        (LISTS, {"rotations": True}, "leave rotations out"),
    ],
)
def test_wrong_vinyals_lists_are_told(tmp_path, lists, options, reason):
    with pytest.raises(DataError, match=reason):
        load_omniglot(vinyals(tmp_path, lists), split="vinyals", **options)


def cifar_fs(folder: Path, loose: bool = False) -> Path:
    """Two classes of three pictures in each part, as strips or in folders."""
    for part, number in itertools.product(PARTS, range(2)):
        pictures = DRAW.integers(0, 256, (3, 32, 32, 3))
        name = folder / part / f"{part}{number}"
        (name if loose else name.parent).mkdir(parents=True, exist_ok=True)
        for i, picture in enumerate(pictures if loose else [pictures.reshape(-1, 32, 3)]):
            (name / f"{i}.png" if loose else name.with_suffix(".png")).write_bytes(png(picture))
    return folder


@pytest.mark.parametrize("loose", [False, True])
def test_cifar_fs_is_read_from_strips_and_from_folders(tmp_path, loose):
    splits = load_cifar_fs(cifar_fs(tmp_path, loose))
    assert [part.names for part in splits] == [(f"{part}0", f"{part}1") for part in PARTS]
    assert {np.asarray(pictures).shape for part in splits for pictures in part.pictures} == {(3, 32, 32, 3)}
    if not loose:
        strip = np.asarray(Image.open(tmp_path / "test" / "test1.png"))
        np.testing.assert_array_equal(np.asarray(splits.test.pictures[1])[2], strip[64:])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (png(np.zeros((64, 31, 3))), "is 31 wide and 64 high"),
        (png(np.zeros((65, 32, 3))), "is 32 wide and 65 high"),
        (png(np.zeros((64, 32, 3)))[:60], "cannot be read as PNG"),
        (b"GIF89a", "cannot be read as PNG"),
    ],
)
def test_wrong_strips_are_told(tmp_path, content, reason):
    (cifar_fs(tmp_path) / "val" / "val0.png").write_bytes(content)
    with pytest.raises(DataError, match=f"val0.png: {reason}"):
        load_cifar_fs(tmp_path)


@pytest.mark.skipif("BILAX_DATA" not in os.environ, reason="BILAX_DATA is not set")
def test_the_real_cifar_fs_has_its_hundred_classes():
    splits = load_classes("cifar-fs")
    assert [len(part.names) for part in splits] == [64, 16, 20]
    assert {len(pictures) for part in splits for pictures in part.pictures} == {600}


def test_an_alphabet_in_both_archives_is_refused(tmp_path):
    entries = {f"{alphabet}/character01/01_01.png": drawing() for alphabet in (*VALIDATION_FULL, "Latin")}
    for name in FULL:
        archive(tmp_path / name, entries)
    with pytest.raises(DataError, match="a test alphabet must be new"):
        load_omniglot(tmp_path)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"../../etc/character01/x.png": b""}, "is not a drawing"),
        ({"../character01/x.png": b""}, "is not a drawing"),
        ({"/character01/x.png": b""}, "is not a drawing"),
        ({"Greek/character01/x.exe": b""}, "is not a drawing"),
        ({"Greek/character01/x.png": b"not a picture"}, "Greek/character01/x.png: cannot be read as PNG"),
        ({"Greek/character01/x.png": bytes(2 << 20)}, "unpacks to 2,097,152 bytes, more than the 1,048,576"),
        ({"Greek/character01/x.png": drawing()[:80]}, "cannot be read as PNG"),
        ({"Greek/": b""}, "no drawing such as"),
    ],
)
def test_hostile_archives_are_refused(tmp_path, entries, reason):
    before = set(tmp_path.parent.rglob("*"))
    with pytest.raises(DataError, match=reason):
        read_omniglot([archive(tmp_path / "a.zip", entries)])
    assert set(tmp_path.parent.rglob("*")) - before == {tmp_path / "a.zip"}


def test_damaged_archives_are_refused(tmp_path):
    path = archive(tmp_path / "a.zip", {f"Greek/character01/{i}.png": drawing() for i in range(3)})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged or cut off"):
        read_omniglot([path])
    path.write_bytes(whole[:300] + bytes(100) + whole[400:])
    with pytest.raises(DataError, match="damaged or cut off"):
        read_omniglot([path])
    with pytest.raises(DataError, match="does not exist"):
        read_omniglot([tmp_path / "none.zip"])


def test_a_picture_too_large_to_be_meant_is_refused():
    bomb = io.BytesIO()
    Image.new("1", (5000, 5000)).save(bomb, "PNG")
    with pytest.raises(DataError, match="5000 × 5000 is too large"):
        decode(bomb.getvalue(), (28, 28), 1, "bomb", ("PNG",))


def test_grey_of_16_bits_is_scaled():
    content = png(np.array([[0, 257 * 100, 65535]]), np.uint16)
    assert decode(content, None, 1, "deep", ("PNG",)).ravel().tolist() == [0, 100, 255]
    assert decode(content, None, 3, "deep", ("PNG",))[0, 1].tolist() == [100, 100, 100]


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_what_is_transparent_is_white(mode):
    clear = Image.fromarray(np.array([[[0, 0, 0, 0], [0, 0, 0, 255]]], np.uint8))  # black, seen only on the right
    picture = clear.quantize(2) if mode == "P" else clear.convert(mode)
    content = io.BytesIO()
    picture.save(content, "PNG")
    assert Image.open(content).mode == mode
    assert decode(content.getvalue(), None, 1, "glyph", ("PNG",)).ravel().tolist() == [255, 0]
    assert decode(content.getvalue(), None, 3, "glyph", ("PNG",)).tolist() == [[[255] * 3, [0] * 3]]


def test_missing_omniglot_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.delenv("BILAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="name it with --folder or BILAX_DATA"):
        load_classes("omniglot", tmp_path)


# pickles


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self):
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_containers_are_read_in_every_protocol(tmp_path, protocol):
    content = {
        "bytes": DRAW.integers(0, 256, (3, 4, 2)).astype(np.uint8),
        "columns": np.asfortranarray(DRAW.random((3, 4))),
        "big-endian": np.arange(5, dtype=">i4"),
        "text": np.array(["ab", "c"]),
        "list": [1, 2.5, None, True, b"raw", "é", (np.int64(3), np.zeros(0))],
        7: {"inner": {1, 2}},
    }
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    found = read_pickle(path)
    for name in ("bytes", "columns", "big-endian", "text"):
        np.testing.assert_array_equal(found[name], content[name])
        assert found[name].dtype == content[name].dtype
    assert found["list"][:6] == content["list"][:6]
    assert found["list"][6][0] == 3
    assert found["list"][6][1].shape == (0,)
    assert found[7] == {"inner": {1, 2}}


def test_a_pickle_of_python_2_is_read(tmp_path):
    # What Python 2 and numpy 1 wrote for {'a': np.array([200, 1], 'u1')}.
    text = (
        b"(dp0\nS'a'\np1\ncnumpy.core.multiarray\n_reconstruct\np2\n(cnumpy\nndarray\np3\n(I0\ntp4\nS'b'\np5\ntp6\n"
        b"Rp7\n(I1\n(I2\ntp8\ncnumpy\ndtype\np9\n(S'u1'\np10\nI0\nI1\ntp11\nRp12\n(I3\nS'|'\np13\nNNNI-1\nI-1\nI0\n"
        b"tp14\nbI00\nS'\\xc8\\x01'\np15\ntp16\nbs."
    )
    path = tmp_path / "a.pkl"
    path.write_bytes(text)
    np.testing.assert_array_equal(read_pickle(path)["a"], [200, 1])


def _cycle():
    holder: list = []
    holder.append(holder)
    return holder


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda flag: Hostile(flag), r"refused: the name posix.mkdir|nt.mkdir"),
        (lambda flag: {"image_data": [Hostile(flag)]}, "refused: the name"),
        (lambda flag: np.array([Hostile(flag)], dtype=object), "refused"),
        (lambda flag: np.array([1], dtype=object), "refused: an array of type 'O8'"),
        (lambda flag: np.zeros(2, [("a", "f4")]), "refused: an array of type 'V4'"),
        (lambda flag: Path("x"), "refused: the name pathlib"),
        (lambda flag: print, "refused: the name builtins.print"),
        (lambda flag: np.dtype("f4"), "refused: a Dtype"),
        (lambda flag: _cycle(), "refused: a container that holds itself"),
    ],
)
def test_hostile_pickles_are_refused_and_nothing_of_them_runs(tmp_path, make, reason):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(make(tmp_path / "flag")))
    with pytest.raises(DataError, match=reason):
        read_pickle(path)
    assert not (tmp_path / "flag").exists()


HALF = 1 << 29


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # None, to be remembered as number 2^31 - 1
        b"\x80\x02X" + struct.pack("<I", HALF) + b".",  # text
        b"\x80\x03B" + struct.pack("<I", HALF) + b".",  # bytes
        b"\x80\x04\x95" + struct.pack("<Q", HALF) + b".",  # a frame
        b"\x80\x04\x8e" + struct.pack("<Q", HALF) + b".",  # many bytes
        b"\x80\x05\x96" + struct.pack("<Q", HALF) + b".",  # a bytearray
    ],
)
def test_ten_bytes_do_not_fill_the_memory(tmp_path, content):
    (tmp_path / "a.pkl").write_bytes(content)
    tracemalloc.start()
    with contextlib.suppress(DataError):
        read_pickle(tmp_path / "a.pkl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def by_hand(folder: Path, *operations: bytes) -> Path:
    """A pickle written operation by operation, as no pickler writes it."""
    path = folder / "a.pkl"
    path.write_bytes(b"\x80\x05" + b"".join(operations) + b".")
    return path


def text(content: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content


DOUBLED = b"N" + b"2\x86" * 20
"""None, twenty times put into a tuple with itself: to hash it or to write it out takes a million steps"""
FROM_BUFFER = b"cnumpy._core.numeric\n_frombuffer\n"
BYTE = b"cnumpy\ndtype\n" + text(b"u1") + b"\x85R"


@pytest.mark.parametrize(
    "operations",
    [
        b"}" + DOUBLED + b"Ns",
        b"}(" + DOUBLED + b"Nu",
        b"(" + DOUBLED + b"Nd",
        b"\x8f(" + DOUBLED + b"\x90",
        b"(" + DOUBLED + b"\x91",
        b"cbuiltins\nset\n](" + DOUBLED + b"e\x85R",
        b"ccollections\nOrderedDict\n](" + DOUBLED + b"Nla\x85R",
    ],
)
def test_keys_and_items_of_sets_are_single_values(tmp_path, operations):
    with pytest.raises(DataError, match="refused: a tuple as a key or in a set"):
        read_pickle(by_hand(tmp_path, operations))


@pytest.mark.parametrize("key", [10**5000, 1 << 61, -(1 << 61), "a" * 1001, b"a" * 1001], ids=range(5))
@pytest.mark.parametrize("make", [lambda key: {key: 1}, lambda key: {key}, lambda key: frozenset([key])])
def test_keys_that_take_long_to_hash_are_refused(tmp_path, key, make):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(make(key)))
    with pytest.raises(DataError, match=r"a\.pkl: refused: a key, or an item of a set, that is too large"):
        read_pickle(tmp_path / "a.pkl")


@pytest.mark.parametrize(
    "operations",
    [
        b"c_codecs\nencode\n" + text(b"a") + DOUBLED + b"\x86R",
        b"cnumpy\ndtype\n" + DOUBLED + b"\x85R",
        FROM_BUFFER + b"(C\x01a" + BYTE + DOUBLED + text(b"C") + b"tR",
        b"c" + b"a" * 100_000 + b"\nb\n",
        b"cnumpy\ndtype\n" + text(b"O" * 100_000) + b"\x85R",
        text(b"\xff" * 100_000),  # no UTF-8
    ],
)
def test_errors_of_hostile_pickles_stay_short(tmp_path, operations):
    with pytest.raises(DataError) as caught:
        read_pickle(by_hand(tmp_path, operations))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("operations", "reason"),
    [
        (FROM_BUFFER + b"N}" + text(b"__defaults__") + text(b"Z") + b"\x85s\x86b", "a state for a function"),
        (FROM_BUFFER + b"}" + text(b"mark") + b"K\x01sb", "a state for a function"),
        (b"cnumpy\nndarray\n}" + text(b"mark") + b"K\x01sb", "a state for a type"),
        (FROM_BUFFER + b"(C\x01a" + BYTE + b"K\x01\x85tRK\0K\x01s", "entries in a ndarray"),
        (b"(icollections\nOrderedDict\n", "an object"),
        (b"(ccollections\nOrderedDict\no", "an object"),
        (b"cnumpy\nndarray\n)\x81", "an object"),
        (b"\x82\x01", "an object"),
        (b"cbuiltins\nset\nK\x01\x85\x85R", "a tuple in place of a list"),
        (b"ccollections\nOrderedDict\n)\x85R", "a tuple in place of a list"),
        (
            b"](c_codecs\nencode\nq\0"
            + text(b"a" * 5000)
            + b"q\1"
            + text(b"latin1")
            + b"q\2\x86R"
            + b"h\0h\1h\2\x86R" * 99
            + b"e",
            "the same content again and again",
        ),
    ],
)
def test_a_pickle_changes_nothing_and_makes_no_more_than_it_holds(tmp_path, operations, reason):
    function, kind = unpickling._array, unpickling._Array
    before = function.__defaults__, dict(vars(function)), dict(vars(kind))
    with pytest.raises(DataError, match=f"refused: {reason}"):
        read_pickle(by_hand(tmp_path, operations))
    assert (function.__defaults__, dict(vars(function)), dict(vars(kind))) == before


def test_dictionaries_of_python_2_that_keep_an_order_are_read(tmp_path):
    path = by_hand(tmp_path, b"ccollections\nOrderedDict\n](" + text(b"b") + b"K\x01la(K\x02Nla\x85R")
    assert list(read_pickle(path).items()) == [("b", 1), (2, None)]


def test_an_array_that_announces_more_than_it_holds_is_refused(tmp_path):
    whole = pickle.dumps(np.arange(100, dtype=np.uint8), 2)
    assert whole.count(b"Kd\x85") == 1  # the shape (100,)
    path = tmp_path / "a.pkl"
    path.write_bytes(whole.replace(b"Kd\x85", b"Kz\x85"))
    with pytest.raises(DataError, match=r"does not fill its shape \(122,\)"):
        read_pickle(path)
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="damaged or cut off"):
        read_pickle(path)


# miniImageNet, tieredImageNet, folders


def mini(folder: Path, size: int = 12, **changes) -> Path:
    for part in ("train", "val", "test"):
        images = DRAW.integers(0, 256, (30, size, size, 3)).astype(np.uint8)
        rows = {f"n{part}{i}": list(range(10 * i, 10 * i + 10)) for i in range(3)}
        content = {"image_data": images, "class_dict": rows} | (changes if part == "test" else {})
        (folder / f"mini-imagenet-cache-{part}.pkl").write_bytes(pickle.dumps(content))
    return folder


def test_mini_imagenets_pickles_are_read(tmp_path):
    splits = load_mini_imagenet(mini(tmp_path))
    stored = pickle.loads((tmp_path / "mini-imagenet-cache-test.pkl").read_bytes())
    assert splits.test.names == ("ntest0", "ntest1", "ntest2")
    np.testing.assert_array_equal(np.asarray(splits.test.pictures[1]), stored["image_data"][10:20])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_data": np.zeros((30, 12, 12, 3))}, "image_data must be bytes"),
        ({"image_data": np.zeros((30, 12, 12), np.uint8)}, "image_data must be bytes"),
        ({"image_data": np.zeros((30, 0, 0, 3), np.uint8)}, "image_data must be bytes"),
        ({"class_dict": {"a": [0, 30]}}, "names picture 30 of 30"),
        ({"class_dict": {"a": [0, -1]}}, "names picture -1 of 30"),
        ({"class_dict": {"a": [0, 1], "b": [1]}}, "picture 1 is given to two classes"),
        ({"class_dict": {"a": [0, 2, 2]}}, r"class_dict\['a'\] lists picture 2 twice"),
        ({"class_dict": {"a": "xyz"}}, "must list the numbers"),
        ({"class_dict": {"a": [0, [1]]}}, "must list the numbers of pictures, got list"),
        ({"class_dict": {"ntrain0": [0, 1]}}, "ntrain0 is in two of"),
        ({"image_data": np.zeros((30, 14, 14, 3), np.uint8)}, "different shapes"),
    ],
)
def test_mislabelled_mini_imagenet_is_refused(tmp_path, changes, reason):
    with pytest.raises(DataError, match=reason):
        load_mini_imagenet(mini(tmp_path, **changes))


def test_mini_imagenets_training_pictures_are_refused_as_test_pictures(tmp_path):
    mini(tmp_path)
    train = pickle.loads((tmp_path / "mini-imagenet-cache-train.pkl").read_bytes())
    renamed = train | {"class_dict": {name.replace("train", "new"): rows for name, rows in train["class_dict"].items()}}
    (tmp_path / "mini-imagenet-cache-test.pkl").write_bytes(pickle.dumps(renamed))
    with pytest.raises(DataError, match=r"test: class nnew0: 10 of 10 pictures.* are in train: class ntrain0 too"):
        load_mini_imagenet(tmp_path)


def test_mini_imagenets_tables_are_read(tmp_path):
    (tmp_path / "images").mkdir()
    for p, part in enumerate(("train", "val", "test")):
        with (tmp_path / f"{part}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("filename", "label"))
            for i in range(4):
                table.writerow((f"{part}{i}.jpg", f"n{part}{i % 2}"))
                Image.fromarray(np.full((20, 30, 3), 40 * i + p, np.uint8)).save(tmp_path / "images" / f"{part}{i}.jpg")
    splits = load_mini_imagenet(tmp_path)
    assert splits.train.shape == (84, 84, 3)
    assert splits.train.names == ("ntrain0", "ntrain1")
    assert [int(p[0, 0, 0]) for p in np.asarray(splits.train.pictures[1])] == [40, 120]
    with (tmp_path / "test.csv").open("a") as file:
        file.write("../test.csv,n0\n")
    with pytest.raises(DataError, match="line 6 names no file"):
        load_mini_imagenet(tmp_path)
    good = (tmp_path / "val.csv").read_text()
    (tmp_path / "val.csv").write_text(good + "val0.jpg,nval1\n")
    with pytest.raises(DataError, match=r"line 6 names val0\.jpg a second time"):
        load_mini_imagenet(tmp_path)
    for line, reason in (
        ("train0.jpg,other", r"val\.csv: line 2 names train0\.jpg a second time"),
        ("val0.jpg, ", r"line 2 gives no label to val0\.jpg"),
        ("val0.jpg, ntrain0", "the class ntrain0 is in two of"),
    ):
        (tmp_path / "val.csv").write_text(f"filename,label\n{line}\n")
        (tmp_path / "test.csv").write_text("filename,label\ntest0.jpg,ntest0\n")
        with pytest.raises(DataError, match=reason):
            load_mini_imagenet(tmp_path)
    (tmp_path / "val.csv").write_text(good + '"' + 200_000 * "x")
    with pytest.raises(DataError, match="cannot be read as a table"):
        load_mini_imagenet(tmp_path)
    with pytest.raises(DataError, match=r"in none of(.|\n)*Put mini-.*-train\.pkl, .*; or train\.csv, .*, images in a"):
        load_classes("mini-imagenet", tmp_path / "images")


def tiered(folder: Path, labels=None) -> np.ndarray:
    images = DRAW.integers(0, 256, (3, 12, 10, 10, 3)).astype(np.uint8)
    for part, pictures in zip(("train", "val", "test"), images, strict=True):
        files = [np.frombuffer(png(picture), np.uint8)[:, None] for picture in pictures]
        numbers = np.arange(12) // 4 if labels is None else labels
        (folder / f"{part}_images_png.pkl").write_bytes(pickle.dumps(files))
        (folder / f"{part}_labels.pkl").write_bytes(pickle.dumps({"label_specific": numbers, "label_general": numbers}))
    return images


def test_tiered_imagenet_is_read(tmp_path):
    images = tiered(tmp_path)
    splits = load_tiered_imagenet(tmp_path)
    assert splits.validation.names == ("0000", "0001", "0002")
    np.testing.assert_array_equal(splits.train.pictures[2][np.array([3, 0])], images[0][[11, 8]])
    assert next(iter(Episodes(splits.train, way=3, queries=2)))[0].query.shape == (4, 6, 10, 10, 3)


def test_tiered_imagenets_training_classes_are_refused_as_test_classes(tmp_path):
    tiered(tmp_path)
    for name in ("images_png", "labels"):
        shutil.copy(tmp_path / f"train_{name}.pkl", tmp_path / f"test_{name}.pkl")
    reason = r"test: class 0000: 4 of 4 pictures, picture 0 for one, are in train: class 0000 too"
    with pytest.raises(DataError, match=reason):
        load_tiered_imagenet(tmp_path)


@pytest.mark.parametrize("count", [1, 2])
def test_tiered_imagenets_parts_may_share_a_tenth_of_a_class(tmp_path, count):
    tiered(tmp_path, labels=np.zeros(12, int))
    train, test = (pickle.loads((tmp_path / f"{part}_images_png.pkl").read_bytes()) for part in ("train", "test"))
    (tmp_path / "test_images_png.pkl").write_bytes(pickle.dumps([*test[:-count], *train[:count]]))
    with pytest.raises(DataError, match="2 of 12 pictures, picture 10") if count > 1 else contextlib.nullcontext():
        load_tiered_imagenet(tmp_path)


def test_mislabelled_tiered_imagenet_is_refused(tmp_path):
    tiered(tmp_path, labels=np.zeros(11, int))
    with pytest.raises(DataError, match="12 pictures need as many whole numbers"):
        load_tiered_imagenet(tmp_path)
    tiered(tmp_path, labels=[0, [1], *range(10)])
    with pytest.raises(DataError, match="12 pictures need as many whole numbers, got list"):
        load_tiered_imagenet(tmp_path)
    tiered(tmp_path)
    files = pickle.loads((tmp_path / "test_images_png.pkl").read_bytes())
    files[7] = files[7][:-20]
    (tmp_path / "test_images_png.pkl").write_bytes(pickle.dumps(files))
    with pytest.raises(DataError, match=r"test_images_png\.pkl: picture 7 is not a whole PNG file"):
        load_tiered_imagenet(tmp_path)
    (tmp_path / "train_images_png.pkl").write_bytes(pickle.dumps(files[:1] * 12))
    with pytest.raises(DataError, match="the same picture again and again"):
        load_tiered_imagenet(tmp_path)
    (tmp_path / "train_images_png.pkl").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="expected a list of PNG files"):
        load_tiered_imagenet(tmp_path)


def folder_of_pictures(root: Path, classes: int = 5) -> Path:
    for i in range(classes):
        (root / f"kind{i}").mkdir(parents=True)
        for j in range(3):
            Image.fromarray(np.full((9, 7, 3), 20 * i + j, np.uint8)).save(root / f"kind{i}" / f"{j}.png")
    return root


def test_a_folder_per_class_is_read_and_split(tmp_path):
    splits = load_folder(folder_of_pictures(tmp_path), size=8)
    names = [split.names for split in splits]
    assert sorted(itertools.chain(*names)) == [f"kind{i}" for i in range(5)]
    assert [len(part) for part in names] == [3, 1, 1]
    whole = read_folder(tmp_path, 8, 1)
    assert np.asarray(whole.pictures[4])[:, 0, 0, 0].tolist() == [80, 81, 82]
    assert names == [split.names for split in load_folder(tmp_path, size=8)]


def test_a_class_in_two_parts_is_refused_whatever_its_name(tmp_path):
    for part in ("train", "val", "test"):
        folder_of_pictures(tmp_path / part)
        for i in range(5):
            (tmp_path / part / f"kind{i}").rename(tmp_path / part / str(i))
    with pytest.raises(DataError, match="the class 0 is in two of"):
        load_folder(tmp_path, size=8)


def test_a_folder_that_lacks_one_part_is_refused(tmp_path):
    for part in ("train", "test"):
        folder_of_pictures(tmp_path / part)
    with pytest.raises(DataError, match="lacks val/: give all of train, val, test, or the classes alone"):
        load_folder(tmp_path, size=8)


def test_a_photo_is_turned_the_way_it_says(tmp_path):
    picture = Image.fromarray(np.repeat(np.arange(12, dtype=np.uint8).reshape(3, 4, 1), 3, 2))
    exif = picture.getexif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    picture.save(tmp_path / "photo.png", exif=exif)
    found = decode(tmp_path / "photo.png", None, 3, "photo", ("PNG",))
    np.testing.assert_array_equal(found, np.rot90(np.asarray(picture), -1))


def test_what_is_wrong_with_a_folder_is_named(tmp_path):
    folder_of_pictures(tmp_path, 2)
    with pytest.raises(DataError, match="2 classes cannot be split"):
        load_folder(tmp_path)
    (tmp_path / "kind0" / "1.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"1\.png: cannot be read"):
        read_folder(tmp_path)
    (tmp_path / "kind0" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes\.txt is not a picture"):
        read_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no pictures"):
        read_folder(tmp_path)


# episodes


def test_an_episode_keeps_classes_apart_and_pictures_unrepeated():
    episodes = Episodes(numbered(), way=4, shots=2, queries=3, tasks=5, seed=3)
    episode = episodes.batch(0)
    assert episode.support.shape == (5, 8, 3, 3, 1)
    assert episode.query.shape == (5, 12, 3, 3, 1)
    for t in range(5):
        sides = [(episode.support[t], episode.support_targets[t]), (episode.query[t], episode.query_targets[t])]
        classes, pictures = {}, {}
        for x, targets in sides:
            for one, label in zip(np.round(255 * x[:, 0, :2, 0]).astype(int), targets, strict=True):
                classes.setdefault(int(label), set()).add(int(one[0]))
                pictures.setdefault(int(label), []).append(int(one[1]))
        assert sorted(classes) == [0, 1, 2, 3]
        assert all(len(found) == 1 for found in classes.values())
        assert len(set.union(*classes.values())) == 4
        assert all(len(set(found)) == 5 for found in pictures.values())


def test_classes_are_numbered_anew_in_each_task():
    episode = Episodes(numbered(4), way=4, shots=1, queries=1, tasks=20).batch(0)
    first = np.round(255 * episode.support[:, 0, 0, 0, 0])
    assert len(set(first.tolist())) == 4


@pytest.mark.parametrize("make", [lambda seed: Episodes(numbered(), 3, 1, 2, seed=seed), lambda s: Sinusoids(seed=s)])
def test_episodes_repeat_from_their_seed(make):
    def first(seed):
        return [batch for (batch,) in itertools.islice(make(seed), 3)]

    for a, b in zip(first(1), first(1), strict=True):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right)
    assert not np.array_equal(first(1)[0].support, first(2)[0].support)
    assert not np.array_equal(first(1)[0].support, first(1)[1].support)
    np.testing.assert_array_equal(make(1).batch(2).query, first(1)[2].query)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"way": 7}, "way=7 needs as many classes; there are 6"),
        ({"shots": 6, "queries": 3}, "class class0 has 8 pictures, but shots=6 and queries=3 need 9"),
        ({"tasks": 0}, "tasks must be a whole number"),
    ],
)
def test_impossible_episodes_are_refused_at_the_call(options, reason):
    with pytest.raises(ValueError, match=reason):
        Episodes(numbered(), **{"queries": 2, **options})


class Extreme(np.random.Generator):
    """Draws every distortion, as large as can be."""

    def random(self, size):  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.zeros(size)

    def uniform(self, low, high, size):  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.full(size, high)


def test_a_distortion_is_the_affine_map_it_says():
    size, centre = 56, np.array([27.5, 27.5])
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    angle = np.deg2rad(10)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[1, 0.3], [0.3, 1]]) * 1.2
    for place in ([20.0, 30.0], [33.0, 24.0]):
        blob = np.exp(-((rows - place[0]) ** 2 + (columns - place[1]) ** 2) / 8).astype(np.float32)
        moved = distort(np.stack([blob, blob], 2)[None], Extreme(np.random.PCG64()))[0]
        np.testing.assert_array_equal(moved[..., 0], moved[..., 1])
        weight = moved[..., 0] / moved[..., 0].sum()
        found = [(weight * rows).sum(), (weight * columns).sum()]
        np.testing.assert_allclose(found, centre + np.linalg.solve(matrix, place - centre - 4), atol=0.05)


def test_distorted_episodes_repeat_and_have_the_same_classes():
    plain, distorted = (Episodes(numbered(), 3, 1, 2, augment=one).batch(0) for one in (None, distort))
    np.testing.assert_array_equal(plain.query_targets, distorted.query_targets)
    assert plain.query.shape == distorted.query.shape
    assert not np.array_equal(plain.query, distorted.query)
    np.testing.assert_array_equal(Episodes(numbered(), 3, 1, 2, augment=distort).batch(0).query, distorted.query)


def test_crops_are_shifts_with_reflected_edges_and_every_second_one_is_mirrored():
    rows, columns = np.meshgrid(np.arange(16.0), np.arange(16.0), indexing="ij")
    picture = np.stack([rows, columns], 2).astype(np.float32)
    moved = crop_and_flip(np.repeat(picture[None], 400, 0), np.random.default_rng(0))
    inner = moved[:, 2:-2, 2:-2]  # a shift by up to 2 leaves these without reflected edges
    mirrored = inner[:, 0, 0, 1] > inner[:, 0, -1, 1]
    upright = np.where(mirrored[:, None, None, None], inner[:, :, ::-1], inner)
    shifts = upright[:, 0, 0] - 2
    np.testing.assert_array_equal(upright, picture[2:-2, 2:-2] + shifts[:, None, None])
    assert {tuple(shift) for shift in shifts.tolist()} == set(itertools.product(range(-2, 3), range(-2, 3)))
    assert 0.4 < mirrored.mean() < 0.6
    assert (moved >= 0).all()
    assert (moved <= 15).all()


def test_sinusoids_lie_on_one_sinusoid_per_task():
    episode = Sinusoids(shots=20, queries=20, tasks=3).batch(0)
    for x, y, x2, y2 in zip(*episode[:2], *episode[2:], strict=True):
        # a sin(x − b) lies in the span of sin x and cos x: fitted on the support it gives the queries.
        weights = np.linalg.lstsq(np.hstack([np.sin(x), np.cos(x)]), y, rcond=None)[0]
        np.testing.assert_allclose(np.hstack([np.sin(x2), np.cos(x2)]) @ weights, y2, atol=1e-4)
        assert 0.1 <= np.linalg.norm(weights) <= 5


def test_digits_are_tested_on_digits_never_trained_on():
    splits = load_digit_tasks()
    assert splits.train.names[:2] == ("0", "0/90")
    assert set(splits.train.groups()).isdisjoint(splits.test.groups())
    assert splits.test.names == tuple("56789")
    # Validation turns pictures by a quarter; turned back, none of them is a test picture.
    held = {np.rot90(p, -1).tobytes() for each in splits.validation.pictures for p in np.asarray(each)}
    test = {p.tobytes() for each in splits.test.pictures for p in np.asarray(each)}
    assert held.isdisjoint(test)
    assert len(held) + len(test) == 896


def test_a_tag_differs_where_a_picture_a_class_or_its_part_does():
    splits = random_splits(numbered(10), seed=1)
    assert splits.tag() == random_splits(numbered(10), seed=1).tag()
    other = np.asarray(splits.test.pictures[0]).copy()
    other.flat[0] ^= 1
    changed = splits._replace(test=splits.test._replace(pictures=(other, *splits.test.pictures[1:])))
    moved = splits._replace(train=splits.test, test=splits.train)
    renamed = splits._replace(test=splits.test._replace(names=("x", *splits.test.names[1:])))
    assert len({each.tag() for each in (splits, changed, moved, renamed)}) == 4


def test_random_splits_use_every_class_once():
    splits = random_splits(numbered(10), seed=1)
    assert sorted(itertools.chain(*(split.names for split in splits))) == sorted(numbered(10).names)
    assert [len(split.names) for split in splits] == [6, 2, 2]
