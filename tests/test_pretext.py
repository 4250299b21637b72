"""The seam of pretext tasks: I-JEPA from the command line, and a third task that no core module knows."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import close
from safetensors.torch import load_file

import cli

ROOT = Path(cli.__file__).parent
SMALL = (
    "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --eval-every 1 --quiet"
)


@pytest.fixture
def jepa(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backbone of one epoch of I-JEPA, on 8 x 8 patches."""
    shutil.copytree(pretrained / "ijepa", tmp_path / "pre")
    monkeypatch.chdir(tmp_path)
    return "--backbone vit_mini --pretext ijepa --weights pre --dataset quilts"


def test_ijepa_goes_through_all_commands(jepa: str, capsys: Any) -> None:
    assert cli.run(f"align {jepa} {SMALL} --out a".split()) == 0, capsys.readouterr().err
    config = json.loads(Path("a/config.json").read_text())
    assert (config["lower"]["p_lr"], config["lower"]["p_weight_decay"], config["lower"]["ema"]) == (
        0.005,
        0.0005,
        0.9995,
    )
    assert (config["upper"]["d_weight_decay"], config["data"]["min_crop"]) == (0.0005, 0.3)
    assert config["model"]["head"] == "batchnorm"
    peft = "--epochs 3 --batch 40 --seeds 2 --lr 1e-2 --quiet"
    assert cli.run(f"finetune --from a {peft} --out f".split()) == 0, capsys.readouterr().err
    assert json.loads(Path("f/config.json").read_text())["peft"]["weight_decay"] == 0.0005
    assert cli.run(f"finetune {jepa} {peft} --out g".split()) == 0
    capsys.readouterr()
    assert cli.run(["evaluate", "f", "--against", "g", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["arms"]
    assert rows[1]["first_minus_this"]["splits"] == 6
    assert json.loads(Path("f/result.json").read_text())["pretext"] == "ijepa"
    for line, message in [
        ("align --backbone vit_mini --weights pre --dataset quilts", "is an I-JEPA checkpoint, give --pretext ijepa"),
        (f"align {jepa} --min-keep 9", "can have 9 of them, more than --min-keep 9 are wanted"),
        (f"align {jepa} --target-scale 0.4,0.2", "the first number is the smaller one"),
        ("pretrain --pool quilts --backbone vit_mini --pretext ijepa --patch-size 4", "on a grid of 4 x 4 patches"),
        ("align --backbone vit_b16 --pretext ijepa --dataset quilts", "vit_b16 with ijepa needs a checkpoint"),
    ]:
        assert cli.run(line.split()) == 2, line
        assert message in capsys.readouterr().err


def test_test_scores_use_the_saved_batchnorm_statistics(jepa: str, capsys: Any) -> None:
    """Read the file back and count by hand: mean of patches, saved moments, eps 1e-6, linear layer."""
    from data import quilts
    from ijepa import load
    from lora import Backbone

    assert cli.run(f"finetune {jepa} --epochs 4 --batch 40 --seeds 1 --lr 1e-2 --quiet --out f".split()) == 0
    saved = load_file("f/adapter-s0.safetensors")
    _, task = quilts(0)
    shift, scale = torch.tensor(task.mean).view(3, 1, 1), torch.tensor(task.std).view(3, 1, 1)
    vit, _, _ = load(Path("pre/backbone.pth"), "vit_mini", "target_encoder")
    assert isinstance(task.test.images, torch.Tensor)
    x = Backbone(vit)((task.test.images - shift) / scale, saved["theta"]).mean(1)
    x = (x - saved["head.norm.mean"]) / (saved["head.norm.var"] + 1e-6).sqrt()
    z = (x * saved["head.norm.weight"] + saved["head.norm.bias"]) @ saved["head.weight"].T + saved["head.bias"]
    right = 100 * float((z.argmax(1) == task.test.targets).float().mean())
    assert json.loads(Path("f/result.json").read_text())["test"] == [pytest.approx(right)]
    assert float((saved["head.norm.var"] - 1).abs().max()) > 0.01


def test_batchnorm_statistics_follow_the_pass_at_theta_D_only() -> None:
    """Two passes with different features: the running mean moves by a tenth of one of them, and evaluation uses it."""
    from config import BACKBONES
    from finetune import downstream_loss
    from lora import Backbone, Here, build_vit, features, init_head, init_stats, init_theta, logits
    from runtime import rng

    arch = BACKBONES["vit_mini"].arch.model_copy(update={"class_token": False})
    torch.manual_seed(0)
    backbone = Backbone(build_vit(arch))
    theta_P, theta_D = (init_theta(arch.depth, 2, arch.dim, rng(i, "x")) + 0.1 * i for i in (1, 2))
    phi = init_head(arch.dim, 3, rng(0, "h"), batchnorm=True)
    stats = init_stats(phi)
    images, targets = torch.randn(6, 3, 16, 16), torch.randint(3, (6,))
    loss_D = downstream_loss(backbone)
    loss_D(theta_P, phi, (images, targets))
    assert not stats["norm.mean"].any()
    loss_D(theta_D, phi, (images, targets), Here(None, stats))
    x = features(backbone, theta_D, images).detach()
    close(stats["norm.mean"], 0.1 * x.mean(0), 1e-5)
    close(stats["norm.var"], 0.9 + 0.1 * x.var(0), 1e-5)
    z = logits(backbone, theta_D, phi | stats, images)
    by_hand = ((x - stats["norm.mean"]) / (stats["norm.var"] + 1e-6).sqrt()) @ phi["weight"].T + phi["bias"]
    close(z, by_hand, 1e-5)


def test_a_third_task_runs_through_algorithm_1(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The example as a user runs it; its loss falls, its file starts a fine-tuning; it is short."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import rotation

    monkeypatch.chdir(tmp_path)
    rotation.main(weights, Path("rot"), alternations=12)
    records = [json.loads(text) for text in Path("rot/metrics.jsonl").read_text().splitlines()][1:]
    first, last = (sum(records[i]["loss_P"]) / 5 for i in (0, -1))
    assert last < first
    again = "finetune --from rot --epochs 1 --batch 80 --seeds 1 --lr 1e-2 --quiet --out f"
    assert cli.run(again.split()) == 0
    source = (ROOT / "examples/rotation.py").read_text()
    assert len(source.splitlines()) < 100
    code = [line for line in source.split('"""')[2].splitlines() if line.strip()]
    assert len(code) < 80
    assert "Rotation(" not in "".join(path.read_text() for path in ROOT.glob("*.py") if path.name != "bisslight.py")
    sys.modules.pop("rotation", None)


def test_rotation_turns_images_by_quarter_turns() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from rotation import Rotation

    from config import BACKBONES
    from lora import Backbone, build_vit
    from runtime import rng

    task = Rotation(Backbone(build_vit(BACKBONES["vit_mini"].arch)), rng(0, "x"))
    image = torch.arange(3 * 16 * 16.0).view(1, 3, 16, 16)
    batch = task.prepare(image.expand(32, -1, -1, -1), rng(1, "x"))
    assert set(batch.turns.tolist()) == {0, 1, 2, 3}
    for turned, k in zip(batch.images, batch.turns.tolist(), strict=True):
        back = turned
        for _ in range(4 - k):
            back = back.transpose(1, 2).flip(1)
        assert torch.equal(back, image[0])
