"""Program: files: read with a remedy, written whole or not at all, digests, locked directories."""

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from config import Record
from support.errors import RunError, UsageError, as_read_error, as_usage_error
from support.processes import process_0_says, stop_if_asked, world

if sys.platform != "win32":
    import fcntl

LOG = logging.getLogger("bisslight")
WAITING = "%s: another process is at work in it, waiting for that"


def read_json(path: Path, remedy: str = "give the command that wrote it again") -> Record:
    """Read a JSON object. Raises UsageError, with this remedy, where it is missing or damaged."""
    if not path.exists():
        raise UsageError(f"there is no {path}; {remedy}")
    with as_read_error(str(path), remedy):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no values by name")
        return content


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file at once, or leave it as it was: write another file, then rename that.

    Of torchrun's processes only the first one writes. Raises RunError where it cannot.
    """
    if world().rank > 0:
        return
    if isinstance(content, str):
        content = content.encode()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that was killed as it wrote
        with temporary.open("xb") as file:  # not through a link that somebody has put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or the name could reach the disk before the content does
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # there may be none, or the disk may be read-only
            temporary.unlink()
        remedy = "make room or allow it, then give the same command again"
        raise RunError(f"{path}: cannot be written ({error.strerror}); {remedy}") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Busy(UsageError):
    """Another process is at work in the directory."""


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Make a directory, and lock it while the block runs; one process, or one torchrun, at a time.

    The lock ends with this process, even by kill -9; a file system without such locks is refused
    (UsageError). If another process has the lock, wait until that lets it go, or without `wait`
    raise Busy. Raises Stopped after a signal.
    """
    lock = FileLock(path / ".lock")
    if not try_to_take(lock, path):  # another process has it
        if not wait:
            raise Busy(
                f"--out {path}: another process is at work in it; wait, or give another --out"
            )
        LOG.info(WAITING, path)
        while not try_to_take(lock, path):
            stop_if_asked()
            time.sleep(0.5)
    try:
        yield
    finally:
        lock.release()  # does nothing in torchrun's other processes, which do not have it


def try_to_take(lock: FileLock, path: Path) -> bool:
    """Make the directory `path` and try to take its lock; returns whether it is ours.

    Of torchrun's processes the first one takes it for all, and all return the same.
    """
    if world().rank == 0:
        with as_usage_error(f"--out {path}: cannot be made or locked"), suppress(Timeout):
            path.mkdir(parents=True, exist_ok=True)
            check_locks(path / ".lock")
            lock.acquire(timeout=0)  # Timeout at once where another process has it
    return process_0_says(lock.is_locked)


def check_locks(lock: Path) -> None:
    """Refuse (UsageError) a file system whose locks do not end with their process.

    There, filelock would use the file itself as a lock. A kill leaves that file, and from another
    machine nobody can tell that its owner is dead, so the next run would wait for ever.
    """
    if sys.platform == "win32":  # it has no flock, and its locks end with a process
        return
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_UN)  # a mere trial: this process has no lock to lose
        except OSError as error:
            raise UsageError(
                f"{lock}: its file system has no flock ({error.strerror}), so a run that is "
                "killed would stay locked; take a folder on another disk, such as a local one"
            ) from error
