"""The drawn dataset, folders, splits, and the order and augmentation of batches."""

import itertools
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from config import Data, RunError, UsageError
from data import MOTIFS, Images, Split, View, batches, epochs, find_images, folder, in_order, load_pool, quilts, stream
from tasks import load_task

CPU = torch.device("cpu")


def tiles(images: Tensor) -> Tensor:
    """Which motif each of the 16 tiles shows, by the nearest one; a reading of the pixels, not of the generator."""
    patches = images.mean(1).unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), 16, 16)
    motifs = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS]).float()
    return torch.cdist(patches, motifs * 0.7 + 0.15).argmin(-1)


def test_quilts_are_a_function_of_their_seed() -> None:
    pool, task = quilts(3)
    quilts.cache_clear()
    again, task_again = quilts(3)
    assert torch.equal(pool, again)
    assert torch.equal(task.test.images, task_again.test.images)  # type: ignore[arg-type]
    assert not torch.equal(pool, quilts(4)[0])
    sizes = [tuple(part.images.shape) for part in (task.train, task.val, task.test)]  # type: ignore[union-attr]
    assert sizes == [(80, 3, 16, 16), (160, 3, 16, 16), (480, 3, 16, 16)]
    assert all((part.targets.bincount() == len(part.targets) // 8).all() for part in (task.train, task.val, task.test))


def test_a_class_is_which_tiles_are_equal_and_never_which_motif() -> None:
    """Every pool image shows two motifs in one of 8 layouts (up to swapping), which differ in 5 to 11 tiles."""
    pool, task = quilts(0)
    shown = tiles(pool)
    assert all(len(row.unique()) == 2 for row in shown)
    layouts = {tuple((row != row[0]).int().tolist()) for row in shown}
    assert len(layouts) == 8
    for a, b in itertools.combinations(layouts, 2):
        distance = sum(x != y for x, y in zip(a, b, strict=True))
        assert 5 <= distance <= 11
    kinds = torch.tensor(sorted(layouts))
    labelled = tiles(task.test.images)  # type: ignore[arg-type]
    same = (labelled[:, None] != labelled[:, :1, None].transpose(1, 2)).squeeze(1).int()  # (480, 16)
    wrong = torch.minimum((same[:, None] != kinds).sum(-1), (same[:, None] == kinds).sum(-1)).min(1).values
    assert 0.5 < float((wrong > 0).float().mean()) < 0.95  # a tenth of 16 tiles is redrawn, at times as it was


def make(root: Path, *names: str, colour: int = 0) -> None:
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (colour + i, 2 * i, 255 - i)).save(path)


def names(split: Split) -> list[str]:
    return [Path(p).name for p in split.images]


def test_class_folders_are_split_balanced_deterministic_and_independent_of_place(tmp_path: Path) -> None:
    files = [f"{c}/{i}.png" for c in ("a", "b") for i in range(25)]
    make(tmp_path / "one", *files)
    make(tmp_path / "two", *reversed(files))
    (tmp_path / "one" / "README.md").write_text("not an image")
    task, again, other = folder(tmp_path / "one", 0), folder(tmp_path / "two", 0), folder(tmp_path / "one", 1)
    assert task.classes == ["a", "b"]
    counts = [split.targets.bincount().tolist() for split in (task.train, task.val, task.test)]
    assert counts == [[16, 16], [4, 4], [5, 5]]  # a fifth of 25, then of 20
    every = [name for split in (task.train, task.val, task.test) for name in map(str, split.images)]
    assert len(set(every)) == 50
    assert names(task.val) == names(again.val)
    assert names(task.test) == names(again.test)
    assert names(task.test) != names(other.test)


def test_parts_on_disk_are_used_and_only_the_missing_one_is_split_off(tmp_path: Path) -> None:
    make(
        tmp_path,
        *[f"train/{c}/{i}.png" for c in "ab" for i in range(10)],
        *[f"test/{c}/x{i}.jpg" for c in "ab" for i in range(3)],
    )
    task = folder(tmp_path, 0)
    assert names(task.test) == ["x0.jpg", "x1.jpg", "x2.jpg"] * 2
    assert [len(s.targets) for s in (task.train, task.val)] == [16, 4]


def test_wrong_folders_end_in_one_clear_line(tmp_path: Path) -> None:
    make(tmp_path / "empty", "a/1.png", "b/1.png")
    (tmp_path / "empty" / "c").mkdir()
    make(tmp_path / "single", "a/1.png", "b/1.png")
    make(tmp_path / "flat", "1.png")
    make(tmp_path / "extra", "train/a/1.png", "train/b/1.png", "test/z/1.png")
    make(tmp_path / "notrain", "test/a/1.png")
    make(tmp_path / "hollow", "train/a/1.png", "train/b/1.png", "test/1.png")
    make(tmp_path / "lonely", "a/1.png")
    for name, message in [
        ("missing", "there is no such folder"),
        ("empty", "class 'c' has no images"),
        ("single", "class 'a' is too small to split off test"),
        ("flat", "it holds no class folders"),
        ("extra", "class 'z' of test is not in train"),
        ("notrain", "has test but no train"),
        ("hollow", "test holds no class folders"),
        ("lonely", "needs at least two class folders, has 1"),
    ]:
        with pytest.raises(UsageError, match=message):
            folder(tmp_path / name, 0)
    for name, message in [("quilt", "unknown dataset, did you mean quilts"), (str(tmp_path), "did you mean folder:")]:
        with pytest.raises(UsageError, match=message):
            load_task(Data(dataset=name), tmp_path)
    with pytest.raises(UsageError, match="there is no such folder"):
        load_pool(str(tmp_path / "missing"), 0)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="no images in it"):
        load_pool(str(tmp_path / "nothing"), 0)


def test_a_pool_is_any_folder_nested_or_not(tmp_path: Path) -> None:
    make(tmp_path, "1.png", "deep/er/2.JPEG", ".hidden/3.png")
    assert [p.name for p in load_pool(str(tmp_path), 0)[0]] == ["1.png", "2.JPEG"]  # type: ignore[union-attr]


def test_links_that_lead_back_do_not_list_an_image_twice(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "b/2.png", "elsewhere/3.png")
    (tmp_path / "a/up").symlink_to(tmp_path / "a")
    assert len(find_images(tmp_path / "a")) == 1  # the system itself gives up after forty times
    (tmp_path / "a/to-b").symlink_to(tmp_path / "b")
    (tmp_path / "b/to-a").symlink_to(tmp_path / "a")
    found = [str(path.relative_to(tmp_path / "a")) for path in find_images(tmp_path / "a")]
    assert found == ["1.png", "to-b/2.png"]  # a link to another folder is followed, one back is not
    (tmp_path / "c").mkdir()
    (tmp_path / "c/far").symlink_to(tmp_path / "elsewhere")
    assert [path.name for path in find_images(tmp_path / "c")] == ["3.png"]


def test_a_stream_has_no_seam_and_each_pass_sees_every_image_once() -> None:
    draws = [draw for batch in stream(10, 4, 0, "x", 0, 10) for draw in batch]
    assert [number for number, _ in draws] == list(range(40))
    for at in range(0, 40, 10):
        assert sorted(index for _, index in draws[at : at + 10]) == list(range(10))
    assert draws[:10] != [(n - 10, i) for n, i in draws[10:20]]


def test_a_stream_can_be_entered_anywhere() -> None:
    whole = list(stream(10, 4, 0, "x", 0, 10))
    assert list(stream(10, 4, 0, "x", 7, 10)) == whole[7:]
    assert list(stream(10, 4, 1, "x", 0, 10)) != whole


def test_a_pool_smaller_than_a_batch_streams_on() -> None:
    (batch,) = stream(3, 8, 0, "x", 0, 1)
    assert [i for _, i in batch[:3]] != [] and {i for _, i in batch} == {0, 1, 2}
    assert len(batch) == 8


def test_epochs_keep_the_last_partial_batch() -> None:
    sizes = [len(batch) for batch in epochs(10, 4, 0, "x", 2)]
    assert sizes == [4, 4, 2] * 2
    assert [len(batch) for batch in in_order(range(10), 4)] == [4, 4, 2]


def photos(tmp_path: Path) -> Split:
    make(tmp_path, *[f"{i}.png" for i in range(6)])
    return Split(sorted(tmp_path.glob("*.png")), torch.arange(6))


VIEW = View(8, (0.5,) * 3, (0.5,) * 3, augment="crop")


def test_batches_do_not_depend_on_workers_or_on_where_a_run_resumed(tmp_path: Path) -> None:
    images = Images(photos(tmp_path), VIEW, True, 0, "x")
    runs = [[*batches(images, stream(6, 4, 0, "x", 0, 4), workers, CPU)] for workers in (0, 2)]
    runs.append([*runs[0][:2], *batches(images, stream(6, 4, 0, "x", 2, 4), 0, CPU)])
    for other in runs[1:]:
        for (x, y), (x2, y2) in zip(runs[0], other, strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)


def test_augmentation_differs_between_draws_and_is_off_in_evaluation(tmp_path: Path) -> None:
    split = photos(tmp_path)
    gradient = torch.linspace(0, 255, 30 * 20).reshape(30, 20).byte()
    Image.fromarray(gradient.numpy()).save(split.images[0])  # grey: it is also converted
    train, test = Images(split, VIEW, True, 0, "x"), Images(split, VIEW, False, 0, "x")
    assert not torch.equal(train.image(0, 0), train.image(6, 0))
    assert torch.equal(test.image(0, 0), test.image(6, 0))
    assert test.image(0, 0).shape == (3, 8, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(tmp_path: Path, workers: int) -> None:
    split = photos(tmp_path)
    broken = Path(split.images[3])
    broken.write_bytes(broken.read_bytes()[:40])
    images = Images(split, VIEW, False, 0, "x")
    with pytest.raises(RunError, match=r"3\.png: cannot be read as an image"):
        list(batches(images, in_order(range(6), 4), workers, CPU))
