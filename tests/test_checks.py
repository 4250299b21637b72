"""What is asked of a task before a run: what a script hands over, and what is doubtful."""

import logging
import os
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset
from toy import photos_in

from config import AlignConfig, FinetuneConfig, PretrainConfig
from data import (
    SPLITS,
    ImageError,
    Look,
    Pool,
    Split,
    Task,
    Transform,
    check_readable,
    decode_once,
    folder,
)
from extras.datasets import check
from extras.plan import plan
from extras.pretrain import pretrain
from lora import cross_entropy
from support.benchmarks import open_pool
from support.checks import (
    as_checked,
    check_pool,
    check_task,
    find_doubts,
    find_empty,
    find_lacking_classes,
    find_without_class,
    most_lose_levels,
)
from support.experiment import log_contents, look_at, look_at_data, look_at_pool
from support.names import (
    ImageFile,
    describe,
    files_of,
    find_derived,
    find_doubtful_names,
    find_folders_in_classes,
    find_labels_of_other_folders,
    find_masks_in_pool,
)

TRANSFORM = Transform(8, (0.5,) * 3, (0.5,) * 3)

# --- what a script hands over --------------------------------------------------------------------

PIXELS = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ZEROS_AND_ONES = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1]])


def own(images: Any = PIXELS, labels: Any = None, **more: Any) -> Task:
    """A task of three classes with these validation images and labels."""
    good = Split(PIXELS, torch.tensor([0, 1, 2, 0, 1, 2]))
    if labels is not None and labels.ndim == 2:
        good = Split(PIXELS, 2 * ZEROS_AND_ONES - 1)
    val = Split(images, good.targets if labels is None else labels)
    return Task("own", good, val, good, ["a", "b", "c"])._replace(**more)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (ZEROS_AND_ONES, r"no label is -1, no.* 2 \* labels - 1"),
        (torch.eye(3, dtype=torch.int64).repeat(2, 1), r"labels.argmax\(1\)"),
        (
            torch.cat([2 * ZEROS_AND_ONES[:, :2] - 1, ZEROS_AND_ONES[:, 2:]], 1),
            "of class c .* leave",
        ),
        (-torch.ones(6, 3).long(), "no label is 1"),
        (2 * ZEROS_AND_ONES, "1 yes, -1 no, 0 not counted"),
        (ZEROS_AND_ONES.bool(), "labels are torch.bool; give whole numbers"),
        (ZEROS_AND_ONES.float(), "labels are torch.float32"),
        (torch.zeros(6), "labels are torch.float32"),
        (torch.zeros(6, dtype=torch.int32), "labels are torch.int32"),
        (torch.arange(6) % 3 + 1, "labels go from 1 to 3; .* from 0 to 2"),
        (torch.tensor([0, 1, 2, -100, 0, 1]), "labels go from -100 to 2"),
        (torch.zeros(6, 1).long(), r"labels.flatten\(\)"),
        (torch.zeros(5).long(), "6 images and 5 labels"),
        (torch.zeros(7).long(), "6 images and 7 labels"),
    ],
)
def test_labels_that_mean_something_else_are_refused(labels: Tensor, message: str) -> None:
    """0 is "not counted": with tables of 0 and 1 any network would have 100 %."""
    with pytest.raises(ValueError, match=f"^val: .*{message}"):
        check_task(own(labels=labels))


def test_a_class_that_each_training_image_has_is_refused_of_val_and_test_alone() -> None:
    """Training images are not scored, but a table of 0 and 1 would teach nothing."""
    some = Split(PIXELS, 2 * ZEROS_AND_ONES - 1)
    each = Split(PIXELS, some.targets.index_fill(1, torch.tensor([0]), 1))  # class a
    classes = ["a", "b", "c"]
    check_task(Task("own", each, some, some, classes))
    for name in ("val", "test"):
        said = rf"^{name}: of class a no label is -1, .*; add images without it, or leave the class"
        with pytest.raises(ValueError, match=said):
            check_task(Task("own", each, some, some, classes)._replace(**{name: each}))
    table = Split(PIXELS, ZEROS_AND_ONES)
    with pytest.raises(ValueError, match=r"^train: no label is -1, no; .* 2 \* labels - 1"):
        check_task(Task("own", table, some, some, classes))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ((255 * PIXELS).byte(), r"torch.uint8; give float32 from 0 to 1: .* / 255"),
        ((PIXELS > 0.5).byte(), "torch.uint8"),
        (PIXELS > 0.5, "torch.bool"),
        (PIXELS.double(), "torch.float64"),
        (255 * PIXELS, "numbers from 0 to 1"),
        (PIXELS - 0.5, "numbers from 0 to 1"),
        (PIXELS / torch.zeros(1), "numbers from 0 to 1"),
        (PIXELS[:, :1], r"images.expand\(-1, 3, -1, -1\)"),
        (PIXELS.permute(0, 2, 3, 1), r"colours are last images.permute\(0, 3, 1, 2\)"),
        (PIXELS.clone().requires_grad_(), "detach"),
        (PIXELS[:0], "has no images"),
        (["a.png"] * 6, "pathlib.Path"),
        (PIXELS.numpy(), "one tensor"),
    ],
)
def test_images_of_another_kind_are_refused(images: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^val: .*{message}"):
        check_task(own(images=images))
    with pytest.raises(ValueError, match=f"^pool: .*{message}"):
        check_pool(Pool(images))


def test_good_tasks_are_taken_and_their_names_are_looked_at() -> None:
    several = 2 * ZEROS_AND_ONES - 1
    several[0, 1] = 0
    for labels in (None, torch.tensor([2, 2, 2, 0, 0, 0]), several):
        check_task(own(labels=labels))
    one, many = own(), own(labels=several)
    for wrong, message in (
        (own(classes=["a", "b", "a"]), "names are needed, each once"),
        (own(mean=(123.7, 116.3, 103.5)), "mean"),
        (own(std=(0.5, 0.5, 0.0)), "std"),
        (own(std=(0.5,)), "three numbers"),
        (one._replace(train=many.train), "one class an image, or of all several"),
    ):
        with pytest.raises(ValueError, match=message):
            check_task(wrong)


# --- what makes a number mean something else -----------------------------------------------------


def test_equal_images_in_two_splits_are_told_in_folders_and_in_memory(tmp_path: Path) -> None:
    """Two of the six test images are training images under other names."""
    names = [f"{part}/{kind}/{k}.png" for part in SPLITS for kind in ("cat", "dog") for k in "123"]
    photos_in(tmp_path, names)
    assert find_doubts(folder(tmp_path, 0)) == []
    for k in "12":
        shutil.copy(tmp_path / f"train/cat/{k}.png", tmp_path / f"test/cat/{k}.png")
    said = "train and test have 2 images in common: the test is of images that were trained on"
    assert find_doubts(folder(tmp_path, 0)) == [said]

    first = Split(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    last = Split(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    (line,) = find_doubts(Task("own", first, last, last, ["a", "b"]))
    assert line.startswith("val and test have 4 images in common: epochs and rates are chosen on")


def test_files_that_differ_in_their_endings_alone_are_told(tmp_path: Path) -> None:
    """Converted pictures, or photos and their masks; also within a split that the user made."""
    names = [f"{part}/{kind}/{k}.jpg" for part in SPLITS for kind in ("cat", "dog") for k in "123"]
    photos_in(tmp_path, names)
    assert find_doubts(folder(tmp_path, 0)) == []
    photos_in(tmp_path, ["test/cat/1.png", "test/cat/2.png", "train/dog/3.PNG"])
    (line,) = find_doubts(folder(tmp_path, 0))
    assert "another ending: 3, such as " in line and "/dog/3.PNG and " in line
    assert "an image and its mask" in line
    edited = ["train/dog/2.JPG", "test/dog/DSC1.jpg", "test/dog/dsc1.JPG"]
    photos_in(tmp_path, edited)  # an image of a camera and its export
    (line,) = [line for line in find_doubts(folder(tmp_path, 0)) if "namesake" in line]
    assert "another ending: 5, such as " in line


def read_before(task: Task) -> dict[Path, Look]:
    """What was found in each file, as a run looks at its images before the work."""
    return check_readable([file for name in SPLITS for file in getattr(task, name).images])


def with_copies_in_test(place: Path, files: int) -> Task:
    """Training files of 4 bytes each, of which the first four are in test, too, under new names."""
    contents = [k.to_bytes(4, "big") for k in range(files)]
    named = {f"train_{k}.bmp": content for k, content in enumerate(contents)}
    named |= {f"test_{k}.bmp": content for k, content in enumerate(contents[:4])}
    named |= {f"val_{k}.bmp": bytes(k) for k in range(1, 3)}  # no training file has their sizes
    for name, content in named.items():
        (place / name).write_bytes(content)
    splits = []
    for part in SPLITS:
        of_part = [place / name for name in named if name.startswith(part)]
        splits.append(Split(of_part, torch.arange(len(of_part)) % 2))
    return Task("own", *splits, ["a", "b"])


def test_of_many_small_training_files_all_are_compared_with_test(tmp_path: Path) -> None:
    """So many as are not read at the start of a run, so their pixels are not known."""
    (line,) = find_doubts(with_copies_in_test(tmp_path, 20_002))
    assert line.startswith("train and test have 4 images in common: the test is of images that")


@pytest.mark.parametrize(("limit", "most"), [("MOST_BYTES", 16), ("MOST_SIZES", 4)])
def test_where_only_some_training_files_are_compared_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """Of eight files every second one: two of the four that are in test."""
    task = with_copies_in_test(tmp_path, 8)
    monkeypatch.setattr(f"support.checks.{limit}", most)
    common, partly = find_doubts(task)
    assert common.startswith("train and test have at least 2 images in common: the test is of")
    assert partly.startswith("train has 8 files: one in 2 was compared with val and test")


@pytest.mark.parametrize("ending", ["png", "bmp", "tiff"])
def test_a_picture_that_was_saved_anew_is_told_by_its_pixels(tmp_path: Path, ending: str) -> None:
    """Two training images lie in test, in another format and under other names."""
    names = [f"{part}/{kind}/{k}.png" for part in SPLITS for kind in ("cat", "dog") for k in "123"]
    photos_in(tmp_path, names)
    assert find_doubts(folder(tmp_path, 0), read_before(folder(tmp_path, 0))) == []
    for kind in ("cat", "dog"):
        picture = Image.open(tmp_path / f"train/{kind}/2.png")
        more: Any = {"compress_level": 0} if ending == "png" else {}
        picture.save(tmp_path / f"test/{kind}/new.{ending}", **more)
    task = folder(tmp_path, 0)
    assert find_doubts(task) == []  # their bytes are others
    said = "train and test have 2 images in common: the test is of images that were trained on"
    assert find_doubts(task, read_before(task)) == [said]
    # Where the training images are too many to be read, val and test are still compared by pixels.
    picture.save(tmp_path / f"val/dog/other.{ending}", **more)
    task = folder(tmp_path, 0)
    pixels = {file: x for file, x in read_before(task).items() if file not in task.train.images}
    said = "val and test have an image in common: epochs and rates are chosen on images that are"
    assert [line[: len(said)] for line in find_doubts(task, pixels)] == [said]


def test_a_picture_with_two_labels_is_told_in_folders_and_in_memory(tmp_path: Path) -> None:
    names = [f"{part}/{kind}/{k}.png" for part in SPLITS for kind in ("cat", "dog") for k in "123"]
    photos_in(tmp_path, names)
    shutil.copy(tmp_path / "train/cat/1.png", tmp_path / "train/cat/copy.png")  # one label
    shutil.copy(tmp_path / "test/cat/1.png", tmp_path / "test/dog/copy.png")
    task = folder(tmp_path, 0)
    said = "pictures that are there twice, with different labels: 1"
    counted = "test: its 7 images are 6 different pictures: each image counts in the accuracy"
    first, second = find_doubts(task, read_before(task))
    assert first.startswith(counted) and second == said
    twice = torch.cat([PIXELS[:3], PIXELS[:3]])
    splits = [Split(torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2] * 2)) for _ in range(2)]
    for labels, n in (([0, 1, 2, 0, 1, 2], 0), ([0, 1, 2, 1, 2, 2], 2)):
        last = Split(twice, torch.tensor(labels))
        lines = find_doubts(Task("own", *splits, last, ["a", "b", "c"]))
        assert [line for line in lines if "twice" in line] == [f"{said[:-1]}{n}"] * bool(n)


def test_a_picture_with_a_label_in_one_split_and_another_in_another_is_told(tmp_path: Path) -> None:
    names = [f"{part}/{kind}/{k}.png" for part in SPLITS for kind in ("cat", "dog") for k in "123"]
    photos_in(tmp_path, names)
    shutil.copy(tmp_path / "val/cat/1.png", tmp_path / "test/cat/copy.png")  # one label
    shutil.copy(tmp_path / "val/cat/2.png", tmp_path / "test/dog/copy.png")
    task = folder(tmp_path, 0)
    common, labels = find_doubts(task, read_before(task))
    assert common.startswith("val and test have 2 images in common")
    assert labels == "pictures that are there twice, with different labels: 1"


def test_an_image_that_counts_several_times_is_told(tmp_path: Path) -> None:
    """In folders, in lists with a path twice or in two ways, and in memory; not of training."""
    names = [f"{part}/{kind}/{k}.png" for part in SPLITS for kind in ("cat", "dog") for k in "123"]
    photos_in(tmp_path, names)
    task = folder(tmp_path, 0)
    test = [*map(Path, task.test.images)]
    in_other_words = [file.parent / ".." / file.parent.name / file.name for file in test]
    val = Split([*task.val.images] * 2, task.val.targets.repeat(2))
    listed = task._replace(
        train=Split([*task.train.images] * 2, task.train.targets.repeat(2)),
        val=val,
        test=Split([*test * 9, *in_other_words], task.test.targets.repeat(10)),
    )
    in_val = "val: its 12 images are 6 different pictures: epochs and rates are chosen by each"
    in_test = "test: its 60 images are 6 different pictures: each image counts in the accuracy,"
    for found, line in zip(
        find_doubts(listed, read_before(listed)), (in_val, in_test), strict=True
    ):
        assert found.startswith(line)

    for file in tmp_path.glob("test/*/*.png"):
        for k in range(9):
            Image.open(file).save(file.with_name(f"{file.stem} ({k}).bmp"))
    task = folder(tmp_path, 0)
    (line,) = find_doubts(task, read_before(task))
    assert line.startswith(in_test)

    labels = torch.tensor([0, 1, 2] * 2)
    parts = [Split(torch.rand(6, 3, 8, 8), labels) for _ in SPLITS]
    repeated = Split(torch.cat([parts[2].images] * 10), labels.repeat(10))  # type: ignore[list-item]
    (line,) = find_doubts(Task("own", *parts[:2], repeated, ["a", "b", "c"]))
    assert line.startswith(in_test)


def test_one_file_in_two_splits_is_no_converted_namesake(tmp_path: Path) -> None:
    """That it is in both splits is told, by content."""
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in "012"])
    photos_in(tmp_path, ["dog/2.jpg"])
    files = sorted(tmp_path.glob("*/*"))

    def part(*names: str) -> Split:
        """The files of these names, of both classes."""
        own = [file for file in files if file.name in names]
        return Split(own, torch.tensor([int(file.parent.name == "dog") for file in own]))

    task = Task("own", part("0.png", "1.png"), part("2.png"), part("0.png", "1.png"), ["a", "b"])
    lines = find_doubts(task)
    assert [line for line in lines if "namesake" in line] == []
    assert any(line.startswith("train and test have 4 images in common") for line in lines)
    (line,) = [x for x in find_doubts(task._replace(test=part("2.jpg"))) if "namesake" in x]
    assert "another ending: 1, such as" in line


def test_accents_as_old_macs_write_them_are_told(tmp_path: Path) -> None:
    """NFC, NFD, and a Hindi letter that has one form alone, which is none of a Mac's."""
    for name, told in (("Kü", 0), ("Ku\u0308", 1), ("\u0915\u093c", 0), ("Ku", 0)):
        place = tmp_path / str(told) / name
        photos_in(place, [f"{kind}/{k}.png" for kind in ("cat", name) for k in range(5)])
        lines = [line for line in describe(folder(place, 0)) if "NFD" in line]
        assert len(lines) == told
        in_memory = [line for line in describe(own(classes=[name, "b", "c"])) if "NFD" in line]
        assert len(in_memory) == told


def test_numbers_begin_anew_in_each_part_without_a_word(tmp_path: Path) -> None:
    photos_in(tmp_path, [f"{part}/{kind}/1.png" for part in SPLITS for kind in ("cat", "dog")])
    assert find_doubts(folder(tmp_path, 0)) == []


def test_labels_that_are_mostly_not_counted_are_told() -> None:
    """CheXpert writes 0 for no and -1 for uncertain."""
    labels = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])
    parts = [Split(torch.rand(4, 3, 8, 8), labels) for _ in SPLITS]
    doubts = find_doubts(Task("own", *parts, ["a", "b"]))
    assert [line.split(".")[0] for line in doubts] == [
        f"{name}: 50 % of the labels are 0, not counted" for name in SPLITS
    ]
    parts = [
        Split(torch.rand(4, 3, 8, 8), torch.where(labels == 0, -1, -labels.abs() + 2))
        for _ in SPLITS
    ]
    assert find_doubts(Task("own", *parts, ["a", "b"])) == []


def test_a_class_that_a_split_lacks_is_told() -> None:
    whole = Split(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2]))
    part = Split(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    task = Task("own", whole, Split(torch.rand(3, 3, 8, 8), whole.targets), part, ["a", "b", "c"])
    assert find_doubts(task) == ["test has no image of class c"]


def test_of_many_classes_that_lack_the_first_are_named() -> None:
    names = [f"c{k}" for k in range(12)]
    whole = Split(torch.rand(12, 3, 8, 8), torch.arange(12))
    parts = [Split(torch.rand(12, 3, 8, 8), labels) for labels in (torch.arange(12), whole.targets)]
    task = Task("own", whole, *parts, names)._replace(
        test=Split(torch.rand(1, 3, 8, 8), torch.tensor([11]))
    )
    assert find_doubts(task) == ["test has no image of class c0, c1, c2, c3, c4 and 6 more"]


def test_of_several_classes_what_their_map_is_of_is_told() -> None:
    """12 images, of which each shows a person: any network finds it. 18 of 20 classes have none."""
    labels = -torch.ones(12, 20).long()
    labels[:, 14] = 1
    labels[:7, 6] = 1
    names = [f"c{k}" for k in range(20)]
    assert find_lacking_classes("test", Split(torch.rand(12, 3, 8, 8), labels), names) == [
        "test has no image of class c0, c1, c2, c3, c4 and 13 more;"
        " its mAP is the mean of 2 of 20 classes",
        "test: no image is without class c14, so any network finds it",
    ]
    lacking_alone = ["train has no image of class c0, c1, c2, c3, c4 and 13 more"]  # not scored
    train = Split(torch.rand(12, 3, 8, 8), labels)
    assert find_lacking_classes("train", train, names) == lacking_alone
    labels[:10], labels[10:] = 1, -1
    assert find_lacking_classes("test", Split(torch.rand(12, 3, 8, 8), labels), names) == []


def test_training_images_without_a_class_are_told() -> None:
    """By the loss itself: softmax has no gradient there."""
    labels = torch.tensor([[1, -1], [-1, -1], [0, -1], [-1, 1]])
    z = torch.randn(4, 2, requires_grad=True)
    cross_entropy(z, labels, "softmax").sum().backward()
    assert z.grad is not None
    n = int((z.grad == 0).all(1).sum())
    (line,) = find_without_class(Split(torch.rand(4, 3, 8, 8), labels))
    assert n == 2 and line.startswith(f"train: {n} of 4 images have no class; the loss softmax")
    assert find_without_class(Split(torch.rand(2, 3, 8, 8), labels[[0, 3]])) == []
    assert find_without_class(own().train) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": range(2)}, "give a list of names"),
        ({"classes": {"a": 0, "b": 1}}, "give a list of names"),
        ({"classes": "ab"}, "give a list of names"),
        ({"mean": 0.5}, "three numbers each"),
    ],
)
def test_names_and_normalisation_of_other_kinds_are_refused(
    changes: dict[str, Any], said: str
) -> None:
    split = Split(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=said):
        check_task(Task("own", split, split, split, ["a", "b"])._replace(**changes))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ((1, 2, 3), "^task: is a tuple; give data.Task"),
        (own(val=None), "^val: is a NoneType; give data.Split"),
        (own(train=(PIXELS, torch.arange(6))), "^train: is a tuple; give data.Split"),
        (own(test=TensorDataset(PIXELS)), "^test: is a TensorDataset; give data.Split"),
        (own(mean=("a", "b", "c")), "^mean .* give three numbers each"),
        (own(std=(None,) * 3), "^mean .* give three numbers each"),
        (own(classes=["cat", "Cat ", "dog"]), "'cat' and 'Cat ' look alike"),
        (own(classes=["a1", "A1", "b"]), "'a1' and 'A1' look alike"),
        (own(classes=["e\u0301", "\u00e9", "b"]), "look alike"),
    ],
)
def test_what_is_no_task_is_refused_in_a_line(task: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_task(task)


@pytest.mark.parametrize("names", ["2 ²", "1 ①", "IV Ⅳ"])
def test_signs_that_every_disk_tells_apart_are_two_classes(tmp_path: Path, names: str) -> None:
    check_task(own(classes=[*names.split(), "b"]))
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in names.split() for k in range(5)])
    assert folder(tmp_path, 0).classes == sorted(names.split())


def test_what_is_no_pool_is_refused_in_a_line() -> None:
    pool: Any = PIXELS
    with pytest.raises(ValueError, match=r"^pool: is a Tensor; give data.Pool"):
        check_pool(pool)
    split: Any = own().train
    with pytest.raises(ValueError, match=r"^pool: images are a Split; give one tensor"):
        check_pool(Pool(split))


def test_black_images_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pool: all pixels are 0"):
        check_pool(Pool(torch.zeros(2, 3, 8, 8)))


def test_images_divided_by_255_twice_are_refused() -> None:
    split = Split(torch.rand(2, 3, 8, 8) / 255, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="divided by 255 twice"):
        check_task(Task("own", split, split, split, ["a", "b"]))


def test_a_task_that_is_handed_over_again_has_the_pictures_of_now(tmp_path: Path) -> None:
    """A split's images are decoded once; a script may replace the files and go on."""
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(5)])
    task = folder(tmp_path, 0)
    first = decode_once(as_checked(task).test, TRANSFORM, range(2)).images
    for file in task.test.images:
        Image.new("RGB", (8, 8), "white").save(file)
    second = decode_once(as_checked(task).test, TRANSFORM, range(2)).images
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    assert first.min() < 255 and second.min() == 255


def test_of_splits_of_a_script_it_is_not_said_how_they_were_drawn(tmp_path: Path) -> None:
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(5)])
    task = folder(tmp_path, 0)
    assert len(describe(task)) == 2
    assert len(describe(as_checked(task._replace(test=task.val, val=task.test)))) == 1


def test_images_in_memory_are_equal_however_they_were_divided_by_255() -> None:
    levels = torch.randint(0, 256, (4, 3, 8, 8)).float()
    labels = torch.tensor([0, 1, 0, 1])
    train, test = Split(levels / 255, labels), Split(levels * (1 / 255), labels)
    assert not torch.equal(train.images, test.images)
    val = Split(torch.rand(4, 3, 8, 8), labels)
    (line,) = find_doubts(Task("own", train, val, test, ["a", "b"]))
    assert line.startswith("train and test have 4 images in common")


def test_images_of_one_colour_are_told_if_they_are_the_most() -> None:
    """As of (255 * x) // 255: 0 and 1 are left. One black image of four is none to doubt."""
    labels = torch.tensor([0, 1, 0, 1])
    images = torch.rand(4, 3, 8, 8)
    black = images.clone()
    black[:3] = 0
    one_black = images.flip(0).clone()
    one_black[0] = 0
    splits = [Split(pixels, labels) for pixels in (torch.rand(4, 3, 8, 8), one_black, black)]
    doubts = find_doubts(Task("own", *splits, ["a", "b"]))
    assert "test: 3 of 4 images are of one colour" in doubts and not any(
        "val:" in x for x in doubts
    )


def test_files_that_are_black_or_of_one_colour_are_told_as_in_memory(tmp_path: Path) -> None:
    """The numbers 0 and 1, as of pixels from 0 to 1 that were saved as whole numbers; 2 are none.

    Each picture of one colour is a line, too, where they are more than half.
    """
    generator = np.random.default_rng(0)
    told = (
        "no pixel is above 1 of 255, so the images are black; were numbers from 0 to 1 saved as"
        " whole numbers?"
    )
    for case, highest in (("black", 1), ("dark", 2)):
        for kind in ("cat", "dog"):
            for k in range(10):
                pixels = generator.integers(0, highest + 1, (8, 8, 3), dtype=np.uint8)
                pixels[0, 0] = highest
                file = tmp_path / case / kind / f"{k}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
        task = folder(tmp_path / case, 0)
        expected = [f"{name}: {told}" for name in SPLITS] if case == "black" else []
        assert find_doubts(task, read_before(task)) == expected

    task = folder(tmp_path / "dark", 0)
    colour = 0
    for split, plain in ((task.train, 6), (task.test, 3)):  # of 14, and of 4
        for file in split.images[:plain]:
            colour += 1
            Image.new("RGB", (8, 8), (3 * colour, 9, 200)).save(file)
    said = ["test: 3 of 4 images are of one colour"]
    assert find_doubts(task, read_before(task)) == said
    assert check(f"folder:{tmp_path}/dark", tmp_path).problems == said
    assert len(check(f"folder:{tmp_path}/black", tmp_path).problems) == 3


def test_of_very_many_training_images_black_ones_are_told_from_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One file stands for 20,001 of training; of the last two parts all are read."""
    photos_in(tmp_path, [f"{k}.png" for k in range(4)])
    black, *files = [tmp_path / name for name in ("black.png", "0.png", "1.png", "2.png", "3.png")]
    Image.new("RGB", (4, 4)).save(black)
    train = Split([black] * 20_001, torch.arange(20_001) % 2)
    val, test = (Split(files[k::2], torch.tensor([0, 1])) for k in range(2))
    cfg = FinetuneConfig(backbone="vit_mini", dataset="own")
    look_at_data(cfg, Task("own", train, val, test, ["a", "b"]), None)
    (told,) = [line for line in caplog.messages if "black" in line]
    assert told.startswith("own: train: no pixel is above 1 of 255, so the images are black")


@pytest.mark.parametrize("kind", ["train", "pool"])
def test_of_very_many_images_a_thousand_are_read_and_the_line_says_of_how_many(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one colour, where the file's number is even. Each start and each dry run reads them."""
    read: list[Path] = []

    def look(file: Path) -> Look:
        read.append(file)
        return Look(is_of_one_colour=int(file.stem) % 2 == 0)

    monkeypatch.setattr("data.look_at_file", look)
    files = [tmp_path / f"{k}.jpg" for k in range(21_000)]  # every 21st: half of them are even
    files[21] = tmp_path / "100000.jpg"
    if kind == "pool":
        look_at_pool("photos", Pool(files))
    else:
        split = Split(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
        train = Split(files, torch.arange(21_000) % 2)
        monkeypatch.setattr("support.checks.find_common_images", lambda *_: [])  # opens files
        cfg = FinetuneConfig(backbone="vit_mini", dataset="own")
        look_at_data(cfg, Task("own", train, split, split, ["a", "b"]), None)
    assert [*sorted(read)] == [*sorted(files[::21])] and len(read) == 1_000
    (told,) = [line for line in caplog.messages if "colour" in line]
    told_of = "1,000 of 21,000 images were looked at, and 501 of these are of one colour"
    assert told.endswith(f"{kind}: {told_of}")


@pytest.mark.parametrize("command", ["finetune", "align", "pretrain", "plan", "check"])
def test_a_script_that_takes_half_images_is_told_so_once_by_each_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any is used, also by the second command of a notebook."""
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(5)])
    file = tmp_path / "cat/0.png"
    file.write_bytes(file.read_bytes()[:-40])

    def read() -> str:
        """Read all images as the command does; returns what it finds wrong with them."""
        task, pool = folder(tmp_path, 0), open_pool(f"{tmp_path}", tmp_path)
        labelled: Any = {"backbone": "vit_mini", "dataset": f"folder:{tmp_path}"}
        small: Any = {"epochs": 1, "warmup_epochs": 0, "batch": 5, "device": "cpu"}
        cfg = PretrainConfig(backbone="vit_mini", pool=f"{tmp_path}", **small)
        try:
            if command == "finetune":
                look_at_data(FinetuneConfig(**labelled), task, None)
            elif command == "align":
                look_at_data(AlignConfig(**labelled), task, pool)
            elif command == "pretrain":
                pretrain(cfg, tmp_path.parent / "out")
            elif command == "plan":
                plan(cfg, tmp_path.parent / "out")
            else:
                return "".join(check(f"folder:{tmp_path}", tmp_path).problems)
        except ImageError as error:
            return str(error)
        return ""

    assert "cat/0.png" in read() and "LOAD_TRUNCATED" not in caplog.text
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    for _ in range(2):
        caplog.clear()
        assert read() == ""
        told = "half an image may be taken for a whole one; set it to False"
        assert caplog.text.count(told) == 1


def test_the_images_that_are_read_of_many_are_spread_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos_in(tmp_path, [f"{k}.png" for k in range(10)])
    files = [tmp_path / f"{k}.png" for k in range(10)]
    monkeypatch.setattr("support.experiment.SAMPLE", 4)
    assert [*look_at(files, most=10)] == [*look_at(files)] == files
    looks = look_at(files, most=9)
    assert [*looks] == files[::3]
    for file in files[3::3]:
        Image.new("RGB", (4, 4), "red").save(file)
    assert find_empty("train", files, look_at(files, most=9)) == [
        "train: 4 of 10 images were looked at, and 3 of these are of one colour"
    ]


def own_files(*parts: Sequence[str]) -> list[ImageFile]:
    """The files of these names, none of which is there, as those of a task in train, val, test."""
    splits = []
    for names in parts:
        labels = [int("dog/" in name) for name in names]
        splits.append(Split([Path("/photos", name) for name in names], torch.tensor(labels)))
    return files_of(Task("own", *splits, ["cat", "dog"]))


@pytest.mark.parametrize(
    ("image", "other", "is_copy"),
    [
        ("{}.png", "{}_mask.png", False),
        ("img_{}.png", "mask_{}.png", False),
        ("fundus_{}.png", "mask_{}.png", False),
        ("images/{}.png", "masks/{}.png", False),
        ("{}.png", "{}_flip.png", True),
        ("{}.png", "{}_bright.png", True),
        ("{}.png", "{}.jpg", True),
        ("{}_orig.png", "{}_edited.png", True),
    ],
)
def test_an_image_of_another_class_is_no_mask_and_no_copy(
    image: str, other: str, is_copy: bool
) -> None:
    """A script gives the labels of files in one folder: of faces and masks, originals and fakes."""
    images = [Path("/all", image.format(k)) for k in "123"]
    others = [Path("/all", other.format(k)) for k in "123"]
    first = Split(images, torch.tensor([0, 0, 0]))
    for labels, told in ((1, 0), (0, 1)):
        second = Split(others, torch.full((3,), labels))
        empty = Split([], torch.tensor([], dtype=torch.int64))
        task = Task("own", first, empty, second, ["a", "b"])
        lines = [line for line in find_doubtful_names(task) if line.startswith("images that")
                 or line.startswith("images whose")]  # fmt: skip
        assert len(lines) == told
        assert not told or is_copy != ("look like masks" in lines[0])


@pytest.mark.parametrize(
    ("class_name", "image", "other"),
    [
        ("rot", "{}", "{}_rot"),
        ("ford_gt", "{}", "{}_gt"),
        ("ford_gt", "img_{}", "gt_{}"),
        ("with_mask", "{}", "{}_mask"),
        ("edited", "image_{}", "edited_{}"),
        ("front", "{}", "{}_front"),
    ],
)
def test_words_of_a_class_name_say_nothing_of_masks_and_copies(
    class_name: str, image: str, other: str
) -> None:
    """In a class of another name, these files are told, whatever the other classes are."""
    images = [Path("/photos", class_name, f"{image.format(k)}.png") for k in "123"]
    others = [Path("/photos", class_name, f"{other.format(k)}.png") for k in "123"]
    empty = Split([], torch.tensor([], dtype=torch.int64))
    labels = torch.tensor([0, 0, 0])
    for classes, told in (
        ([class_name, "blau"], 0),
        (["cat", "blau"], 1),
        (["cat", class_name], 1),
    ):
        task = Task("own", Split(images, labels), empty, Split(others, labels), classes)
        assert len(find_doubtful_names(task)) == told


def test_masks_beside_their_originals_are_told(tmp_path: Path) -> None:
    """Only where the original is there, and the word is a word of its own: flipper is none."""
    names = [f"{kind}/{k}" for kind in ("cat", "dog") for k in ("benign (1)", "1", "2", "3")]
    photos_in(tmp_path, [f"{name}.png" for name in [*names, "cat/4_mask", "dog/1flipper"]])
    assert find_doubts(folder(tmp_path, 0)) == []
    made = ["cat/benign (1)_mask", "cat/1_mask_2", "dog/2_anno", "dog/3.mask", "dog/mask_1"]
    photos_in(tmp_path, [f"{name}.png" for name in made])
    (line,) = find_derived(files_of(folder(tmp_path, 0)))
    assert "look like masks of others: 5, such as" in line and "cat/1_mask_2.png" in line


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("img_{}", "mask_{}"),
        ("p{}_image", "p{}_mask"),
        ("P{}_image_2", "P{}_label_2"),
        ("IMG{}", "GroundTruth{}"),
        ("{}", "{}GT"),
        ("P{}/image", "P{}/seg"),
    ],
)
def test_masks_that_have_an_images_name_but_for_a_word_are_told(image: str, mask: str) -> None:
    """Both in one folder; in training, too, since a network learns from them as from images."""
    cats = [f"cat/{name.format(k)}.png" for k in "123" for name in (image, mask)]
    dogs = [f"dog/{image.format(k)}.png" for k in "123456"]
    (line,) = find_derived(own_files([*cats, *dogs[:2]], dogs[2:4], dogs[4:]))
    first = f"/photos/cat/{mask.format(1)}.png"
    assert f"images that look like masks of others: 3, such as {first}. If" in line


def test_copies_that_have_their_originals_name_but_for_a_word_are_told() -> None:
    """Each with its original, where one of both is not in training: here of 1 and 3."""
    cats = [f"cat/{k}_{word}.png" for k in "123" for word in ("orig", "flipped")]
    dogs = [f"dog/{k}_orig.png" for k in "123456"]
    files = own_files([*cats[1:4], *dogs[:2]], [cats[5], *dogs[2:4]], [cats[0], cats[4], *dogs[4:]])
    (line,) = find_derived(files)
    first = "/photos/cat/1_flipped.png of /photos/cat/1_orig.png"
    assert f"that they were made of others: 2, such as {first}. A" in line


@pytest.mark.parametrize(
    "change",
    [
        *("{}_flipLR", "{}_90deg", "{} - Copy (2)", "aug_{}_123", "Copy of {}", "{}-bright"),
        *("resized/{}", "more/{}", "{}_зеркало", "{} - 副本", "{}_größer"),
    ],
)
def test_changed_copies_are_told_where_one_is_not_in_training(change: str) -> None:
    """By names alone. Copies that are in training, with their originals, are well."""
    names = [f"cat/{k}.png" for k in "123456"]
    made = [f"cat/{change.format(k)}.png" for k in "123456"]
    dogs = [[f"dog/{part}{k}.png" for k in "123"] for part in SPLITS]
    all_in_train = find_derived(own_files([*names, *made, *dogs[0]], dogs[1], dogs[2]))
    assert all_in_train == []
    (line,) = find_derived(own_files([*names, *made[2:], *dogs[0]], dogs[1], made[:2] + dogs[2]))
    assert ": 2, such as " in line and f"{made[0]} of " in line and f"/{names[0]}." in line
    (line,) = find_derived(own_files(dogs[0], dogs[1], [*names, *made, *dogs[2]]))
    assert ": 6, such as " in line


def test_versions_that_roboflow_made_of_a_picture_are_told_where_they_are_parted() -> None:
    def versions(mark: str) -> list[str]:
        """Names of cats that differ from other versions in their mark."""
        return [f"cat/{k}_jpg.rf.{mark}{k}.jpg" for k in "123"]

    dog = ["dog/1_jpg.rf.aa.jpg"]
    assert find_derived(own_files([*versions("a"), *versions("b")], dog, dog)) == []
    (line,) = find_derived(own_files(versions("a"), versions("b"), dog))
    assert "Roboflow made of one picture, as their names say: 3, such as" in line


@pytest.mark.parametrize(
    "names",
    [
        [f"{kind}/{k}_{j}.png" for kind in ("cat", "dog") for k in "123" for j in "123"]
        + [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in "123"],
        [f"{kind}/patient {p}/{k}.png" for kind in ("cat", "dog") for p in "12345" for k in "123"],
        [f"{kind}/{kind} {place}/{place}{k}.png" for kind in ("cat", "dog") for place in "abc"
         for k in "123"],
        [f"101/{kind}/image_000{k}.jpg" for kind in ("cat", "dog") for k in "123456"],
        [f"{kind}/n0{kind}_{k}.JPEG" for kind in ("cat", "dog") for k in "123456"],
        ["cat/red.png", "cat/red apple.png", *[f"dog/{k}.png" for k in "123456"]],
        [f"{kind}/{k}_front.png" for kind in ("cat", "dog") for k in "123456"],
        [f"{place}_{k}.png" for place in ("cat/img", "cat/photo", "dog/mask") for k in "123456"],
    ],
)  # fmt: skip
def test_usual_names_and_folders_are_not_taken_for_copies(names: list[str]) -> None:
    assert find_derived(own_files(names[::3], names[1::3], names[2::3])) == []


def test_copies_that_were_divided_after_they_were_made_are_told_across_parts() -> None:
    """A mirrored image in test/, its original in train/, which may have an image of this name, too.

    Names that end in their part, and parts that are numbered anew, are usual.
    """
    train = [f"train/{kind}/{k}.png" for kind in ("cat", "dog") for k in "123456"]
    val = [f"val/{kind}/a{k}.png" for kind in ("cat", "dog") for k in "123"]
    flipped = [f"test/cat/{k}_flip.png" for k in "123"]
    (line,) = find_derived(own_files(train, val, flipped))
    assert ": 3, such as /photos/test/cat/1_flip.png of /photos/train/cat/1.png. A" in line
    (line,) = find_derived(own_files([*train, *flipped[:1]], val, ["test/cat/1.png"]))
    assert ": 1, such as /photos/test/cat/1_flip.png of /photos/test/cat/1.png. A" in line
    bright = [f"train/cat/{k}_bright.png" for k in "123"]
    (line,) = find_derived(own_files([*train, *bright], val, ["test/cat/4_bright.png"]))
    assert ": 1, such as /photos/test/cat/4_bright.png of /photos/train/cat/4.png. A" in line
    deeper = [f"test/cat/more/{k}_flip.png" for k in "123"]
    (line,) = find_derived(own_files([*train, "train/cat/best/7.png"], val, deeper))
    assert ": 3, such as /photos/test/cat/more/1_flip.png of /photos/train/cat/1.png. A" in line
    named_by_part = [f"test/{kind}/{k}_test.png" for kind in ("cat", "dog") for k in "123456"]
    anew = [f"test/{kind}/{k}.png" for kind in ("cat", "dog") for k in "123456"]
    for usual in (named_by_part, anew, ["test/dog/a1_flip.png", *anew]):
        assert find_derived(own_files(train, val[:3], usual)) == []


def test_training_on_changed_copies_of_test_images_is_told() -> None:
    """By any words, if there are several: one that all images of a part have may be its name."""
    cats = [f"train/cat/{k}_{word}.png" for k in "123456" for word in ("bright", "rotate15")]
    test = [f"test/{kind}/{k}.png" for kind in ("cat", "dog") for k in "123456"]
    val, dogs = ["val/dog/v.png"], [f"train/dog/d{k}.png" for k in "123456"]
    (line,) = find_derived(own_files([*cats, *dogs], val, test))
    assert ": 12, such as /photos/train/cat/1_bright.png of /photos/test/cat/1.png. A" in line
    assert find_derived(own_files([*cats[::2], *dogs], val, test)) == []


def test_accents_of_old_macs_hide_no_copy() -> None:
    train, dog = ["train/cat/ka\u0308se.png"], ["val/dog/1.png"]
    (line,) = find_derived(own_files(train, dog, ["test/cat/k\u00e4se_flip.png"]))
    assert ": 1, such as /photos/test/cat/k\u00e4se_flip.png of " in line


@pytest.mark.parametrize("kind", ["tram", "train", "test", "val"])
def test_a_class_may_have_the_name_of_a_part(tmp_path: Path, kind: str) -> None:
    """Copies and patients in two parts are told of it as of any other class."""
    names = {"train": "{}", "val": "a{}", "test": "{}_flip"}
    copies = [f"{part}/{kind}/{names[part].format(k)}.png" for part in SPLITS for k in "123"]
    buses = [f"{part}/bus/{part}{k}.png" for part in SPLITS for k in "123"]
    photos_in(tmp_path / "copies", copies + buses)
    (line,) = find_doubts(folder(tmp_path / "copies", 0))
    assert ": 3, such as " in line and f"/test/{kind}/1_flip.png of " in line

    patients = [f"{part}/{x}/P{k}/{part}.png" for part in SPLITS for x in (kind, "bus")
                for k in "123456"]  # fmt: skip
    photos_in(tmp_path / "patients", patients)
    (line,) = about_folders(tmp_path / "patients")
    assert "those of 12 names are divided among train, val, test." in line
    photos_in(tmp_path / "one_name", [f"{part}/{x}/{part}{k}.png" for part in SPLITS
                                      for x in (kind, "bus") for k in "123"])  # fmt: skip
    assert find_doubts(folder(tmp_path / "one_name", 0)) == []


@pytest.mark.parametrize("copy", ["{}_flip", "{}_jpg.rf.b{}"])
def test_copies_are_told_where_an_image_may_have_several_classes(copy: str) -> None:
    """As where each has one; numbers that begin anew in each part are no copies."""
    image = copy.replace("b", "a") if "rf" in copy else "{}"
    labels = 2 * ZEROS_AND_ONES - 1
    for test, told in ((copy, 1), ("{}", 0)):
        splits = [
            Split([Path(f"/d/{part}/{name.format(k, k)}.png") for k in range(6)], labels)
            for part, name in (("train", image), ("val", "a{}"), ("test", test))
        ]
        lines = find_doubtful_names(Task("own", *splits, ["a", "b", "c"]))
        assert len(lines) == told
        assert not told or ": 6, such as /d/test/0_" in lines[0]


def test_capital_letters_do_not_hide_a_copy() -> None:
    train, dog = ["cat/DSC1.JPG", "cat/DSC2.JPG"], ["dog/1.png"]
    (line,) = find_derived(own_files(train, dog, ["cat/dsc1_edited.jpg"]))
    assert ": 1, such as /photos/cat/dsc1_edited.jpg of /photos/cat/DSC1.JPG. A" in line


@pytest.mark.parametrize(
    ("image", "mask", "told"),
    [
        ("img_{}", "mask_{}", True),
        ("fundus_{}", "mask_{}", True),
        ("p{}_image", "p{}_mask", True),
        ("scan{}-rgb", "scan{}-seg", True),
        ("IMG_{}", "carMask{}", False),  # a car is none in IMG
        ("with_mask_{}", "without_mask_{}", False),
        ("img_{}", "mask_9{}", False),
        ("bottle_{}", "label_{}", False),  # photographs of a bottle and of its label
    ],
)
def test_masks_whose_images_have_another_word_in_its_place_are_told(
    image: str, mask: str, told: bool
) -> None:
    names = [f"{kind}/{name.format(k)}.png" for kind in ("cat", "dog") for name in (image, mask)
             for k in "123456"]  # fmt: skip
    lines = find_derived(own_files(names[::3], names[1::3], names[2::3]))
    assert len(lines) == told
    assert not told or "look like masks of others: 12, such as" in lines[0]


def numbered(orders: dict[str, str], classes: str) -> Task:
    """A task of four images a class, in folders as cat/, whose classes are numbered in `orders`."""
    splits = []
    for part in SPLITS:
        files = [
            Path(f"/pets/{part}/{kind}/{k}.png") for kind in orders[part].split() for k in "12"
        ]
        labels = torch.arange(len(files)) // 2
        splits.append(Split(files, labels))
    return Task("own", *splits, classes.split())


def test_labels_that_are_not_those_of_the_folders_are_refused() -> None:
    """As of `os.listdir` in each part, or of a part that lacks a class, from where all shift."""
    good = dict.fromkeys(SPLITS, "cat dog fox")
    check_task(numbered(good, "cat dog fox"))
    check_task(numbered(good, "a b c"))
    check_task(numbered(good, "dog cat none"))  # not all folders are classes
    cases = (("fox cat dog", "cat are labelled dog"), ("cat fox", "fox are labelled dog"))
    for test, first in cases:
        with pytest.raises(ValueError, match=f"^labels: images in /pets/test/{first}; number the"):
            check_task(numbered(good | {"test": test}, "cat dog fox"))
    patients = dict.fromkeys(SPLITS, "1/1 2/1 3/3")  # of the classes 1, 2 and 3
    check_task(numbered(patients, "1 2 3"))


def test_a_folder_of_all_images_hides_no_wrong_label() -> None:
    """As where pets/ is the second data set beside dog/, which holds all of this one."""
    task = numbered(dict.fromkeys(SPLITS, "cat dog fox") | {"test": "cat fox"}, "cat dog fox")
    splits = [
        Split([Path("/dog", file.relative_to("/")) for file in split.images], split.targets)
        for split in (task.train, task.val, task.test)
    ]
    with pytest.raises(ValueError, match=r"^labels: images in /dog/pets/test/fox are labelled dog"):
        check_task(Task("own", *splits, task.classes))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accents_and_capitals_hide_no_wrong_label(form: str) -> None:
    """Folders from a Mac, classes from a table."""
    folders = unicodedata.normalize(form, "Café Thé")
    good = dict.fromkeys(SPLITS, folders)
    check_task(numbered(good, "café thé"))
    swapped = " ".join(reversed(folders.split()))
    with pytest.raises(ValueError, match=r"^labels: images in /pets/test/.* are labelled thé"):
        check_task(numbered(good | {"test": swapped}, "café thé"))


def test_spaces_for_other_signs_hide_no_wrong_label() -> None:
    good = dict.fromkeys(SPLITS, "golden_retriever Siamese-cat")
    task = numbered(good, "x y")._replace(classes=["golden retriever", "siamese cat"])
    check_task(task)
    assert find_doubtful_names(task) == []
    swapped = Split(task.test.images, 1 - task.test.targets)
    with pytest.raises(ValueError, match=r"test/Siamese-cat are labelled golden retriever;"):
        check_task(task._replace(test=swapped))
    turns = numbered(dict.fromkeys(SPLITS, "-1 1"), "-1 1")  # two classes, as of a wheel
    with pytest.raises(ValueError, match=r"test/-1 are labelled 1;"):
        check_task(turns._replace(test=Split(turns.test.images, 1 - turns.test.targets)))


@pytest.mark.parametrize(
    ("folders", "classes", "test", "told"),
    [
        ("n01 n02 n03", "tench shark hen", [1, 0, 2], ["n01, labelled shark, and tench in"]),
        ("n01 n02 n03", "tench shark hen", [0, 1, 2], []),
        ("cat dog fox", "cat other", [1, 0, 0], ["cat, labelled other, and cat in"]),
        ("1 2 3 4 5 6 7 8 9 10", "0 1 2 3 4 5 6 7 8 9", [0, *range(2, 10), 1],
         ["10, labelled 1, and 9 in"]),
        ("P1 P2 P3 P4", "ill well", [1, 0, 1, 0], []),  # patients, numbered anew in each part
    ],
)  # fmt: skip
def test_a_split_that_is_numbered_in_another_order_is_told(
    folders: str, classes: str, test: list[int], told: list[str]
) -> None:
    """Of folders that have other names than the classes; of each split that differs."""
    names, most = folders.split(), len(classes.split()) - 1
    order = [min(k, most) for k in range(len(names))]
    splits = [
        Split(
            [Path(f"/d/{part}/{name}/{part}{k}.png") for name in names for k in "12"],
            torch.tensor(labels).repeat_interleave(2),
        )
        for part, labels in zip(SPLITS, (order, order, test), strict=True)
    ]
    task = Task("own", *splits, classes.split())
    check_task(task)
    lines = find_doubtful_names(task)
    assert [line.split(" such as ")[1].split(" train.")[0] for line in lines] == told
    assert all(line.startswith("test: folders whose images have another label") for line in lines)
    both = task._replace(val=Split(task.val.images, task.test.targets))
    assert len(find_doubtful_names(both)) == 2 * len(told)


def about_labels(task: Task) -> list[str]:
    """What is told of labels that are not those of the folders, up to the first question."""
    check_task(task)
    start = "images in folders that are named as other classes than their labels: "
    lines = find_labels_of_other_folders(files_of(task), task.classes)
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start).split(".png")[0] for line in lines]


def test_labels_of_rows_in_another_order_than_the_files_are_told() -> None:
    task = numbered(dict.fromkeys(SPLITS, "cat dog fox"), "cat dog fox")
    assert about_labels(task) == []
    rows = Split(task.train.images, task.train.targets[torch.tensor([0, 3, 4, 1, 2, 5])])
    assert about_labels(task._replace(train=rows)) == ["train 4 of 6, such as /pets/train/cat/2"]


def test_one_label_that_was_corrected_does_not_hide_that_the_others_are_wrong() -> None:
    orders = dict.fromkeys(SPLITS, "cat dog fox") | {"test": "fox cat dog"}
    task = numbered(orders, "cat dog fox")
    corrected = Split(task.test.images, torch.tensor([2, 0, 1, 1, 2, 2]))
    assert about_labels(task._replace(test=corrected)) == ["test 5 of 6, such as /pets/test/fox/2"]


def test_labels_of_a_split_with_one_folder_are_told_if_they_are_of_another_class() -> None:
    """`ImageFolder` of new/ gives its only class the number 0."""
    orders = dict.fromkeys(SPLITS, "cat dog fox") | {"test": "fox"}
    told = ["test 2 of 2, such as /pets/test/fox/1"]
    assert about_labels(numbered(orders, "cat dog fox")) == told


def test_a_folder_that_is_no_class_does_not_hide_the_others() -> None:
    orders = dict.fromkeys(SPLITS, "cat dog") | {"test": "ant cat dog"}
    task = numbered(orders, "cat dog fox")
    assert about_labels(task) == ["test 4 of 6, such as /pets/test/cat/1"]


def test_folders_that_are_no_classes_although_they_have_their_names_are_taken() -> None:
    """Writers 1 and 2 who wrote both digits, and a folder with the name of what is looked for."""
    writers = [Path(f"/w/{writer}/{k}.png") for writer in "12" for k in "01"]
    digits = Split(writers, torch.tensor([0, 1, 0, 1]))
    check_task(Task("own", digits, digits, digits, ["1", "2"]))
    for place in ("/m/melanoma", "/m/melanoma/P1", "/m/P1/melanoma"):
        files = [Path(place, "0.png"), Path(place, "1.png"), Path("/m/P2/0.png")]
        moles = Split(files, torch.tensor([0, 1, 1]))
        assert about_labels(Task("own", moles, moles, moles, ["benign", "melanoma"])) == []


def test_classes_that_are_numbered_otherwise_than_folders_are_taken() -> None:
    """From 0 where folders begin at 1, and 0 for small digits; unless all numbers are classes."""
    for folders, classes, label_of in (
        ("1 2 3", "0 1 2", {"1": 0, "2": 1, "3": 2}),
        ("0 1 2 3", "0 1", {"0": 0, "1": 0, "2": 1, "3": 1}),
    ):
        files = [
            Path(f"/n/{part}/{name}/{part}.png") for part in SPLITS for name in folders.split()
        ]
        labels = torch.tensor([label_of[file.parent.name] for file in files])
        n = len(folders.split())
        splits = [Split(files[k : k + n], labels[k : k + n]) for k in (0, n, 2 * n)]
        assert about_labels(Task("own", *splits, classes.split())) == []
    orders = dict.fromkeys(SPLITS, "1 2 3") | {"test": "1 2"}
    task = numbered(orders, "1 2 3")
    one_wrong = Split(task.test.images, torch.tensor([0, 1, 1, 1]))
    told = ["test 1 of 4, such as /pets/test/1/2"]
    assert about_labels(task._replace(test=one_wrong)) == told


@pytest.mark.parametrize(
    ("folders", "wrong"),
    [
        ("0 1 2 3 4 5 6 7 8 9 99", 9),  # 99 for what nobody can read
        ("0 1 10 2 3 4 5 6 7 8", 7),  # in the order of texts
        ("1 2 3 4 5 6 7 8 9 10", 0),  # classes begin at 0
        ("0 1 2 3 4 5 6 7 8 9 97 98 99", 9),
        ("0 1 2 3 4 5 6 7 8 9 96 97 98 99", 0),  # more than one in four
    ],
)
def test_one_number_that_is_no_class_hides_no_wrong_label(folders: str, wrong: int) -> None:
    """Labels count the folders from 0, or from 1 where the folders 0 to 9 come first."""
    classes = [str(k) for k in range(10)]
    names = folders.split()
    shift = names[:10] == classes
    labels = torch.tensor([min(k + shift, 9) for k in range(len(names))])
    splits = [Split([Path(f"/d/{part}/{x}/0.png") for x in names], labels) for part in SPLITS]
    task = Task("own", *splits, classes)
    told = about_labels(task)
    assert len(told) == (wrong > 0)
    if told:
        assert told[0].startswith(f"train {wrong} of {len(names)}, val {wrong} of")


def test_absolute_and_relative_paths_may_be_mixed(tmp_path: Path) -> None:
    photos_in(tmp_path, ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"])
    files = sorted(tmp_path.rglob("*.png"))
    labels = torch.tensor([0, 0, 1, 1])
    relative = [Path(os.path.relpath(file)) for file in files]
    task = Task("own", *(Split(x, labels) for x in (files, files, relative)), ["cat", "dog"])
    check_task(task)
    assert find_doubts(task)  # the three splits share their images


@pytest.mark.parametrize("change", ["one is brighter", "half precision"])
def test_equal_images_in_memory_are_known_whatever_the_others_are(change: str) -> None:
    levels = torch.randint(256, (10, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    pixels = levels / 255
    train, test = pixels, pixels.clone()
    if change == "one is brighter":
        train = torch.cat([pixels, pixels[:1] * 0.9 + 0.05])
    else:
        test = pixels.half().float()
    splits = [Split(x, torch.arange(len(x)) % 2) for x in (train, 1 - pixels, test)]
    doubts = find_doubts(Task("own", *splits, ["a", "b"]))
    assert doubts[0].startswith("train and test have 10 images in common")


def test_dim_images_in_memory_are_told_and_are_not_taken_for_equal() -> None:
    """A camera's numbers of 16 bits: from 900 to 1040, where 257 are one of 255 levels."""
    counts = torch.randint(900, 1041, (30, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    pixels = counts / 65535
    labels = torch.arange(10) % 2
    splits = [Split(pixels[first : first + 10], labels) for first in (0, 10, 20)]
    doubts = find_doubts(Task("own", *splits, ["a", "b"]))
    assert [line.split(" where")[0] for line in doubts] == [
        f"{name}: of most images few levels are left" for name in SPLITS
    ]
    twice = [splits[0], splits[1], splits[0]]
    doubts = find_doubts(Task("own", *twice, ["a", "b"]))
    assert doubts[0].startswith("train and test have 10 images in common")


def test_a_bright_pixel_does_not_hide_that_images_lose_their_levels() -> None:
    """Numbers of 16 bits, 100 to 210, and one of 65535; what has 8 bits already loses nothing."""
    counts = torch.randint(100, 211, (10, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    counts[:, :, 0, 0] = 65535
    assert most_lose_levels(counts / 65535)
    assert not most_lose_levels((counts - 100).clamp(max=255) / 255)
    black_and_white = (counts > 150).float()
    assert not most_lose_levels(black_and_white)
    (line,) = find_empty("pool", counts / 65535, {})
    assert line.startswith("pool: of most images few levels are left where they are cut")


def test_images_that_are_nearly_black_are_not_taken_for_equal() -> None:
    """A camera's numbers of 16 bits, here at most 15 of 65535, in two images among bright ones."""
    bright, images = torch.rand(2, 6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images[4:] = torch.arange(2 * 3 * 64).reshape(2, 3, 8, 8) // 24 / 65535
    labels = torch.arange(6) % 2
    splits = [Split(pixels, labels) for pixels in (1 - bright, bright, images)]
    assert images[4].max() > 0 and not torch.equal(images[4], images[5])
    assert find_doubts(Task("own", *splits, ["a", "b"])) == []


def test_masks_in_a_pool_are_told(tmp_path: Path) -> None:
    """Changed copies are none to tell there: nothing is tested."""
    photos_in(tmp_path, [*(f"all/{k}.png" for k in range(9)), "all/1_flip.png"])
    assert check(f"{tmp_path}/all", tmp_path).problems == []
    photos_in(tmp_path / "all", [*(f"{k}_mask.png" for k in range(4)), "x/images/1.png"])
    photos_in(tmp_path / "all", ["x/masks/1.png"])
    (line,) = check(f"{tmp_path}/all", tmp_path).problems
    assert "look like masks of others: 5, such as" in line


def test_masks_in_a_folder_beside_that_of_their_images_are_told() -> None:
    """Some of them have a word more in their names. Folders of people with masks have images."""
    people = [f"{kind}/{k}.png" for kind in ("with_mask", "images_without_mask") for k in "123"]
    assert find_masks_in_pool([Path("/pool", name) for name in people]) == []
    names = ["PNGImages/1.png", "PNGImages/2.png", "PNGImages/3.png"]
    names += ["PedMasks/1_mask.png", "PedMasks/2.png", "PedMasks/9_mask.png"]
    (line,) = find_masks_in_pool([Path("/pool", name) for name in names])
    assert "masks of others: 2, such as /pool/PedMasks/1_mask.png." in line


def test_masks_in_a_folder_of_their_class_are_told(tmp_path: Path) -> None:
    """Where they have the names of images above them; a class may have folders of other names."""
    names = [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(6)]
    photos_in(tmp_path, [*names, "cat/more/1.png", "dog/labels/scan.png"])
    assert not [line for line in find_doubts(folder(tmp_path, 0)) if "masks of others" in line]
    photos_in(tmp_path, ["cat/Masks/1.tif", "dog/labels/2.png"])
    (line,) = [line for line in find_doubts(folder(tmp_path, 0)) if "masks of others" in line]
    assert "masks of others: 2, such as" in line and "cat/Masks/1.tif" in line


def about_folders(root: Path) -> list[str]:
    """What a run, and as much `data check`, tell of folders inside of the class folders of `root`.

    Paths are told without `root`.
    """
    told = [line for line in find_doubts(folder(root, 0)) if line.startswith("folders ")]
    assert told == [
        line for line in check(f"folder:{root}", root).problems if line.startswith("folders ")
    ]
    return [line.replace(f"{root}/", "") for line in told]


@pytest.mark.parametrize(
    ("inside", "covers"),
    [
        (("train_images", "test_images"), False),
        (("Train set", "Test set"), True),
        (("masks",), True),
        (tuple(f"P{k}" for k in range(8)), False),
    ],
)
def test_folders_of_images_inside_of_classes_are_told_where_they_are_divided(
    tmp_path: Path, inside: tuple[str, ...], covers: bool
) -> None:
    """Parts, masks and patients alike, whatever their names: nobody can list those."""
    for kind in ("cat", "dog"):
        names = [f"train/{kind}/{place}/{place}_{k}.png" for place in inside for k in range(8)]
        photos_in(tmp_path, names + [f"train/{kind}/cover {k}.png" for k in range(5 * covers)])
    (line,) = about_folders(tmp_path)
    first = sorted(f"train/cat/{place}" for place in inside)[0]
    assert line.startswith(
        f"folders of images inside of class folders: {2 * len(inside)}, such as {first} and "
    )
    whose = f"those of {2 * len(inside)} folders"
    assert f"{whose} are divided among train, val, test. If a folder is a person, a film" in line
    assert line.endswith("If a folder holds masks, remove it")


def of_parts(*inside: str) -> list[str]:
    """Names of four images in each of these folders, in each class and each part."""
    places = [f"{part}/{kind}/{x}" for part in SPLITS for kind in ("cat", "dog") for x in inside]
    return [f"{place}/{k}_{Path(place).name}.png" for place in places for k in range(4)]


def of_table(
    names: Sequence[Sequence[str]], labels: Sequence[Sequence[int]], several: bool = False
) -> list[str]:
    """What is told of the names of files in train, val and test whose labels a table has."""
    splits = []
    for of_split, numbers in zip(names, labels, strict=True):
        targets = torch.tensor(numbers)
        rows = 2 * torch.tensor([[0, 1, 0], [1, 0, 1]])[targets] - 1
        splits.append(Split([Path("/d", name) for name in of_split], rows if several else targets))
    classes = ["ill", "well", "none"] if several else ["ill", "well"]
    return find_doubtful_names(Task("own", *splits, classes))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("inside", ["{}/{}.png", "{}/ill/{}.png", "more/{}/visit/{}.png"])
def test_patients_of_a_table_are_told_where_they_are_divided(inside: str, several: bool) -> None:
    """Each has one label. Whole ones are well, and shards, whose images have labels by chance."""
    ill = [int(bit) for bit in "011010011001"]
    if "ill" in inside:  # the others' folder has another name
        names = [inside.format(f"P{k}", "{}").replace("ill", ["ill", "well"][ill[k]])
                 for k in range(12)]  # fmt: skip
    else:
        names = [inside.format(f"P{k}", "{}") for k in range(12)]
    parts = [range(4), range(4, 5), range(5, 6)]
    drawn = [[name.format(k) for name in names for k in part] for part in parts]
    (line,) = of_table(drawn, [[x for x in ill for _ in part] for part in parts], several)
    first = Path("/d", names[0]).parents["visit" in inside or "ill" in inside]
    assert line.startswith(f"folders of images that are no classes: 12, such as {first} and /d/")
    assert "those of 12 folders are divided among train, val, test. If a folder is a p" in line
    assert line.endswith(
        " a part of the data, give whole folders to each of train, val and test; if it is a kind"
        " of images, as a species of a family, or each part is numbered anew, this is well"
    )

    whole = [[name.format(k) for name in names[part] for k in range(6)]
             for part in (slice(6), slice(6, 9), slice(9, 12))]  # fmt: skip
    labels = [[x for x in ill[part] for _ in range(6)]
              for part in (slice(6), slice(6, 9), slice(9, 12))]  # fmt: skip
    assert of_table(whole, labels, several) == []
    if "ill" not in inside:
        mixed = [[(x + k) % 2 for x in ill for k in part] for part in parts]
        assert of_table(drawn, mixed, several) == []


def test_patients_of_a_table_who_lie_in_two_parts_are_told() -> None:
    names = [[f"{part}/P{k}/{part}{j}.png" for k in range(8) for j in "12"] for part in SPLITS]
    labels = [[k // 2 % 2 for k in range(16)]] * 3
    (line,) = of_table(names, labels)
    assert "no classes: 24, such as /d/test/P0 and /d/test/P1, and those of 8 names are" in line


def test_folders_of_classes_with_readable_names_are_no_patients() -> None:
    """One wrong label in each changes nothing, nor do the groups that they lie in."""
    names = [[f"g{x // 3}/n{x}/{k}.png" for x in range(15) for k in part]
             for part in (range(8), (8,), (9,))]  # fmt: skip
    labels = [[x for x in range(15) for _ in range(n)] for n in (8, 1, 1)]
    labels[0][::8] = [*range(1, 15), 0]
    splits = [Split([Path("/d", x) for x in of_split], torch.tensor(numbers))
              for of_split, numbers in zip(names, labels, strict=True)]  # fmt: skip
    classes = [f"animal {chr(97 + x)}" for x in range(15)]
    assert find_doubtful_names(Task("own", *splits, classes)) == []


@pytest.mark.parametrize(
    "name",
    [
        "{a}/{b}/{k}.png",  # shards of a few files
        "batch_{a}/{k}.png",
        "p{a}/P{k}/{k}.png",  # groups of patients
        "part_1/{k}.png",
        "{part}/{k}.png",
        "{part}/{a}/{k}.png",
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_folders_that_say_nothing_of_the_label_are_told_nothing(name: str, several: bool) -> None:
    random = np.random.default_rng(0)
    parts = random.choice(SPLITS, 800)
    labels = random.integers(0, 2, 800)
    files = [name.format(part=part, a=k % 8, b=k // 8 % 20, k=k) for k, part in enumerate(parts)]
    of_parts = [np.flatnonzero(parts == part) for part in SPLITS]
    names = [[files[k] for k in of_part] for of_part in of_parts]
    assert of_table(names, [labels[of_part].tolist() for of_part in of_parts], several) == []


@pytest.mark.parametrize("several", [False, True])
def test_namesakes_of_a_table_in_two_folders_are_told(several: bool) -> None:
    """Where they have the same labels, as raw/0.png and aug/0.png, and not by chance.

    So of patients, and of parts, whose images begin at 0 anew.
    """
    labels = [int(bit) for bit in "0110100110010110"]
    numbers = range(16)
    raw, aug = ([f"{kind}/{k}.png" for k in numbers] for kind in ("raw", "aug"))
    (line,) = of_table([raw[:12], raw[12:], aug], [labels[:12], labels[12:], labels], several)
    assert "in another folder of their class: 16, such as /d/aug/0.png of /d/raw/0.png. A" in line
    others = [1, *labels[:-1]]
    assert of_table([raw[:12], raw[12:], aug], [labels[:12], labels[12:], others], several) == []
    parts = [[f"{part}/{k}.png" for k in numbers] for part in SPLITS]
    assert of_table(parts, [labels] * 3, several) == []
    patients = [[f"P{k}/{j}.png" for j in numbers] for k in range(3)]
    assert of_table(patients, [[0] * 16, [1] * 16, [1] * 16], several) == []


def test_whole_folders_in_parts_that_the_user_made_are_well(tmp_path: Path) -> None:
    """As the guide has it: train/CLASS/PATIENT and so on; but patients of train/ make val, too."""
    names = of_parts("P1", "P2", "2024/P3", "2024/P4")
    photos_in(tmp_path / "whole", names)
    assert about_folders(tmp_path / "whole") == []
    photos_in(tmp_path / "no_val", [name for name in names if not name.startswith("val/")])
    (line,) = about_folders(tmp_path / "no_val")
    assert "folders are divided among train, val. If a folder is a person" in line


def test_masks_and_parts_inside_of_classes_are_told_in_parts_that_the_user_made(
    tmp_path: Path,
) -> None:
    """Nothing is divided there, but masks may be classified; one folder in each class is well."""
    names = of_parts("rgb", "mask", "more/test_set")
    photos_in(tmp_path / "both", names)
    assert about_folders(tmp_path / "both") == [
        "folders of images inside of class folders: 10, such as test/cat/mask and train/cat/mask."
        " All images in them count as those of the class. If a folder holds masks, remove it"
    ]
    photos_in(tmp_path / "one", [name for name in names if "/mask/" in name])
    assert about_folders(tmp_path / "one") == []


@pytest.mark.parametrize("folders", ["train val test", "P1 P2 P3"])
def test_a_script_that_divides_whole_folders_inside_of_classes_is_told_nothing(
    folders: str,
) -> None:
    parts = [[f"{kind}/{place}/{place}_{k}.png" for kind in ("cat", "dog") for k in range(4)]
             for place in folders.split()]  # fmt: skip
    assert find_folders_in_classes(own_files(*parts), ["cat", "dog"]) == []
    parts[0].append(parts[2].pop())
    (line,) = find_folders_in_classes(own_files(*parts), ["cat", "dog"])
    assert "class folders: 6, such as /photos/dog/" in line
    assert "and those of 1 folder are divided among train, test. If" in line


def test_a_patient_whose_folders_are_in_two_parts_is_told(tmp_path: Path) -> None:
    """The parts were made image by image; up to four such folders are day/ and night/ and so on."""
    patients = [f"P{k}" for k in range(1, 6)]
    photos_in(tmp_path / "many", of_parts(*patients))
    (line,) = about_folders(tmp_path / "many")
    assert line.startswith(
        "folders of images inside of class folders: 30, such as test/cat/P1 and train/cat/P1. All"
        " images in them count as those of the class, and those of 10 names are divided among"
        " train, val, test. If a folder is a person"
    )
    assert "; if it is a kind of images, or each part is numbered anew, this is well." in line
    photos_in(tmp_path / "four", of_parts(*patients[:4]))
    assert about_folders(tmp_path / "four") == []
    parts = {"train": "012", "val": "345", "test": "678"}
    whole = [f"{part}/cat/P{k}/P{k}.png" for part, numbers in parts.items() for k in numbers]
    photos_in(tmp_path / "whole", whole + [name.replace("cat/P", "dog/Q") for name in whole])
    assert about_folders(tmp_path / "whole") == []


def test_a_patient_whose_visits_are_in_several_parts_is_told(tmp_path: Path) -> None:
    """No visit has a namesake, but its patient has."""
    visits = {"train": "v1", "val": "v2", "test": "v3"}
    names = [
        f"{part}/{kind}/{patient}/{visit}/{part}_{k}.png"
        for part, visit in visits.items()
        for kind in ("cat", "dog")
        for patient in ("P1", "P2", "P3", "P4", "P5")
        for k in range(2)
    ]
    photos_in(tmp_path / "divided", names)
    (line,) = about_folders(tmp_path / "divided")
    assert "such as test/cat/P1 and train/cat/P1. All" in line
    assert "those of 10 names are divided among train, val, test." in line
    whole = [name.replace("/P", f"/{Path(name).parts[0]}_P") for name in names]
    photos_in(tmp_path / "whole", whole)
    assert about_folders(tmp_path / "whole") == []


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("anna ben cem dana", "If they are people, films or objects, put each into one part"),
        ("Bilder Masken", "if they are masks, remove them"),
        ("P1 P2 P3 P4 P5", ""),  # these are told as a problem
    ],
)
def test_folders_of_few_names_inside_of_classes_are_said_in_words(
    tmp_path: Path, inside: str, said: str
) -> None:
    """They are no problem: nobody can tell people, masks and views of an object apart."""
    photos_in(tmp_path, of_parts(*inside.split()))
    found = check(f"folder:{tmp_path}", tmp_path)
    _, *lines = found.holds
    if said:
        (line,) = lines
        names = ", ".join(inside.split())
        assert line.startswith(f"folders inside of classes: {names}. All images in them count")
        assert said in line and found.problems == []
    else:
        assert lines == [] and len(found.problems) == 1


def test_a_folder_beside_the_images_of_one_class_is_said_in_words(tmp_path: Path) -> None:
    """No folder is said where each holds all images of its class, nor where they are patients."""
    photos_in(tmp_path / "one", of_parts("images"))
    assert len(describe(folder(tmp_path / "one", 0))) == 1
    names = [f"{part}/{kind}/{part}{k}/0.png" for part in SPLITS for kind in "ab" for k in "12"]
    photos_in(tmp_path / "patients", names)
    assert len(describe(folder(tmp_path / "patients", 0))) == 1
    photos_in(tmp_path / "one", ["train/cat/to_sort/7.png"])
    (_, line) = describe(folder(tmp_path / "one", 0))
    assert line == (
        "folders inside of classes: images, to_sort. All images in them count as those of the"
        " class; if they are masks, remove them"
    )


@pytest.mark.parametrize(
    ("folders", "level"),
    [
        ("train/P0 train/P3 train/P4 val/P1 test/P2", logging.INFO),
        ("train/P0 train/P3 train/P4 val/P1 test/P3", logging.WARNING),  # P3 is in two parts
        ("train/P0 train/gt_P0 val/P1 test/P2", logging.WARNING),
        ("train/Bilder train/Masken val test", logging.WARNING),
    ],
)
def test_few_patients_who_are_whole_in_parts_that_the_user_made_are_no_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folders: str, level: int
) -> None:
    """As those that the guide's lines have divided; masks of one part lie beside its images."""
    places = [name.replace("/", f"/{kind}/") if "/" in name else f"{name}/{kind}"
              for name in folders.split() for kind in ("cat", "dog")]  # fmt: skip
    photos_in(tmp_path, [f"{place}/{k}.png" for place in places for k in range(4)])
    with caplog.at_level(logging.INFO, logger="bisslight"):
        log_contents("photos", folder(tmp_path, 0))
    (told,) = [x for x in caplog.records if "folders inside of classes: " in x.getMessage()]
    assert told.levelno == level


def test_that_folders_are_divided_is_told_once(tmp_path: Path) -> None:
    """What was drawn is said, but the doubt has what to do."""
    names = [name for name in of_parts("P1", "P2") if not name.startswith("val/")]
    photos_in(tmp_path, names)
    found = check(f"folder:{tmp_path}", tmp_path)
    assert found.holds[1:] == ["drawn image by image: train, val"]
    (problem,) = found.problems
    assert "as docs/guide.md shows" in problem


def test_numbered_patients_of_numbered_classes_are_no_strays(tmp_path: Path) -> None:
    """Grades 0 and 1, and patients 0 to 5, whole ones in each part."""
    patients = ("train/0/1", "val/0/2", "test/0/3", "train/1/0", "val/1/4", "test/1/5")
    photos_in(tmp_path, [f"{place}/{k}.png" for place in patients for k in range(3)])
    assert about_folders(tmp_path) == []


def test_a_class_dragged_into_another_is_told(tmp_path: Path) -> None:
    """Of classes and films that are numbered, each film lies in the class whose folder is above."""
    photos_in(tmp_path / "pets", [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(9)])
    photos_in(tmp_path / "pets", [f"cat/dog/x{k}.png" for k in range(9)])
    _, line = about_folders(tmp_path / "pets")
    assert "lie in: 1, such as cat/dog, whose images count as cat. Move them" in line
    films = [f"train/{kind}/{film}/{k}.png" for kind in "12" for film in "12" for k in range(5)]
    photos_in(tmp_path / "films", films)
    first, _ = about_folders(tmp_path / "films")
    assert "class folders: 4, such as train/1/1 and train/1/2." in first


@pytest.mark.parametrize(
    ("folder_of_masks", "other", "is_told"),
    [
        ("masks", "rose", True),
        ("Ground_Truth", "rose", True),
        ("mask", "rose", False),  # faces with one, and without
        ("masks", "no_masks", False),
        ("labels", "labels_torn", False),
    ],
)
def test_a_folder_of_masks_beside_classes_is_told(
    tmp_path: Path, folder_of_masks: str, other: str, is_told: bool
) -> None:
    for kind in ("daisy", other, folder_of_masks):
        for k in range(5):
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.new("L", (4, 4), k).save(tmp_path / kind / f"{kind}-{k}.png")
    told = [line for line in describe(folder(tmp_path, 0)) if "is a class here" in line]
    assert len(told) == is_told
    if told:
        assert told[0].startswith(f"{folder_of_masks} is a class here, with 5 images. If these")
        assert told[0].endswith(f", move {tmp_path / folder_of_masks} out of the data set")


@pytest.mark.parametrize(
    ("names", "said", "level"),
    [
        ("gt civic golf", "gt is a class here", logging.WARNING),
        ("labels boxes bags", "labels is a class here", logging.WARNING),
        ("masks gloves goggles", "masks is a class here", logging.WARNING),
        ("annotations stamps seals", "annotations is a class here", logging.WARNING),
        ("cat/day cat/night dog/day dog/night", "folders inside of classes: day", logging.WARNING),
        ("Ka\u0308tzchen Hund", "names with accents in the form NFD", logging.INFO),
        ("cat dog", "drawn image by image: train, val, test", logging.INFO),
    ],
)
def test_what_may_be_meant_so_is_no_problem_but_a_warning_where_a_number_may_be_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str, said: str, level: int
) -> None:
    """Warnings are shown with --quiet, too, and in scripts that set up no logging."""
    places = names.split()
    if "/" in names:  # each folder inside of a class has whole parts, or it would be a problem
        places = [f"{part}/{place}" for part in SPLITS for place in places]
    photos_in(tmp_path, [f"{x}/{Path(x).name}{k}.png" for x in places for k in range(5)])
    found = check(f"folder:{tmp_path}", tmp_path)
    assert found.problems == []
    (line,) = [line for line in found.holds if line.startswith(said)]
    task = folder(tmp_path, 0)
    assert find_doubts(task) == []
    with caplog.at_level(logging.INFO, logger="bisslight"):
        log_contents("pets", task)
    (record,) = [record for record in caplog.records if line in record.getMessage()]
    assert record.levelno == level
