"""Exported adapters, opened by the programs they are for."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import close
from quilts import quilts
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms.functional import to_pil_image
from toy import contents, done, finetune_line, refusal, save_by_class

from config import BACKBONES, Arch, FinetuneConfig
from data import rng
from extras.export import crop_share, fold_norm, to_peft, to_timm
from head import features, init_head, init_norm, logits
from lora import Backbone, init_theta
from mae import Decoder, split_state
from support.adapters import find_adapters, load_adapter
from support.checkpoints import Pretrained, build_vit
from support.results import AdapterInfo

pytestmark = pytest.mark.usefixtures("elsewhere")
SIZES: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
ARCH = Arch(32, 3, 4, 32, 8)
IMAGES = torch.randn(5, 3, 32, 32, generator=rng(2, "x"))


@pytest.mark.parametrize("class_token", [True, False])
def test_peft_and_timm_predict_what_ours_does(tmp_path: Path, class_token: bool) -> None:
    """Opened from files by HF peft's own loader, on a plain timm model, and by timm.

    Without a class token the head has a BatchNorm, which is exported as part of a linear layer.
    """
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    theta = init_theta(3, 4, 32, rng(0, "x")) + 0.1 * torch.randn(3, 512)
    arch = ARCH._replace(class_token=class_token)
    ours = Backbone(build_vit(arch), 1.5)
    phi_D = init_head(32, 7, rng(3, "x")) | ({} if class_token else init_norm(32)[0])
    if not class_token:
        moments = {"norm.mean": torch.randn(32), "norm.var": torch.rand(32) + 0.5}
        phi_D |= moments | {"norm.bias": torch.randn(32), "norm.weight": torch.rand(32) + 0.5}
    expected, head = logits(features(ours, theta, IMAGES), phi_D), fold_norm(phi_D)
    without = logits(features(ours, None, IMAGES), phi_D)
    assert float((expected - without).detach().abs().max()) > 1e-2  # LoRA acts
    config, tensors = to_peft(theta, head, ours)
    assert not tensors["base_model.model.blocks.0.attn.qkv.lora_B.weight"][32:64].any()  # not on k
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    own: Any = {} if class_token else {"class_token": False, "global_pool": "avg", "fc_norm": False}
    plain = VisionTransformer(**SIZES, **own, num_classes=7)
    plain.load_state_dict({**ours.vit.state_dict(), **plain.head.state_dict(prefix="head.")})
    close(peft.PeftModel.from_pretrained(plain, tmp_path).eval()(IMAGES), expected, 1e-5)
    half = (0.5, 0.5, 0.5)
    origin = AdapterInfo(channels=(half, half), classes=[*"abcdefg"])
    cfg = FinetuneConfig(backbone="vit_mini", dataset="own")
    networks = Pretrained(ours, Decoder(32, 16, 8), arch, sha256="")
    config, tensors = to_timm(networks, theta, head, origin, cfg)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    merged = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    close(merged(IMAGES), expected, 1e-5)


def test_a_run_is_exported_from_the_command_line(runs: Path, weights: Path) -> None:
    """The merged folder predicts what the run's own tensors do: of the first seed, or of a file."""
    shutil.copytree(runs / "with", "with")
    first, second = find_adapters(Path("with"))
    done("export with")
    moved = Path("moved.pth")
    moved.write_bytes((weights / "backbone.pth").read_bytes())
    done(f"export {second} --out second --weights {moved}")  # elsewhere: its digest decides
    vit = build_vit(BACKBONES["vit_mini"])
    vit.load_state_dict(split_state(torch.load(moved, weights_only=True)["model"])[0])
    images = torch.as_tensor(quilts(0)[1].test.images)[:20]
    for adapter, place in ((first, "with/export"), (second, "second")):
        merged = timm.create_model(f"local-dir:{place}/timm", pretrained=True).eval()
        theta, phi_D, _ = load_adapter(adapter)
        close(merged(images), logits(features(Backbone(vit), theta, images), phi_D), 1e-5)
    assert list(merged.pretrained_cfg["mean"]) == pytest.approx(list(quilts(0)[1].mean))
    written = [path.read_text() for path in Path("with/export").glob("*/*.json")]
    assert not any(str(Path.cwd()) in text or str(weights) in text for text in written)
    for run in ("with/export", "nowhere"):
        assert run in refusal(f"export {run} --out other")
    before = contents(Path("with"))
    assert "with/export" in refusal("export with")  # not even an earlier export is replaced
    assert contents(Path("with")) == before


@pytest.mark.parametrize("dataset", ["quilts", "folder:photos"])
def test_timms_own_transform_and_network_predict_what_predict_does(
    dataset: str, weights: Path
) -> None:
    """On an image of the network's size, which only the images of a folder are cut from."""
    test = quilts(0)[1].test
    save_by_class(Path("photos"), torch.as_tensor(test.images)[:40], test.targets)
    done(finetune_line(weights.parent, f"--dataset {dataset} --augment none --out f"))
    done("export f --out e")
    image = to_pil_image(torch.as_tensor(test.images)[77])
    image.save("image.png")
    network = timm.create_model("local-dir:e/timm", pretrained=True).eval()
    about: Any = timm.data
    transform = about.create_transform(**about.resolve_data_config(model=network))
    probabilities = network(transform(image)[None]).softmax(1)[0].detach()
    (guess,) = json.loads(done("predict f image.png --json"))["guesses"]
    best = int(probabilities.argmax())
    assert network.pretrained_cfg["label_names"][best] == guess["label"]
    assert float(probabilities[best]) == pytest.approx(guess["probability"], abs=1e-5)


def test_an_align_run_is_exported_as_a_network_of_features(runs: Path) -> None:
    """There is no head, and so no class to name. The line on the screen loads it."""
    line = done(f"export {runs}/aligned --out e").splitlines()[-1]
    network = eval(line, {"timm": timm}).eval()
    assert network(torch.zeros(1, 3, 16, 16)).shape == (1, 64)


def test_timms_transform_resizes_as_this_program_does() -> None:
    """It takes the whole part of size / crop_pct; both then cut the centre."""
    for size in range(8, 1030):
        assert math.floor(size / crop_share(size, whole_images=False)) == round(size * 256 / 224)
        assert crop_share(size, whole_images=True) == 1
