"""Folders, splits, tasks of one's own, and the order and augmentation of batches."""

import errno
import hashlib
import math
import multiprocessing
import os
import re
import signal
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import shared
from PIL import Image
from torch import Tensor
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import data
from data import (
    ImageError,
    Images,
    Pool,
    Split,
    Task,
    Transform,
    batches,
    decode_once,
    stream,
)
from support.folders import find_images, folder
from support.looking import (
    describe,
    digest_of_pool,
    digest_of_task,
    find_lacking_classes,
    look_at_pool,
    look_at_task,
)

CPU = torch.device("cpu")
TRANSFORM = Transform(8, (0.5,) * 3, (0.5,) * 3, augment="crop")


def make(root: Path, *names: str) -> None:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (i, 2 * i, 255 - i)).save(root / name)


def photos(root: Path) -> Split:
    make(root, *[f"{i}.png" for i in range(6)])
    return Split(sorted(root.glob("*.png")), torch.arange(6))


def digest(task: Task) -> str:
    """What a run's definition keeps of a task."""
    return digest_of_task(task, look_at_task(task))


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
    assert digest(task) != digest(other)
    of_the_first_release = "2f3e9aea3057dc874f9d9063bc8095b06e7094585ca4e521c4783488001db032"
    assert names_and_labels(task, "one") == names_and_labels(again, "two") == of_the_first_release


@pytest.mark.parametrize("link", ["bird", "train/bird", "train", "train/cat/more", "cat/more"])
def test_a_link_to_nowhere_in_place_of_a_folder_is_a_fault(tmp_path: Path, link: str) -> None:
    """A class, a part or a part of a class on a disk that is not mounted; also below a pool."""
    place = "train/" if link.startswith("train/") else "test/" if link == "train" else ""
    make(tmp_path, *[f"{place}{c}/{i}.png" for c in ("cat", "dog") for i in range(5)])
    (tmp_path / link).symlink_to("/unmounted/more")
    with pytest.raises(ValueError, match=f"{tmp_path / link}: is a link to nowhere"):
        folder(tmp_path, 0)
    assert f"{tmp_path / link}: is a link to nowhere" in find_images(tmp_path).faults[0]


CAFES = [unicodedata.normalize(form, "Café") for form in ("NFC", "NFD")]  # macOS writes the latter


@pytest.mark.parametrize(
    "folders",
    [
        ("cat/2022", "cat/2023", "dog/2022", "dog/2023"),
        ("cat", "cat/more", "dog/a/b/c"),
        ("cat", "cat/train", "cat/boat", "dog", "dog/test"),
        ("bus", "train", "train/old", "car"),
        ("flask", "test tube", "train ticket", "Training shoes"),
        ("test", "control"),
        ("test/day", "test/night", "control/day", "control/night"),
        ("valid/a", "invalid/a"),
        ("photos", "labels", "masks"),  # what they are is printed, and nobody guesses
        ("@anna", "#recycled", "$100"),
        ("c.jpg", "d"),  # a folder that is called as an image
        (CAFES[1], "dog"),
    ],
)
def test_class_folders_are_those_of_torchvision(tmp_path: Path, folders: tuple[str, ...]) -> None:
    make(tmp_path / "set", *[f"{place}/{i}.png" for place in folders for i in range(5)])
    first = tmp_path / "set" / folders[0].partition("/")[0]
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    theirs = ImageFolder(tmp_path / "set")
    task = folder(tmp_path / "set", 0)
    ours: dict[str, str] = {}
    for split in task.splits().values():
        labels = (task.classes[k] for k in split.targets.tolist())
        ours.update(zip(map(str, split.images), labels, strict=True))
    names = [unicodedata.normalize("NFC", name) for name in theirs.classes]
    assert ours == {path: names[label] for path, label in theirs.samples}


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("train", "val", "test"),
        ("train", "valid", ""),
        ("Training", "", "Testing"),
        ("train", "dev", "testset"),
        ("trainset", "validation", ""),
        ("training_set", "", "Test Set"),
        ("train", "", ""),
    ],
)
def test_parts_are_what_torchvision_reads_of_each(
    tmp_path: Path, train: str, val: str, test: str
) -> None:
    """Names of classes may have two forms of Unicode. Parts that are not there are drawn."""
    cafe = iter(CAFES * 2)
    given = {"train": train, "val": val, "test": test}
    there = {part: name for part, name in given.items() if name}
    for name in there.values():
        make(tmp_path / name, *[f"{kind}/{k}.png" for kind in (next(cafe), "b") for k in range(9)])
    task = folder(tmp_path, 0)
    assert task.classes == [CAFES[0], "b"] or task.classes == ["b", CAFES[0]]
    assert [*task.drawn] == [part for part in given if part not in there]
    for part, name in there.items():
        read = {Path(path) for path, _ in ImageFolder(tmp_path / name).samples}
        ours = {*task.splits()[part].images}
        assert ours < read if part == "train" and task.drawn else ours == read


@pytest.mark.parametrize(
    ("folders", "named"),
    [
        ((), "none"),
        (("daisy",), "daisy"),
        (("train/daisy", "test/daisy"), "daisy"),
        (("photos/cat", "photos/dog"), "{root}/photos"),
        (("a/photos/cat", "a/photos/dog"), "{root}/a/photos"),
        (("train/cat", "train/dog", "valid/cat", "validation/cat"), "{root}/validation"),
        (("cat/train", "cat/test", "dog/train", "dog/test"), "{root}/train/cat|{root}/test/cat"),
        (("train/cat/train", "train/dog"), "{root}/train/cat"),
        (("daisy/a", "rose/b", "Testing/daisy"), "Testing"),
        (("test/a", "test/b", "val/a"), "test, val"),
        (("train/a", "train/b", "bus"), "bus"),
        (("train/a", "train/b", "test/a", "test/z"), "z"),
    ],
)
def test_folders_that_are_no_task_are_refused(
    tmp_path: Path, folders: tuple[str, ...], named: str
) -> None:
    """Otherwise a network learns to tell training images from test images, and is good at it."""
    make(tmp_path, *[f"{place}/{i}.png" for place in folders for i in range(5)])
    with pytest.raises(ValueError, match=rf"(^|\W)({named.format(root=tmp_path)})(\W|$)"):
        folder(tmp_path, 0)


def test_empty_classes_and_parts_are_all_named_with_what_is_there_instead(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "b/1.png", "c/1.png")
    (tmp_path / "c/1.png").rename(tmp_path / "c/1.txt")
    with pytest.raises(ValueError, match=r"for val, but 1 \.txt.* for test, but .*of class c, but"):
        folder(tmp_path, 0)


def test_what_is_drawn_what_is_left_out_and_what_a_part_lacks_is_told(tmp_path: Path) -> None:
    make(tmp_path / "a", *[f"x/{i}.png" for i in range(10)], *[f"y/{i}.png" for i in range(5)])
    make(tmp_path / "a", "beside.png")
    for name in ("x/1.heic", "x/2.HEIC", "y/notes", "read.txt"):
        (tmp_path / "a" / name).touch()
    task = folder(tmp_path / "a", 0)
    assert (task.sizes(), task.drawn) == ({"train": 10, "val": 2, "test": 3}, ["val", "test"])
    assert task.left_out == {".heic": 2, "": 1, ".png beside class folders": 1, ".txt": 1}
    counts, left_out = describe(task)
    assert "x 10, y 5" in counts and ".heic" in left_out
    several = Split(torch.zeros(3, 3, 2, 2), torch.tensor([[1, 1], [1, -1], [-1, 0]]))
    assert "x 6, y 3" in describe(Task("own", several, several, several, ["x", "y"]))[0]
    make(tmp_path / "b", "train/x/1.png", "train/y/1.png", "val/x/2.png", "test/y/3.png", "z/4.png")
    task = folder(tmp_path / "b", 0)
    assert (task.left_out, [*task.drawn]) == ({".png beside parts": 1}, [])
    assert find_lacking_classes(task) == ["val lacks y", "test lacks x"]


def test_what_systems_put_among_images_is_no_class_and_no_image(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Thumbnails of a NAS, its bin, what a Mac packs. Names may have any encoding."""
    old = os.fsdecode(bytes([0xE9]))
    files = [f"{c}/{i}{old}.png" for c in "ab" for i in "123"]
    made = ("@eaDir/1.png/T.jpg", "a/@eaDir/1.png/T.jpg", "#recycle/a/1.png", "__MACOSX/a/1.png")
    make(tmp_path, *files, *made)
    task = folder(tmp_path, 0)
    assert task.classes == ["a", "b"] and digest(task)
    assert task.sizes() == {"train": 2, "val": 2, "test": 2}
    assert find_images(tmp_path).images == [tmp_path / file for file in files]

    def iterdir(place: Path) -> Any:
        raise PermissionError(13, "Permission denied", place)

    monkeypatch.setattr(Path, "iterdir", iterdir)  # a test may run as root
    found = find_images(tmp_path)
    assert found.faults == [f"{tmp_path}: cannot be read (Permission denied); see its permissions"]


def test_images_in_memory_of_the_size_of_the_network_are_taken_as_stored() -> None:
    pixels = torch.rand(4, 3, 12, 12)
    fits = Transform(12, (0.5, 0.4, 0.3), (0.5, 0.2, 0.1))
    images = Images(Split(pixels, torch.arange(4)), fits, True, 0, "x")
    ((x, y),) = batches(images, [[(0, 3), (1, 0)]], 0, CPU)
    mean, std = (torch.tensor(v)[:, None, None] for v in (fits.mean, fits.std))
    assert torch.equal(x, (pixels[[3, 0]] - mean) / std) and y.tolist() == [3, 0]


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
        torch.rand(1)  # so the state is not the one that the crop would leave
        before = torch.get_rng_state()
        for split in (on_disk, in_memory):
            assert torch.equal(load(split, transform, True, draw), expected)
        assert torch.equal(torch.get_rng_state(), before)
        flipped.add(mirror)
    assert flipped == ({True, False} if flip else {False})
    centre = T.functional.center_crop(T.functional.resize(image, [32], mode), [28])
    expected = T.functional.normalize(T.functional.to_tensor(centre), *transform[1:3])
    uncropped = transform._replace(augment="none")
    for split in (on_disk, in_memory):
        assert torch.equal(load(split, transform, False, 0), expected)
        assert torch.equal(load(split, uncropped, True, 0), expected)


def jpegs(folder: Path) -> list[Path]:
    """A colour, a grey and a progressive JPEG file, and one that viewers turn, by its EXIF."""
    noise = torch.rand(3, 90, 120, generator=torch.Generator().manual_seed(0))
    image = T.functional.to_pil_image(noise)
    image.save(folder / "colour.jpg", quality=90)
    image.convert("L").save(folder / "grey.jpg")
    image.save(folder / "progressive.jpg", progressive=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "turned.jpg", exif=exif)
    return sorted(folder.glob("*.jpg"))


@pytest.mark.parametrize("photographs", [False, True])
def test_a_jpeg_file_is_cut_as_by_pillow_to_one_grey_level(
    tmp_path: Path, photographs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded it is the same. Bicubic resizing may differ by more, in one of 1,000 values.

    EXIF orientation is ignored.
    """
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
        assert photographs or decoded.shape == (3, 90, 120)
        for cut in (partial(data.cut_random, seed=0), data.cut_centre):
            for mode in ("bicubic", "bilinear"):
                t = Transform(48, (0.5,) * 3, (0.5,) * 3, "crop", 0.2, mode)
                differences = (cut(decoded, t).int() - cut(pillow, t).int()).abs()
                assert differences.shape == (3, 48, 48)
                assert differences.max() <= (1 if mode == "bilinear" else 16)
                assert (differences > 1).float().mean() < 1e-3


def test_files_that_only_look_like_plain_jpegs_are_pillows(tmp_path: Path) -> None:
    """CMYK, and a PNG with the name of a JPEG."""
    image = T.functional.to_pil_image(torch.rand(3, 20, 30))
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    image.save(tmp_path / "png.jpg", format="PNG")
    for name in ("cmyk.jpg", "png.jpg"):
        assert isinstance(data.read_image(tmp_path / name), Image.Image)


def test_images_are_decoded_once_and_give_the_same_inputs(tmp_path: Path, monkeypatch: Any) -> None:
    """Of several processes each decodes its own part; too much is not kept."""
    split = photos(tmp_path)

    def inputs(split: Split, part: range) -> tuple[Tensor, Tensor]:
        return next(batches(Images(split, TRANSFORM), [[(i, i) for i in part]], 0, CPU))

    for part in (range(6), range(2, 5)):
        kept = decode_once(split, TRANSFORM, part)
        assert isinstance(kept.images, Tensor) and decode_once(split, TRANSFORM, part) is kept
        for ours, expected in zip(inputs(kept, range(len(part))), inputs(split, part), strict=True):
            assert torch.equal(ours, expected)
    monkeypatch.setattr(data, "MOST_KEPT", 6 * 3 * 8 * 8 - 1)
    decode_once.cache_clear()
    assert decode_once(split, TRANSFORM, range(6)).images == split.images


def test_a_link_that_leads_back_is_followed_once(tmp_path: Path) -> None:
    """Also a link into another folder, whose link leads back."""
    make(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "b/back").symlink_to("../a")
    for target, names in ((".", "1"), ("..", "12"), ("../b", "12")):
        (tmp_path / "a/link").symlink_to(target)
        assert [path.stem for path in find_images(tmp_path / "a").images] == [*names]
        (tmp_path / "a/link").unlink()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or it is hidden")
def test_batches_on_a_gpu_are_those_on_the_cpu(tmp_path: Path) -> None:
    """All arrive, in order, the last one too."""
    images = Images(photos(tmp_path), TRANSFORM, True, 0, "x")
    draws = list(stream(6, 4, 0, "x", range(5)))
    on_gpu = batches(images, draws, 2, torch.device("cuda"))
    for (x, y), (x2, y2) in zip(batches(images, draws, 0, CPU), on_gpu, strict=True):
        torch.testing.assert_close(x2.cpu(), x)
        assert torch.equal(y2.cpu(), y)


# --- what makes a data set another one -----------------------------------------------------------


def test_a_digest_of_a_pool_is_the_same_on_every_platform_and_in_every_place(
    tmp_path: Path,
) -> None:
    for place in ("one", "two"):
        names = ("a-b/x.png", "a/x.png", "a b/x.png", "a/y.png")
        files = [tmp_path / place / name for name in names]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(file.name)
        assert digest_of_pool(Pool(files)).startswith("3:65f2c6d7bb2d82a8")


@pytest.mark.parametrize(
    "change", ["name", "bytes", "label", "order", "mean", "std", "classes", "uncut"]
)
def test_whatever_is_changed_changes_the_digest_of_a_task_and_its_place_does_not(
    tmp_path: Path, change: str
) -> None:
    make(tmp_path / "before", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    split = Split(sorted(tmp_path.glob("before/*/*.png")), torch.tensor([0, 0, 1, 1]))
    task = Task("own", split, split, split, ["a", "b"])
    before = digest(task)
    (tmp_path / "before").rename(tmp_path / "now")
    files = sorted(tmp_path.glob("now/*/*.png"))
    moved = Split(files, split.targets)
    assert digest(task._replace(train=moved, val=moved, test=moved)) == before
    if change == "name":
        moved = Split([*files[:3], files[3].rename(tmp_path / "now/b/3.png")], split.targets)
    elif change == "bytes":
        Image.new("RGB", (20, 30), "red").save(files[2])
    elif change == "label":
        moved = Split(moved.images, torch.tensor([0, 0, 1, 0]))
    elif change == "order":
        moved = Split([*moved.images][::-1], moved.targets)
    else:
        new: Any = {"classes": ["a", "c"], "uncut": True}
        task = task._replace(**{change: new.get(change, (0.5,) * 3)})
    assert digest(task._replace(train=moved, val=moved, test=moved)) != before


def test_pixels_in_memory_and_what_they_are_normalised_by_are_in_the_digest() -> None:
    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    split = Split(pixels, torch.tensor([0, 0, 1, 1]))
    task = Task("omniglot:Greek", split, split, split, ["a", "b"])
    several = [task, task._replace(val=Split(1 - pixels, split.targets))]
    several.append(task._replace(val=Split(pixels.view(4, 3, 4, 16), split.targets)))
    assert len({digest(one) for one in several}) == len(several)
    pools = [Pool(pixels), Pool(1 - pixels), Pool(pixels, mean=(0.5,) * 3)]
    assert len({digest_of_pool(pool) for pool in pools}) == len(pools)


# --- reading, order -----------------------------------------------------------------------------


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    split = photos(tmp_path)
    Path(split.images[3]).write_bytes(Path(split.images[3]).read_bytes()[:40])
    for workers in (0, 1):  # no traceback of a worker
        images = Images(split, TRANSFORM, False, 0, "x")
        with pytest.raises(data.ImageError, match=rf"^{split.images[3]}: "):
            list(batches(images, stream(6, 4, 0, "x", range(2)), workers, CPU))


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
        "cut": "truncated", "folder": "no file", "link": "no file", "fifo": "no file",
        "device": "no file", "bomb": "exceeds", "empty": "convert it to JPEG", "long": "100 times",
    }  # fmt: skip
    with pytest.raises(data.ImageError) as raised:
        look_at_pool(Pool([tmp_path / f"{name}.png" for name in ("good", *reasons)]))
    for name, reason in reasons.items():
        assert re.search(rf"{tmp_path / name}\.png: [^;]*{reason}", str(raised.value))
    assert "good.png" not in str(raised.value)


def test_a_ctrl_c_at_the_terminal_does_not_end_the_workers(tmp_path: Path) -> None:
    """It is the parent's alone, which goes on to its checkpoint."""
    images = Images(photos(tmp_path), TRANSFORM, False, 0, "x")
    loader = batches(images, stream(6, 2, 0, "x", range(3)), 1, CPU)
    others = {*multiprocessing.active_children()}
    next(loader)
    (worker,) = {*multiprocessing.active_children()} - others
    os.kill(worker.pid or 0, signal.SIGINT)
    assert len(list(loader)) == 2


@pytest.mark.parametrize(
    ("processes", "workers"), [("1", 6), ("2", 3), ("10000", 1), ("0", 6), ("", 6)]
)
def test_processes_share_the_cores_that_they_may_use(
    processes: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a cluster may use some of the machine's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(6)}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert data.count_workers() == workers


def test_a_disk_that_has_gone_away_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "photo.png")

    def gone(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(ImageError, match=r"photo\.png: .*Input/output error.*disk"):
        data.read_image(tmp_path / "photo.png")
