"""Exported adapters, opened by the programs they are for."""

import contextlib
import io
import json
import math
import shutil
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import timm
import torch
from conftest import close
from quilts import quilts
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from toy import done, refusal, save_by_class

from config import Arch, FinetuneConfig
from data import rng
from extras.export import crop_share, fold_norm, to_peft, to_timm
from lora import Backbone, features, init_head, init_norm, init_theta, logits
from support.checkpoints import AdapterInfo, build_vit, load_adapter

SIZES: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
ARCH = Arch(32, 3, 4, 32, 8)
IMAGES = torch.randn(5, 3, 32, 32, generator=rng(2, "x"))


@pytest.fixture
def theta() -> Tensor:
    return init_theta(3, 4, 32, rng(0, "x")) + 0.1 * torch.randn(3, 512, generator=rng(1, "x"))


@pytest.mark.parametrize("class_token", [True, False])
def test_peft_and_timm_predict_what_ours_does(
    theta: Tensor, tmp_path: Path, class_token: bool
) -> None:
    """Opened from files by HF peft's own loader, on a plain timm model, and by timm.

    Without a class token the head has a BatchNorm, which is exported as part of a linear layer.
    """
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    arch = ARCH._replace(class_token=class_token)
    ours = Backbone(build_vit(arch), 1.5)
    phi_D = init_head(32, 7, rng(3, "x")) | ({} if class_token else init_norm(32)[0])
    if not class_token:
        moments = {"norm.mean": torch.randn(32), "norm.var": torch.rand(32) + 0.5}
        phi_D |= moments | {"norm.bias": torch.randn(32), "norm.weight": torch.rand(32) + 0.5}
    expected, head = logits(features(ours, theta, IMAGES), phi_D), fold_norm(phi_D)
    without = logits(features(ours, None, IMAGES), phi_D)
    assert float((expected - without).detach().abs().max()) > 1e-2  # LoRA acts
    config, tensors = to_peft(theta, head, 32, 1.5)
    assert not tensors["base_model.model.blocks.0.attn.qkv.lora_B.weight"][32:64].any()  # not on k
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    own: Any = {} if class_token else {"class_token": False, "global_pool": "avg", "fc_norm": False}
    plain = VisionTransformer(**SIZES, **own, num_classes=7)
    plain.load_state_dict({**ours.vit.state_dict(), **plain.head.state_dict(prefix="head.")})
    close(peft.PeftModel.from_pretrained(plain, tmp_path).eval()(IMAGES), expected, 1e-5)
    half = (0.5, 0.5, 0.5)
    origin = AdapterInfo(channels=(half, half))
    cfg = FinetuneConfig(backbone="vit_mini", dataset="own")
    config, tensors = to_timm(ours, arch, theta, head, origin, cfg)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    merged = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    close(merged(IMAGES), expected, 1e-5)


@pytest.fixture
def made(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs `aligned` and `with`, copied to where the test works."""
    monkeypatch.chdir(tmp_path)
    for name in ("aligned", "with"):
        shutil.copytree(runs / name, name)


PEFT = "--epochs 1 --warmup-epochs 0 --batch 40 --lr 1e-2 --quiet"


def test_a_run_is_exported_from_the_command_line(made: None, weights: Path) -> None:
    """The merged folder predicts what the run's own tensors do."""
    assert json.loads(done("export with --seed 1 --json"))["seed"] == 1
    moved = Path("moved.pth")
    moved.write_bytes((weights / "backbone.pth").read_bytes())
    done(f"export with --out e --weights {moved}")  # elsewhere: its digest decides
    arch = Arch(64, 4, 4, 16, 4, 2.0)
    vit = build_vit(arch)
    state = torch.load(weights / "backbone.pth", weights_only=True)["model"]
    vit.load_state_dict({key: state[key] for key in vit.state_dict()})
    images = torch.as_tensor(quilts(0)[1].test.images)[:20]
    merged = timm.create_model("local-dir:with/export/timm", pretrained=True).eval()
    theta, phi_D, _ = load_adapter(Path("with/adapter-s1.safetensors"))
    close(merged(images), logits(features(Backbone(vit), theta, images), phi_D), 1e-5)
    assert list(merged.pretrained_cfg["mean"]) == pytest.approx(list(quilts(0)[1].mean))
    done("export with/lr0.01-s0")  # one rate and seed: tested in the whole
    assert json.loads(done("export with/lr0.01-s1 --json"))["seed"] == 1
    for run in ("with/lr0.01-s1", "aligned"):
        assert "seed 7" in refusal(f"export {run} --seed 7 --out other")
    card = Path("with/export/README.md").read_text()
    both = json.loads(Path("with/result.json").read_text())["test"]
    for figure in (both[1], mean(both), stdev(both)):
        assert f"{figure:.2f}" in card
    assert str(Path.cwd()) not in card and str(weights.parent) not in card


def test_an_export_replaces_nothing(made: None) -> None:
    """Not even an earlier export: its card may have been edited."""
    done("export with")
    card = Path("with/export/README.md")
    card.write_text(card.read_text() + "my own notes")
    assert "with/export" in refusal("export with --seed 1")
    assert card.read_text().endswith("my own notes")


def run_cards_program(export: Path) -> list[str]:
    """What the first program in a model card prints, run where the card lies."""
    card = (export / "README.md").read_text()
    program = card.split("```python")[1].split("```")[0]
    printed = io.StringIO()
    with contextlib.chdir(export), contextlib.redirect_stdout(printed):
        exec(compile(program, "card", "exec"), {})
    return printed.getvalue().split("\n")


@pytest.mark.parametrize("dataset", ["quilts", "folder:photos"])
def test_the_cards_program_predicts_what_predict_does(
    dataset: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an image of the network's size, which only the images of a folder are cut from."""
    monkeypatch.chdir(tmp_path)
    test = quilts(0)[1].test
    save_by_class(Path("photos"), torch.as_tensor(test.images)[:40], test.targets)
    own = f"--backbone vit_mini --weights {weights} --dataset {dataset}"
    done(f"finetune {own} --seeds 1 {PEFT} --augment none --out f")
    done("export f --out e")
    to_pil_image(torch.as_tensor(test.images)[77]).save("e/image.png")
    guess = json.loads(done("predict f e/image.png --json"))[0]
    (printed, _) = run_cards_program(Path("e"))
    label, _, probability = printed.rpartition(" ")
    assert label == guess["label"]
    assert float(probability) == pytest.approx(guess["probability"], abs=1e-5)


def test_the_cards_program_of_an_align_run_prints_the_size_of_its_features(made: None) -> None:
    """There is no head, and so no class to name."""
    done("export aligned")
    to_pil_image(torch.as_tensor(quilts(0)[1].test.images)[0]).save("aligned/export/image.png")
    (printed, _) = run_cards_program(Path("aligned/export"))
    assert "[1, 64]" in printed


def test_timms_transform_resizes_as_this_program_does() -> None:
    """It takes the whole part of size / crop_pct; both then cut the centre."""
    for size in range(8, 1030):
        assert math.floor(size / crop_share(size, whole_images=False)) == round(size * 256 / 224)
        assert crop_share(size, whole_images=True) == 1
