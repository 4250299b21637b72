"""The benchmarks' layouts, on drawn copies and on the small packs, beside torchvision's readers."""

import hashlib
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import shared
from loopback import Server
from PIL import Image
from scipy.io import savemat
from torchvision import datasets as tv

import cli
from config import AlignConfig
from data import PARTS
from extras.datasets import ARCHIVES, check, download, list_all
from support.benchmarks import BENCHMARKS, DTD, FOLDERS, VOC, read_cub, read_lists
from support.errors import RunError, UsageError
from support.experiment import open_pool, open_task


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 24)).save(path)


def lines(path: Path, *text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")


def make_dtd(base: Path) -> list[str]:
    names = [f"{kind}/{kind}_{i}.jpg" for kind in ("polka-dotted", "banded") for i in range(9)]
    for k, part in enumerate(PARTS):
        lines(base / f"dtd/labels/{part}1.txt", *names[k::3])
    return names


def make_voc(base: Path) -> list[str]:
    """Image i of a part has object i; object i + 4 is a difficult one in it."""
    for part, first in zip(PARTS, (0, 10, 20), strict=True):
        names = [f"{first + i:06d}" for i in range(4)]
        for k, kind in enumerate(VOC):
            labels = [1 if k == i else 0 if k == i + 4 else -1 for i in range(4)]
            text = [f"{n} {v:2d}" for n, v in zip(names, labels, strict=True)]
            lines(base / f"VOC2007/ImageSets/Main/{kind}_{part}.txt", *text)
    return [f"{first + i:06d}.jpg" for first in (0, 10, 20) for i in range(4)]


def make_cub(base: Path) -> list[str]:
    names = [f"{k:03d}.Bird_{k}/Bird_{k}_{i}.jpg" for k in (3, 7) for i in range(8)]
    lines(base / "images.txt", *(f"{i} {name}" for i, name in enumerate(names, 1)))
    labels = [f"{i} {int(name[:3])}" for i, name in enumerate(names, 1)]
    lines(base / "image_class_labels.txt", *labels)
    lines(base / "train_test_split.txt", *(f"{i} {i % 4 != 0:d}" for i in range(1, 17)))
    lines(base / "classes.txt", *(f"{k} {k:03d}.Bird_{k}" for k in range(1, 201)))
    return names


def make_pets(base: Path) -> list[str]:
    names = [(f"great_cat_{i}", 2) for i in range(8)] + [(f"Pug_{i}", 30) for i in range(8)]
    for part, odd in (("trainval", 0), ("test", 1)):
        lines(base / f"annotations/{part}.txt", *(f"{n} {k} 1 1" for n, k in names[odd::2]))
    return [f"{name}.jpg" for name, _ in names]


def make_flowers(base: Path) -> list[str]:
    base.mkdir(parents=True)
    ids = np.arange(1, 25)[None]
    savemat(base / "imagelabels.mat", {"labels": ids % 6 + 97})
    savemat(base / "setid.mat", {"trnid": ids[:, :6], "valid": ids[:, 6:12], "tstid": ids[:, 12:]})
    return [f"image_{i:05d}.jpg" for i in range(1, 25)]


def make_aircraft(base: Path) -> list[str]:
    lines(base / "data/variants.txt", *(f"Falcon {k}" for k in range(100)))
    for p, part in enumerate((*PARTS, "trainval")):
        names = [f"{1000 * (p % 3) + i:07d}" for i in range(4)]
        text = [f"{name} Falcon {i % 2 * 50}" for i, name in enumerate(names)]
        lines(base / f"data/images_variant_{part}.txt", *text)
    return [f"{1000 * p + i:07d}.jpg" for p in range(3) for i in range(4)]


MAKE = {"dtd": make_dtd, "voc07": make_voc, "cub200": make_cub, "pets": make_pets,
        "flowers": make_flowers, "aircrafts": make_aircraft}  # fmt: skip
IMAGES = {"dtd": "dtd/images", "voc07": "VOC2007/JPEGImages", "cub200": "images", "pets": "images",
          "flowers": "jpg", "aircrafts": "data/images"}  # fmt: skip


def make(name: str, root: Path) -> Path:
    """Draw a small copy of a benchmark; its own folder."""
    base = root / FOLDERS[name]
    for file in MAKE[name](base):
        picture(base / IMAGES[name] / file)
    return base


def load(name: str, root: Path, field: str = "dataset", **more: Any) -> Any:
    given = {"backbone": "vit_mini", "dataset": "quilts", "partial": True, field: name} | more
    cfg = AlignConfig(**given, data_root=root)
    return open_task(cfg) if field == "dataset" else open_pool(cfg)


def torchvision_reads(name: str, root: Path, monkeypatch: Any) -> dict[str, dict[str, int]]:
    """What torchvision's own classes make of the same folders."""
    kinds = {"dtd": tv.DTD, "pets": tv.OxfordIIITPet, "flowers": tv.Flowers102}
    monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)  # of whole lists
    found = {}
    for part in ("trainval", "test") if name == "pets" else PARTS:
        data = kinds.get(name, tv.FGVCAircraft)(root, part)
        place = [DTD.index(kind) for kind in data.classes] if name == "dtd" else range(102)
        files = data._images if name == "pets" else data._image_files
        found[part] = {Path(f).name: place[k] for f, k in zip(files, data._labels, strict=True)}
    return found


@pytest.mark.parametrize("name", ["dtd", "pets", "flowers", "aircrafts"])
@pytest.mark.parametrize("real", [False, True])
def test_torchvision_reads_the_same(
    name: str, real: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    if real and name == "aircrafts":
        pytest.skip("there is no pack of aircraft photographs")
    root = shared(f"data/{FOLDERS[name]}").parent if real else make(name, tmp_path).parent
    task = load(name, root)
    ours: dict[str, Any] = {}
    for part, split in zip(PARTS, (task.train, task.val, task.test), strict=True):
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
    for part in PARTS:
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
    known = [(name, label) for part, name, label in read_cub(base)[0] if part == "trainval"]
    assert all(label == int(Path(name).parts[1][:3]) - 1 for name, label in known)
    file = shared("data/bissl_tv_splits/cub200_val_split.txt")
    for chosen in (None, file):
        split, _ = read_lists("cub200", base, 0, chosen)
        assert [len(split[part]) for part in PARTS] == [4800, 1194, 5794]
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
    states = {row["name"]: row["state"] for row in list_all(tmp_path)}
    assert states.pop(name) == "there" and {*states.values()} == {"missing"}


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("cub200", "images.txt", b"99 001.x/y.jpg\n"),
        ("cub200", "image_class_labels.txt", b"\xff\xfe"),
        ("voc07", "VOC2007/ImageSets/Main/car_val.txt", b"000099 1\n"),
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
    for name, whole, listed in (("cub200", 5994, 12), ("dtd", 3760, 0)):
        with pytest.raises(UsageError, match=rf"split.txt: .* {whole} listed .*; {listed} are"):
            load(name, tmp_path, split_file=path)
    monkeypatch.setitem(BENCHMARKS, "cub200", ((10, 2, 4), read_cub))
    task = load("cub200", tmp_path, split_file=path)
    assert [x.name for x in task.val.images] == ["Bird_3_0.jpg", "Bird_3_4.jpg"]  # 3 is for test
    path.write_text("12")
    with pytest.raises(UsageError, match=r"split.txt: .* numbers below 12;"):
        load("cub200", tmp_path, split_file=path)


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
    missing, *damaged = found["problems"]
    assert missing["problem"] == "lists 16 images of 7349, 2 of them are missing"
    assert Path(missing["first"]).name == "great_cat_3.jpg"
    assert [Path(row["problem"].partition(":")[0]).stem for row in damaged] == ["Pug_1", "Pug_2"]
    assert check("pets", tmp_path, partial=True)["problems"] == damaged
    line = ["data", "check", "pets", "--data-root", str(tmp_path), "--json"]
    assert cli.run([*line, "--partial"]) == 1
    for row in damaged:
        Path(row["problem"].partition(":")[0]).unlink()
    assert cli.run([*line, "--partial"]) == 0


def test_a_pool_is_quilts_the_training_part_of_imagenet_or_any_folder(tmp_path: Path) -> None:
    """And what `data check` says of a pool and of class folders."""
    for file in ("pool/1.png", "pool/deep/2.JPEG", "pool/.hidden/3.png", "imagenet/val/n01/1.JPEG"):
        picture(tmp_path / file)
    (tmp_path / "pool/.hidden/none").mkdir()
    assert load("quilts", tmp_path, "pool").images.shape == (4000, 3, 16, 16)
    with pytest.raises(UsageError, match="imagenet/train"):  # validation is no pool
        load("imagenet", tmp_path, "pool")
    with pytest.raises(UsageError, match=r"imagenet: .*imagenet/train"):
        check("imagenet", tmp_path)
    with pytest.raises(UsageError, match="no images in"):
        load(f"folder:{tmp_path}/pool/.hidden/none", tmp_path, "pool")
    picture(tmp_path / "imagenet/train/n01/2.JPEG")
    for name, files in ((f"folder:{tmp_path}/pool", ["1.png", "2.JPEG"]), ("imagenet", ["2.JPEG"])):
        assert [path.name for path in load(name, tmp_path, "pool").images] == files
    assert check(f"{tmp_path}/pool", tmp_path)["images"] == 2
    for i, kind in enumerate("ab" * 10):
        picture(tmp_path / "classes" / kind / f"{i}.png")
    counts = {"classes": 2, "train": 14, "val": 2, "test": 4, "images": 20}
    assert counts.items() <= check(f"folder:{tmp_path}/classes", tmp_path).items()
    for wrong, message in (("pet", "is no benchmark or folder; did you mean pets"),
                           (f"folder:{tmp_path}/imagenet/val", "needs two or more")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            check(wrong, tmp_path)


@pytest.mark.filterwarnings("ignore:.*tar.*:DeprecationWarning")  # torchvision, Python 3.12
def test_a_download_is_whole_or_not_there(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    made, root = make("pets", tmp_path / "made"), tmp_path / "root"
    for part in ("images", "annotations"):
        with tarfile.open(tmp_path / f"{part}.tar.gz", "w:gz") as tar:
            tar.add(made / part, part)
        server.files[f"{part}.tar.gz"] = (tmp_path / f"{part}.tar.gz").read_bytes()
    server.files["list.mat"] = b"is put there as it is"
    good = {f"{server.url}/{x}": hashlib.md5(y).hexdigest() for x, y in server.files.items()}
    for bad, message in {
        "images.tar.gz": r"images.tar.gz: .*corrupted.*`cd .* && curl -C - -O http",
        "gone.tar": r"gone.tar: HTTP Error 404",
    }.items():
        monkeypatch.setitem(ARCHIVES, "pets", good | {f"{server.url}/{bad}": 32 * "0"})
        with pytest.raises(RunError, match=message):
            download("pets", root)
    monkeypatch.setitem(ARCHIVES, "pets", good)
    assert not (root / "oxford-iiit-pet").exists()
    assert download("pets", root)["path"] == str(root / "oxford-iiit-pet")
    assert [path.name for path in root.iterdir()] == ["oxford-iiit-pet"]  # no archive is left
    assert len(load("pets", root).test.targets) == 8
    assert (root / "oxford-iiit-pet/list.mat").read_bytes() == server.files["list.mat"]
    for name, message in {"pets": "is there already", "imagenet": "is at image-net.org"}.items():
        with pytest.raises(UsageError, match=message):
            download(name, root)
