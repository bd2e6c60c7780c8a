"""Reading, finding and fetching data; whatever is wrong is named with its file and place."""

import bz2
import dataclasses
import functools
import gzip
import hashlib
import http.server
import inspect
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from bilax.app import cli
from bilax.app.data_command import DataCheck, DataFetch, DataList
from bilax.datasets import (
    DATA_SETS,
    DataError,
    DataSet,
    fetching,
    find,
    load,
    load_classes,
    read_idx,
    read_npz,
    registry,
)
from bilax.datasets.fetching import download
from bilax.datasets.idx import PARTS, parse_idx, read_pair
from bilax.datasets.libsvm import read_libsvm
from bilax.datasets.registry import cache_folder, candidates, check, fetch
from bilax.experiments.few_shot.run import FewShot
from tests.test_episodes import numbered


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def four_files(labels: int = 10) -> dict[str, bytes]:
    """A data set of random pictures in the layout of MNIST."""
    draw = np.random.default_rng(0)
    arrays = {
        PARTS[0]: draw.integers(0, 256, (40, 28, 28)),
        PARTS[1]: draw.integers(0, labels, 40),
        PARTS[2]: draw.integers(0, 256, (10, 28, 28)),
        PARTS[3]: draw.integers(0, labels, 10),
    }
    return {name: idx(array) for name, array in arrays.items()}


def put(folder: Path, files: dict[str, bytes], packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.fixture
def empty_machine(tmp_path, monkeypatch):
    """No data anywhere: an own cache, no BILAX_DATA, nothing installed, no mirrors."""
    monkeypatch.delenv("BILAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = four_files()
    hashes = tuple(hashlib.sha256(files[part]).hexdigest() for part in PARTS)
    for name in ("mnist", "fashion-mnist"):
        known = dataclasses.replace(DATA_SETS[name], mirrors=(), sha256=hashes, installed=(tmp_path / "installed",))
        monkeypatch.setitem(DATA_SETS, name, known)
    return files


# reading IDX


@pytest.mark.parametrize("packed", [True, False])
def test_idx_is_read_back(tmp_path, packed):
    array = np.random.default_rng(1).integers(0, 256, (5, 3, 4)).astype(np.uint8)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    np.testing.assert_array_equal(read_idx(path, 3), array)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"\x00\x00\x08", "ends at byte 3, inside the header of 16"),
        (b"\x00\x00\x0d\x03" + bytes(12), "bytes 0-3 are 00 00 0d 03"),
        (b"\x00\x01\x08\x03" + bytes(12), "bytes 0-3 are 00 01 08 03"),
        (idx(np.zeros(20)), "starts with 00 00 08 03"),
        (idx(np.zeros((2, 3, 4)))[:-1], "is cut off.*end at byte 40, but it ends at byte 39"),
        (idx(np.zeros((2, 3, 4))) + b"x", "bytes left over.*end at byte 40, but it ends at byte 41"),
        # Sizes whose product passes 2**32 must not wrap around to something that fits.
        (struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 4), "is cut off"),
    ],
)
def test_malformed_idx_names_the_place(content, place):
    with pytest.raises(DataError, match=f"some-file: .*{place}"):
        parse_idx(content, 3, "some-file")


def test_libsvm_text_is_read_packed_or_not(tmp_path, monkeypatch):
    lines = b"-1.0 2:0.5 22:-3e-2\n+1 1:1\n1\n"
    (tmp_path / "ijcnn1").mkdir()
    (tmp_path / "ijcnn1" / "ijcnn1.trn.bz2").write_bytes(bz2.compress(lines))
    (tmp_path / "ijcnn1" / "ijcnn1.tst").write_bytes(lines[:20])
    monkeypatch.setenv("BILAX_DATA", str(tmp_path))
    train, test = load("ijcnn1")
    expected = np.zeros((3, 22), np.float32)
    expected[0, 1], expected[0, 21], expected[1, 0] = 0.5, -3e-2, 1
    np.testing.assert_array_equal(train.inputs, expected)
    np.testing.assert_array_equal(train.labels, [0, 1, 1])
    np.testing.assert_array_equal(test.inputs, expected[:1])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"1 4:1", "contains 4 features"),
        (b"1 0:1", "Invalid index 0"),
        (b"1 2:1 1:1", "sorted and unique"),
        (b"1 1:nan", "a value is not finite"),
        (b"1 1:1e39", "a value is not finite"),
        (b"2 1:1", "neither -1 nor 1"),
        (b"1 1", "need more than 1 value"),
        (b"1 99999999999999999999:1", "too large"),
        (b"\xff\xfe", "could not convert"),
    ],
)
def test_malformed_libsvm_text_names_the_line(tmp_path, wrong, why):
    path = tmp_path / "some"
    good = [b"-1 1:1 3:2"] * 9
    path.write_bytes(b"\n".join([*good[:6], wrong, *good[6:], wrong]))
    with pytest.raises(DataError, match=rf"some: line 7 cannot be read \(.*{why}"):
        read_libsvm(path, 3)


def test_libsvm_text_that_would_fill_the_memory_or_is_cut_is_refused(tmp_path):
    path = tmp_path / "some"
    path.write_bytes(b"1\n" * (1 << 20))
    with pytest.raises(DataError, match=r"some: becomes .* bytes, more than"):
        read_libsvm(path, 22)
    path.write_bytes(bz2.compress(b"1 1:1\n" * 100)[:-5])
    with pytest.raises(DataError, match=r"the bzip2 stream of .* is damaged or cut off"):
        read_libsvm(path, 22)
    path.write_bytes(b"\n")
    with pytest.raises(DataError, match="holds no examples"):
        read_libsvm(path, 22)


def test_cut_gzip_names_the_file(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(idx(np.arange(100) % 7))[:-12])
    with pytest.raises(DataError, match=r"cut\.gz: the gzip stream of \d+ bytes is damaged"):
        read_idx(path, 1)


def test_images_and_labels_must_match(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx(np.zeros((3, 2, 2))))
    labels.write_bytes(idx(np.array([0, 1])))
    with pytest.raises(DataError, match=r"images holds 3 images, but .*labels holds 2"):
        read_pair(images, labels, 10)
    labels.write_bytes(idx(np.array([0, 11, 1])))
    with pytest.raises(DataError, match=r"labels: label 1 \(byte 9\) is 11, outside 0..9"):
        read_pair(images, labels, 10)


# finding


def test_places_are_searched_in_order(tmp_path, monkeypatch, empty_machine):
    monkeypatch.setenv("BILAX_DATA", str(tmp_path / "env"))
    folders = [tmp_path / "given", tmp_path / "env", cache_folder(), tmp_path / "installed"]
    for folder in reversed(folders):  # each one found takes precedence over the later ones
        put(folder if folder.name == "installed" else folder / "mnist", empty_machine, packed=folder.name != "env")
        files = find("mnist", tmp_path / "given")
        assert files is not None
        assert files[0].is_relative_to(folder)
    assert tmp_path / "given" in candidates("mnist", tmp_path / "given")  # the files may lie in it directly


def test_an_incomplete_folder_is_passed_over(tmp_path, empty_machine):
    put(tmp_path / "given", dict(list(empty_machine.items())[:3]))
    assert find("mnist", tmp_path / "given") is None


def test_cache_folder_of_each_platform(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    names = {}
    for platform in ("linux", "darwin", "win32"):
        monkeypatch.setattr(registry.sys, "platform", platform)
        monkeypatch.setenv("LOCALAPPDATA", "local")
        names[platform] = cache_folder().as_posix()
    assert names == {"linux": "home/.cache/bilax", "darwin": "home/Library/Caches/bilax", "win32": "local/bilax/cache"}


def test_load_scales_bytes(tmp_path, empty_machine):
    put(tmp_path, empty_machine)
    train, test = load("mnist", tmp_path)
    assert train.inputs.shape == (40, 784)
    assert train.shape == (28, 28)
    assert test.labels.shape == (10,)
    raw = parse_idx(empty_machine[PARTS[0]], 3, "")
    np.testing.assert_allclose(train.inputs, raw.reshape(40, -1) / 255, rtol=1e-6)


def test_check_finds_a_changed_byte(tmp_path, empty_machine):
    files = dict(empty_machine)
    put(tmp_path, files)
    check("mnist", find("mnist", tmp_path) or [])
    files[PARTS[2]] = files[PARTS[2]][:-1] + bytes([files[PARTS[2]][-1] ^ 1])
    put(tmp_path, files)
    with pytest.raises(DataError, match=r"t10k-images.*SHA-256"):
        check("mnist", find("mnist", tmp_path) or [])


def test_digits_need_no_file(empty_machine):
    train, test = load("digits")
    assert len(train.labels) + len(test.labels) == 1797
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert train.inputs.min() == 0
    assert train.inputs.max() == 1


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_files_are_unchanged(name):
    files = find(name) if os.environ.get("BILAX_DATA") else None
    if files is None:
        pytest.skip(f"BILAX_DATA does not name a folder with {name}")
    check(name, files)
    train, test = load(name)
    assert len(train.labels) == 60_000
    assert len(test.labels) == 10_000


# fetching, from a server on loopback


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`, and does to its answers what `behaviour` lists, one per request, then behaves."""

    def __init__(self, content: dict[str, bytes], behaviour=(), ranges: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.behaviour, self.ranges = content, list(behaviour), ranges
        self.asked: list[str | None] = []
        self.address = f"http://127.0.0.1:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        behaviour = self.server.behaviour.pop(0) if self.server.behaviour else None
        body = self.server.content.get(self.path.lstrip("/"))
        if body is None or behaviour == "missing":
            return self.send_error(404)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", "abc" if behaviour == "no number" else str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        self.wfile.write(rest[: len(rest) // 2] if behaviour == "cut" else rest)
        return None

    def log_message(self, format, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = []

    def start(*arguments, **options) -> Server:
        server = Server(*arguments, **options)
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


def packed(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content) for name, content in files.items()}


def test_fetch_then_find(empty_machine, serve):
    server = serve(packed(empty_machine))
    files = fetch("mnist", mirrors=[server.address])
    assert files == find("mnist")
    check("mnist", files)
    assert sorted(p.name for p in files[0].parent.iterdir()) == sorted(packed(empty_machine))
    fetch("mnist", mirrors=[server.address])
    assert len(server.asked) == 4  # a second fetch asks for nothing
    files[0].write_bytes(files[0].read_bytes()[:-9])
    fetch("mnist", mirrors=[server.address])
    assert len(server.asked) == 5  # a damaged file is fetched again
    check("mnist", files)


def test_a_cut_connection_is_resumed(tmp_path, serve):
    body = bytes(range(256)) * 40
    server = serve({"file": body}, ["cut", "cut"])
    seen = []
    download(server.address + "file", tmp_path / "partial", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "partial").read_bytes() == body
    assert server.asked == [None, "bytes=5120-", "bytes=7680-"]
    assert seen[-1] == (len(body), len(body))


def test_what_is_left_of_an_attempt_serves_the_next(empty_machine, serve):
    server = serve(packed(empty_machine), ["cut"] * 5)
    with pytest.raises(DataError, match="gave up after 5 attempts: the connection was cut after"):
        fetch("mnist", mirrors=[server.address])
    assert find("mnist") is None  # nothing half done is in place
    files = fetch("mnist", mirrors=[server.address])
    assert server.asked[5].startswith("bytes=")
    check("mnist", files)


def test_a_length_that_is_no_number_is_none(tmp_path, serve):
    server = serve({"f": b"abcdef"}, ["no number"])
    fetching.download(f"{server.address}f", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"abcdef"


@pytest.mark.parametrize("behaviour", [None, "no number"])
def test_downloads_are_no_larger_than_a_data_set_can_be(tmp_path, monkeypatch, serve, behaviour):
    monkeypatch.setattr(fetching, "LARGEST", 1000)
    server = serve({"f": bytes(2_000_000)}, [behaviour])
    with pytest.raises(DataError, match="bytes, more than the 1,000"):
        fetching.download(f"{server.address}f", tmp_path / "part")
    assert not (tmp_path / "part").exists() or (tmp_path / "part").stat().st_size < 200_000


def test_data_are_fetched_over_a_connection_that_nobody_can_change():
    assert all(mirror.startswith("https://") for known in DATA_SETS.values() for mirror in known.mirrors)


def test_a_server_without_ranges_starts_again(tmp_path, serve):
    body = bytes(range(256)) * 8
    server = serve({"file": body}, ["cut"], ranges=False)
    download(server.address + "file", tmp_path / "partial")
    assert (tmp_path / "partial").read_bytes() == body


def test_a_partial_file_longer_than_the_whole_is_dropped(tmp_path, serve):
    server = serve({"file": b"short"})
    (tmp_path / "partial").write_bytes(b"much longer than the file")
    download(server.address + "file", tmp_path / "partial")
    assert (tmp_path / "partial").read_bytes() == b"short"


def test_a_wrong_file_is_refused_and_the_next_mirror_asked(empty_machine, serve):
    wrong = serve(packed(four_files(labels=3)))
    with pytest.raises(DataError, match=rf"127.0.0.1:{wrong.server_port}/train-labels.*SHA-256(.|\n)*--mirror"):
        fetch("mnist", mirrors=[wrong.address])
    assert not list(cache_folder().rglob("*labels*"))  # neither in place nor as a beginning to go on from
    right = serve(packed(empty_machine))
    check("mnist", fetch("mnist", mirrors=[wrong.address, right.address]))


def test_a_page_in_place_of_the_file_is_refused(empty_machine, serve):
    server = serve(dict.fromkeys(packed(empty_machine), b"<html>sign in</html>"))
    with pytest.raises(DataError, match="SHA-256"):
        fetch("mnist", mirrors=[server.address])


def test_a_missing_file_and_a_dead_server_are_told_apart(empty_machine, serve):
    server = serve({})
    dead = Server({})
    dead.server_close()
    with pytest.raises(DataError, match=r"404(.|\n)*gave up after 5 attempts"):
        fetch("mnist", mirrors=[server.address, dead.address])


def test_load_fetches_what_is_nowhere(empty_machine, serve, monkeypatch):
    server = serve(packed(empty_machine))
    monkeypatch.setitem(DATA_SETS, "mnist", dataclasses.replace(DATA_SETS["mnist"], mirrors=(server.address,)))
    assert len(load("mnist")[0].labels) == 40


# commands


def test_data_commands(empty_machine, serve, capsys, tmp_path):
    DataList().main()
    assert "bilax data fetch mnist" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="mnist is in none of"):
        DataCheck("mnist").main()
    server = serve(packed(empty_machine))
    DataFetch("mnist", into=tmp_path / "own", mirror=server.address).main()
    DataCheck("mnist", folder=tmp_path / "own").main()
    assert "complete and unchanged" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no data set 'mnits': choose one of digits, mnist, fashion-mnist"):
        DataCheck("mnits").main()


# the registry


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_entry_is_complete(name):
    known = registry.entry(name)
    assert known.licence
    assert known.origin
    assert known.kinds()
    assert all(known.files)
    assert bool(known.mirrors) == bool(known.sha256)
    assert not known.sha256 or len(known.sha256) == len(known.files[0])
    assert not known.options or known.classes
    for option in known.options:
        assert option in inspect.signature(known.classes).parameters  # pyright: ignore[reportArgumentType]
        assert option in {field.name for field in dataclasses.fields(FewShot)}
    if known.examples and not known.files:
        assert sum(known.sizes) <= sum(len(part.labels) for part in load(name))


def test_a_new_entry_is_known_everywhere(tmp_path, monkeypatch, capsys):
    def read(folder: Path):
        return read_npz(folder / "new.npz"), read_npz(folder / "new.npz")

    def read_classes(folder: Path, rotations: bool):
        return load_classes("digits")._replace(train=numbered(4 if rotations else 1))

    new = DataSet(licence="mine", origin="this test", files=(("new.npz",),), examples=read, classes=read_classes)
    monkeypatch.setitem(DATA_SETS, "new-set", dataclasses.replace(new, options=("rotations",)))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(DataError, match=r"new-set is in none of(.|\n)*Put new\.npz in a folder.*from this test"):
        load("new-set", tmp_path)
    (tmp_path / "new-set").mkdir()
    npz(tmp_path / "new-set" / "new.npz", **good())
    assert len(load("new-set", tmp_path)[1].labels) == 6
    assert len(FewShot(dataset="new-set", folder=tmp_path, rotations=True).splits.train.names) == 4
    for words in (["run", "cleaning"], ["reproduce", "table-3"], ["run", "few-shot"], ["data", "check"]):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        assert ",new-set}" in capsys.readouterr().out
    DataList(tmp_path).main()
    assert "new-set" in capsys.readouterr().out


def test_what_a_data_set_is_not_for_is_told():
    with pytest.raises(DataError, match="no data set 'omniglot' with labelled examples: choose one of digits, mnist, "):
        load("omniglot")
    with pytest.raises(DataError, match="no data set 'mnist' with few-shot classes: choose one of digits, omniglot, "):
        load_classes("mnist")
    with pytest.raises(DataError, match="digits has no official test; those that have are: omniglot"):
        registry.load_own_test("digits")
    with pytest.raises(DataError, match="omniglot cannot be fetched"):
        fetch("omniglot")
    with pytest.raises(SystemExit, match="no files of 'digits': part of scikit-learn"):
        DataCheck("digits").main()


def test_a_data_set_without_hashes_is_checked_by_reading_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(DATA_SETS, "omniglot", dataclasses.replace(
        DATA_SETS["omniglot"], files=(("any.zip",),), classes=lambda _: load_classes("digits"),
    ))  # fmt: skip
    (tmp_path / "any.zip").touch()
    DataCheck("omniglot", tmp_path).main()
    shown = capsys.readouterr().out
    assert "test: 5 classes, 447 pictures of 8 × 8 × 1" in shown
    assert "unchanged" not in shown


# a person's own arrays


def npz(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


def good() -> dict[str, np.ndarray]:
    return {"x": np.zeros((6, 2, 2)), "y": np.array([0, 1, 2, 0, 1, 2])}


def test_npz_is_read(tmp_path):
    data = read_npz(npz(tmp_path / "a.npz", **good()))
    assert data.inputs.shape == (6, 4)
    assert data.shape == (2, 2)
    assert read_npz(npz(tmp_path / "b.npz", x=np.full((2, 3), 255, np.uint8), y=np.array([0, 1]))).inputs.max() == 1


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"x": np.array([[0.0, 1], [np.nan, 1]]), "y": np.array([0, 1])}, r"x\[1, 0\] is nan"),
        ({"x": np.zeros((5, 4))}, "x holds 5 examples and y 6 labels"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, "not be empty"),
        ({"y": np.array([0, 1, -2, 0, 1, 2])}, r"label y\[2\] is -2"),
        ({"y": np.array([0.0, 1, 2, 0, 1, 2])}, "whole numbers"),
        ({"x": np.array([["a"], ["b"]] * 3)}, "must hold numbers"),
        ({"x": np.array([[None]] * 6)}, "holds Python objects"),
    ],
)
def test_npz_errors_name_the_place(tmp_path, change, place):
    path = npz(tmp_path / "mine.npz", **{**good(), **change})
    with pytest.raises(DataError, match=rf"mine\.npz: .*{place}"):
        read_npz(path)


def test_files_that_are_no_npz(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_npz(tmp_path / "none.npz")
    with pytest.raises(DataError, match="lacks the array 'y'"):
        read_npz(npz(tmp_path / "lacking.npz", x=np.zeros((2, 2))))
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"single\.npy: holds a single array"):
        read_npz(tmp_path / "single.npy")
    whole = npz(tmp_path / "whole.npz", **good()).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.npz: cannot be read"):
        read_npz(tmp_path / "cut.npz")
