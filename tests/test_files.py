"""Files from strangers: regular files alone, and no more memory than a file can be meant to take."""

import gzip
import io
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bilax.app.run_folder import read_run
from bilax.datasets import DataError, read_idx, read_npz
from bilax.datasets.folders import read_folder
from bilax.datasets.imagenet import read_listed, read_tiered
from bilax.datasets.omniglot import read_omniglot, read_omniglot_runs
from bilax.datasets.unpickling import read_pickle
from bilax.experiments.few_shot.run import load_learned
from bilax.files import UNPACKED, digest, read_arrays, read_json, write_arrays
from bilax.run.checkpoint import read_history


def bomb_idx(folder: Path) -> Path:
    """A gzip file of 0.3 MB that holds 270, as its header says."""
    path = folder / "bomb.gz"
    with gzip.open(path, "wb") as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, 256, 1024, 1024))
        for _ in range(256):
            file.write(bytes(1 << 20))
    return path


def npy(shape: tuple[int, ...], content: bytes = b"", dtype: str = "|u1") -> bytes:
    """A .npy file that announces a shape."""
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + content


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def bomb_npz(folder: Path) -> Path:
    side = 1 << 14
    members = {"x.npy": npy((side, side), bytes(side**2)), "y.npy": npy((side,), bytes(side))}
    return archive(folder / "bomb.npz", members)


def announced_npz(folder: Path) -> Path:
    return archive(folder / "announced.npz", {"x.npy": npy((1 << 20, 1 << 13)), "y.npy": npy((1,), b"\0")})


def png(side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "PNG")
    return stream.getvalue()


def bomb_drawings(folder: Path) -> Path:
    return archive(folder / "drawings.zip", {"Greek/character01/0394_01.png": png(4000)})


def taken(call) -> tuple[int, float]:
    """The bytes that Python and numpy had at once, and the seconds."""
    tracemalloc.start()
    began = time.process_time()
    try:
        call()
        return tracemalloc.get_traced_memory()[1], time.process_time() - began
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "read", "reason"),
    [
        (bomb_idx, lambda path: read_idx(path, 3), "unpacks to more than"),
        (bomb_idx, digest, "unpacks to more than"),
        (bomb_npz, read_npz, "unpacks to 268,"),
        (announced_npz, read_npz, "does not fill the shape"),
        (bomb_drawings, lambda path: read_omniglot([path]), "too large to be meant"),
    ],
)
def test_bombs_are_refused_before_they_take_memory(tmp_path, make, read, reason):
    path = make(tmp_path)
    assert path.stat().st_size < 2e6

    def refused():
        with pytest.raises(DataError, match=f"{path.name}: .*{reason}"):
            read(path)

    most, seconds = taken(refused)
    assert most < 2 * UNPACKED + 1e7
    assert seconds < 5


def test_pictures_that_are_kept_packed_must_be_small(tmp_path):
    """Each batch unpacks many: 80 pictures of 4096 × 4096 would take 8 GB."""
    files = [np.frombuffer(png(side), np.uint8) for side in (600, 600)]
    (tmp_path / "images.pkl").write_bytes(pickle.dumps(files))
    (tmp_path / "labels.pkl").write_bytes(pickle.dumps({"label_specific": [0, 1]}))
    with pytest.raises(DataError, match="picture 0: a picture of 600 × 600 is too large"):
        read_tiered(tmp_path / "images.pkl", tmp_path / "labels.pkl")


READERS = {
    "idx": lambda path: read_idx(path, 1),
    "npz": read_npz,
    "pickle": read_pickle,
    "zip": lambda path: read_omniglot([path]),
    "runs": read_omniglot_runs,
    "table": lambda path: read_listed(path, path.parent, set()),
    "json": read_json,
    "digest": digest,
    "arrays": read_arrays,
}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device", "none"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, reader, kind):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="does not exist" if kind == "none" else "is not a regular file"):
        reader(path)


def test_pipes_among_pictures_and_in_run_folders_are_refused(tmp_path):
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    os.mkfifo(tmp_path / "pictures" / "a" / "1.png")
    with pytest.raises(DataError, match=r"1\.png is not a regular file"):
        read_folder(tmp_path / "pictures")
    for name in ("config.json", "result.json"):
        run = tmp_path / name.removesuffix(".json")
        run.mkdir()
        (run / "config.json").write_text('{"config": {}}')
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            read_run(run)
    (tmp_path / "history").mkdir()
    os.mkfifo(tmp_path / "history" / "000000000-000000010.npz")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_history(tmp_path)


def test_a_trained_network_is_no_larger_than_its_settings_say(tmp_path):
    (tmp_path / "learned.eqx").write_bytes(bytes(100_000))
    with pytest.raises(DataError, match="holds 100,000 bytes, more than"):
        load_learned(tmp_path, {"weight": np.zeros((3, 3))})


@pytest.mark.parametrize("content", ["", "null", "[]", "{", "[" * 10_000, "\ud800", "1e999"])
def test_json_that_is_none_is_named(tmp_path, content):
    (tmp_path / "some.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match=r"some\.json"):
        read_json(tmp_path / "some.json")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.float32(1),
        np.array(["ab"]),
        np.array(True),
    ],
)
def test_arrays_come_back_as_they_were(tmp_path, array):
    write_arrays(tmp_path / "a.npz", {"one": array})
    found = read_arrays(tmp_path / "a.npz")["one"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert found.flags.writeable


def test_arrays_that_pack_too_well_are_written_unpacked(tmp_path):
    write_arrays(tmp_path / "a.npz", {"zeros": np.zeros(UNPACKED // 8 + 1)})
    assert (tmp_path / "a.npz").stat().st_size > UNPACKED
    assert not read_arrays(tmp_path / "a.npz")["zeros"].any()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"x.txt": b"hello"}, "'x.txt' is no array"),
        ({"x.npy": b""}, "'x.npy' is no array"),
        ({"x.npy": b"hello world"}, "damaged"),
        ({"x.npy": npy((1,), bytes(8), "|O")}, "Python objects"),
        ({"x.npy": npy((2,), bytes(1))}, "does not fill"),
        ({"x.npy": npy((-1,), bytes(1))}, "does not fill"),
    ],
)
def test_members_that_are_no_arrays(tmp_path, members, reason):
    with pytest.raises(DataError, match=reason):
        read_arrays(archive(tmp_path / "a.npz", members))


def test_an_archive_with_a_name_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("run01/class_labels.txt", "")
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("run01/class_labels.txt", "")
    with pytest.raises(DataError, match="an entry is there twice"):
        read_omniglot_runs(tmp_path / "a.zip")


def test_many_runs_take_no_longer_than_their_number(tmp_path):
    runs = {f"run{i:05d}/class_labels.txt": b"" for i in range(20_000)}
    began = time.process_time()
    with pytest.raises(DataError, match="is empty"):
        read_omniglot_runs(archive(tmp_path / "a.zip", runs))
    assert time.process_time() - began < 5
