"""Damaged and hostile files, thousands if asked for: `python -m tests.fuzz COUNT [SEED [KIND ...]]`.

Each input is a good file, or a folder of some, that was changed at random. Whatever reads it must return or refuse it
with a sentence: within 5 seconds of computing, in 1 GB, without running anything and without writing elsewhere. An
input is known by its kind, the seed and its number, and made again by them.
"""

import bz2
import contextlib
import functools
import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from PIL import Image

import bilax
from bilax.app import report
from bilax.app.run_folder import check_config, read_run, write_config, write_result
from bilax.app.show import load_json
from bilax.datasets import read_npz
from bilax.datasets.cifar import load_cifar_fs
from bilax.datasets.classes import PARTS
from bilax.datasets.folders import read_folder
from bilax.datasets.idx import read_pair
from bilax.datasets.imagenet import read_listed, read_mini_imagenet, read_tiered
from bilax.datasets.labelled import read_embeddings, read_labelled
from bilax.datasets.libsvm import read_libsvm
from bilax.datasets.omniglot import FULL, read_omniglot, read_omniglot_runs, vinyals_splits
from bilax.experiments.few_shot.run import FewShot, save_learned
from bilax.experiments.few_shot.trained import load_trained

SECONDS, BYTES = 5, 1 << 30
FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn", "socket.connect"}
JSON_WORDS = [b"null", b"[]", b"{}", b"1e308", b"-1", b"1" * 400, b'"$\\\\frac$[b]"', b"NaN", b'"\\ud800"', b"[" * 5000]
PROBLEM = bilax.Problem(lambda x, y: jnp.sum((y - 1.0) ** 2), lambda x, y: jnp.sum((y - x) ** 2))
METHOD = bilax.rhg(2, 0.1)


class Evil:
    """What a pickle runs if it is let."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def png(side: int, number: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (side, side), number).save(stream, "PNG")
    return stream.getvalue()


def archive(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)


def make_idx(folder: Path) -> None:
    images = struct.pack(">HBB3I", 0, 8, 3, 4, 5, 6) + bytes(120)
    (folder / "images").write_bytes(gzip.compress(images))
    (folder / "labels").write_bytes(struct.pack(">HBBI", 0, 8, 1, 4) + bytes(range(4)))


def make_libsvm(folder: Path) -> None:
    lines = b"".join(b"%d 1:0.5 %d:-1e-3 7:1\n" % (i % 2 * 2 - 1, 2 + i % 4) for i in range(40))
    (folder / "packed").write_bytes(bz2.compress(lines))
    (folder / "plain").write_bytes(lines)


def make_npz(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", x=np.eye(6, 4), y=np.arange(6) % 3)


def make_csv(folder: Path) -> None:
    rows = "".join(f"{i},{i % 3}.5,{'red' if i % 2 else 'blue'},{'ab'[i % 2]}\n" for i in range(12))
    (folder / "a.csv").write_text(f"number,size,colour,label\n{rows}")


def make_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    columns = {"size": np.arange(12) / 3, "colour": ["red", "blue"] * 6, "label": list("aabb") * 3}
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet")


def make_npy(folder: Path) -> None:
    np.save(folder / "a.npy", np.eye(6, 4))


def make_mini(folder: Path) -> None:
    content = {"image_data": np.zeros((4, 8, 8, 3), np.uint8), "class_dict": {"a": [0, 1], "b": [2, 3]}}
    (folder / "a.pkl").write_bytes(pickle.dumps(content))


def make_tiered(folder: Path) -> None:
    files = [np.frombuffer(png(8, i), np.uint8) for i in range(4)]
    (folder / "images.pkl").write_bytes(pickle.dumps(files))
    (folder / "labels.pkl").write_bytes(pickle.dumps({"label_specific": np.arange(4) % 2}))


def make_drawings(folder: Path) -> None:
    archive(folder / "a.zip", {f"Greek/character0{i}/0394_0{i}.png": png(9, i) for i in (1, 2)})


def make_runs(folder: Path) -> None:
    pairs = {"item01.png": "class02.png", "item02.png": "class01.png"}
    lines = "".join(f"run01/test/{item} run01/training/{known}\n" for item, known in pairs.items())
    parts = {f"run01/test/{item}": png(9) for item in pairs}
    parts |= {f"run01/training/{known}": png(9) for known in pairs.values()}
    archive(folder / "a.zip", {"run01/class_labels.txt": lines.encode(), **parts})


def make_table(folder: Path) -> None:
    (folder / "images").mkdir()
    for i in range(2):
        (folder / "images" / f"{i}.png").write_bytes(png(9, i))
    (folder / "a.csv").write_text("filename,label\n0.png,a\n1.png,b\n")


def make_strips(folder: Path) -> None:
    for i, part in enumerate(PARTS):
        (folder / part).mkdir()
        Image.new("RGB", (32, 64), (i, 0, 0)).save(folder / part / f"{part}.png")


def make_lists(folder: Path) -> None:
    for name, alphabet in zip(FULL, ("Greek", "Latin"), strict=True):
        archive(folder / name, {f"{alphabet}/character01/0394_01.png": png(9)})
    (folder / "splits-vinyals").mkdir()
    for part, line in zip(
        PARTS, ("Greek/character01/rot000", "Greek/character01/rot090", "Latin/character01/rot180"), strict=True
    ):
        (folder / "splits-vinyals" / f"{part}.txt").write_text(f"{line}\n")


def make_pictures(folder: Path) -> None:
    for name, form in (("a", "PNG"), ("b", "JPEG"), ("c", "GIF"), ("d", "WEBP"), ("e", "BMP")):
        (folder / name).mkdir()
        Image.new("RGB", (9, 7)).save(folder / name / f"1.{form.lower()}", form)


def make_run(folder: Path) -> None:
    write_config(folder, {"method": "rhg", "inner_steps": 2})
    write_result(folder, solve(folder / "checkpoints", steps=6), {"seconds": 1.0, "measures": {"a": 1.0}})


def make_checkpoints(folder: Path) -> None:
    solve(folder, steps=6)


def make_learned(folder: Path) -> None:
    config = FewShot(filters=2)
    settings = {"experiment": "few-shot", "dataset": "digits", "folder": None, "shape": [8, 8, 1], "filters": 2}
    write_config(folder, settings)
    learner = config.learner(0, (8, 8, 1))
    save_learned(folder, (learner.x0, learner.y0))


def make_stored(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps({"config": {"seed": 0}, "results": {"a": [1.0]}}))


def make_lines(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"step": i, "upper": 1.0}) + "\n" for i in range(4)))


def solve(folder: Path, steps: int = 9, **options: Any) -> bilax.Solution:
    saving = bilax.Saving(folder, every_steps=3, every_seconds=None)
    return bilax.solve(PROBLEM, METHOD, jnp.ones(2), jnp.zeros(2), steps=steps, saving=saving, **options)


def read_lines_of_features(folder: Path) -> None:
    for name in ("packed", "plain"):
        read_libsvm(folder / name, 7)


def read_packed(folder: Path) -> None:
    read_tiered(folder / "images.pkl", folder / "labels.pkl").pictures[0][np.arange(1)]


def read_run_folder(folder: Path) -> None:
    report.page([read_run(folder)])


def read_settings(folder: Path) -> None:
    check_config(folder, {"method": "rhg", "inner_steps": 2}, ())
    write_config(folder, {"method": "rhg", "inner_steps": 2})


def read_lines(folder: Path) -> None:
    state: Any = bilax.Snapshot((), (), 2, None)  # pyright: ignore[reportArgumentType]
    bilax.JsonLines(folder / "a.jsonl").restore({}, state)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any], int]] = {
    "idx": (make_idx, lambda folder: read_pair(folder / "images", folder / "labels", 10), 4),
    "libsvm": (make_libsvm, read_lines_of_features, 4),
    "npz": (make_npz, lambda folder: read_npz(folder / "a.npz"), 6),
    "arrays": (make_npz, lambda folder: read_labelled(folder / "a.npz"), 2),
    "csv": (make_csv, lambda folder: read_labelled(folder / "a.csv"), 6),
    "parquet": (make_parquet, lambda folder: read_labelled(folder / "a.parquet"), 6),
    "embeddings": (make_npy, lambda folder: read_embeddings(folder / "a.npy", 6), 3),
    "labelled pictures": (make_pictures, lambda folder: read_labelled(folder, size=8), 2),
    "mini": (make_mini, lambda folder: read_mini_imagenet(folder / "a.pkl"), 6),
    "tiered": (make_tiered, read_packed, 6),
    "drawings": (make_drawings, lambda folder: read_omniglot([folder / "a.zip"], 8), 4),
    "runs": (make_runs, lambda folder: read_omniglot_runs(folder / "a.zip", 8), 4),
    "strips": (make_strips, load_cifar_fs, 3),
    "lists": (make_lists, lambda folder: vinyals_splits(folder, 8), 4),
    "table": (make_table, lambda folder: read_listed(folder / "a.csv", folder / "images", set(), 8), 3),
    "pictures": (make_pictures, lambda folder: read_folder(folder, 8), 4),
    "run folder": (make_run, read_run_folder, 1),
    "settings": (make_run, read_settings, 2),
    "checkpoints": (make_checkpoints, lambda folder: solve(folder, resume=True), 4),
    "learned": (make_learned, load_trained, 2),
    "stored": (make_stored, lambda folder: load_json(folder / "a.json"), 2),
    "lines": (make_lines, read_lines, 1),
}
"""how a good input is made, what reads it, and how often it is drawn"""


def changed(content: bytes, rng: random.Random) -> bytes:
    """Bytes with one to four changes."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(found) + 1)
        how = rng.randrange(8)
        if how == 0:
            del found[place:]
        elif how == 1 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif how == 2:
            found[place : place + 4] = rng.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 4, b"\xff\xff\xff\x7f"])
        elif how == 3:
            found[place:place] = rng.randbytes(rng.randint(1, 40))
        elif how == 4:
            del found[place : place + rng.randint(1, 40)]
        elif how == 5:
            found[place:place] = found[max(0, place - rng.randint(1, 200)) : place] * rng.choice([1, 50])
        elif how == 6:
            found[place : place + rng.randint(0, 12)] = rng.choice(JSON_WORDS)
        else:
            found[:] = rng.choice([b"", bytes(found[::-1]), rng.choice(JSON_WORDS), rng.randbytes(100)])
    return bytes(found)


@functools.cache
def unpacking_to_much() -> list[bytes]:
    """Small files of large content, and an archive of none; the last is large arrays."""
    zeros, arrays = bytes(1 << 27), io.BytesIO()
    np.savez_compressed(arrays, x=np.zeros((1 << 13, 1 << 14), np.uint8), y=np.zeros(1 << 13, np.uint8))
    return [png(4097), gzip.compress(zeros), bz2.compress(zeros), b"PK\x05\x06" + bytes(18), arrays.getvalue()]


def replaced(path: Path, rng: random.Random) -> None:
    """Something else in place of a file."""
    path.unlink()
    how = rng.randrange(7)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/dev/stdin", "nowhere", path.name]))
    elif how == 2:
        path.mkdir()
    elif how == 3:
        path.write_bytes(pickle.dumps(rng.choice([Evil(), [Evil()], {"image_data": Evil(), "label_specific": Evil()}])))
    elif how == 4:
        archive(path, {rng.choice(["x.npy", "../x.npy", "run01/class_labels.txt"]): pickle.dumps(Evil())})
    elif how == 5:
        path.write_bytes(unpacking_to_much()[-1])
    else:
        path.write_bytes(rng.choice(unpacking_to_much()[:-1]))


def harm(folder: Path, rng: random.Random) -> str:
    """Changes one file of a folder; tells which and how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    if rng.random() < 0.2:
        replaced(path, rng)
        return f"{path.relative_to(folder)} replaced"
    path.write_bytes(changed(path.read_bytes(), rng))
    return f"{path.relative_to(folder)} changed"


def refused_or_read(read: Callable[[Path], Any], folder: Path) -> None:
    """Reads; what refuses with a sentence has done well."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            read(folder)
    except (ValueError, SystemExit) as error:
        if not str(error):
            raise


def main(count: int, seed: int = 0, kinds: tuple[str, ...] = ()) -> int:
    """Reads so many inputs; prints what went wrong and returns how often."""
    kinds = kinds or tuple(KINDS)
    wrong, taken, where, broken = 0, 0, Path(tempfile.mkdtemp()), []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:  # a hook cannot be taken away again
            return
        if event in FORBIDDEN:
            broken.append(f"{event} {arguments!r:.80}")
        if event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1]):
            path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
            if path and not str(path).startswith((str(where), "/dev/null")):
                broken.append(f"wrote {path}")

    for kind in kinds:  # so that all is imported and compiled
        make, read, _ = KINDS[kind]
        (where / kind).mkdir()
        make(where / kind)
        shutil.copytree(where / kind, where / "warm")
        read(where / "warm")
        shutil.rmtree(where / "warm")
    sys.addaudithook(watch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = [KINDS[kind][2] for kind in kinds]
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = rng.choices(kinds, weights)[0]
        shutil.copytree(where / kind, where / "input")
        how = f"{kind}, seed {seed}, number {number}: {harm(where / 'input', rng)}"
        print(how, file=sys.stderr, flush=True)  # the last line tells what ended the process
        broken.clear()
        began = time.process_time()
        signal.alarm(12 * SECONDS)  # ends the process where something blocks
        try:
            refused_or_read(KINDS[kind][1], where / "input")
        except BaseException:
            broken.append(traceback.format_exc(limit=-4))
        signal.alarm(0)
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        if time.process_time() - began > SECONDS:
            broken.append(f"took {time.process_time() - began:.0f} s")
        if taken > BYTES:
            broken.append(f"took {taken:,} bytes")
            before += taken
        for each in broken:
            print(f"{how}\n{each}", flush=True)
        wrong += bool(broken)
        shutil.rmtree(where / "input")
    watching = False
    shutil.rmtree(where)
    print(f"{count} inputs, {wrong} went wrong, {taken:,} bytes at the most")
    return wrong


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(bool(main(int(given[0]), int(given[1]) if len(given) > 1 else 0, tuple(given[2:]))))
