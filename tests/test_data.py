"""Folders, splits, tasks of one's own, and the order and augmentation of batches."""

import hashlib
import math
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import shared
from PIL import Image
from torch import Tensor
from torchvision import transforms as T
from toy import photos_in

import data
from config import AlignConfig
from data import (
    Images,
    Pool,
    Split,
    Task,
    Transform,
    batches,
    decode_once,
    evenly_spaced,
    fingerprint,
    folder,
    overheard,
    read_folder,
    read_image,
    stream,
)
from support.checks import check_task
from support.experiment import digest_images, digests_of_data
from support.names import describe
from support.results import are_of_same_images
from support.runs import find_changes

CPU = torch.device("cpu")
TRANSFORM = Transform(8, (0.5,) * 3, (0.5,) * 3, augment="crop")


def make(root: Path, *names: str) -> None:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (i, 2 * i, 255 - i)).save(root / name)


def photos(root: Path) -> Split:
    make(root, *[f"{i}.png" for i in range(6)])
    return Split(sorted(root.glob("*.png")), torch.arange(6))


def names_and_labels(task: Task, root: str) -> str:
    """sha256 of the names below a folder and the labels of all splits."""
    sha = hashlib.sha256()
    for split in task[1:4]:
        sha.update("\n".join(str(file).partition(f"/{root}/")[2] for file in split.images).encode())
        sha.update(split.targets.numpy().tobytes())
    return sha.hexdigest()


def test_class_folders_are_split_balanced_and_independent_of_place(tmp_path: Path) -> None:
    files = [f"{c}/{i}.png" for c in ("a", "b") for i in range(25)]
    make(tmp_path / "one", *files, ".hidden/1.png", "a/.2.png")
    make(tmp_path / "two", *reversed(files))
    (tmp_path / "one" / "README.md").write_text("not an image")
    task, again, other = (folder(tmp_path / x, s) for x, s in (("one", 0), ("two", 0), ("one", 1)))
    splits = (task.train, task.val, task.test)
    assert task.classes == ["a", "b"]
    assert [x.targets.bincount().tolist() for x in splits] == [[16, 16], [4, 4], [5, 5]]
    assert len({path for x in splits for path in x.images}) == 50
    assert fingerprint(task) != fingerprint(other)
    of_the_first_release = "2f3e9aea3057dc874f9d9063bc8095b06e7094585ca4e521c4783488001db032"
    assert names_and_labels(task, "one") == names_and_labels(again, "two") == of_the_first_release


def test_only_the_part_that_is_missing_is_split_off(tmp_path: Path) -> None:
    make(tmp_path, *[f"train/{c}/{i}.png" for c in "ab" for i in range(10)])
    make(tmp_path, *[f"test/{c}/x{i}.jpg" for c in "ab" for i in range(3)])
    task = folder(tmp_path, 0)
    assert [path.name for path in task.test.images] == ["x0.jpg", "x1.jpg", "x2.jpg"] * 2
    assert [len(split.targets) for split in (task.train, task.val)] == [16, 4]
    for part in ("train", "test"):
        (tmp_path / part).rename(tmp_path / part.capitalize())
    assert folder(tmp_path, 0).sizes() == task.sizes()


@pytest.mark.parametrize(
    ("link", "to"), [("dog", "cat"), ("cat/up", ".."), ("cat/more", "../cow/sub"), ("val", "train")]
)
def test_a_link_to_a_folder_of_another_class_or_part_is_refused_by_name(
    tmp_path: Path, link: str, to: str
) -> None:
    """Its images would be in two classes, or train and validate. A loop in a class is harmless."""
    files = [f"{c}/{i}.png" for c in ("cat", "cow") for i in range(9)]
    root = tmp_path / "train" if link == "val" else tmp_path
    make(root, *files, "cow/sub/9.png")
    (root / "cow/again").symlink_to(".")
    assert len(folder(tmp_path, 0).classes) == 2
    (tmp_path / link).symlink_to(to)
    with pytest.raises(ValueError, match=f"^{tmp_path / link}: leads to a folder of another class"):
        folder(tmp_path, 0)


@pytest.mark.parametrize(
    ("link", "to"),
    [("cow/x.png", "../cat/0.png"), ("test/cat/x.png", "../../train/cat/0.png")],
)
def test_a_link_to_an_image_of_another_class_or_part_is_refused_by_name(
    tmp_path: Path, link: str, to: str
) -> None:
    """Links out of the data set, as of a store of files, are as good as files."""
    places = ("train/", "test/") if "test" in link else ("",)
    make(tmp_path, *[f"{p}{c}/{i}.png" for p in places for c in ("cat", "cow") for i in range(9)])
    make(tmp_path, "@store/1.png")
    (tmp_path / places[0] / "cat/stored.png").symlink_to(tmp_path / "@store/1.png")
    assert len(folder(tmp_path, 0).classes) == 2
    (tmp_path / link).symlink_to(to)
    with pytest.raises(ValueError, match=f"{tmp_path / link}: is a link to an image that is in"):
        folder(tmp_path, 0)


@pytest.mark.parametrize("link", ["bird", "train/bird", "train", "train/cat/more", "cat/more"])
def test_a_link_to_nowhere_in_place_of_a_folder_is_a_fault(tmp_path: Path, link: str) -> None:
    """A class, a part or a part of a class on a disk that is not mounted; also below a pool."""
    place = "train/" if link.startswith("train/") else "test/" if link == "train" else ""
    make(tmp_path, *[f"{place}{c}/{i}.png" for c in ("cat", "dog") for i in range(5)])
    (tmp_path / link).symlink_to("/unmounted/more")
    with pytest.raises(ValueError, match=f"{tmp_path / link}: is a link to nowhere"):
        folder(tmp_path, 0)
    assert f"{tmp_path / link}: is a link to nowhere" in data.find_images(tmp_path).faults[0]


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (
            ("Training/cat", "Training/dog", "Testing/cat"),
            "rename Testing to test and Training to train. If",
        ),
        (
            ("colour/cat", "colour/dog", "grey/cat", "grey/dog", "docs"),
            "cat: if such folders are classes, give",
        ),
        (("set/cat", "set/dog", "set (1)/cat", "set (1)/dog"), "both hold a folder cat"),
        (("seg_train/cat", "seg_test/dog"), "named train, val and test"),
        (("Train2017", "Val2017"), "rename Train2017 to train and Val2017 to val. If"),
        (("TestData", "TrainData"), "named train, val and test"),
        (("images", "masks"), "images and masks, which are no classes"),
        (("images", "ground_truth"), "images and ground_truth, which are no classes"),
        (("JPEGImages", "SegmentationClass"), "JPEGImages and SegmentationClass, which are no"),
        (("train/images", "train/labels"), "images and labels, which are no classes"),
        (("images/cat", "images/dog", "masks/cat", "masks/dog"), "images and masks"),
        (("photos/cat", "photos/dog"), r"may be in .*/photos: give that"),
        (
            ("train/cat", "train/dog", "valid/cat", "valid/dog"),
            ": rename valid to val. If these are",
        ),
        (("cat/train", "cat/test", "dog/train", "dog/test"), "cat holds test and train"),
        (("cat", "cat/train", "cat/test", "dog", "dog/train"), "cat holds test and train"),
        (("cat", "dog", "dog/Train", "dog/Val"), "dog holds Train and Val: .* as .*/train/dog;"),
        (("cat", "cat/test", "dog", "dog/test"), "cat holds test: .* as .*/test/cat; .* rename"),
        (("cat", "cat/training", "cat/Testing", "dog"), "cat holds Testing and training"),
        (("cat", "cat/valid", "dog", "dog/valid"), "cat holds valid: if these are parts"),
        (("train/cat", "train/cat/test", "train/dog", "train/dog/test"), "train/cat holds test"),
        (("train/cat/train", "train/cat/valid", "train/dog"), "train/cat holds train and valid: "),
        (("cat/images", "cat/masks", "dog/images", "dog/masks"), "cat holds images and masks: "),
        (("cat", "cat/images", "cat/masks", "dog"), "masks are no images .* move .*cat/masks, and"),
        (("train/cat/images", "train/cat/masks", "train/dog"), "train/cat holds images and masks"),
        (("train/cat", "train/dog", "test/cat/1/img", "test/cat/1/GT"), "cat/1 holds img and GT"),
        (
            ("cat/scan", "cat/masks", "dog/scan", "dog/masks"),
            "if it has masks, move all such folders out",
        ),
        (
            ("cat/train_images", "cat/test_images", "dog/train_images", "dog/test_images"),
            "if it is a part of each class, make .*/train/cat, .*/test/cat and so on; if",
        ),
        (("images", "image_masks"), "images and image_masks, .*. If they are classes, rename im"),
        (("train_val_set", "test_set"), "If these are classes, rename them"),
        (
            ("Training", "Testing", "daisy"),
            "daisy; parts .*: rename Testing to test and .*, and move daisy into both",
        ),
        (
            ("train", "Testing", "daisy"),
            "daisy, train; .*: rename Testing to test, and move daisy into both",
        ),
        (
            ("train", "test", "val", "docs"),
            r": move docs into all three \(or out of .* no class\). If",
        ),
        (("train", "test", "labels"), "val and test: move labels out of [^,]*. If these are"),
        (("train", "valid", "rose", "masks"), "to val, and move rose into both .*, and move masks"),
        (("train_1", "train_2", "test"), "parts are named train, val and test: name them so. If"),
        (
            ("bus", "car", "train"),
            "test. If these are classes, .* is a part, move bus, car into it",
        ),
        (("daisy", "rose", "test"), "test: move daisy, rose into .*/train/. If these are classes"),
        (("trainval/a", "test/a"), "test: rename trainval to train. If these are classes, rename"),
        (("test/a", "test/b"), "test: put the images to train on, by class, into .*/train/. If"),
        (
            ("cat/P01", "dog/P01"),
            "a folder P01: if .* are patients .* see docs/guide.md, .*; if such .* classes",
        ),
        (
            ("cat/anna", "dog/anna"),
            "a folder anna: if such folders are classes, .*; if such folders are patients",
        ),
    ],
)
def test_folders_that_are_no_classes_are_refused(
    tmp_path: Path, folders: tuple[str, ...], message: str
) -> None:
    """Otherwise a network learns to tell training images from test images, and is good at it."""
    make(tmp_path, *[f"{place}/{i}.png" for place in folders for i in range(5)])
    with pytest.raises(ValueError, match=message):
        folder(tmp_path, 0)


@pytest.mark.parametrize(
    "folders",
    [
        ("cat", "cat/more", "dog", "dog/more"),
        ("train/cat/film 1", "train/dog/film 1"),
        ("cat/indoors", "dog/outdoors"),
        ("cat", "cat/train", "cat/boat", "dog", "dog/test"),
        ("train/cat/images", "train/dog/images"),
        ("train/cat/1", "train/cat/2", "train/dog/1"),
        ("with mask", "without mask"),
        ("blood test", "urine test"),
        ("train station", "bus station"),
        ("images_with_mask", "images_without_mask"),
        ("valid_test", "invalid_test"),
        ("train/valid_test", "train/invalid_test"),
    ],
)
def test_classes_with_odd_names_or_folders_in_them_are_classes(
    tmp_path: Path, folders: tuple[str, ...]
) -> None:
    make(tmp_path, *[f"{place}/{i}.png" for place in folders for i in range(5)])
    assert len(folder(tmp_path, 0).classes) == 2


def test_a_class_may_hold_images_and_a_folder_of_text_files(tmp_path: Path) -> None:
    """As data sets with boxes do: labels/ has no image."""
    make(tmp_path, *[f"train/{kind}/images/{i}.png" for kind in ("cat", "dog") for i in range(5)])
    for place in tmp_path.glob("train/*"):
        (place / "labels").mkdir()
        (place / "labels/0.txt").touch()
    assert len(folder(tmp_path, 0).train.images) == 8 - 2


DRAWN = (
    "drawn image by image: train, val, test. If several images show one patient, film or object,"
    " divide them yourself, as docs/guide.md shows"
)


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ("train", "train, val, test"),
        ("train test", "train, val"),
        ("train val", "train, test"),
        ("train val test", ""),
    ],
)
def test_splits_that_are_drawn_image_by_image_are_named(
    tmp_path: Path, given: str, drawn: str
) -> None:
    """Nothing else would tell that film1_001.png and film1_002.png are parted."""
    names = [f"{part}/{kind}/{k}.png" for part in given.split() for kind in "ab" for k in range(9)]
    make(tmp_path, *names)
    _, *lines = describe(folder(tmp_path, 0))
    assert lines == ([DRAWN.replace("train, val, test", drawn)] if drawn else [])


def test_a_task_is_described_by_its_classes_and_by_what_was_left_out(tmp_path: Path) -> None:
    make(tmp_path, *[f"a/{i}.png" for i in range(10)], *[f"b/{i}.png" for i in range(5)], "c.png")
    for name in ("a/1.heic", "a/2.HEIC", "b/notes", "read.txt"):
        (tmp_path / name).touch()
    assert describe(folder(tmp_path, 0)) == [
        "2 classes, 15 images: a 10, b 5; train 10, val 2, test 3",
        DRAWN,
        "left out: 2 .heic, 1 without an ending, 1 .png beside class folders, 1 .txt",
    ]
    assert describe(Pool([Path("1.png")])) == ["images without labels: 1"]
    split = Split(torch.zeros(3, 3, 2, 2), torch.tensor([[1, 1], [1, -1], [-1, 0]]))
    several = Task("own", split, split, split, ["a", "b"])
    assert describe(several) == ["2 classes, 9 images: a 6, b 3; train 3, val 3, test 3"]
    many = Split(torch.zeros(31, 3, 2, 2), torch.tensor([*range(30), 7]))
    (line,) = describe(Task("own", many, many, many, [f"c{k}" for k in range(30)]))
    assert "c7 6" in line and "c9 3, ..., c25 3" in line and "(from 3 to 6 a class)" in line


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["a/1.png", "b/1.png", "c/1.txt"],
            "class c has no image, but 1 .txt: .*no image for val of class a, b",
        ),
        (["1.png"], "two or more class folders, and .* holds none: put the images into .*/CLASS/$"),
        (["daisy/1.png"], "two or more class folders, and .* holds daisy: put the images into "),
        (["train/daisy/1.png"], "and train holds daisy: put the images into .*/train/CLASS/$"),
        (["photos.zip"], "two or more class folders, and .* holds none: unpack archives$"),
        (["photos.zip", "1.png"], "two or more class folders, and .* holds none: put the images "),
        (
            [
                f"{place}/{k}.png"
                for place in ("train/a", "train/b", "test/a", "test/z")
                for k in "12"
            ],
            "no image for train of class z; put some into .*train; .* test of class b; put .*test$",
        ),
        # As competitions have it: images without labels, which `predict` classifies.
        *(
            (
                [f"{place}/{k}.png" for place in ("train/a", "train/b", unlabelled) for k in "123"],
                "^[^;]*test has 3 images, and none in a folder of a class; put them into .*/test/CL"
                "ASS or, .* move .*test elsewhere: a fifth .* classifies the others$",
            )
            for unlabelled in ("test", "test/test")
        ),
        (
            [*(f"train/{c}/{k}.png" for c in "ab" for k in "123"), "test/other.txt"],
            "^[^;]*test has no image; put some into [^;]*/test/CLASS or remove .*test: a fifth",
        ),
        (  # where the disk tells A and a apart
            [
                f"{place}/{k}.png"
                for place in ("train/A", "train/B", "test/a", "test/b")
                for k in "123"
            ],
            "no image for test of class A, B; put some into .*test$",
        ),
        (
            ["train/1.png", "test/a/1.png", "test/b/1.png"],
            "^[^;]*train has 1 image, and none in a folder of a class; put them into [^;]*CLASS$",
        ),
        (
            [*(f"{c}/{k}.png" for c in "xy" for k in "123"), "z/1.heic", "z/2.heic"],
            "^class z has no image, but 2 .heic: convert images to JPEG or PNG, or remove it",
        ),
        (
            [*(f"{c}/{k}.png" for c in "xy" for k in "123"), "z/z.tar.gz", "z/z.CR2"],
            "^class z has no image, but 1 .cr2, 1 .gz: convert images to JPEG or PNG, unpack ar",
        ),
        *(
            (
                [*(f"{c}/{k}.png" for c in "xy" for k in "123"), f"z/0{ending}", "z/z.txt"],
                f"^class z has no image, but 1 {ending}, 1 .txt: {remedy} .* or PNG, or remove it",
            )
            for ending, remedy in (
                (".npy", "convert images"),
                (".dcm", "convert images"),
                (".nii", "convert images"),
                (".nii.gz", "convert images"),  # no archive to unpack
                (".svs", "convert images"),
                (".mp4", "save frames"),
            )
        ),
        (
            [*(f"{c}/{k}.png" for c in "xy" for k in "123"), "z/z.txt"],
            "^class z has no image, but 1 .txt: put some into its folder, or remove it",
        ),
        (["train/a/1.png", "train/b/1.png", "validation/a/1.png"], "validation"),
        (
            [f"{c}/{i}.png" for c in ("cat", "Cat", "x") for i in "123"],
            "'Cat' and 'cat' look alike",
        ),
        (
            [f"{c}/{i}.png" for c in ("é", "e\u0301") for i in "123"],
            r"'e\\u0301' and '\\xe9' look alike",
        ),
        (
            [f"{c}/{i}.png" for c in ("a b", "a\xa0b", "x") for i in "123"],
            r"'a b' and 'a\\xa0b' look",
        ),
    ],
)
def test_wrong_folders_end_in_one_clear_line(
    tmp_path: Path, files: list[str], message: str
) -> None:
    make(tmp_path, *[name for name in files if name.endswith(".png")])
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        folder(tmp_path, 0)


def test_letters_of_both_cases_are_two_classes(tmp_path: Path) -> None:
    make(tmp_path, *[f"{letter}/{k}.png" for letter in "Aab" for k in range(3)])
    if len([*tmp_path.iterdir()]) == 3:  # else the disk does not tell them apart
        task = folder(tmp_path, 0)
        assert task.classes == ["A", "a", "b"]
        check_task(task)


def test_what_systems_put_among_images_is_no_class_and_no_image(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Thumbnails of a NAS, its bin, what a Mac packs. Names may have any encoding."""
    old = os.fsdecode(bytes([0xE9]))
    files = [f"{c}/{i}{old}.png" for c in "ab" for i in "123"]
    made = ("@eaDir/1.png/T.jpg", "a/@eaDir/1.png/T.jpg", "#recycle/a/1.png", "__MACOSX/a/1.png")
    make(tmp_path, *files, *made)
    task = folder(tmp_path, 0)
    assert task.classes == ["a", "b"] and fingerprint(task)
    assert task.sizes() == {"train": 2, "val": 2, "test": 2}
    assert data.find_images(tmp_path).images == [tmp_path / file for file in files]

    def scandir(place: Path) -> Any:
        raise PermissionError(13, "Permission denied", place)

    monkeypatch.setattr(os, "scandir", scandir)  # a test may run as root
    found = data.find_images(tmp_path)
    assert found.faults == [f"{tmp_path}: cannot be read (Permission denied); see its permissions"]


def test_images_that_are_left_out_by_their_names_are_counted(tmp_path: Path) -> None:
    """What stands for a picture in a cloud, and @user.png; not what is beside a copied file."""
    make(tmp_path, *[f"{c}/{i}.png" for c in "ab" for i in "123"], "a/@user.png", "a/._1.png")
    (tmp_path / "b/.4.png.icloud").touch()
    (tmp_path / "b/.5.png.icloud").touch()
    assert describe(folder(tmp_path, 0)) == [
        "2 classes, 6 images: a 3, b 3; train 2, val 2, test 2",
        DRAWN,
        "left out: 2 .icloud, 1 .png beginning with @",
    ]


def test_images_of_folders_that_are_left_out_by_their_names_are_counted(tmp_path: Path) -> None:
    """Classes may be meant. A NAS has its thumbnails one folder deeper, and they are none."""
    names = [f"{c}/{i}.png" for c in (".net", "@a", "java", "rust") for i in "123"]
    make(tmp_path, *names, "@eaDir/1.png/SYNO.jpg", "java/@eaDir/2.jpg")
    (tmp_path / ".net/notes.txt").touch()
    assert describe(folder(tmp_path, 0))[-1] == "left out: 3 .png in .net, 3 .png in @a"


def test_a_folder_under_two_names_is_taken_under_the_first_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order a disk lists them."""
    make(tmp_path, "b/1.png", "m/2.png")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "z").symlink_to(tmp_path / "m")
    listed = os.scandir

    def in_order(place: Path, order: int) -> Any:
        """What a folder has, sorted upwards (1) or downwards (-1)."""
        return sorted(listed(place), key=lambda entry: entry.name)[::order]

    for order in (1, -1):
        monkeypatch.setattr(os, "scandir", partial(in_order, order=order))
        found = data.find_images(tmp_path).images
        assert [str(file.relative_to(tmp_path)) for file in found] == ["a/1.png", "m/2.png"]


def test_images_in_memory_are_brought_to_the_size_of_the_network() -> None:
    split = Split(pixels := torch.rand(4, 3, 12, 12), torch.arange(4))
    ((x, y),) = batches(Images(split, TRANSFORM, False, 0, ""), [[*enumerate(range(4))]], 0, CPU)
    assert x.shape == (4, 3, 8, 8) and y.tolist() == [0, 1, 2, 3]
    fits = Transform(12, (0.5, 0.4, 0.3), (0.5, 0.2, 0.1))
    ((x, _),) = batches(Images(split, fits, True, 0, "x"), [[(0, 3), (1, 0)]], 0, CPU)
    mean, std = (torch.tensor(v)[:, None, None] for v in (fits.mean, fits.std))
    assert torch.equal(x, (pixels[[3, 0]] - mean) / std)


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (1, 7), (7, 3), (12, 4), (9, 40)])
def test_every_pass_sees_every_image_once(n: int, batch: int) -> None:
    """Whatever the sizes: in epochs, in a stream without seams, and from any step of it on."""
    epochs = list(stream(n, batch, 5, "x", range(3 * math.ceil(n / batch)), by_epoch=True))
    seen = [draw for part in epochs for draw in part]
    assert [number for number, _ in seen] == list(range(3 * n))
    assert {len(part) for part in epochs} <= {batch, n % batch}
    steps = math.ceil(3 * n / batch)
    whole = list(stream(n, batch, 5, "x", range(steps)))
    flat = [draw for part in whole for draw in part]
    assert {len(part) for part in whole} == {batch}
    for p in range(3):
        assert sorted(i for _, i in flat[p * n : (p + 1) * n]) == list(range(n))
    for at in range(steps + 1):
        assert list(stream(n, batch, 5, "x", range(at, steps))) == whole[at:]
    assert flat[: 3 * n] == seen  # one order for both


def test_batches_do_not_depend_on_workers_or_on_where_a_run_resumed(tmp_path: Path) -> None:
    images = Images(photos(tmp_path), TRANSFORM, True, 0, "x")
    runs = [[*batches(images, stream(6, 4, 0, "x", range(4)), n, CPU)] for n in (0, 2, None)]
    runs.append([*runs[0][:2], *batches(images, stream(6, 4, 0, "x", range(2, 4)), 0, CPU)])
    for other in runs[1:]:
        for (x, y), (x2, y2) in zip(runs[0], other, strict=True):
            assert len(x) == 4 and torch.equal(x, x2) and torch.equal(y, y2)


@pytest.mark.parametrize(("resampling", "flip"), [("bicubic", True), ("bilinear", False)])
def test_images_are_cut_as_said(tmp_path: Path, resampling: Any, flip: bool) -> None:
    """Spelled out: training, a crop of 0.3 to 1 and a flip; elsewhere the centre at 256/224."""
    noise = torch.rand(3, 40, 30, generator=torch.Generator().manual_seed(0))
    T.functional.to_pil_image(noise).save(tmp_path / "1.png")
    image, mode = Image.open(tmp_path / "1.png"), T.InterpolationMode(resampling)
    on_disk = Split([tmp_path / "1.png"], torch.zeros(1))
    in_memory = Split(noise[None], torch.zeros(1))
    transform = Transform(28, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "crop", 0.3, resampling, flip)

    def load(split: Split, t: Transform, train: bool, draw: int) -> Tensor:
        return next(batches(Images(split, t, train, 5, "x"), [[(draw, 0)]], 0, CPU))[0][0]

    flipped = set()
    for draw in range(8):
        torch.manual_seed(data.rng(5, "x", "augment", draw).initial_seed())
        box = T.RandomResizedCrop.get_params(image, [0.3, 1.0], [3 / 4, 4 / 3])
        mirror = flip and bool(torch.rand(1) < 0.5)
        cut = T.functional.resized_crop(image, *box, [28, 28], mode)
        x = T.functional.to_tensor(T.functional.hflip(cut) if mirror else cut)
        expected = T.functional.normalize(x, *transform[1:3])
        for split in (on_disk, in_memory):
            assert torch.equal(load(split, transform, True, draw), expected)
        before = torch.get_rng_state()
        Images(on_disk, transform, True, 5, "x")[draw, 0]
        assert torch.equal(torch.get_rng_state(), before)
        flipped.add(mirror)
    assert flipped == ({True, False} if flip else {False})
    centre = T.functional.center_crop(T.functional.resize(image, [32], mode), [28])
    expected = T.functional.normalize(T.functional.to_tensor(centre), *transform[1:3])
    for train, same in ((False, transform), (True, transform._replace(augment="none"))):
        assert torch.equal(load(on_disk, same, train, 0), expected)


def jpegs(folder: Path) -> list[Path]:
    """A colour, a grey and a progressive JPEG file, of waves in which decoders could differ."""
    y, x = torch.meshgrid(torch.arange(90), torch.arange(120), indexing="ij")
    waves = torch.stack([(x * y / 90).sin(), (x / 7).sin() + 0 * y, (y / 5).cos() + 0 * x])
    image = T.functional.to_pil_image((waves + 1) / 2)
    image.save(folder / "colour.jpg", quality=90)
    image.convert("L").save(folder / "grey.jpg")
    image.save(folder / "progressive.jpg", progressive=True)
    return sorted(folder.glob("*.jpg"))


@pytest.mark.parametrize("photographs", [False, True])
def test_a_jpeg_file_is_cut_as_by_pillow_to_one_grey_level(
    tmp_path: Path, photographs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded it is the same. Bicubic resizing may differ by more, in one of 1,000 values."""
    if photographs:
        files = sorted(shared("data/flower_photos").rglob("*.jpg"))[::20]
        files += sorted(shared("data/tiny-imagenet").rglob("*.JPEG"))[::200]
    else:
        files = jpegs(tmp_path)
    for file in files:
        decoded = data.read_image(file)
        with monkeypatch.context() as patch:  # a torchvision without decoders
            patch.setattr(torch.ops, "image", object())
            pillow: Any = data.read_image(file)
        assert isinstance(decoded, Tensor) and decoded.equal(data.as_tensor(pillow))
        for cut in (partial(data.cut_random, seed=0), data.cut_centre):
            for mode in ("bicubic", "bilinear"):
                t = Transform(48, (0.5,) * 3, (0.5,) * 3, "crop", 0.2, mode)
                ours = cut(decoded, t).int()
                theirs = cut(pillow, t).int()
                assert ours.shape == theirs.shape
                differences = (ours - theirs).abs()
                assert differences.max() <= (1 if mode == "bilinear" else 16)
                assert (differences > 1).float().mean() < 1e-3


def test_files_that_only_look_like_plain_jpegs_are_pillows(tmp_path: Path) -> None:
    """CMYK, and a PNG with the name of a JPEG."""
    image = T.functional.to_pil_image(torch.rand(3, 20, 30))
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    image.save(tmp_path / "png.jpg", format="PNG")
    for name in ("cmyk.jpg", "png.jpg"):
        assert isinstance(data.read_image(tmp_path / name), Image.Image)


def test_the_orientation_of_exif_is_ignored_whoever_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = T.functional.to_pil_image(torch.rand(3, 20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    image.save(tmp_path / "turned.jpg", exif=exif)
    by_torchvision = data.read_image(tmp_path / "turned.jpg")
    monkeypatch.setattr(torch.ops, "image", object())  # a torchvision without decoders
    by_pillow = data.read_image(tmp_path / "turned.jpg")
    assert isinstance(by_torchvision, Tensor) and isinstance(by_pillow, Image.Image)
    assert (by_torchvision.shape, by_pillow.size) == ((3, 20, 30), (30, 20))


def test_pixels_travel_as_bytes_and_are_decoded_once(tmp_path: Path, monkeypatch: Any) -> None:
    """What is kept gives the same inputs, and needs the files no more; too much is not kept."""
    split = photos(tmp_path)
    images = Images(split, TRANSFORM, False, 0, "eval")
    assert images[0, 0][0].dtype == torch.uint8
    draws = [[(i, i) for i in range(6)]]
    ((expected, _),) = batches(images, draws, 0, CPU)
    kept = decode_once(split, TRANSFORM, range(6))
    assert isinstance(kept.images, Tensor) and kept.images.dtype == torch.uint8
    for path in (*split.images[:2], *split.images[5:]):
        Path(path).unlink()
    own = decode_once(split, TRANSFORM, range(2, 5))  # of several processes, each reads its own
    assert own.targets.tolist() == [2, 3, 4]
    assert torch.equal(torch.as_tensor(own.images), kept.images[2:5])
    assert decode_once(split, TRANSFORM, range(6)) is kept
    ((x, y),) = batches(Images(kept, TRANSFORM, False, 0, "eval"), draws, 3, CPU)
    assert torch.equal(x, expected) and torch.equal(y, split.targets)
    assert not multiprocessing.active_children()  # there is nothing to decode
    monkeypatch.setattr(data, "MOST_KEPT", 6 * 3 * 8 * 8 - 1)
    decode_once.cache_clear()
    assert decode_once(split, TRANSFORM, range(6)).images == split.images
    assert decode_once(kept, TRANSFORM, range(6)).images.equal(kept.images)


def test_a_link_that_leads_back_is_followed_once(tmp_path: Path) -> None:
    """Also a link into another folder, whose link leads back."""
    make(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "b/back").symlink_to("../a")
    for target, names in ((".", "1"), ("..", "12"), ("../b", "12")):
        (tmp_path / "a/link").symlink_to(target)
        assert [path.stem for path in data.find_images(tmp_path / "a").images] == [*names]
        (tmp_path / "a/link").unlink()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or it is hidden")
def test_batches_on_a_gpu_are_those_on_the_cpu(tmp_path: Path) -> None:
    """All arrive, in order, the last one too."""
    images = Images(photos(tmp_path), TRANSFORM, True, 0, "x")
    for steps in (0, 1, 5):
        draws = list(stream(6, 4, 0, "x", range(steps)))
        on_cpu, on_gpu = (
            batches(images, draws, 0, CPU),
            batches(images, draws, 2, torch.device("cuda")),
        )
        for (x, y), (x2, y2) in zip(on_cpu, on_gpu, strict=True):
            torch.testing.assert_close(x2.cpu(), x)
            assert torch.equal(y2.cpu(), y)


# --- what makes a data set another one -----------------------------------------------------------


def written(root: Path, *names: str) -> list[Path]:
    """Files that hold their own names."""
    files = [root / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    return files


def test_a_digest_is_the_same_on_every_platform_and_in_every_place(tmp_path: Path) -> None:
    """Written down, so that a run may go on elsewhere."""
    names = ("a-b/x.png", "a/x.png", "a b/x.png", "a/y.png")
    for place in ("one", "two/../three"):
        (tmp_path / "two").mkdir(exist_ok=True)
        pool = Pool(written(tmp_path / place, *names))
        assert fingerprint(pool).startswith("2:f27fff7fe4ceef5d")
    pixels = torch.arange(24.0).view(2, 3, 2, 2) / 24
    split = Split(pixels, torch.tensor([0, 1]))
    task = Task("own", split, split, split, ["no", "yes"])
    assert fingerprint(task).startswith("2:f2df121927d8f861")


@pytest.mark.parametrize(
    "change", ["name", "size", "bytes", "label", "mean", "std", "class of a script", "uncut"]
)
def test_whatever_changes_the_numbers_of_files_changes_their_digest(
    tmp_path: Path, change: str
) -> None:
    """Pictures that are replaced under their names, too: an uncompressed one keeps its size."""
    files = written(tmp_path, "a/1.bmp", "a/2.bmp", "b/1.bmp", "b/2.bmp")
    split = Split(files, torch.tensor([0, 0, 1, 1]))
    task = Task("own", split, split, split, ["a", "b"])
    before = fingerprint(task)
    if change == "name":
        split = Split([*files[:3], files[3].rename(tmp_path / "b/3.bmp")], split.targets)
    elif change == "size":
        files[2].write_text("longer than it was")
    elif change == "bytes":
        files[2].write_text("7.bmp")
    elif change == "label":
        split = Split(files, torch.tensor([0, 0, 1, 0]))
    elif change == "class of a script":
        task = task._replace(classes=["a", "c"])
    else:
        task = task._replace(**{change: change == "uncut" or (0.5,) * 3})
    assert fingerprint(task._replace(train=split, val=split, test=split)) != before


def test_a_file_that_is_replaced_by_one_of_as_many_bytes_is_known_by_its_content(
    tmp_path: Path,
) -> None:
    """It is none of the 50 that the other digest is made of; a run of before goes on without."""
    files = written(tmp_path, *[f"{k}.bmp" for k in range(60)])
    split = Split(files, torch.tensor([0, 1] * 30))
    task = Task("own", split, split, split, ["a", "b"])
    pool = Pool(files)
    cfg = AlignConfig(backbone="vit_mini", dataset="own", pool="own")
    before = digests_of_data(cfg, task, pool, digest_images(task, pool))
    files[1].write_text("x" * files[1].stat().st_size)
    after = digests_of_data(cfg, task, pool, digest_images(task, pool))
    assert before["data_sha256"] == after["data_sha256"]
    assert before["pool_sha256"] == after["pool_sha256"]
    changes = [f"the content of --{name} was changed" for name in ("dataset", "pool")]
    assert find_changes(before, after) == changes
    assert not are_of_same_images(before, after)
    del before["contents_sha256"], before["pool_contents_sha256"]
    assert find_changes(before, after) == [] and are_of_same_images(before, after)
    in_memory = Pool(torch.zeros(2, 3, 8, 8))
    assert data.digests_of_pool(in_memory).keys() == {"pool_sha256"}


def test_pixels_in_memory_and_what_they_are_normalised_by_are_in_the_digest() -> None:
    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    split = Split(pixels, torch.tensor([0, 0, 1, 1]))
    task = Task("omniglot:Greek", split, split, split, ["a", "b"])
    several = [task, task._replace(classes=["a", "c"]), task._replace(std=(0.5,) * 3)]
    several.append(task._replace(val=Split(1 - pixels, split.targets)))
    several.append(task._replace(val=Split(pixels.view(4, 3, 4, 16), split.targets)))
    assert len({fingerprint(one) for one in several}) == len(several)
    pools = [Pool(pixels), Pool(1 - pixels), Pool(pixels, mean=(0.5,) * 3)]
    assert len({fingerprint(pool) for pool in pools}) == len(pools)


def test_names_that_torchvision_gives_to_classes_are_not_in_the_digest(tmp_path: Path) -> None:
    """Its release 0.21 has none for the 102 flowers, so they are numbers there."""
    split = Split(written(tmp_path, "1.jpg", "2.jpg"), torch.tensor([0, 1]))
    task = Task("flowers", split, split, split, ["pink primrose", "daisy"])
    assert fingerprint(task) == fingerprint(task._replace(classes=["0", "1"]))


def test_of_very_many_files_evenly_spaced_ones_are_asked_for_their_size(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Of 10, at most 4: each third. All of them are as the first ones of a network disk."""
    files = written(tmp_path, *[f"{k}.png" for k in range(10)])
    asked: list[str] = []
    monkeypatch.setattr(data, "MOST_SIZES", 4)
    monkeypatch.setattr(data, "size_of", lambda file: asked.append(file.stem))
    fingerprint(Pool(files))
    assert asked == ["0", "3", "6", "9"]


@pytest.mark.parametrize("kind", ["folder", "link to nowhere", "FIFO"])
def test_a_pool_with_something_that_is_no_file_is_refused_before_the_work(
    tmp_path: Path, kind: str
) -> None:
    make(tmp_path, "1.png")
    odd = tmp_path / "2.png"
    if kind == "folder":
        odd.mkdir()
    elif kind == "FIFO":
        os.mkfifo(odd)
    else:
        odd.symlink_to("nowhere")
    with pytest.raises(data.ImageError, match=rf"^{odd}: cannot be read .*; replace or remove it"):
        fingerprint(Pool([tmp_path / "1.png", odd]))


# --- reading, order -----------------------------------------------------------------------------


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    for processes, workers in (("1", 6), ("2", 3), ("10000", 1), ("0", 6), ("", 6)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert data.count_workers() == workers


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    split = photos(tmp_path)
    Path(split.images[3]).write_bytes(Path(split.images[3]).read_bytes()[:40])
    for workers in (0, 1):  # no traceback of a worker
        images = Images(split, TRANSFORM, False, 0, "x")
        with pytest.raises(data.ImageError, match=rf"^{split.images[3]}: .*data check` lists all$"):
            list(batches(images, stream(6, 4, 0, "x", range(2)), workers, CPU))


def words_of_pillow(file: Path) -> str:
    """The first three that it has for a damaged file, whatever its version calls the damage."""
    try:
        with Image.open(file) as image:
            image.load()
    except (OSError, Image.DecompressionBombError) as error:
        return " ".join(str(error).split()[:3])
    raise AssertionError(f"Pillow reads {file}")


def test_all_that_is_wrong_with_files_is_said_at_once(tmp_path: Path) -> None:
    """Each with its true reason; a FIFO or a socket is not waited for."""
    make(tmp_path, "good.png", "cut.png", "folder.png/1.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:-30])
    (tmp_path / "link.png").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "bomb.png").write_bytes(b"P5 100000 100000 255\n")
    (tmp_path / "empty.png").touch()
    Image.new("L", (1, 20000)).save(tmp_path / "long.png")  # with a shorter side of 224, 3 GB
    reasons = {
        "cut": words_of_pillow(tmp_path / "cut.png"), "folder": "no file", "link": "no file",
        "fifo": "no file", "device": "no file", "bomb": words_of_pillow(tmp_path / "bomb.png"),
        "empty": words_of_pillow(tmp_path / "empty.png"), "long": "100 times",
    }  # fmt: skip
    assert len({*reasons.values()}) == 5
    with pytest.raises(data.ImageError) as raised:
        data.check_readable([tmp_path / f"{name}.png" for name in ("good", *reasons)])
    told = str(raised.value).split("remove it; ")
    for said, (name, reason) in zip(told, reasons.items(), strict=True):
        assert said.startswith(f"{tmp_path / name}.png: cannot be read (") and reason in said


def test_a_ctrl_c_at_the_terminal_does_not_end_the_workers(tmp_path: Path) -> None:
    """It is the parent's alone, which goes on to its checkpoint."""
    images = Images(photos(tmp_path), TRANSFORM, False, 0, "x")
    loader = batches(images, stream(6, 2, 0, "x", range(3)), 1, CPU)
    others = {*multiprocessing.active_children()}
    next(loader)
    (worker,) = {*multiprocessing.active_children()} - others
    os.kill(worker.pid or 0, signal.SIGINT)
    assert len(list(loader)) == 2


def test_the_pages_of_a_picture_that_are_not_taken_are_told(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white", "red")]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    with overheard() as said:
        read_image(tmp_path / "stack.tif")
    assert said == ["it has 3 pages, the first one is taken"]


def test_of_no_files_none_are_taken() -> None:
    assert evenly_spaced([], 5) == []


def test_images_below_a_linked_folder_are_no_links(tmp_path: Path) -> None:
    """The folder is told; to remove the images, as a fault of each would ask, would lose them."""
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in ("a", "c") for k in range(6)])
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "c/link.png").symlink_to(tmp_path / "c/0.png")  # of its own class
    _, faults = read_folder(tmp_path, 0)
    assert not [fault for fault in faults if "is a link to an image" in fault and "/a/" in fault]
    assert any("b" in fault and "folder" in fault for fault in faults)


def test_heic_under_another_name_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"\0\0\0\x18ftypheic" + bytes(12))
    with pytest.raises(data.ImageError, match=r"photo\.jpg: .*is HEIC.*convert it to JPEG"):
        data.read_image(photo)
    photo = photo.rename(tmp_path / "photo.HEIC")
    with pytest.raises(data.ImageError, match=r"is HEIC.*convert it to JPEG or PNG\)"):
        data.read_image(photo)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.CR2", r"\(\.cr2: convert images to JPEG or PNG\)"),
        ("a.zip", r"\(\.zip: unpack archives\)"),
        ("a.png", r"\(cannot identify image file\)"),
    ],
)
def test_a_file_of_a_kind_that_is_not_read_is_told_with_what_to_do(
    tmp_path: Path, name: str, said: str
) -> None:
    """As where `predict` is given one by its name."""
    (tmp_path / name).write_bytes(b"nothing that Pillow knows")
    with pytest.raises(data.ImageError, match=rf"a\.\w+: cannot be read {said}"):
        data.read_image(tmp_path / name)
