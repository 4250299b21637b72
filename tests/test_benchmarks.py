"""The benchmarks' lists, on drawn copies and on the small packs, beside torchvision's readers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import shared
from copies import MAKE, make, picture
from PIL import Image
from torchvision import datasets as tv
from toy import ALIGN_STEPS, done, refusal

from config import NAMED, AlignConfig
from config import make as make_settings
from data import SPLITS, Pool, Task
from support.benchmarks import (
    BENCHMARKS,
    DTD,
    MAKE_TASK,
    VOC,
    read_cub,
    read_lists,
)
from support.errors import UsageError
from support.experiment import open_pool, open_task


def load(name: str, root: Path, **more: Any) -> Task:
    given = {"backbone": "vit_mini", "dataset": name, "partial": True, "data_root": root} | more
    return open_task(make_settings(AlignConfig, given))


def torchvision_reads(name: str, root: Path, monkeypatch: Any) -> dict[str, dict[str, int]]:
    """What torchvision's own classes make of the same folders: labels by the files they open."""
    kinds = {"dtd": tv.DTD, "pets": tv.OxfordIIITPet, "flowers": tv.Flowers102}
    monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)  # of whole lists
    opened = []

    def open_image(file: Any) -> Image.Image:
        opened.append(Path(getattr(file, "name", file)).name)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(Image, "open", open_image)
    found = {}
    for part in ("trainval", "test") if name == "pets" else SPLITS:
        data = kinds.get(name, tv.FGVCAircraft)(root, part)
        place = [DTD.index(kind) for kind in data.classes] if name == "dtd" else range(102)
        labels = [place[data[i][1]] for i in range(len(data))]
        found[part] = dict(zip(opened, labels, strict=True))
        opened.clear()
    return found


@pytest.mark.parametrize("name", ["dtd", "pets", "flowers", "aircrafts"])
@pytest.mark.parametrize("real", [False, True])
def test_torchvision_reads_the_same(
    name: str, real: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    if real and name == "aircrafts":
        pytest.skip("there is no pack of aircraft photographs")
    root = shared(f"data/{BENCHMARKS[name].folder}").parent if real else make(name, tmp_path).parent
    task = load(name, root)
    ours: dict[str, Any] = {}
    for part, split in zip(SPLITS, (task.train, task.val, task.test), strict=True):
        labels = zip(split.images, split.targets.tolist(), strict=True)
        ours[part] = {path.name: label for path, label in labels}
    if name == "pets":
        ours["trainval"] = ours.pop("train") | ours.pop("val")
    assert ours == torchvision_reads(name, root, monkeypatch)
    assert name == "aircrafts" or len(task.classes) == {"dtd": 47, "pets": 37, "flowers": 102}[name]


def test_voc_labels_are_those_of_the_annotations() -> None:
    """Main/CLASS_PART.txt against the objects that torchvision's VOCDetection reads."""
    root = shared("data/VOCdevkit").parent
    task, hits = load("voc07", root), load("voc07", root, voc_difficult="positive")
    for part in SPLITS:
        xml = tv.VOCDetection(root, year="2007", image_set=part)
        for i in range(len(xml)):
            objects = xml[i][1]["annotation"]["object"]
            easy = {VOC.index(o["name"]) for o in objects if o["difficult"] == "0"}
            any_ = {VOC.index(o["name"]) for o in objects}
            labels, positive = getattr(task, part).targets[i], getattr(hits, part).targets[i]
            assert {*(labels == 1).nonzero()[:, 0].tolist()} == easy
            assert {*(labels == 0).nonzero()[:, 0].tolist()} == any_ - easy
            assert {*(positive == 1).nonzero()[:, 0].tolist()} == any_
    assert (task.test.targets.ndim, task.classes[14]) == (2, "person")


def test_the_whole_cub_split_has_the_papers_sizes() -> None:
    """A fifth of each class of the official 5,994 training images, from the complete lists."""
    base = shared("data/annotations/CUB_200_2011")
    known = read_cub(base).parts["trainval"]
    assert all(label == int(Path(name).parts[1][:3]) - 1 for name, label in known)
    file = shared("data/bissl_tv_splits/cub200_val_split.txt")
    for chosen in (None, file):
        split = read_lists("cub200", base, 0, chosen).parts
        assert [len(split[part]) for part in SPLITS] == [4800, 1194, 5794]
        assert {*Counter(label for _, label in split["train"]).values()} == {24}
        assert len({*split["train"], *split["val"]}) == 5994
    assert len({str(read_lists("cub200", base, k)) for k in (0, 1)}) == 2
    rest = (file.parent / "cub200_train_split.txt").read_text().split()  # the other original file
    assert {known[int(i)] for i in rest} == {*split["train"]}


@pytest.mark.parametrize("name", [*MAKE])
def test_an_incomplete_copy_is_an_error_unless_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"`bisslight data download {name}`"):
        load(name, tmp_path)
    make(name, tmp_path)
    with pytest.raises(UsageError, match=r"train, validation and test have .* --partial"):
        load(name, tmp_path, partial=False)
    task = load(name, tmp_path)
    if name == "pets":  # written down, so that another platform or release takes the same files
        assert sorted(path.name for path in task.val.images) == ["Pug_6.jpg", "great_cat_4.jpg"]
    gone = task.train.images[0]
    gone.unlink()
    less = load(name, tmp_path)
    assert {*less.train.images} == {*task.train.images} - {gone}
    assert {*less.val.images} == {*task.val.images}  # a missing file does not move the others


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("cub200", "image_class_labels.txt", b"\xff\xfe"),
        ("flowers", "setid.mat", b"noise"),
    ],
)
def test_a_bad_list_file_ends_in_one_line(
    name: str, file: str, content: bytes, tmp_path: Path
) -> None:
    base = make(name, tmp_path)
    (base / file).write_bytes(content)
    with pytest.raises(UsageError, match=r": cannot be read \(.*; its lists") as error:
        load(name, tmp_path)
    assert str(error.value).startswith(str(base))


def test_split_files_are_checked(tmp_path: Path, monkeypatch: Any) -> None:
    make("cub200", tmp_path), make("dtd", tmp_path)
    path = tmp_path / "split.txt"
    path.write_text("0\n3\n")
    for name, wrong in (("cub200", "5994 listed .*; 12 are"), ("dtd", "cub200 and pets")):
        with pytest.raises(UsageError, match=rf"split.txt: .* {wrong}"):
            load(name, tmp_path, split_file=path)
    small = BENCHMARKS["cub200"]._replace(sizes=(10, 2, 4))
    monkeypatch.setitem(BENCHMARKS, "cub200", small)
    task = load("cub200", tmp_path, split_file=path)
    assert [x.name for x in task.val.images] == ["Bird_3_0.jpg", "Bird_3_4.jpg"]  # 3 is for test
    path.write_text("12")
    with pytest.raises(UsageError, match=r"split.txt: .* numbers below 12;"):
        load("cub200", tmp_path, split_file=path)


def test_a_pool_is_the_training_part_of_imagenet_any_folder_or_made(tmp_path: Path) -> None:
    def pool(name: str) -> Pool:
        return open_pool(name, tmp_path, 0)

    for file in ("pool/1.png", "pool/deep/2.JPEG", "pool/.hidden/3.png", "imagenet/val/n01/1.JPEG"):
        picture(tmp_path / file)
    (tmp_path / "empty").mkdir()
    assert pool("quilts").images.shape == (4000, 3, 16, 16)
    with pytest.raises(UsageError, match="imagenet/train"):  # validation is no pool
        pool("imagenet")
    with pytest.raises(UsageError, match="no images in"):
        pool(f"{tmp_path}/empty")
    picture(tmp_path / "imagenet/train/n01/2.JPEG")
    for name, files in ((f"{tmp_path}/pool", ["1.png", "2.JPEG"]), ("imagenet", ["2.JPEG"])):
        assert [path.name for path in pool(name).images] == files


def test_a_script_gives_its_own_data_a_name(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a flag's value, brings its settings along, and its function gets --data-seed."""
    seeds = list[int]()

    def make_task(seed: int) -> Task:
        seeds.append(seed)
        return open_task(AlignConfig(backbone="vit_mini", dataset="omniglot:Greek"))

    monkeypatch.setitem(NAMED, "mine", {"pool": "omniglot", "augment": "none"})
    monkeypatch.setitem(MAKE_TASK, "mine", make_task)
    line = f"align --backbone vit_mini --weights {weights} --dataset mine {ALIGN_STEPS}"
    done(f"{line} --quiet --data-seed 3 --out {tmp_path}/run")
    settings = json.loads((tmp_path / "run/config.json").read_text())
    assert (settings["dataset"], settings["pool"], settings["augment"]) == (
        "mine", "omniglot", "none",
    )  # fmt: skip
    assert seeds == [3]
    said = refusal(f"pretrain --backbone vit_mini --pool mine --out {tmp_path}/other")
    assert "--pool mine" in said  # it has no function that makes a pool
