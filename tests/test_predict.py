"""`predict`: classes of image files as in the run's own test, without the labelled data."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from quilts import quilts
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from toy import PEFT_SETTINGS, PEFT_STEPS, done, finetune_line, refusal, run, save_by_class

from config import FinetuneConfig
from data import Split, Task
from extras.predict import predict
from finetune import finetune
from support.adapters import find_adapters, load_adapter
from support.benchmarks import omniglot_task
from support.folders import folder

pytestmark = pytest.mark.usefixtures("elsewhere")


def log_p(adapter: Path, files: list[Path]) -> Tensor:
    """Logarithms of the probabilities of all classes for each file, (n, C)."""
    classes = load_adapter(adapter).info.classes
    found = torch.full((len(files), len(classes)), torch.nan)
    for guess in predict(adapter, files, top=len(classes)).guesses:
        place = files.index(Path(guess["image"])), classes.index(guess["label"])
        found[place] = guess["probability"]
    return found.log()


def check_test_again(run: Path, files: list[Path], labels: Tensor) -> None:
    """What `predict` says of the test images gives the test results of both seeds of the run."""
    tests = json.loads((run / "result.json").read_text())["tests"]
    for adapter, test in zip(find_adapters(run), tests, strict=True):
        found = log_p(adapter, files)
        assert int((found.argmax(1) == labels).sum()) == test["right"]
        loss = -found[range(len(labels)), labels].mean()
        assert float(loss) == pytest.approx(test["loss"], rel=1e-5)
    first, *_ = predict(run, files).guesses  # of a run, its first adapter is taken
    assert first["probability"] == pytest.approx(
        float(log_p(find_adapters(run)[0], files)[0].exp().max())
    )


@pytest.mark.slow
def test_saved_omniglot_is_classified_as_in_the_runs_own_test() -> None:
    """These images lay in memory, of the network's size, and were not cut: neither are files."""
    own = "--backbone vit_mini --dataset omniglot:Greek"
    done(f"finetune {own} {PEFT_STEPS} --epochs 1 --seeds 2 --out f --quiet")
    test = omniglot_task("Greek", 0).test
    files = []
    for k, image in enumerate(torch.as_tensor(test.images)):
        files.append(Path(f"{k}.png"))
        to_pil_image(image).save(files[k])  # two bits a pixel, so that eight lose nothing
    check_test_again(Path("f"), files, test.targets)


@pytest.fixture(scope="module")
def predicting(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Task]:
    """A folder with a run `f` on class folders, and its test images in `unknown/`; the task."""
    place = tmp_path_factory.mktemp("predicting")
    test = quilts(0)[1].test
    images = torch.as_tensor(test.images)[:40].repeat_interleave(2, 2).repeat_interleave(3, 3)
    save_by_class(place / "photos", images, test.targets)
    more = f"--dataset folder:{place}/photos --seeds 2 --augment none"
    done(finetune_line(weights.parent, f"{more} --out {place}/f"))
    task = folder(place / "photos", 0)
    (place / "unknown").mkdir()
    for k, file in enumerate(task.test.images):
        shutil.copy(str(file), place / f"unknown/{k:02}.png")
    shutil.rmtree(place / "photos")
    return place, task


@pytest.fixture
def photos(predicting: tuple[Path, Task]) -> Task:
    """A copy of that folder, in which the test works; the class folders are gone."""
    place, task = predicting
    shutil.copytree(place, Path(), dirs_exist_ok=True)
    return task


def test_files_are_cut_as_the_runs_test_images_and_the_data_may_be_gone(photos: Task) -> None:
    """Some of the paths are absolute, some relative."""
    files = sorted(Path("unknown").iterdir())
    files[0] = files[0].absolute()
    check_test_again(Path("f"), files, photos.test.targets)


def test_predictions_are_printed_as_a_table_and_as_json(photos: Task) -> None:
    files = sorted(Path("unknown").iterdir())
    adapter = find_adapters(Path("f"))[1]
    probabilities = log_p(adapter, files).exp()
    assert torch.allclose(probabilities.sum(1), torch.ones(len(files)))
    rows = json.loads(done(f"predict {adapter} unknown --top 2 --json"))["guesses"]
    assert [row["image"] for row in rows] == [str(file) for file in files for _ in range(2)]
    for k in range(len(files)):
        two = rows[2 * k : 2 * k + 2]
        order = probabilities[k].argsort(descending=True)[:2].tolist()
        assert [row["label"] for row in two] == [photos.classes[c] for c in order]
        assert two[0]["probability"] == pytest.approx(float(probabilities[k].max()), abs=1e-6)

    table = done(f"predict {adapter} {files[2]}")
    assert str(adapter) in table and str(files[2]) in table and rows[4]["label"] in table
    everything = json.loads(done(f"predict f {files[0]} --top 99 --json"))["guesses"]
    assert len(everything) == len(photos.classes)


def test_what_cannot_predict_is_told_in_a_line(photos: Task, pretrained: Path, runs: Path) -> None:
    Path("empty").mkdir()
    Path("notes.txt").write_text("no image")
    Path("lost").mkdir()
    Path("lost/more").symlink_to("nowhere")
    for line, named, code in (
        (f"predict {runs}/aligned unknown", "classes", 2),
        ("predict unknown unknown", "unknown", 2),
        ("predict f empty", "empty", 2),
        ("predict f unknown --top 0", "--top", 2),
        ("predict f nowhere.png", "nowhere.png", 2),
        ("predict f lost", "lost/more", 2),
        ("predict f/lr1/adapter.safetensors unknown", "lr1", 2),
        (f"predict f unknown --weights {pretrained / 'ijepa'}", "--weights", 2),
        ("predict f notes.txt", "notes.txt", 1),
    ):
        assert named in refusal(line, code)
    # Settings of another run beside an adapter: the factor of LoRA decides what is predicted.
    config = find_adapters(Path("f"))[0].parent / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"scale": 4.0}))
    for line in ("predict f unknown", "export f --out e"):
        assert "scale" in refusal(line)


def test_what_is_no_image_is_counted(photos: Task) -> None:
    for name in ("a.heic", "b.HEIC", "c.gif", "notes.txt"):
        (Path("unknown") / name).touch()
    found = predict(Path("f"), [Path("unknown")])
    assert found.left_out == {".heic": 2, ".gif": 1, ".txt": 1}
    assert ".heic" in str(found)


def test_images_that_cannot_be_read_are_named_and_the_others_classified(
    photos: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """The exit code is 1."""
    files = sorted(Path("unknown").iterdir())
    whole = json.loads(done("predict f unknown --json"))["guesses"]
    damaged = [files[0], files[1], files[3]]
    for file in damaged:
        file.write_bytes(b"no image")
    code, out, _ = run("predict f unknown --json")
    found = json.loads(out)
    left = [guess for guess in whole if Path(guess["image"]) not in damaged]
    for guess, before in zip(found["guesses"], left, strict=True):
        assert guess == before | {"probability": pytest.approx(before["probability"], abs=1e-6)}
    for told in (found["faults"], caplog.messages):
        for file, line in zip(damaged, told, strict=True):
            assert line.startswith(f"{file}: ")
    assert code == 1
    for file in files:
        file.write_bytes(b"no image")
    said = refusal("predict f unknown", 1)
    assert all(str(file) in said for file in files)


@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_of_several_classes_the_softmax_gives_shares_and_bce_probabilities(
    loss: str, weights: Path
) -> None:
    """They sum to 1, whatever an image shows; with "bce" each class has its own probability."""
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = 2 * torch.stack([torch.arange(40) % 2, torch.arange(40) // 2 % 2], 1) - 1
    parts = [Split(images[k::3], labels[k::3]) for k in range(3)]
    settings = PEFT_SETTINGS | {"backbone": "vit_mini", "weights": weights, "dataset": "own"}
    cfg = FinetuneConfig(**settings, voc_loss=loss)
    finetune(cfg, Path("m"), task=Task("own", *parts, ["a", "b"]))
    to_pil_image(images[0]).save("one.png")
    (adapter,) = find_adapters(Path("m"))
    total = float(log_p(adapter, [Path("one.png")]).exp().sum())
    assert (total == pytest.approx(1)) == (loss == "softmax")
