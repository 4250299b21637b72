"""What is asked of a task before a run: labels and pixels of scripts, and one hash an image."""

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from toy import photos_in

from data import ImageError, Pool, Split, Task, Transform
from support import looking
from support.checks import check_pool, check_task
from support.experiment import look_at_data
from support.folders import folder
from support.looking import digest_of_task, find_shared_images, look_at_pool, look_at_task
from support.runs import untracked

TRANSFORM = Transform(8, (0.5,) * 3, (0.5,) * 3)
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
        (-torch.ones(6, 3).long(), "no label is 1"),
        (2 * ZEROS_AND_ONES, "1 yes, -1 no, 0 not counted"),
        (ZEROS_AND_ONES.bool(), "labels are torch.bool; give whole numbers"),
        (torch.zeros(6), "labels are torch.float32"),
        (torch.arange(6) % 3 + 1, "labels go from 1 to 3; .* from 0 to 2"),
        (torch.tensor([0, 1, 2, -100, 0, 1]), "labels go from -100 to 2"),
        (torch.zeros(6, 1).long(), r"labels.flatten\(\)"),
        (torch.zeros(5).long(), "6 images and 5 labels"),
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
        with pytest.raises(ValueError, match=f"^{name}: of class a no label is -1"):
            check_task(Task("own", each, some, some, classes)._replace(**{name: each}))
    table = Split(PIXELS, ZEROS_AND_ONES)
    with pytest.raises(ValueError, match=r"^train: no label is -1, .* 2 \* labels - 1"):
        check_task(Task("own", table, some, some, classes))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ((255 * PIXELS).byte(), r"torch.uint8; give float32 from 0 to 1: .* / 255"),
        (PIXELS > 0.5, "torch.bool"),
        (255 * PIXELS, "numbers from 0 to 1"),
        (PIXELS - 0.5, "numbers from 0 to 1"),
        (PIXELS / torch.zeros(1), "numbers from 0 to 1"),
        (PIXELS / 255 / 255, "divided by 255 twice"),
        (0 * PIXELS, "all pixels are 0"),
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


def test_good_tasks_are_taken() -> None:
    several = 2 * ZEROS_AND_ONES - 1
    several[0, 1] = 0
    for labels in (None, torch.tensor([2, 2, 2, 0, 0, 0]), several):
        check_task(own(labels=labels))


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ((1, 2, 3), "task"),
        (own(classes=["a", "b", "a"]), "classes"),
        (own(classes={"a": 0, "b": 1, "c": 2}), "classes"),
        (own(mean=(123.7, 116.3, 103.5)), "mean"),
        (own(std=(0.5, 0.5, 0.0)), "mean"),
        (own(std=(0.5,)), "mean"),
        (own(train=Split(PIXELS, 2 * ZEROS_AND_ONES - 1)), "labels"),
        (own(val=None), "val"),
        (own(train=(PIXELS, torch.arange(6))), "train"),
    ],
)
def test_what_is_no_task_is_refused_and_what_is_wrong_is_named(task: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}\\b"):
        check_task(task)


# --- the one hash --------------------------------------------------------------------------------


def test_images_that_are_cut_otherwise_than_others_are_refused() -> None:
    """Those of the network's size are taken whole."""
    large = Split(torch.rand(6, 3, 12, 12), own().test.targets)
    with pytest.raises(ValueError, match=r"^val and test: give their images in one size"):
        check_task(own()._replace(test=large))
    check_task(own()._replace(test=large, uncut=True))
    check_task(own()._replace(train=large))


@pytest.mark.parametrize("in_memory", [True, False])
def test_one_hash_is_in_the_definition_and_tells_shared_images(
    in_memory: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image under another name, in another class and part is the same one."""
    names = [
        f"{part}/{c}/{k}.png" for part in ("train", "val", "test") for c in "ab" for k in "012"
    ]
    photos_in(tmp_path, names)
    copy = tmp_path / "test/b/0.png"
    copy.write_bytes((tmp_path / "train/a/1.png").read_bytes())
    task = folder(tmp_path, 0)
    if in_memory:
        splits = [
            Split(torch.stack([pixels_of(file) for file in split.images]), split.targets)
            for split in task.splits().values()
        ]
        task = Task("own", *splits, task.classes)
    with caplog.at_level(logging.INFO):
        hashes = look_at_data(task, None, untracked)
    example = "number 3 of test" if in_memory else str(copy)
    told = f"train and test share 1 image, such as {example}"
    assert find_shared_images(task, hashes) == [told]
    assert caplog.messages[-1] == f"{task.name}: {told}"
    assert hashes["train"][1] == hashes["test"][3]
    assert digest_of_task(task, hashes) == digest_of_task(task, look_at_task(task))


def pixels_of(file: Path) -> Tensor:
    """The numbers of an image file, from 0 to 1."""
    with Image.open(file) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_damaged_files_of_a_task_are_all_named_and_of_a_large_pool_those_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos_in(tmp_path, [f"{kind}/{k}.png" for kind in "ab" for k in range(6)])
    for name in ("a/1.png", "b/3.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ImageError, match=r"a/1\.png: cannot .*; .*b/3\.png: cannot be read"):
        look_at_task(folder(tmp_path, 0))
    pool = Pool(sorted(tmp_path.glob("*/*.png")))
    with pytest.raises(ImageError, match="a/1"):
        look_at_pool(pool)
    look_at_pool(pool, but_for=[tmp_path / "a/1.png", tmp_path / "b/3.png"])
    monkeypatch.setattr(looking, "MOST_READ", 11)
    monkeypatch.setattr(looking, "SAMPLE", 6)
    look_at_pool(pool)  # every second one: a/0, a/2, ...


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        (torch.rand(2, 3, 8, 8), "pool: is a Tensor"),
        (Pool(torch.rand(2, 3, 8, 8), mean=cast(Any, 0.5)), "three numbers"),
        (Pool([Path("a.png"), Path("/b.png")]), "some paths are absolute"),
    ],
)
def test_what_is_no_pool_is_refused_and_what_is_wrong_is_named(pool: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_pool(pool)
