"""`predict`: classes of image files as in the run's own test, without the labelled data."""

import csv
import io
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from quilts import quilts
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from toy import PEFT_STEPS, align_line, done, refusal, run, save_by_class

from data import Task, folder
from extras.predict import predict
from support import omniglot
from support.checkpoints import load_adapter, save_adapter

pytestmark = pytest.mark.usefixtures("elsewhere")


def log_p(run: Path, files: list[Path], seed: int | None = None) -> Tensor:
    """Logarithms of the probabilities of all classes for each file, (n, C)."""
    adapter = load_adapter(run / f"adapter-s{seed or 0}.safetensors")
    classes = adapter.info.classes
    found = torch.full((len(files), len(classes)), torch.nan)
    for guess in predict(run, files, top=len(classes), seed=seed):
        place = files.index(Path(guess.image)), classes.index(guess.label)
        found[place] = guess.probability
    return found.log()


def check_test_again(run: Path, files: list[Path], labels: Tensor) -> None:
    """What `predict` says of the test images gives the test results of both seeds of the run."""
    result = json.loads((run / "result.json").read_text())
    for seed in (0, 1):
        found = log_p(run, files, seed)
        assert int((found.argmax(1) == labels).sum()) == result["right"][seed]
        loss = -found[range(len(labels)), labels].mean()
        assert float(loss) == pytest.approx(result["test_loss"][seed], rel=1e-5)
    assert torch.equal(log_p(run, files), log_p(run, files, 0))


def test_saved_omniglot_is_classified_as_in_the_runs_own_test() -> None:
    """These images lay in memory, of the network's size, and were not cut: neither are files."""
    own = "--backbone vit_mini --dataset omniglot:Greek"
    done(f"finetune {own} {PEFT_STEPS} --seeds 2 --out f --quiet")
    test = omniglot.task("Greek", 0).test
    files = []
    for k, image in enumerate(torch.as_tensor(test.images)):
        files.append(Path(f"{k}.png"))
        to_pil_image(image).save(files[k])  # two bits a pixel, so that eight lose nothing
    check_test_again(Path("f"), files, test.targets)


@pytest.fixture
def photos(weights: Path) -> Task:
    """A run `f` on class folders that are then gone, and its test images in `unknown/`."""
    test = quilts(0)[1].test
    images = torch.as_tensor(test.images)[:40].repeat_interleave(2, 2).repeat_interleave(3, 3)
    save_by_class(Path("photos"), images, test.targets)
    model = f"--backbone vit_mini --weights {weights} --dataset folder:photos"
    done(f"finetune {model} {PEFT_STEPS} --seeds 2 --augment none --out f --quiet")
    task = folder(Path("photos"), 0)
    for k, file in enumerate(task.test.images):
        Path("unknown").mkdir(exist_ok=True)
        shutil.copy(str(file), f"unknown/{k:02}.png")
    shutil.rmtree("photos")
    return task


def test_files_are_cut_as_the_runs_test_images_and_the_data_may_be_gone(photos: Task) -> None:
    """Some of the paths are absolute, some relative."""
    files = sorted(Path("unknown").iterdir())
    files[0] = files[0].absolute()
    check_test_again(Path("f"), files, photos.test.targets)


def test_predictions_are_printed_as_a_table_as_json_and_as_csv(photos: Task) -> None:
    files = sorted(Path("unknown").iterdir())
    probabilities = log_p(Path("f"), files, 1).exp()
    assert torch.allclose(probabilities.sum(1), torch.ones(len(files)))
    rows = json.loads(done("predict f unknown --seed 1 --top 2 --json"))
    assert [row["image"] for row in rows] == [str(file) for file in files for _ in range(2)]
    assert [row["rank"] for row in rows] == [1, 2] * len(files)
    for k in range(len(files)):
        two = rows[2 * k : 2 * k + 2]
        order = probabilities[k].argsort(descending=True)[:2].tolist()
        assert [row["label"] for row in two] == [photos.classes[c] for c in order]
        assert two[0]["probability"] == pytest.approx(float(probabilities[k].max()), abs=1e-6)

    line = f"predict f {files[2]} unknown --seed 1"
    table = done(f"{line} --csv table.csv")
    said = list(csv.DictReader(io.StringIO(Path("table.csv").read_text())))
    assert len(said) == 1 + len(files) and said[0] == said[3]
    assert all(row["label"] in table for row in said)
    assert table.count(str(Path("unknown").absolute())) == 1  # the folder is told once
    assert done(f"{line} --csv -") == Path("table.csv").read_text()
    everything = json.loads(done(f"predict f {files[0]} --top 99 --json"))
    assert [row["rank"] for row in everything] == list(range(1, len(photos.classes) + 1))
    done(f"{line} --csv table.csv")  # its own table it writes again
    assert math.fsum(row["probability"] for row in everything) == pytest.approx(1, abs=1e-5)


def test_a_file_that_is_no_table_is_not_replaced_by_one(photos: Task) -> None:
    image = next(Path("unknown").iterdir())
    before = image.read_bytes()
    assert str(image) in refusal(f"predict f {image} --csv {image}")
    assert image.read_bytes() == before


def test_files_that_cannot_be_read_are_counted(photos: Task) -> None:
    Path("unknown/deeper").mkdir()
    for name in ("a.heic", "deeper/b.heic", ".hidden"):
        Path("unknown", name).write_text("no image of a kind that is read")
    said = run("predict f unknown").err
    assert "2 files" in said and ".heic" in said


def test_what_is_in_a_files_name_is_no_command_to_the_terminal(photos: Task) -> None:
    Path("unknown/00.png").rename("unknown/\x1b[31mred.png")
    assert "\x1b" not in done("predict f unknown") and "red.png" in done("predict f unknown")


def test_what_cannot_predict_is_told_in_a_line(photos: Task, pretrained: Path) -> None:
    done(align_line(pretrained, "--out a"))
    Path("empty").mkdir()
    Path("notes.txt").write_text("no image")
    for line, named, code in (
        ("predict a unknown", "classes", 2),
        ("predict unknown unknown", "unknown", 2),
        ("predict f empty", "empty", 2),
        ("predict f unknown --top 0", "--top 0", 2),
        ("predict f nowhere.png", "nowhere.png", 2),
        ("predict f unknown --seed 7", "seed 7", 2),
        (f"predict f unknown --weights {pretrained / 'ijepa'}", "--weights", 2),
        ("predict f notes.txt", "notes.txt", 1),
    ):
        assert named in refusal(line, code)


def test_an_adapter_without_names_of_classes_is_refused(photos: Task) -> None:
    file = Path("f/adapter-s0.safetensors")
    theta, phi_D, origin = load_adapter(file)
    nameless = origin.model_copy(update={"classes": []})
    file.write_bytes(save_adapter(theta, phi_D, nameless))
    assert "classes" in refusal("predict f unknown")
