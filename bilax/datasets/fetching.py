"""Fetches a data set: with progress, resumed where it broke off, checked, and put in place whole or not at all."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from bilax.files import DataError, check_size, digest

ATTEMPTS = 5
TIMEOUT = 30.0
BLOCK = 1 << 16
LARGEST = 1 << 26
"""bytes of one file at the most; the largest of FashionMNIST has 26 million"""

Advance = Callable[[int, int | None], None]
"""advance(bytes so far, bytes in all if known)"""


def fetch_files(name: str, sha256: Mapping[str, str], folder: Path, mirrors: Sequence[str]) -> list[Path]:
    """Puts files, which `sha256` names with the hash of each, into `folder`; those already right are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    files = []
    with Progress(*columns, transient=True) as progress:
        for part, expected in sha256.items():
            task = progress.add_task(f"{name} {part}", total=None)

            def advance(done: int, total: int | None, task=task) -> None:
                progress.update(task, completed=done, total=total)

            files.append(_fetch_part(name, f"{part}.gz", expected, folder, mirrors, advance))
    return files


def _fetch_part(
    name: str, file: str, sha256: str, folder: Path, mirrors: Sequence[str], advance: Advance = lambda done, total: None
) -> Path:
    place = folder / file
    with contextlib.suppress(DataError):  # a damaged file is fetched again
        if place.exists() and digest(place) == sha256:
            return place
    failures = []
    for mirror in mirrors:
        address = mirror.rstrip("/") + "/" + file
        # Mirrors may pack the same content differently, so what one began another must not continue.
        partial = folder / f"{file}.{hashlib.sha256(address.encode()).hexdigest()[:8]}.part"
        try:
            download(address, partial, advance)
            found = digest(partial)
            if found != sha256:
                raise DataError(f"its unpacked content has SHA-256 {found}, expected {sha256}")
        except DataError as error:
            # A broken connection leaves a good beginning behind; content that came whole but wrong is of no use.
            if not isinstance(error, InterruptedDownloadError):
                partial.unlink(missing_ok=True)
            failures.append(f"  {address}: {error}")
            continue
        os.replace(partial, place)
        return place
    tried = "\n".join(failures)
    raise DataError(
        f"{name}: {file} could not be fetched.\n{tried}\nPut the files of {name} in a folder and name it with "
        f"--folder or BILAX_DATA, or give another address: bilax data fetch {name} --mirror ADDRESS."
    )


class InterruptedDownloadError(DataError):
    """The connection failed; a later attempt can go on from here."""


def download(address: str, partial: Path, advance: Advance = lambda done, total: None) -> None:
    """Completes `partial` from `address`, going on from what it holds already."""
    problem: Exception | str = ""
    for _ in range(ATTEMPTS):
        try:
            if _continue(address, partial, advance):
                return
            problem = f"the connection was cut after {partial.stat().st_size} bytes"
        except urllib.error.HTTPError as error:
            if error.code == 416 and partial.exists():
                partial.unlink()
                continue
            raise InterruptedDownloadError(f"the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            problem = error
    raise InterruptedDownloadError(f"gave up after {ATTEMPTS} attempts: {problem}")


def _continue(address: str, partial: Path, advance: Advance) -> bool:
    """One request for the rest of the file; tells whether all of it is there now."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if have and not (
            response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        ):
            have = 0  # the server sends the whole file again
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isascii() and length.isdecimal() else None
        check_size(address, total or 0, LARGEST, "has")
        with partial.open("ab" if have else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                have += len(block)
                check_size(address, have, LARGEST, "has more than")
                advance(have, total)
    return total is None or have == total
