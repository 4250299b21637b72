"""`bisslight data`: what is there, what is wrong with it, and what a download leaves."""

import hashlib
import tarfile
from pathlib import Path
from typing import Any

import pytest
from copies import make, picture
from extras.datasets import check, download, list_all
from loopback import Server
from PIL import Image

import cli
from support.benchmarks import BENCHMARKS, read_lists
from support.errors import RunError, UsageError


def test_what_is_there_is_listed_with_its_terms(tmp_path: Path) -> None:
    make("dtd", tmp_path)
    (tmp_path / "imagenet").mkdir()
    rows = {row["name"]: row for row in list_all(tmp_path)}
    there = {name for name, row in rows.items() if row["state"] == "there"}
    assert rows.keys() == {*BENCHMARKS, "imagenet"} and there == {"dtd", "imagenet"}
    assert all(row["terms"] for row in rows.values())


def test_check_counts_what_is_missing_and_names_what_is_damaged(
    tmp_path: Path, capsys: Any
) -> None:
    base = make("pets", tmp_path)
    for name in ("Pug_1", "Pug_2"):
        (base / f"images/{name}.jpg").write_bytes(b"")
    for name in ("great_cat_3", "great_cat_5"):
        (base / f"images/{name}.jpg").unlink()
    found = check("pets", tmp_path)
    assert [found[key] for key in ("listed", "absent", "images")] == [16, 2, 14]
    subset, missing, *damaged = found["problems"]
    assert "16 of 7349" in subset["problem"] and missing["problem"].startswith("2 ")
    assert Path(missing["first"]).name == "great_cat_3.jpg"
    assert [Path(row["problem"].partition(":")[0]).stem for row in damaged] == ["Pug_1", "Pug_2"]
    assert check("pets", tmp_path, partial=True)["problems"] == damaged
    line = ["data", "check", "pets", "--data-root", str(tmp_path), "--json"]
    assert cli.run([*line, "--partial"]) == 1
    for row in damaged:
        Path(row["problem"].partition(":")[0]).unlink()
    assert cli.run([*line, "--partial"]) == 0


def drawn(path: Path, text: str) -> None:
    """An image that is like no other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (8, 8), hashlib.sha256(text.encode()).digest() * 6).save(path)


def test_a_pool_and_class_folders_are_checked_to_the_last_image(tmp_path: Path) -> None:
    """A fault of the folders does not hide a damaged image."""
    for file in ("pool/1.png", "pool/deep/2.JPEG", "pool/.hidden/3.png"):
        picture(tmp_path / file)
    assert check(f"{tmp_path}/pool", tmp_path)["images"] == 2
    for i, kind in enumerate("ab" * 10):
        drawn(tmp_path / "classes" / kind / f"{i}.png", f"{i}")
    counts = {"classes": 2, "train": 14, "val": 2, "test": 4, "images": 20}
    whole = check(f"folder:{tmp_path}/classes", tmp_path)
    assert counts.items() <= whole.items() and whole["problems"] == []
    assert check(f"{tmp_path}/classes", tmp_path) == whole | {"name": f"{tmp_path}/classes"}
    picture(tmp_path / "classes/c/small.png")
    (tmp_path / "classes/a/0.png").write_bytes(b"")
    found = check(f"folder:{tmp_path}/classes", tmp_path)
    small, damaged = [row["problem"] for row in found["problems"]]
    assert check(f"{tmp_path}/classes", tmp_path)["problems"] == found["problems"]
    assert "c has 1" in small and "a/0.png" in damaged and found["images"] == 21


def test_other_files_twins_and_classes_without_a_test_are_told(tmp_path: Path) -> None:
    for part, kinds in (("train", "abc"), ("test", "ab")):
        for kind in kinds:
            for i in range(3):
                drawn(tmp_path / part / kind / f"{i}.png", f"{part}{kind}{i}")
    (tmp_path / "train/b/twin.png").write_bytes((tmp_path / "train/a/0.png").read_bytes())
    for name in ("train/a/1.heic", "train/c/2.gif", ".hidden.heic", ".hidden/3.gif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = check(f"folder:{tmp_path}", tmp_path)
    assert found["left out"].startswith("2 ") and ".heic" in found["left out"]
    twins, missing = found["problems"]
    assert "train/a/0.png" in twins["first"] and "train/b/twin.png" in twins["first"]
    assert missing["problem"].endswith(" c")


def test_a_name_that_is_nothing_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "imagenet/val/n01/1.JPEG")
    for wrong, message in (("pet", "pets"), ("imagenet", "imagenet/train")):
        with pytest.raises(UsageError, match=message):
            check(wrong, tmp_path)


def serve(monkeypatch: pytest.MonkeyPatch, archives: dict[str, str]) -> None:
    """Let pets come from these URLs, with these digests."""
    monkeypatch.setitem(BENCHMARKS, "pets", BENCHMARKS["pets"]._replace(archives=archives))


@pytest.mark.filterwarnings("ignore:.*tar.*:DeprecationWarning")  # torchvision, Python 3.12
def test_a_download_is_whole_or_not_there(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    made, root = make("pets", tmp_path / "made"), tmp_path / "root"
    for part in ("images", "annotations"):
        with tarfile.open(tmp_path / f"{part}.tar.gz", "w:gz") as tar:
            tar.add(made / part, part)
        server.files[f"{part}.tar.gz"] = (tmp_path / f"{part}.tar.gz").read_bytes()
    server.files["list.mat"] = b"is put there as it is"
    good = {f"{server.url}/{x}": hashlib.md5(y).hexdigest() for x, y in server.files.items()}
    for bad in ("images.tar.gz", "gone.tar"):  # of another digest, and not on the server
        serve(monkeypatch, good | {f"{server.url}/{bad}": 32 * "0"})
        with pytest.raises(RunError, match=f"curl -C - -O {server.url}/{bad}"):
            download("pets", root)
    serve(monkeypatch, good)
    assert not (root / "oxford-iiit-pet").exists()
    assert download("pets", root)["path"] == str(root / "oxford-iiit-pet")
    assert [path.name for path in root.iterdir()] == ["oxford-iiit-pet"]  # no archive is left
    assert len(read_lists("pets", root / "oxford-iiit-pet").parts["test"]) == 8
    assert (root / "oxford-iiit-pet/list.mat").read_bytes() == server.files["list.mat"]
    for name, message in {"pets": "is there already", "imagenet": "is at image-net.org"}.items():
        with pytest.raises(UsageError, match=message):
            download(name, root)
