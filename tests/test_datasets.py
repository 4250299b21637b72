"""`bisslight data`: what is wrong with a data set, and what a download leaves."""

import hashlib
import json
import re
import shutil
import tarfile
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from copies import make
from loopback import Server
from torchvision.datasets import OxfordIIITPet
from toy import done, photos_in, refusal, run

import data
from extras.datasets import check
from support.benchmarks import BENCHMARKS, download, open_pool, open_task
from support.errors import RunError, UsageError


def test_check_counts_what_is_missing_and_names_what_is_damaged(tmp_path: Path) -> None:
    base = make("pets", tmp_path)
    for name in ("Pug_1", "Pug_2"):
        (base / f"images/{name}.jpg").write_bytes(b"")
    for name in ("great_cat_3", "great_cat_5"):
        (base / f"images/{name}.jpg").unlink()
    found = check("pets", tmp_path)
    missing, *damaged = found.problems
    assert "test have (6, 2, 6) images" in missing
    assert found.images == 14
    assert [Path(line.partition(":")[0]).stem for line in damaged] == ["Pug_1", "Pug_2"]
    assert sorted(check("pets", tmp_path, partial=True).problems) == damaged


def test_a_pool_and_class_folders_are_checked_to_the_last_image(tmp_path: Path) -> None:
    """A fault of the folders does not hide a damaged image. In a pool, equal images are none."""
    photos_in(tmp_path / "pool", ["1.png", "deep/2.JPEG", ".hidden/3.png"])
    shutil.copy(tmp_path / "pool/1.png", tmp_path / "pool/deep/2.JPEG")
    pool = check(f"{tmp_path}/pool", tmp_path)
    assert (pool.images, pool.problems) == (2, [])
    photos_in(tmp_path / "classes", [f"{kind}/{k}.png" for kind in "ab" for k in range(10)])
    whole = check(f"folder:{tmp_path}/classes", tmp_path)
    assert (whole.images, whole.problems) == (20, [])
    (tmp_path / "classes/c").mkdir()
    (tmp_path / "classes/a/0.png").write_bytes(b"")
    found = check(f"{tmp_path}/classes", tmp_path)
    lacking, damaged = found.problems
    assert "no image for train of class c" in lacking
    assert "a/0.png: cannot be read" in damaged and found.images == 20


def test_images_that_parts_share_and_copies_in_a_part_are_told(tmp_path: Path) -> None:
    """Of many copies a line names three; JSON has all."""
    photos_in(tmp_path, [f"{part}/{kind}/{k}.png" for part in ("test", "train", "val")
                         for kind in "ab" for k in range(5)])  # fmt: skip
    pairs = [(f"train/a/{k}.png", f"train/a/twin{k}.png") for k in range(3)]
    pairs += [("train/b/4.png", "test/b/0.png")]
    for one, two in pairs:
        shutil.copy(tmp_path / one, tmp_path / two)
    shared, copies, *_, end = said_of_problem(f"data check {tmp_path}").splitlines()
    assert shared.startswith("train and test share 1 image") and "test/b/0.png" in shared
    assert "train/a/2.png = train/a/twin2.png" in copies and "test/b/0.png" not in copies
    assert end == "2 problems in 33 images"
    found = json.loads(said_of_problem(f"data check {tmp_path} --json"))
    assert found["copies"] == [[f"{tmp_path}/{one}", f"{tmp_path}/{two}"] for one, two in pairs]


def test_a_flat_folder_is_a_pool_but_a_problem_where_it_is_named_as_a_labelled_one(
    tmp_path: Path,
) -> None:
    photos_in(tmp_path / "flat", [f"{k}.png" for k in range(5)])
    assert "no problems in 5 images" in done(f"data check {tmp_path}/flat")
    assert "no problems in 5 images" in done(f"data check folder:{tmp_path}/flat --pool")
    said = said_of_problem(f"data check folder:{tmp_path}/flat")
    assert f"{tmp_path}/flat/CLASS/" in said and "1 problem in 5 images" in said


def test_folders_of_a_pool_are_no_classes_where_it_is_asked_for(tmp_path: Path) -> None:
    photos_in(tmp_path / "days", ["monday/0.png", "tuesday/0.png"])
    assert "no image for val" in said_of_problem(f"data check {tmp_path}/days")
    assert "images without labels: 2" in done(f"data check {tmp_path}/days --pool")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/back").symlink_to(".")
    assert "has no images" in said_of_problem(f"data check {tmp_path}/links")
    assert "--pool: is for a folder of images" in refusal("data check omniglot:Greek --pool")


def said_of_problem(line: str) -> str:
    """What `data check` says of a data set with a problem: stdout."""
    code, out, err = run(line)
    assert (code, err) == (1, "")
    return out


def test_handwriting_is_checked_by_its_name() -> None:
    """Greek has 24 characters, each written by 20 people; the pool has 129 of 20."""
    said = done("data check omniglot:Greek")
    assert "24 classes, 20 images each" in said and "no problems in 480 images" in said
    assert "no problems in 2580 images" in done("data check omniglot")
    assert "did you mean omniglot:Greek?" in refusal("data check omniglot:Grek")


@pytest.mark.filterwarnings("ignore:.*tar.*:DeprecationWarning")  # torchvision, Python 3.12
def test_a_download_is_verified_and_looked_through(
    server: Server, tmp_path: Path, monkeypatch: Any
) -> None:
    made, root = make("pets", tmp_path / "made"), tmp_path / "root"
    sources = []
    for part in ("images", "annotations"):
        with tarfile.open(tmp_path / f"{part}.tar.gz", "w:gz") as tar:
            tar.add(made / part, part)
        content = server.files[f"{part}.tar.gz"] = (tmp_path / f"{part}.tar.gz").read_bytes()
        sources.append((f"{server.url}/{part}.tar.gz", hashlib.md5(content).hexdigest()))
    monkeypatch.setattr(OxfordIIITPet, "_RESOURCES", [(sources[0][0], 32 * "0")])
    with pytest.raises(RunError, match=r"pets: .*give this command again"):
        download("pets", root)
    monkeypatch.setattr(OxfordIIITPet, "_RESOURCES", sources)
    parts, _ = BENCHMARKS["pets"].read(download("pets", root))
    assert len(parts["test"]) == 8
    with pytest.raises(UsageError, match="cannot be downloaded"):
        download("imagenet", root)
    for wrong in ("pet", "imagenet", "flowers"):
        with pytest.raises(UsageError, match=f"{wrong}: there is no folder"):
            check(wrong, root)


@pytest.mark.parametrize("look", [check, partial(open_task, seed=0), open_pool])
def test_a_file_is_no_folder_of_images(look: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*photos\.zip"):
        look(str(tmp_path / "photos.zip"), root=tmp_path)
    (tmp_path / "photos.zip").touch()
    with pytest.raises(UsageError, match=r"photos\.zip is a file"):
        look(str(tmp_path / "photos.zip"), root=tmp_path)


def test_the_guides_lines_divide_patients_and_leave_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each patient is in one part, also one who is in two classes; no image is lost.

    Neither where patient 1 has an image 2_0.png and patient 1_2 an image 0.png, nor in a second
    division, which would put patients into other parts.
    """
    monkeypatch.chdir(tmp_path)
    patients = [f"{p}{more}" for p in range(20) for more in ("", "_2")]
    names = [
        f"{kind}/{patient}/{k}.png"
        for kind in ("cat", "dog")
        for patient in patients
        for k in ("0", "1", "2_0")
    ]
    photos_in(tmp_path / "PHOTOS", names)
    guide = (Path(data.__file__).parent / "docs/guide.md").read_text()
    assert "\n### Keep each patient, film or object in one part\n" in guide
    (code,) = re.findall(r"```python\n(import random\n.*?)```", guide, re.DOTALL)
    exec(code, {})
    found = check("folder:DIVIDED", tmp_path)
    assert found.problems == [] and found.images == len(names)
    parts = defaultdict[str, set[str]](set)  # of each patient
    for file in Path("DIVIDED").glob("*/*/*/*.png"):
        _, part, _, patient, _ = file.parts
        parts[patient].add(part)
    assert all(len(of_patient) == 1 for of_patient in parts.values())
    sizes = Counter(part for (part,) in parts.values())
    assert sizes == {"train": 24, "val": 8, "test": 8}
    with pytest.raises(FileExistsError, match="DIVIDED"):
        exec(code, {})
