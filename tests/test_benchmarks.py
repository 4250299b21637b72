"""The benchmarks' lists, on drawn copies and on the small packs, beside torchvision's readers."""

from pathlib import Path
from typing import Any

import pytest
from conftest import shared
from copies import MAKE, make
from PIL import Image
from torchvision import datasets as tv
from toy import photos_in

from data import SPLITS, Task
from support.benchmarks import BENCHMARKS, VOC_CLASSES, open_pool, open_task, read_cub
from support.errors import UsageError


def load(name: str, root: Path, **more: Any) -> Task:
    return open_task(name, root=root, **{"seed": 0, "partial": True} | more)


@pytest.fixture(autouse=True)
def any_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of Flowers are compared with digests by torchvision; those of a copy differ."""
    monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)


@pytest.mark.parametrize("name", ["dtd", "cub200", "pets", "flowers", "aircrafts"])
def test_labels_of_one_class_are_the_same_with_difficult_objects(name: str, tmp_path: Path) -> None:
    """`--preset as-released` counts VOC's difficult objects, which are marked by 0, on any data."""
    root = make(name, tmp_path).parent
    plain, hits = load(name, root), load(name, root, difficult="positive")
    for split, of_hits in zip(plain[1:4], hits[1:4], strict=True):
        assert split.targets.equal(of_hits.targets)


@pytest.mark.parametrize("name", ["dtd", "pets", "flowers", "aircrafts"])
@pytest.mark.parametrize("real", [False, True])
def test_torchvision_opens_the_same_files_with_the_same_labels(
    name: str, real: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """By what its classes open and return for each number, and not by the lists that they keep."""
    if real and name == "aircrafts":
        pytest.skip("there is no pack of aircraft photographs")
    root = shared(f"data/{BENCHMARKS[name].folder}").parent if real else make(name, tmp_path).parent
    task = load(name, root)
    ours: dict[str, Any] = {}
    for part, split in zip(SPLITS, task[1:4], strict=True):
        labels = zip(split.images, split.targets.tolist(), strict=True)
        ours[part] = {path.name: label for path, label in labels}
    if name == "pets":
        ours["trainval"] = ours.pop("train") | ours.pop("val")

    kinds: Any = {"dtd": tv.DTD, "pets": tv.OxfordIIITPet, "flowers": tv.Flowers102}
    opened = []

    def open_image(file: Any) -> Image.Image:
        opened.append(Path(getattr(file, "name", file)).name)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(Image, "open", open_image)
    for part in ("trainval", "test") if name == "pets" else SPLITS:
        data = kinds.get(name, tv.FGVCAircraft)(root, part)
        theirs = [data[i][1] for i in range(len(data))]
        assert ours[part] == dict(zip(opened, theirs, strict=True))
        named = getattr(data, "classes", task.classes)
        # The lists of Pets are shortened, so torchvision has not all names.
        assert task.classes == (
            [str(k) for k in range(len(task.classes))] if name == "pets" else named
        )
        opened.clear()


def test_voc_labels_are_those_of_the_annotations() -> None:
    """Main/CLASS_PART.txt against the objects that torchvision's VOCDetection reads."""
    root = shared("data/VOCdevkit").parent
    task, hits = load("voc07", root), load("voc07", root, difficult="positive")
    for part in SPLITS:
        xml = tv.VOCDetection(root, year="2007", image_set=part)
        for i in range(len(xml)):
            objects = xml[i][1]["annotation"]["object"]
            easy = {VOC_CLASSES.index(o["name"]) for o in objects if o["difficult"] == "0"}
            any_ = {VOC_CLASSES.index(o["name"]) for o in objects}
            labels, positive = getattr(task, part).targets[i], getattr(hits, part).targets[i]
            assert {*(labels == 1).nonzero()[:, 0].tolist()} == easy
            assert {*(labels == 0).nonzero()[:, 0].tolist()} == any_ - easy
            assert {*(positive == 1).nonzero()[:, 0].tolist()} == any_
    assert (task.test.targets.ndim, task.classes[14]) == (2, "person")


def test_the_whole_cub_split_has_the_papers_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of each class of the official 5,994 training images, from the complete lists."""
    base = shared("data/annotations/CUB_200_2011")
    parts, _ = read_cub(base)
    known = parts["trainval"]
    assert all(label == int(Path(name).parts[1][:3]) - 1 for name, label in known)
    file = shared("data/bissl_tv_splits/cub200_val_split.txt")
    monkeypatch.setattr(Path, "exists", lambda path: True)  # there are the lists alone
    (tmp_path / "CUB_200_2011").symlink_to(base)
    found = []
    for more in ({}, {"seed": 1}, {"split_file": file}):
        task = load("cub200", tmp_path, partial=False, **more)
        assert task.sizes() == {"train": 4800, "val": 1194, "test": 5794}
        assert set(task.train.targets.bincount().tolist()) == {24}
        assert len({*task.train.images, *task.val.images}) == 5994
        found.append(task.train.images)
    assert found[0] != found[1]
    rest = (file.parent / "cub200_train_split.txt").read_text().split()  # the other original file
    root = tmp_path / "CUB_200_2011"
    assert {root / known[int(i)][0] for i in rest} == {*found[2]}


def test_classes_of_cub_are_named_by_their_numbers(tmp_path: Path) -> None:
    """Sorted as text, 1 comes before 10 and 100."""
    file = make("cub200", tmp_path) / "classes.txt"
    file.write_text("\n".join(sorted(file.read_text().splitlines())))
    task = load("cub200", tmp_path)
    for image, label in zip(task.test.images, task.test.targets.tolist(), strict=True):
        assert Path(str(image)).parent.name == task.classes[label].replace(" ", "_")


@pytest.mark.parametrize("name", [*MAKE])
def test_an_incomplete_copy_is_an_error_unless_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"`bisslight data download {name}`"):
        load(name, tmp_path)
    make(name, tmp_path)
    with pytest.raises(UsageError, match=r"train, val and test have .* --partial"):
        load(name, tmp_path, partial=False)
    task = load(name, tmp_path)
    assert task.drawn == (["val"] if name in ("cub200", "pets") else [])  # others have their own
    if name == "pets":  # written down, so that another platform or release takes the same files
        assert sorted(path.name for path in task.val.images) == ["Pug_6.jpg", "great_cat_4.jpg"]
    gone = task.train.images[0]
    gone.unlink()
    less = load(name, tmp_path)
    assert {*less.train.images} == {*task.train.images} - {gone}
    assert {*less.val.images} == {*task.val.images}  # a missing file does not move the others
    for file in (tmp_path / BENCHMARKS[name].folder).rglob("*.[tm][xa]t"):
        file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot be read \(.*; see --data-root"):
        load(name, tmp_path)


@pytest.fixture
def split_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for it beside a copy of CUB-200, whose 12 training images count as all."""
    make("cub200", tmp_path)
    small = BENCHMARKS["cub200"]._replace(sizes=(10, 2, 4))
    monkeypatch.setitem(BENCHMARKS, "cub200", small)
    return tmp_path / "split.txt"


def test_a_split_file_names_the_validation_images(split_file: Path) -> None:
    split_file.write_text("0\n9\n", encoding="utf-8-sig")  # with the mark that Windows writes
    task = load("cub200", split_file.parent, split_file=split_file, partial=False)
    # Images 3 and 7 of each class are for test, so 0 to 5 are positions of the first class.
    assert [x.name for x in task.val.images] == ["Bird_3_0.jpg", "Bird_7_4.jpg"]
    assert not {*task.val.images} & {*task.train.images}
    assert not task.drawn


def test_a_split_file_of_the_whole_lists_is_refused_where_images_are_missing(
    tmp_path: Path,
) -> None:
    """In a subset a position would name another image."""
    make("cub200", tmp_path)
    (tmp_path / "split.txt").write_text("0\n9\n")
    with pytest.raises(UsageError, match=r"split.txt: .* 5994 training images; here are 12"):
        load("cub200", tmp_path, split_file=tmp_path / "split.txt")


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ("0 12", "from 0 to 11"),
        ("-1 7", "from 0 to 11"),
        ("9 9", "2 different"),
        ("0 2 3 4 5 6 8 9 10 11", "2 different"),
        ("bird", "bird"),
    ],
)
def test_positions_that_name_other_images_are_refused(
    split_file: Path, positions: str, said: str
) -> None:
    """Outside of the lists, twice, and those of the training images."""
    split_file.write_text(positions)
    with pytest.raises(UsageError, match=f"split.txt: .*{said}"):
        load("cub200", split_file.parent, split_file=split_file)


def test_a_pool_is_the_training_part_of_imagenet_or_any_folder(tmp_path: Path) -> None:
    photos_in(tmp_path / "pool", ["1.png", "deep/2.JPEG", ".hidden/3.png"])
    photos_in(tmp_path / "imagenet/val", ["n01/1.JPEG"])
    (tmp_path / "empty").mkdir()
    for name in ("imagenet", f"folder:{tmp_path}/empty"):  # validation is no pool
        with pytest.raises(UsageError, match=r"there is no folder|has no images"):
            open_pool(name, tmp_path)
    photos_in(tmp_path / "imagenet/train", ["n01/2.JPEG"])
    for name, files in ((f"folder:{tmp_path}/pool", ["1.png", "2.JPEG"]), ("imagenet", ["2.JPEG"])):
        assert [path.name for path in open_pool(name, tmp_path).images] == files
