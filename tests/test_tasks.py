"""The benchmarks' layouts, on synthetic copies and on the small packs, beside torchvision's own readers."""

import hashlib
import http.server
import io
import tarfile
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHARED, shared
from PIL import Image
from scipy.io import savemat
from torchvision import datasets as tv

import tasks
from config import Data, RunError, UsageError
from data import Task
from tasks import BENCHMARKS, DTD, VOC, check, download, load_task, read_cub, read_flowers, state_of, with_validation


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shade = int(hashlib.sha256(str(path.name).encode()).hexdigest()[:2], 16)
    Image.new("RGB", (20, 24), (shade, 90, 200 - shade // 2)).save(path)


def lines(path: Path, *text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")


def make_dtd(root: Path) -> None:
    base = root / "dtd/dtd"
    for part in ("train", "val", "test"):
        names = [f"{kind}/{kind}_{part}{i}.jpg" for kind in ("polka-dotted", "banded") for i in range(3)]
        lines(base / f"labels/{part}1.txt", *names)
        for name in names:
            picture(base / "images" / name)


def make_voc(root: Path) -> None:
    base = root / "VOCdevkit/VOC2007"
    for part, first in (("train", 0), ("val", 10), ("test", 20)):
        names = [f"{first + i:06d}" for i in range(4)]
        lines(base / f"ImageSets/Main/{part}.txt", *names)
        for k, kind in enumerate(VOC):
            labels = [1 if k == i else 0 if k == i + 4 else -1 for i in range(4)]
            lines(
                base / f"ImageSets/Main/{kind}_{part}.txt", *(f"{n} {v:2d}" for n, v in zip(names, labels, strict=True))
            )
        for name in names:
            picture(base / f"JPEGImages/{name}.jpg")


def make_cub(root: Path) -> None:
    base = root / "CUB_200_2011"
    names = [f"{k:03d}.Bird_{k}/Bird_{k}_{i}.jpg" for k in (3, 7) for i in range(8)]
    lines(base / "images.txt", *(f"{i} {name}" for i, name in enumerate(names, 1)))
    lines(base / "image_class_labels.txt", *(f"{i} {int(name[:3])}" for i, name in enumerate(names, 1)))
    lines(base / "train_test_split.txt", *(f"{i} {i % 4 != 0:d}" for i in range(1, 17)))
    lines(base / "classes.txt", *(f"{k} {k:03d}.Bird_{k}" for k in range(1, 201)))
    for name in names:
        picture(base / "images" / name)


def make_pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    names = [(f"great_cat_{i}", 2) for i in range(8)] + [(f"Pug_{i}", 30) for i in range(8)]
    for part, odd in (("trainval", 0), ("test", 1)):
        lines(base / f"annotations/{part}.txt", *(f"{n} {k} 1 1" for i, (n, k) in enumerate(names) if i % 2 == odd))
    for name, _ in names:
        picture(base / f"images/{name}.jpg")


def make_flowers(root: Path) -> None:
    base = root / "flowers-102"
    base.mkdir(parents=True)
    labels = np.arange(24) % 6 + 97
    savemat(base / "imagelabels.mat", {"labels": labels[None]})
    ids = np.arange(1, 25)
    savemat(base / "setid.mat", {"trnid": ids[None, :6], "valid": ids[None, 6:12], "tstid": ids[None, 12:]})
    for i in ids:
        picture(base / f"jpg/image_{i:05d}.jpg")


def make_aircraft(root: Path) -> None:
    base = root / "fgvc-aircraft-2013b/data"
    lines(base / "variants.txt", *(f"Falcon {k}" for k in range(100)))
    for p, part in enumerate(("train", "val", "test", "trainval")):
        entries = [(f"{1000 * (p % 3) + i:07d}", f"Falcon {i % 2 * 50}") for i in range(4)]
        lines(base / f"images_variant_{part}.txt", *(f"{i} {name}" for i, name in entries))
        for i, _ in entries:
            picture(base / f"images/{i}.jpg")


MAKE = {
    "dtd": make_dtd, "voc07": make_voc, "cub200": make_cub, "pets": make_pets, "flowers": make_flowers,
    "aircrafts": make_aircraft,
}  # fmt: skip


def everything(task: Task) -> dict[str, Any]:
    """Label by file name, of train and val together where that is what torchvision calls trainval."""
    out: dict[str, Any] = {}
    for part in ("train", "val", "test"):
        split = getattr(task, part)
        out[part] = {path.name: label for path, label in zip(split.images, split.targets.tolist(), strict=True)}
    return out


def torchvision_reads(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """What torchvision's own classes make of the same folders."""
    if name == "dtd":
        made = {part: tv.DTD(root, part) for part in ("train", "val", "test")}
        place = [DTD.index(kind) for kind in made["train"].classes]  # it numbers the classes that are there
        return {p: {f.name: place[k] for f, k in zip(d._image_files, d._labels, strict=True)} for p, d in made.items()}
    if name == "pets":
        pets = {part: tv.OxfordIIITPet(root, part) for part in ("trainval", "test")}
        return {p: {f.name: k for f, k in zip(d._images, d._labels, strict=True)} for p, d in pets.items()}
    if name == "flowers":
        monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)  # md5 of the whole archive's lists
        flowers = {part: tv.Flowers102(root, part) for part in ("train", "val", "test")}
        return {
            p: {Path(f).name: k for f, k in zip(d._image_files, d._labels, strict=True)} for p, d in flowers.items()
        }
    planes = {part: tv.FGVCAircraft(root, part) for part in ("train", "val", "test")}
    return {p: {Path(f).name: k for f, k in zip(d._image_files, d._labels, strict=True)} for p, d in planes.items()}


@pytest.mark.parametrize("name", ["dtd", "pets", "flowers", "aircrafts"])
@pytest.mark.parametrize("real", [False, True])
def test_torchvision_reads_the_same(name: str, real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if real and name == "aircrafts":
        pytest.skip("there is no pack of aircraft photographs")
    root = shared(f"data/{BENCHMARKS[name].folder}").parent if real else tmp_path
    if not real:
        MAKE[name](tmp_path)
    ours = everything(load_task(Data(dataset=name, partial=True), root))
    theirs = torchvision_reads(name, root, monkeypatch)
    if "trainval" in theirs:
        ours["trainval"] = ours.pop("train") | ours.pop("val")
    if name == "pets" and not real:  # it takes labels as they are, minus one
        assert set(theirs["test"].values()) == {1, 29}
    assert ours == theirs


def test_voc_labels_are_those_of_the_annotations() -> None:
    """Main/CLASS_PART.txt against the objects in the XML files, which torchvision's VOCDetection reads."""
    root = shared("data/VOCdevkit").parent
    task = load_task(Data(dataset="voc07", partial=True), root)
    hits = load_task(Data(dataset="voc07", partial=True, voc_difficult="positive"), root)
    for part in ("train", "val", "test"):
        xml = tv.VOCDetection(root, year="2007", image_set=part)
        for i in range(len(xml)):
            objects = xml[i][1]["annotation"]["object"]
            easy = {VOC.index(o["name"]) for o in objects if o["difficult"] == "0"}
            any_ = {VOC.index(o["name"]) for o in objects}
            labels = getattr(task, part).targets[i]
            assert set((labels == 1).nonzero()[:, 0].tolist()) == easy
            assert set((labels == 0).nonzero()[:, 0].tolist()) == any_ - easy
            assert set((getattr(hits, part).targets[i] == 1).nonzero()[:, 0].tolist()) == any_
    assert (task.metric, task.classes[14]) == ("11-point mAP", "person")


def test_cub_labels_stay_official_and_grey_or_missing_classes_keep_their_place(tmp_path: Path) -> None:
    make_cub(tmp_path)
    task = load_task(Data(dataset="cub200", partial=True), tmp_path)
    assert len(task.classes) == 200
    assert task.classes[6] == "Bird 7"
    for split in (task.train, task.val, task.test):
        for path, label in zip(split.images, split.targets.tolist(), strict=True):
            assert label == int(path.parent.name[:3]) - 1
    assert [len(s.targets) for s in (task.train, task.val, task.test)] == [10, 2, 4]


def test_the_whole_cub_split_has_the_papers_sizes() -> None:
    """Our fifth of each class of the official 5,994 training images, from the complete lists."""
    root = SHARED / "data/annotations/CUB_200_2011"
    if not root.exists():
        pytest.skip("the complete lists are not here")
    listing = read_cub(root)
    assert {p: len(e) for p, e in listing.parts.items()} == {"trainval": 5994, "test": 5794}
    for chosen in (
        Data(dataset="cub200"),
        Data(dataset="cub200", split_file=shared("data/bissl_tv_splits/cub200_val_split.txt")),
    ):
        parts = with_validation(listing.parts, BENCHMARKS["cub200"], chosen)
        assert (len(parts["train"]), len(parts["val"])) == (4800, 1194)
        per_class = Counter(label for _, label in parts["train"])
        assert set(per_class.values()) == {24}
        assert len({*parts["train"], *parts["val"]}) == 5994
    if chosen.split_file:  # the other of the two original files is the rest
        rest = shared("data/bissl_tv_splits/cub200_train_split.txt").read_text().split()
        assert {listing.parts["trainval"][int(i)] for i in rest} == set(parts["train"])


def test_the_official_flower_lists_have_the_known_sizes(tmp_path: Path) -> None:
    root = SHARED / "data/annotations/flowers-102"
    if not root.exists():
        pytest.skip("the complete lists are not here")
    listing = read_flowers(root)
    assert {p: len(e) for p, e in listing.parts.items()} == {"train": 1020, "val": 1020, "test": 6149}
    assert set(Counter(label for _, label in listing.parts["train"]).values()) == {10}
    for file, md5 in BENCHMARKS["flowers"].files.items():
        assert hashlib.md5((root / file).read_bytes()).hexdigest() == md5


def test_the_validation_split_is_fixed(tmp_path: Path) -> None:
    """Which files it takes is written down here, so that another platform or release takes the same."""
    make_pets(tmp_path)
    task = load_task(Data(dataset="pets", partial=True), tmp_path)
    assert sorted(path.name for path in task.val.images) == ["Pug_6.jpg", "great_cat_4.jpg"]
    other = load_task(Data(dataset="pets", partial=True, data_seed=1), tmp_path)
    assert task.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("name", [*MAKE])
def test_an_incomplete_copy_is_an_error_unless_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"is not there; `bisslight data download {name}`"):
        load_task(Data(dataset=name), tmp_path)
    MAKE[name](tmp_path)
    with pytest.raises(UsageError, match=r"the whole has .*use --partial for a subset"):
        load_task(Data(dataset=name), tmp_path)
    task = load_task(Data(dataset=name, partial=True), tmp_path)
    assert task.missing == 0
    gone = task.train.images[0]
    assert isinstance(gone, Path)
    gone.unlink()
    less = load_task(Data(dataset=name, partial=True), tmp_path)
    assert less.missing == 1
    assert set(less.train.images) == {*task.train.images} - {gone}
    assert set(less.val.images) == set(task.val.images)  # a missing file does not move the others
    assert state_of(name, tmp_path)[0] == "partial"


def test_a_whole_copy_with_a_missing_image_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_flowers(tmp_path)
    monkeypatch.setitem(BENCHMARKS, "flowers", BENCHMARKS["flowers"]._replace(sizes=(6, 6, 12), files={}))
    assert len(load_task(Data(dataset="flowers"), tmp_path).test.targets) == 12
    with monkeypatch.context() as m:  # as many images, but another list
        m.setitem(BENCHMARKS, "flowers", BENCHMARKS["flowers"]._replace(files={"setid.mat": "00"}))
        with pytest.raises(UsageError, match=r"setid.mat: is not the official file \(md5\)"):
            load_task(Data(dataset="flowers"), tmp_path)
    assert state_of("flowers", tmp_path)[0] == "there"
    (tmp_path / "flowers-102/jpg/image_00009.jpg").unlink()
    with pytest.raises(UsageError, match=r"1 images are missing, first .*image_00009.jpg"):
        load_task(Data(dataset="flowers"), tmp_path)


def ids_from(first: int) -> bytes:
    """setid.mat of the 24 images that `make_flowers` draws, counted from another number."""
    ids, buffer = np.arange(first, first + 24)[None], io.BytesIO()
    savemat(buffer, {"trnid": ids[:, :6], "valid": ids[:, 6:12], "tstid": ids[:, 12:]})
    return buffer.getvalue()


def broken(tmp_path: Path, name: str, file: str, content: str | bytes) -> str:
    """The message for a copy one of whose files is replaced."""
    MAKE[name](tmp_path)
    path = tmp_path / BENCHMARKS[name].folder / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        load_task(Data(dataset=name, partial=True), tmp_path)
    assert str(path.parent) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("cub200", "images.txt", "1\n", "line 1: has 1 fields, 2 are expected"),
        ("cub200", "images.txt", "99 001.x/y.jpg\n", "image 99 is not in train_test_split.txt"),
        ("cub200", "image_class_labels.txt", "1 201\n", "'201' should be a number from 1 to 200"),
        ("cub200", "image_class_labels.txt", b"\xff\xfe", "cannot be read"),
        ("cub200", "train_test_split.txt", "1 2\n", "'2' should be a number from 0 to 1"),
        ("cub200", "image_class_labels.txt", "1 --5\n", "'--5' should be a number"),
        ("cub200", "classes.txt", "x y\n", "'x' should be a number from 1 to 200"),
        ("flowers", "imagelabels.mat", zlib.compress(b"x" * 400)[:-3], "cannot be read"),
        ("aircrafts", "data/variants.txt", "Concorde\n", "has 1 variants, 100 are expected"),
        ("dtd", "dtd/labels/val1.txt", "nope/x.jpg\n", "'nope/x.jpg' is not of one of the 47 classes"),
        ("voc07", "VOC2007/ImageSets/Main/car_val.txt", "000010 1\n", "does not list 000011"),
        ("voc07", "VOC2007/ImageSets/Main/car_val.txt", "000099 1\n", "lists 000099 twice, or it is not in val.txt"),
        ("pets", "annotations/test.txt", "x 38 1 1\n", "'38' should be a number from 1 to 37"),
        ("flowers", "setid.mat", "noise", "cannot be read"),
        ("flowers", "setid.mat", ids_from(0), "image numbers should be from 1 to 24"),
        ("flowers", "setid.mat", ids_from(2), "cannot be read"),
        ("aircrafts", "data/images_variant_val.txt", "1 Concorde\n", "'Concorde' is not in variants.txt"),
    ],
)
def test_a_bad_list_file_is_named(tmp_path: Path, name: str, file: str, content: str | bytes, message: str) -> None:
    assert message in broken(tmp_path, name, file, content)


def test_split_files_are_checked(tmp_path: Path) -> None:
    make_cub(tmp_path)
    path = tmp_path / "split.txt"
    path.write_text("0\n3\n")
    with pytest.raises(UsageError, match="counts in the whole training part of 5994 images, 12 are listed"):
        load_task(Data(dataset="cub200", partial=True, split_file=path), tmp_path)
    make_dtd(tmp_path)
    with pytest.raises(UsageError, match="dtd has an official validation split"):
        load_task(Data(dataset="dtd", partial=True, split_file=path), tmp_path)
    b = BENCHMARKS["cub200"]._replace(sizes=(8, 4, 4))
    listing = b.read(tmp_path / "CUB_200_2011")
    parts = with_validation(listing.parts, b, Data(dataset="cub200", split_file=path))
    assert parts["val"] == [listing.parts["trainval"][0], listing.parts["trainval"][3]]
    for text, message in [
        ("12", "'12' should be a number"),
        ("1\n1", "once, has 2"),
        ("\n".join(map(str, range(9))), "has 9"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            with_validation(listing.parts, b, Data(dataset="cub200", split_file=path))
    with pytest.raises(UsageError, match="are for dtd"):
        load_task(Data(dataset="quilts", partial=True), tmp_path)


def test_check_lists_every_bad_file(tmp_path: Path) -> None:
    make_pets(tmp_path)
    base = tmp_path / "oxford-iiit-pet/images"
    (base / "Pug_1.jpg").write_bytes((base / "Pug_1.jpg").read_bytes()[:200])
    (base / "Pug_2.jpg").write_bytes(b"")
    (base / "great_cat_5.jpg").unlink()
    found = check("pets", tmp_path, lambda *told: None)
    assert found.images == 16
    assert [Path(p.partition(":")[0]).name for p in found.problems[1:]] == ["Pug_2.jpg", "great_cat_5.jpg", "Pug_1.jpg"]
    assert "lists 8 trainval and 8 test images, the whole has 3680 trainval and 3669 test images" in found.problems[0]
    assert "is missing" in found.problems[2]
    subset = check("pets", tmp_path, lambda *told: None, partial=True)
    assert [Path(p.partition(":")[0]).name for p in subset.problems] == ["Pug_2.jpg", "Pug_1.jpg"]
    make_cub(tmp_path)
    assert sum("is not the official file (md5)" in p for p in check("cub200", tmp_path, lambda *t: None).problems) == 3
    assert check(str(base), tmp_path, lambda *told: None).images == 15
    (tmp_path / "imagenet/val").mkdir(parents=True)
    with pytest.raises(UsageError, match="imagenet/train, a folder a class"):
        check("imagenet", tmp_path, lambda *told: None)  # validation images are no pool
    (tmp_path / "imagenet/train/n01").mkdir(parents=True)
    assert "holds 0 images, the whole has 1281167" in check("imagenet", tmp_path, lambda *told: None).problems[0]
    with pytest.raises(UsageError, match="is no such dataset or folder; did you mean pets"):
        check("pet", tmp_path, lambda *told: None)


def tar_of(folder: Path, arc: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, arc)
    return buffer.getvalue()


def test_download_unpacks_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pets' two archives from a server on loopback, into the layout that the loader reads."""
    site, root = tmp_path / "site", tmp_path / "root"
    make_pets(tmp_path / "made")
    made, pages = tmp_path / "made/oxford-iiit-pet", site / "~vgg/data/pets/data"
    pages.mkdir(parents=True)
    (pages / "images.tar.gz").write_bytes(tar_of(made / "images", "images"))
    (pages / "annotations.tar.gz").write_bytes(tar_of(made / "annotations", "annotations"))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("BISSLIGHT_MIRROR", f"http://127.0.0.1:{server.server_address[1]}")
        try:
            with pytest.raises(RunError, match="its publishers give 5c4f3ee8e5d25df40f4fd59a7f44e54c"):
                download("pets", root, lambda *told: None)
            assert not (root / "oxford-iiit-pet").exists()
            b = BENCHMARKS["pets"]
            digests = [
                hashlib.md5((pages / url.rpartition("/")[2]).read_bytes()).hexdigest() for url, _, _ in b.archives
            ]
            archives = tuple((url, md5, where) for (url, _, where), md5 in zip(b.archives, digests, strict=True))
            monkeypatch.setitem(BENCHMARKS, "pets", b._replace(archives=archives))
            slow = tasks.unpack

            def unpack(archive: Path, to: Path) -> None:
                time.sleep(0.1)  # long enough for another process to come
                slow(archive, to)

            monkeypatch.setattr(tasks, "unpack", unpack)
            with ThreadPoolExecutor(3) as pool:
                got = [pool.submit(download, "pets", root, lambda *told: None) for _ in range(3)]
            told = [future.exception() or future.result() for future in got]
            assert told.count(root / "oxford-iiit-pet") == 1  # the others find it there
            assert sum("is there already" in str(what) for what in told) == 2
        finally:
            server.shutdown()
            thread.join()
    assert [p.name for p in root.iterdir()] == ["oxford-iiit-pet"]  # no archive is left
    assert len(load_task(Data(dataset="pets", partial=True), root).test.targets) == 8
    with pytest.raises(UsageError, match=r"is there already, `bisslight data check pets`"):
        download("pets", root, lambda *told: None)
    with pytest.raises(UsageError, match="cannot be downloaded by a program"):
        download("imagenet", root, lambda *told: None)
    with pytest.raises(UsageError, match="unknown dataset, did you mean flowers"):
        download("flower", root, lambda *told: None)


@pytest.mark.parametrize("name", ["../outside.txt", "/absolute.txt", "link"])
def test_an_archive_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    archive, inside = tmp_path / "a.tar", tmp_path / "in"
    inside.mkdir()
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo(name)
        if name == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "../../elsewhere"
        info.size = 0
        tar.addfile(info)
    if name == "/absolute.txt":  # the leading slash is dropped: it lands inside
        tasks.unpack(archive, inside)
        assert (inside / "absolute.txt").exists()
        return
    with pytest.raises(RunError, match="cannot be unpacked safely"):
        tasks.unpack(archive, inside)
    assert {p.name for p in tmp_path.iterdir()} == {"a.tar", "in"}


def test_several_labels_an_image_make_a_batch(tmp_path: Path) -> None:
    make_voc(tmp_path)
    task = load_task(Data(dataset="voc07", partial=True), tmp_path)
    assert task.train.targets.shape == (4, 20)
    assert task.train.targets.dtype == torch.int64
    assert task.train.targets[1].tolist().index(1) == 1
    assert task.train.targets[1].tolist().index(0) == 5
