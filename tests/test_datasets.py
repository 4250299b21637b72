"""`bisslight data`: what is wrong with a data set, and what a download leaves."""

import hashlib
import json
import os
import re
import shutil
import tarfile
import unicodedata
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from copies import make, picture
from loopback import Server
from PIL import Image
from torchvision.datasets import OxfordIIITPet
from toy import done, photos_in, refusal, run

import data
from config import AlignConfig, FinetuneConfig
from extras.datasets import check
from support.benchmarks import BENCHMARKS, download, open_pool, open_task
from support.checks import find_doubts
from support.errors import RunError, UsageError
from support.experiment import look_at_data, look_at_pool


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
    # torchvision has the names of the two classes alone, so a run refuses these lists.
    unnamed, *others = check("pets", tmp_path, partial=True).problems
    assert "its lists name 2 classes, and number them up to 29" in unnamed and others == damaged


def test_classes_that_a_split_of_a_subset_lacks_are_told_by_check_and_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """dtd: half of the test images are of a class without a training image."""
    make("dtd", tmp_path)
    whole = open_task("dtd", 0, tmp_path, partial=True)
    assert check("dtd", tmp_path, partial=True).problems == []
    for split in (whole.train, whole.val):
        for file in map(Path, split.images):
            if file.parent.name == "banded":
                file.unlink()
    told = [f"{name} has no image of class banded" for name in ("train", "val")]
    assert check("dtd", tmp_path, partial=True).problems == told
    cfg = FinetuneConfig(backbone="vit_mini", dataset="dtd", partial=True, data_root=tmp_path)
    task = open_task("dtd", 0, tmp_path, partial=True)
    look_at_data(cfg, task, None)
    assert caplog.messages == [f"dtd: {line}" for line in told]
    caplog.clear()
    look_at_data(cfg.replace(partial=False), task, None)  # such a one is not opened
    assert caplog.messages == []


@pytest.mark.parametrize("is_pool", [False, True])
def test_black_images_of_a_pool_or_benchmark_are_told_by_check_and_run(
    is_pool: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers 0 and 1 that were saved as whole ones, by whoever made the copy smaller."""
    images = make("dtd", tmp_path) / "dtd/images"
    name = f"{images}" if is_pool else "dtd"

    def told() -> list[str]:
        """What a check finds, which a run warns of."""
        caplog.clear()
        if is_pool:
            look_at_pool(name, open_pool(name, tmp_path))
        else:
            cfg = FinetuneConfig(backbone="vit_mini", dataset="dtd", partial=True)
            look_at_data(cfg, open_task("dtd", 0, tmp_path, partial=True), None)
        problems = check(name, tmp_path, partial=not is_pool, as_pool=is_pool).problems
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [line.removeprefix("dtd: ") for line in warned] == problems
        return problems

    assert told() == []
    for file in images.rglob("*.jpg"):
        Image.new("RGB", (20, 24), (1, 1, 1)).save(file)
    black = [line.partition(":")[0] for line in told() if "so the images are black" in line]
    assert black == (["pool"] if is_pool else ["train", "val", "test"])


def test_images_that_two_splits_of_a_subset_share_are_told_by_check_and_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("dtd", tmp_path)
    task = open_task("dtd", 0, tmp_path, partial=True)
    shutil.copy(str(task.train.images[0]), str(task.test.images[0]))
    (told,) = check("dtd", tmp_path, partial=True).problems
    assert told.startswith("train and test have an image in common")
    look_at_data(FinetuneConfig(backbone="vit_mini", dataset="dtd", partial=True), task, None)
    assert caplog.messages == [f"dtd: {told}"]


def test_of_a_subset_of_voc_a_check_tells_what_the_map_is_of(tmp_path: Path) -> None:
    """Image i of a part has object i of four, so 16 of 20 classes lack; nobody is in each image."""
    base = make("voc07", tmp_path)
    lists = base / "VOC2007/ImageSets/Main"
    of_test = [line for line in check("voc07", tmp_path, partial=True).problems if "test" in line]
    assert of_test == [
        "test has no image of class bottle, bus, car, cat, chair and 11 more;"
        " its mAP is the mean of 4 of 20 classes"
    ]
    file = lists / "aeroplane_test.txt"
    file.write_text(file.read_text().replace("-1", " 1").replace(" 0", " 1"))
    found = check("voc07", tmp_path, partial=True).problems
    assert "test: no image is without class aeroplane, so any network finds it" in found


def drawn(path: Path, text: str) -> None:
    """An image that is like no other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (8, 8), hashlib.sha256(text.encode()).digest() * 6).save(path)


def test_a_pool_and_class_folders_are_checked_to_the_last_image(tmp_path: Path) -> None:
    """A fault of the folders does not hide a damaged image. In a pool, equal images are none."""
    for file in ("pool/1.png", "pool/deep/2.JPEG", "pool/.hidden/3.png"):
        picture(tmp_path / file)
    shutil.copy(tmp_path / "pool/1.png", tmp_path / "pool/deep/2.JPEG")
    pool = check(f"{tmp_path}/pool", tmp_path)
    assert (pool.images, pool.problems) == (2, [])
    for i, kind in enumerate("ab" * 10):
        drawn(tmp_path / "classes" / kind / f"{i}.png", f"{i}")
    whole = check(f"folder:{tmp_path}/classes", tmp_path)
    assert (whole.images, whole.problems) == (20, [])
    picture(tmp_path / "classes/c/small.png")
    (tmp_path / "classes/a/0.png").write_bytes(b"")
    found = check(f"{tmp_path}/classes", tmp_path)
    no_val, no_test, damaged = found.problems
    assert "no image for val of class c" in no_val and "for test of class c" in no_test
    assert "a/0.png: cannot be read" in damaged and damaged.endswith("; replace or remove it")
    assert str(found).splitlines()[:3] == found.problems and found.images == 21
    (tmp_path / "alone").mkdir()
    (tmp_path / "classes").rename(tmp_path / "alone/train")
    assert len(check(f"{tmp_path}/alone", tmp_path).problems) == 3


def test_a_folder_without_images_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check(f"folder:{tmp_path}", tmp_path).problems
    assert problem == (
        f"{tmp_path}: has no images; put labelled ones into {tmp_path}/CLASS, a folder for each"
        f" class, and those of a pool, which need no labels, into {tmp_path}"
    )
    assert check(f"folder:{tmp_path}", tmp_path).holds == ["images: 0"]  # not: "a pool"
    (tmp_path / "1.heic").touch()
    (problem,) = check(f"{tmp_path}", tmp_path).problems
    assert problem.endswith("has no images, but 1 .heic; convert images to JPEG or PNG")
    (tmp_path / "1.heic").rename(tmp_path / "photos.7z")
    (problem,) = check(f"{tmp_path}", tmp_path).problems
    assert problem.endswith("has no images, but 1 .7z; unpack archives")


def test_images_beside_class_folders_are_opened_too(tmp_path: Path) -> None:
    """They are none of the data set, but `--pool` takes them where it is given this folder."""
    for k in range(5):
        for kind in "ab":
            drawn(tmp_path / kind / f"{k}.png", f"{kind}{k}")
    drawn(tmp_path / "beside.png", "beside")
    assert check(f"{tmp_path}", tmp_path).problems == []
    (tmp_path / "beside.png").write_bytes(b"no picture")
    (problem,) = check(f"{tmp_path}", tmp_path).problems
    assert problem.startswith(f"{tmp_path}/beside.png: cannot be read")


def test_all_that_people_bring_along_is_told_at_once(tmp_path: Path) -> None:
    for part, kinds in (("train", ("a", "b", "c1", "É")), ("test", ("a", "b", "C1"))):
        for kind in kinds:
            for i in range(3):
                drawn(tmp_path / part / kind / f"{i}.png", f"{part}{kind}{i}")
    drawn(tmp_path / "test" / unicodedata.normalize("NFD", "É") / "0.png", "another")
    for twin in ("train/b/twin.png", "test/a/leak.png"):
        (tmp_path / twin).write_bytes((tmp_path / "train/a/0.png").read_bytes())
    for name in ("train/a/1.heic", "train/c1/2.gif", ".hidden.heic", ".hidden/3.gif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    picture(tmp_path / "train/a/@eaDir/0.png/thumb.jpg")
    (tmp_path / "train/a/folder.png").mkdir()
    (tmp_path / "train/a/link.png").symlink_to("nowhere")
    os.mkfifo(tmp_path / "train/b/fifo.png")
    drawn(tmp_path / "train/b/cut.png", "cut")
    (tmp_path / "train/b/cut.png").write_bytes((tmp_path / "train/b/cut.png").read_bytes()[:-30])
    found = check(f"folder:{tmp_path}", tmp_path)
    assert found.left_out == {".heic": 1, ".gif": 1}
    for told in (
        "no image for test of class c1, É", "no image for train of class C1, E",
        "'C1' and 'c1' look alike", r"'E\u0301' and '\xc9' look alike",
        *(f"{name}.png: cannot be read (no file" for name in ("a/folder", "a/link", "b/fifo")),
        "b/cut.png: cannot be read (image file is truncated",
    ):  # fmt: skip
        assert [line for line in found.problems if told in line], told
    assert [line for line in found.holds if line.startswith("names with accents in the form NFD")]
    (copies,) = (line for line in found.problems if "there twice" in line)
    same = "test/a/leak.png = train/a/0.png = train/b/twin.png (classes a, b; parts test, train)"
    assert copies == f"1 picture is there twice or more: {same}; keep one file of each"


def test_a_picture_that_was_saved_anew_is_a_copy(tmp_path: Path) -> None:
    """Its bytes are others, its pixels are the same; a folder Train alone is a task, too."""
    for kind in "ab":
        for k in range(12):
            drawn(tmp_path / "Train" / kind / f"{k}.png", f"{kind}{k}")
    with Image.open(tmp_path / "Train/a/0.png") as image:
        image.save(tmp_path / "Train/b/anew.png", compress_level=0)
        image.save(tmp_path / "Train/a/as.bmp")
    (copies,) = check(f"{tmp_path}", tmp_path).problems
    assert ": Train/a/0.png = Train/a/as.bmp = Train/b/anew.png (classes a, b; parts" in copies


def test_of_many_copies_the_worst_are_named_and_json_has_all(tmp_path: Path) -> None:
    """Copies in two classes are worse than those in two parts, and these than those in one."""
    photos_in(tmp_path, [f"{part}/{kind}/{k}.png" for part in ("test", "train", "val")
                         for kind in "ab" for k in range(5)])  # fmt: skip
    pairs = {
        "train/a/0.png": ["train/a/x.png"],
        "test/a/1.png": ["test/a/y.png"],
        "train/a/2.png": ["val/a/z.png"],
        "train/b/3.png": ["train/a/w.png"],
        "val/b/4.png": [f"val/b/v{k}.png" for k in range(4)],
    }
    for file, copies in pairs.items():
        for copy in copies:
            (tmp_path / copy).write_bytes((tmp_path / file).read_bytes())
    said, *others = said_of_problem(f"data check {tmp_path}").splitlines()
    assert "1 problem in 38 images" in others
    assert said == (
        "5 pictures are there twice or more: train/a/w.png = train/b/3.png (classes a, b),"
        " train/a/2.png = val/a/z.png (parts train, val), test/a/1.png = test/a/y.png and 2 more"
        " (--json names all); keep one file of each"
    )
    found = json.loads(said_of_problem(f"data check {tmp_path} --json"))
    every = [sorted(str(tmp_path / file) for file in (x, *y)) for x, y in pairs.items()]
    assert sorted(group["files"] for group in found["copies"]) == sorted(every)
    two_parts = [str(tmp_path / file) for file in ("train/a/2.png", "val/a/z.png")]
    of_both = {"files": two_parts, "classes": ["a"], "parts": ["train", "val"]}
    assert of_both in found["copies"]
    for copy in ("x", "w", "../../test/a/y", "../../val/a/z"):
        (tmp_path / f"train/a/{copy}.png").unlink()
    (said, *_) = check(f"{tmp_path}", tmp_path).problems
    assert (
        "1 picture is there twice or more: val/b/4.png = val/b/v0.png = val/b/v1.png = 2 more; keep"
        in said
    )


def test_a_class_that_is_called_as_an_image_is_checked_as_one(tmp_path: Path) -> None:
    """A folder c.jpg inside of a class is still a fault."""
    for kind in ("a", "c.jpg"):
        for k in range(5):
            drawn(tmp_path / kind / f"{k}.png", f"{kind} {k}")
    found = check(f"folder:{tmp_path}", tmp_path)
    assert (found.images, found.problems) == (10, [])
    (tmp_path / "a/5.png").mkdir()
    (problem,) = check(f"folder:{tmp_path}", tmp_path).problems
    assert problem.startswith(f"{tmp_path}/a/5.png: cannot be read (no file, but a folder")


def test_what_there_is_is_said_by_class_and_part(tmp_path: Path) -> None:
    for i in range(10):
        drawn(tmp_path / "set" / "ab"[i % 2] / f"{i}.png", f"{i}")
    (tmp_path / "set/a/1.txt").touch()
    (tmp_path / "set/a/old.zip").touch()
    assert str(check(f"{tmp_path}/set", tmp_path)).splitlines() == [
        f"folder:{tmp_path}/set",
        "2 classes, 10 images: a 5, b 5; train 6, val 2, test 2",
        "drawn image by image: train, val, test. If several images show one patient, film or"
        " object, divide them yourself, as docs/guide.md shows",
        "left out: 1 .txt, 1 .zip; unpack archives if their images are needed",
        "no problems in 10 images",
    ]
    assert str(check(f"{tmp_path}/set/a", tmp_path)).splitlines() == [
        f"folder:{tmp_path}/set/a",
        "a pool, since it has no folders; images without labels: 5. A labelled data set has a"
        " folder for each of two or more classes: a/CLASS/IMAGE",
        "left out: 1 .txt, 1 .zip; unpack archives if their images are needed",
        "no problems in 5 images",
    ]
    (tmp_path / "set/c").symlink_to("nowhere")
    (fault,) = check(f"{tmp_path}/set", tmp_path).problems
    assert f"{tmp_path}/set/c: is a link to nowhere" in fault


def test_a_folder_of_one_class_or_of_other_parts_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    """One class folder is not none, and images of refused parts are not unlabelled."""
    drawn(tmp_path / "one/daisy/0.png", "0")
    said = str(check(f"{tmp_path}/one", tmp_path))
    assert "a pool, since daisy is its only folder; images without labels: 1. A labelled" in said
    assert said.endswith("no problems in 1 image")
    for k, part in enumerate(("Training", "Testing")):
        for kind in "ab":
            drawn(tmp_path / "two" / part / kind / "0.png", f"{k}{kind}")
    problem, _, holds, end = str(check(f"{tmp_path}/two", tmp_path)).splitlines()
    assert "holds Testing, Training" in problem
    assert holds == "images: 4; if they are to have no labels, add --pool"
    assert end == "1 problem in 4 images"


@pytest.mark.parametrize("inside", ["PHOTOS", "unpacked/PHOTOS", "PHOTOS/train"])
def test_a_folder_that_wraps_a_data_set_is_a_problem_as_it_is_of_a_run(
    tmp_path: Path, inside: str
) -> None:
    """As archives are unpacked. It may be a pool, too, and is one where it is named as such."""
    names = [f"{kind}/{k}.png" for kind in ("daisy", "rose") for k in range(5)]
    photos_in(tmp_path / inside, names)
    place = tmp_path / inside.removesuffix("/train")
    told = f"{tmp_path}: holds but one folder; its classes may be in {place}: give that"
    found = check(f"folder:{tmp_path}", tmp_path)
    assert (found.problems, found.images) == ([told], 10)
    with pytest.raises(UsageError, match=re.escape(told.partition(": ")[2])):
        open_task(f"folder:{tmp_path}", 0, tmp_path)
    assert check(f"{place}", tmp_path).problems == []
    found = check(f"{tmp_path}", tmp_path, as_pool=True)
    assert (found.problems, found.holds) == ([], ["images without labels: 10"])
    as_pool = (
        f"a pool, since {Path(inside).parts[0]} is its only folder; images without labels: %d. If"
        f" they are to be labelled, the classes may be in {place}: give that"
    )
    found = check(f"{tmp_path}", tmp_path)  # as --pool names it
    assert (found.problems, found.holds) == ([], [as_pool % 10])
    photos_in(tmp_path, ["preview.png"])  # a pool has images beside its folders, too
    found = check(f"{tmp_path}", tmp_path)
    assert (found.problems, found.holds) == ([], [as_pool % 11])


def test_a_flat_folder_is_a_pool_but_a_problem_where_it_is_named_as_a_labelled_one(
    tmp_path: Path,
) -> None:
    """As it is of a run, and with the same text, which says what a labelled set looks like."""
    photos_in(tmp_path / "flat", [f"{k}.png" for k in range(5)])
    assert "no problems in 5 images" in done(f"data check {tmp_path}/flat")
    assert "no problems in 5 images" in done(f"data check folder:{tmp_path}/flat --pool")
    outcome = run(f"data check folder:{tmp_path}/flat")
    problem, _, holds, end = outcome.out.splitlines()
    assert f"put the images into {tmp_path}/flat/CLASS/" in problem
    assert holds == "images: 5; if they are to have no labels, add --pool"
    assert (outcome.code, end) == (1, "1 problem in 5 images")
    with pytest.raises(UsageError, match=re.escape(problem.partition(": ")[2])):
        open_task(f"folder:{tmp_path}/flat", 0, tmp_path)


def test_a_doubt_is_named_in_the_last_line_of_a_check(tmp_path: Path) -> None:
    """A class of masks is no problem, so the exit code is 0; a text file is no doubt."""
    names = [f"{kind}/{k}.png" for kind in ("daisy", "rose") for k in range(5)]
    photos_in(tmp_path / "set", names)
    (tmp_path / "set/daisy/notes.txt").touch()
    assert done(f"data check {tmp_path}/set").endswith("no problems in 10 images\n")
    photos_in(tmp_path / "set", [f"masks/{k}.png" for k in range(5)], seed=1)
    said = done(f"data check {tmp_path}/set")
    assert "masks is a class here" in said
    assert said.endswith("no problems in 15 images, but a doubt: see above\n")


def test_a_folder_that_may_not_be_entered_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the folder that wraps it, too; a test may run as root, who enters all."""
    photos_in(tmp_path, ["closed/a/0.png", "closed/b/0.png"])
    plain = Path.iterdir

    def iterdir(place: Path) -> Any:
        if place.name == "closed":
            raise PermissionError(13, "Permission denied", f"{place}")
        return plain(place)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    found = check(f"{tmp_path}", tmp_path)
    assert len(found.problems) == 1 and found.images == 2
    assert found.problems[0].startswith(f"{tmp_path}: ")
    assert f"Permission denied: '{tmp_path}/closed'" in found.problems[0]


def test_folders_of_a_pool_are_no_classes_where_it_is_asked_for(tmp_path: Path) -> None:
    photos_in(tmp_path / "days", ["monday/0.png", "tuesday/0.png"])
    assert "no image for val of class monday" in said_of_problem(f"data check {tmp_path}/days")
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
    assert "24 classes, 480 images" in said and "no problems in 480 images" in said
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


def test_an_archive_is_told_to_be_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "photos.zip"
    looks: tuple[Any, ...] = (check, partial(open_task, seed=0))
    for look in looks:
        with pytest.raises(UsageError, match=r"there is no .*photos\.zip; an archive has to be un"):
            look(str(archive), root=tmp_path)
    archive.touch()
    (tmp_path / "photos.jpg").touch()
    for look in (*looks, open_pool):
        with pytest.raises(UsageError, match=r"photos\.zip is an archive: unpack it, and give"):
            look(str(archive), root=tmp_path)
        with pytest.raises(UsageError, match=r"photos\.jpg is a file; give a folder of images"):
            look(str(tmp_path / "photos.jpg"), root=tmp_path)


def empty_files(root: Path, names: str) -> None:
    """Files without content, such as those whose kind is known by their names."""
    for name in names.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_images_of_kinds_that_are_not_read_are_told_by_class_in_check_and_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The class that lacks the most comes first. Originals of converted images lack nothing."""
    names = [f"{part}/{kind}/{k}.png" for part in ("train", "test")
             for kind in ("daisy", "rose", "tulip") for k in range(5)]  # fmt: skip
    photos_in(tmp_path, [*names, "test/daisy/IMG_6.heic.png"])
    empty_files(tmp_path, "train/rose/0.NEF test/daisy/img_6.HEIC test/notes.pdf train/rose/a.txt")
    empty_files(tmp_path, "train/rose/logo.svg train/rose/scan.pdf")  # beside images, they are none
    assert check(f"{tmp_path}", tmp_path).problems == []
    empty_files(tmp_path, "test/daisy/7.dcm train/tulip/7.CR2 test/tulip/more/8.heic")
    told = "images of kinds that are not read: %s. Convert them to JPEG or PNG, or remove them"
    of_classes = told % "tulip 2 of 12 (.cr2, .heic), daisy 1 of 12 (.dcm)"
    assert check(f"{tmp_path}", tmp_path).problems == [of_classes]
    assert find_doubts(open_task(f"folder:{tmp_path}", 0, tmp_path)) == [of_classes]
    of_pool = told % "3 of 34 (.cr2, .dcm, .heic)"
    assert check(f"{tmp_path}", tmp_path, as_pool=True).problems == [of_pool]
    look_at_pool(f"{tmp_path}", open_pool(f"{tmp_path}", tmp_path))
    assert f"pool: {of_pool}" in caplog.messages


def test_photographs_that_are_not_read_are_told_once_of_a_task_and_a_pool_of_the_same_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool of other images, or of more, has a line of its own; what else is left out, too."""
    photos_in(tmp_path / "P", [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(5)])
    empty_files(tmp_path, "P/cat/a.heic P/cat/a.txt Q/b.heic")
    photos_in(tmp_path, ["Q/0.png"])
    of_task = [
        "left out: 1 .txt",
        "images of kinds that are not read: cat 1 of 6 (.heic). Convert them to JPEG or PNG, or"
        " remove them",
    ]
    name = f"folder:{tmp_path}/P"
    for place, of_pool in (("P", []), ("Q", [of_task[1].replace("cat 1 of 6", "1 of 2")])):
        cfg = AlignConfig(backbone="vit_mini", dataset=name, pool=f"{tmp_path}/{place}")
        pool = open_pool(cfg.pool, tmp_path)
        caplog.clear()
        look_at_data(cfg, open_task(name, 0, tmp_path), pool)
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert sorted(warned) == sorted(
            [*(f"{name}: {line}" for line in of_task), *(f"pool: {line}" for line in of_pool)]
        )


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
    assert f"\n### {data.PATIENTS}\n" in guide  # a refusal says that it is there
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
