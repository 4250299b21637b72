"""Downloads that are whole or not there: resumed after a cut, checked for length and digest, renamed into place last.

    PATH              exists only when the whole file arrived and passed its checks
    PATH.part         what has arrived so far; PATH.part.tag says which version of the file it is a part of
    PATH.sha256       the digest recorded when it arrived, `verify`-ed before each use

The downloads of torch.hub, torchvision and pooch start over after a cut, which hurts at 2.6 GB; hence our own.
`$BISSLIGHT_MIRROR`, a URL, stands in for the scheme and host of every address: a course's own server, say.
"""

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from config import RunError, UsageError
from runtime import sha256, write_atomic

ATTEMPTS, PAUSE, TIMEOUT, BLOCK = 4, 1.0, 30, 1 << 20
Report = Callable[[str, int, int, str], None]  # (stage, done, total, text), in MB


def fetch(url: str, path: Path, report: Report, size: int | None = None, md5: str | None = None) -> None:
    """Make `path` a whole copy of `url`, unless it exists.

    Args:
        size: bytes that the file is known to have, within 1 %.
        md5: digest that its publishers give.
    Raises RunError (unreachable, cut again and again, another file, no room), each time saying what to do. What has
    arrived is kept for the next attempt, unless it is wrong.
    """
    url = mirrored(url)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(part):
            if path.exists():  # another process was faster
                return
            receive(url, path, part, report, size, md5)
            if md5 and (found := digest(part, "md5")) != md5:
                raise wrong(part, f"{url}: its md5 is {found}, its publishers give {md5}; it was removed")
            write_atomic(path.with_name(path.name + ".sha256"), f"{sha256(part)}  {path.name}\n")
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
            for done in (tag_of(part), lock_of(part)):  # whoever waits for the lock finds the file first
                done.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror or error}); what arrived is kept") from error


def receive(url: str, path: Path, part: Path, report: Report, size: int | None, md5: str | None) -> None:
    """Fill `part` to its end, going on where a connection broke."""
    reason = ""
    for attempt in range(ATTEMPTS):
        time.sleep(attempt * PAUSE)
        have = part.stat().st_size if part.exists() else 0
        tag = tag_of(part).read_text() if have and tag_of(part).exists() else ""
        request = urllib.request.Request(url, headers={"User-Agent": "bisslight"})
        if tag:  # go on only with the very same version of the file
            request.add_header("Range", f"bytes={have}-")
            request.add_header("If-Range", tag)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                total, start = announced(response)
                if start not in (0, have):
                    raise wrong(part, f"{url}: the server went on at byte {start}, not {have}; run again to start over")
                if total is None and not md5:
                    raise RunError(f"{url}: the server does not say how long the file is; get it elsewhere as {path}")
                if size and total and abs(total - size) > size / 100:
                    raise wrong(part, f"{url}: announces {total} bytes, {size} were expected; not taken")
                free = shutil.disk_usage(part.parent).free
                if total and free < total - start:
                    what = f"{path} needs {(total - start) / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB left"
                    raise RunError(f"{what}; make room or set TORCH_HOME or --data-root to another disk")
                tag_of(part).write_text(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
                with part.open("r+b" if start else "wb") as file:
                    file.truncate(start)
                    file.seek(start)
                    got = copy(response, file, start, total, path.name, report)
            if got == (total or got):
                return
            reason = f"the connection ended after {got} of {total} bytes"
        except urllib.error.HTTPError as error:
            if error.code == 416:  # asked for bytes beyond the end: not this file's part
                part.unlink(missing_ok=True)
            elif error.code != 429 and error.code < 500:
                raise RunError(f"{url}: HTTP {error.code} {error.reason}; get the file elsewhere as {path}") from error
            reason = f"HTTP {error.code} {error.reason}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            cause = getattr(error, "reason", error)
            reason = str(cause) or type(error).__name__
            if isinstance(cause, socket.gaierror | ConnectionRefusedError):
                break  # no network, or no server: trying again at once does not help
    raise RunError(f"cannot download {url} ({reason}); run again to go on, or put the file at {path} yourself")


def announced(response: http.client.HTTPResponse) -> tuple[int | None, int]:
    """(length of the whole file, where this answer starts) from Content-Range or Content-Length."""
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range") or "")
    if response.status == 206:
        return (int(span[2]), int(span[1])) if span else (None, -1)
    length = response.headers.get("Content-Length") or ""
    return int(length) if length.isdecimal() else None, 0


def copy(
    response: http.client.HTTPResponse, file: BinaryIO, start: int, total: int | None, name: str, report: Report
) -> int:
    """Append the answer's body; returns the length reached. A cut connection ends it early, as if at an end."""
    got, told = start, start
    while True:
        try:
            block = response.read(BLOCK)
        except (http.client.HTTPException, OSError):  # a reset, a timeout, a TLS error
            return got
        if not block:
            return got
        file.write(block)
        got += len(block)
        if total and (got == total or got - told >= max(total // 50, BLOCK)):
            told = got
            report("download", -(-got // 10**6), -(-total // 10**6), f"MB of {name}")


def wrong(part: Path, what: str) -> RunError:
    """Remove what is not the file asked for."""
    part.unlink(missing_ok=True)
    tag_of(part).unlink(missing_ok=True)
    return RunError(what)


def tag_of(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def lock_of(part: Path) -> Path:
    return part.with_name(f".{part.name}.lock")


@contextlib.contextmanager
def locked(part: Path) -> Iterator[None]:
    """One process at a time fetches a file; the others wait for it (not on Windows, which has no flock)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with lock_of(part).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def mirrored(url: str) -> str:
    """The address on `$BISSLIGHT_MIRROR`, where that is set (UsageError where it is no http address)."""
    mirror = os.environ.get("BISSLIGHT_MIRROR")
    if not mirror:
        return url
    if urlsplit(mirror).scheme not in ("http", "https") or not urlsplit(mirror).netloc:
        raise UsageError(f"BISSLIGHT_MIRROR {mirror}: is not an http or https address")
    return mirror.rstrip("/") + urlsplit(url).path


def verify(path: Path, found: str) -> None:
    """Refuse (UsageError) a file whose sha256 `found` is no longer the one recorded when it was downloaded."""
    record = path.with_name(path.name + ".sha256")
    if record.exists() and (told := record.read_text().split()) and told[0] != found:
        raise UsageError(f"{path}: has changed since it was downloaded; delete it, it will be fetched again")


def digest(path: Path, name: str) -> str:
    """Digest of a file by the hash of that name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, name).hexdigest()
