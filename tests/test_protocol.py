"""The paper's protocol: official weights, the authors' defaults, the choice of the upper rate."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import close, fixture
from PIL import Image
from test_resume import cut, term

import align
import cli
import finetune
import weights as room
from bisslight import Diverged
from commands import ALIGNED_GRID, GRID, AlignConfig, FinetuneConfig, preset
from config import BACKBONES, Model, UsageError
from extras.pretrain import official
from lora import Backbone, init_head
from model import Model as Whole
from training import trainable
from weights import OFFICIAL, build_head, build_vit, load_backbone


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def official_layout(backbone: str, device: str = "cpu") -> dict[str, Any]:
    """Random values under the official names of a full MAE file."""
    arch = BACKBONES[backbone].arch
    with torch.device(device):
        state = official(build_vit(arch)) | official(build_head(arch, "mae"))
        return {k: torch.empty(v.shape).normal_(0, 0.02) for k, v in state.items()}


# --- weights ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_size_file_gives_timms_tokens() -> None:
    """448 MB: tokens of B/16 at 224 px, beside a plain timm model that loads the encoder's keys."""
    path = Path("mae_pretrain_vit_base_full.pth")
    torch.manual_seed(0)
    torch.save({"model": official_layout("vit_b16")}, path)
    megabytes = OFFICIAL["vit_b16", "mae"][1]
    assert abs(path.stat().st_size / 1e6 - megabytes) < megabytes / 100
    loaded = load_backbone(Model(backbone="vit_b16", weights=path, rank=1, alpha=1, drop_path=0))
    plain = timm.create_model("vit_base_patch16_224", num_classes=0).eval()
    state = torch.load(path, weights_only=True, mmap=True)["model"]
    plain.load_state_dict({key: state[key] for key in plain.state_dict()})
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(loaded.backbone(x), plain.forward_features(x), 1e-5)
    assert loaded.pretext_head is not None
    assert sum(p.numel() for p in loaded.pretext_head.parameters()) == 26_008_320


@pytest.mark.parametrize("name", ["vit_l16", "vit_h14"])
def test_the_larger_files_are_checked_key_by_key(name: str, monkeypatch: Any) -> None:
    """On the meta device: another backbone's file, a missing key and a wrong shape are told."""
    state = official_layout(name, "meta")
    monkeypatch.setattr(room, "read_tensors", lambda path: {"model": state})
    Path("x.pth").touch()

    def load(backbone: str) -> Any:
        return load_backbone(
            Model(backbone=backbone, weights=Path("x.pth"), rank=1, alpha=1, drop_path=0)
        )

    assert load(name).arch == BACKBONES[name].arch
    with pytest.raises(UsageError, match=f"it fits --backbone {name}|decoder_embed"):
        load("vit_b16")
    pred = state.pop("decoder_pred.weight")
    with pytest.raises(UsageError, match=r"first decoder_pred\.weight"):
        load(name)
    state["decoder_pred.weight"] = pred[:-1]
    with pytest.raises(UsageError, match="decoder_pred"):
        load(name)


def test_weights_are_downloaded_on_first_use(server: Any, monkeypatch: Any, capsys: Any) -> None:
    """Offline: a line with URL, place and remedy. Of another size: not taken. Then taken, once."""
    monkeypatch.setitem(BACKBONES, "vit_b16", BACKBONES["vit_mini"])
    torch.save({"model": official_layout("vit_b16")}, "served.pth")
    server.content = Path("served.pth").read_bytes()
    monkeypatch.setenv("TORCH_HOME", str(Path("cache").absolute()))
    place = Path("cache/hub/checkpoints/x_full.pth")
    size = len(server.content) / 1e6
    line = "finetune --backbone vit_b16 --dataset quilts --epochs 1 --warmup-epochs 0 --seeds 1"
    line += " --lr 1e-2 --rank 2 --quiet --out f"
    for url, megabytes, told in (
        ("http://127.0.0.1:1/x_full.pth", size, "Connection refused"),
        (f"{server.url}/x_full.pth", 2 * size, "were expected"),
    ):
        monkeypatch.setitem(OFFICIAL, ("vit_b16", "mae"), (url, megabytes))
        assert cli.run(line.split()) == 2
        err = capsys.readouterr().err
        assert told in err and f"curl -C - -o {place.absolute()} {url}" in err
        assert not list(Path("cache").rglob("*.p*"))
    monkeypatch.setitem(OFFICIAL, ("vit_b16", "mae"), (f"{server.url}/x_full.pth", size))
    assert cli.run([*line.split(), "--dry-run"]) == 0
    assert f"to download from {server.url}/x_full.pth" in capsys.readouterr().out
    asked = len(server.asked)
    for more in ([], ["--force"]):
        assert cli.run([*line.split(), *more]) == 0, capsys.readouterr().err
    assert len(server.asked) == asked + 1
    assert place.read_bytes() == server.content


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_any_plain_timm_vit_can_be_finetuned(name: str, capsys: Any) -> None:
    """What is no plain VisionTransformer is refused by name."""
    for kind, shade in (("a", 40), ("b", 200)):
        Path("pics", kind).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (32, 32), (shade, i, 9)).save(f"pics/{kind}/{i}.png")
    torch.save(timm.create_model(name, num_classes=3).state_dict(), "vit.pth")
    line = f"finetune --backbone timm:{name} --weights vit.pth --dataset folder:pics --rank 4"
    line += " --epochs 1 --warmup-epochs 0 --seeds 1 --lr 1e-3 --out f --quiet"
    code, err = cli.run(line.split()), capsys.readouterr().err
    if "tiny" not in name:
        assert code == 2 and "VisionTransformer" in err, err
        return
    assert code == 0, err
    assert json.loads(Path("f/result.json").read_text())["backbone"] == f"timm:{name}"
    assert cli.run(["export", "f"]) == 0
    opened = timm.create_model("local-dir:f/export/timm", pretrained=True)
    assert opened.num_classes == 2
    assert cli.run(line.replace("tiny_", "tinny_").split()) == 2
    assert "did you mean vit_tiny_patch16_224?" in capsys.readouterr().err


def test_pooling_is_timms_own() -> None:
    """Mean of patches with its own norm after the pooling, as timm's forward computes it."""
    from lora import predict

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    vit: Any = timm.models.VisionTransformer(**sizes, num_classes=5, global_pool="avg")
    torch.nn.init.normal_(vit.head.weight)
    x = torch.randn(2, 3, 32, 32)
    phi = {"weight": vit.head.weight.detach(), "bias": vit.head.bias.detach()}
    close(predict(Backbone(vit), None, phi, x), vit.eval()(x), 1e-6)


# --- the authors' defaults --------------------------------------------------------------------

FIXED = {  # recorded lines that are fixed in the code: value in force
    "lora_dropout": 0.0, "lora_alpha": "= rank", "lower_optimizer": "adamw",
    "lower_betas": [0.9, 0.95], "upper_betas": [0.9, 0.999], "lower_encoder_drop_path": 0.0,
    "decoder_drop_path": 0.0, "norm_pix_loss": True, "amp": "bfloat16 autocast",
    "probe_lr": "= upper lr, constant", "optimizer_direct": "adamw",
}  # fmt: skip
SETTING = {  # recorded line -> the setting's name
    "lambda": "lam", "warmup_alternations": "warmup", "lora_rank": "rank", "lower_batch": "p_batch",
    "upper_batch": "d_batch", "lower_lora_lr": "p_lr", "lower_decoder_lr": "phi_p_lr",
    "lower_weight_decay": "p_weight_decay", "upper_weight_decay": "d_weight_decay",
    "upper_optimizer": "d_optimizer", "upper_drop_path": "drop_path", "grad_clip_norm": "clip",
    "eval_every_alternations": "eval_every", "mfac_block": "partition",
    "optimizer_after_bilevel": "optimizer",
}  # fmt: skip
WORDS = {
    "sgd (momentum 0.9)": "sgd", "transformer layer": "layer", "256 (memory table)": 256,
    "inherits the upper optimizer, i.e. sgd": "sgd",
}  # fmt: skip
