"""Downloads from a server on loopback that cuts, lies and is missing."""

import errno
import hashlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from loopback import CONTENT, Server

from config import RunError, UsageError
from fetch import fetch, mirrored, verify


def get(server: Server, path: Path, **more: Any) -> None:
    fetch(f"{server.url}/file", path, lambda *told: None, **more)


def files(path: Path) -> set[str]:
    return {p.name for p in path.iterdir() if not p.name.endswith(".lock")}


def test_a_download_is_whole_and_its_digest_recorded(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int, str]] = []
    fetch(
        f"{server.url}/file", tmp_path / "a", lambda *t: told.append(t), len(CONTENT), hashlib.md5(CONTENT).hexdigest()
    )
    assert (tmp_path / "a").read_bytes() == CONTENT
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (tmp_path / "a.sha256").read_text() == f"{digest}  a\n"
    assert files(tmp_path) == {"a", "a.sha256"}
    assert told[-1] == ("download", 3, 3, "MB of a")
    get(server, tmp_path / "a")  # is there: nothing is asked for
    assert len(server.asked) == 1
    verify(tmp_path / "a", digest)
    with pytest.raises(UsageError, match="has changed since it was downloaded"):
        verify(tmp_path / "a", 64 * "0")


def test_it_goes_on_where_it_was_cut(server: Server, tmp_path: Path) -> None:
    server.cuts = [1_000_000, 500_000]
    get(server, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000000-", "bytes=1500000-"]


def test_a_later_command_goes_on_too(server: Server, tmp_path: Path) -> None:
    server.cuts = [700_000, 1, 1, 1]
    with pytest.raises(RunError, match=r"the connection ended after 700003 of 3000000 bytes.*run again to go on"):
        get(server, tmp_path / "a")
    assert files(tmp_path) == {"a.part", "a.part.tag"}
    get(server, tmp_path / "a")
    assert server.asked[-1] == "bytes=700003-"
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("changed", [True, False])
def test_a_changed_file_and_a_server_without_ranges_start_over(server: Server, tmp_path: Path, changed: bool) -> None:
    server.cuts = [700_000, 0, 0, 0]
    with pytest.raises(RunError):
        get(server, tmp_path / "a")
    if changed:
        server.content, server.tag = CONTENT[::-1], '"two"'
    else:
        server.ranges = False
    get(server, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == server.content


def test_the_wrong_file_is_not_taken(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="announces 3000000 bytes, 2900000 were expected"):
        get(server, tmp_path / "a", size=2_900_000)
    get(server, tmp_path / "near", size=2_980_000)  # within 1 %
    with pytest.raises(RunError, match=r"its md5 is .*, its publishers give 00; it was removed"):
        get(server, tmp_path / "b", md5="00")
    assert files(tmp_path) == {"near", "near.sha256"}


def test_what_is_not_there_is_told_with_its_place(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"/missing: HTTP 404 .*get the file elsewhere as .*/a"):
        fetch(f"{server.url}/missing", tmp_path / "a", lambda *t: None)
    with pytest.raises(RunError, match=r"cannot download http://127.0.0.1:1/x \(.*refused.*put the file at .*/a"):
        fetch("http://127.0.0.1:1/x", tmp_path / "a", lambda *t: None)
    assert "a" not in files(tmp_path)


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.faults = [503, 429]
    get(server, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    server.faults = [500] * 9
    with pytest.raises(RunError, match=r"cannot download .* \(HTTP 500 Internal Server Error\); run again"):
        get(server, tmp_path / "b")


def test_without_a_length_only_a_digest_can_tell_a_cut(server: Server, tmp_path: Path) -> None:
    server.length = False
    with pytest.raises(RunError, match="does not say how long the file is"):
        get(server, tmp_path / "a")
    server.cuts = [1000]
    with pytest.raises(RunError, match="its publishers give"):
        get(server, tmp_path / "a", md5=hashlib.md5(CONTENT).hexdigest())
    get(server, tmp_path / "a", md5=hashlib.md5(CONTENT).hexdigest())
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_full_disk_keeps_what_arrived(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(RunError, match=r"needs 0.0 GB, the disk has 0.0 GB left"):
            get(server, tmp_path / "a")
    real = Path.open

    class Full:
        """A file that takes a million bytes."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            if self.file.tell() + len(data) > 2_000_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(data))

    def opened(path: Path, mode: str = "r", **rest: Any) -> Any:
        file = real(path, mode, **rest)
        return Full(file) if path.name == "a.part" and mode in ("wb", "r+b") else file

    with monkeypatch.context() as m:
        m.setattr(Path, "open", opened)
        with pytest.raises(RunError, match=r"/a: cannot be written \(No space left on device\); what arrived is kept"):
            get(server, tmp_path / "a")
    assert files(tmp_path) == {"a.part", "a.part.tag"}
    get(server, tmp_path / "a")
    assert server.asked[-1] == "bytes=1048576-"
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_several_processes_fetch_once(server: Server, tmp_path: Path) -> None:
    threads = [threading.Thread(target=get, args=(server, tmp_path / "a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_mirror_stands_in_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISSLIGHT_MIRROR", "http://127.0.0.1:9/course/")
    assert mirrored("https://example.org/mae/x.pth") == "http://127.0.0.1:9/course/mae/x.pth"
    monkeypatch.setenv("BISSLIGHT_MIRROR", "ftp://x")
    with pytest.raises(UsageError, match="is not an http or https address"):
        mirrored("https://example.org/x")
    monkeypatch.setenv("BISSLIGHT_MIRROR", "http://")
    with pytest.raises(UsageError, match="is not an http or https address"):
        mirrored("https://example.org/x")
