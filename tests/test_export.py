"""Exported adapters, opened by the programs they are for."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import close, recorded
from replay import model_of, to_theta
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import cli
from config import Arch, UsageError
from export import from_released, load_theta, to_peft, to_released, to_timm
from lora import Backbone, init_head, init_theta, logits
from runtime import rng, to_bytes

ARCH = Arch(image_size=32, patch_size=8, dim=32, depth=3, heads=4)


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=0)
    return Backbone(vit, scale=1.5)


@pytest.fixture
def theta() -> Tensor:
    theta = init_theta(3, 4, 32, rng(0, "x"))
    return theta + 0.1 * torch.randn(theta.shape, generator=rng(1, "x"))


IMAGES = torch.randn(5, 3, 32, 32, generator=rng(2, "x"))


def test_peft_loads_our_adapter_and_gives_the_same_logits(backbone: Backbone, theta: Tensor, tmp_path: Path) -> None:
    """From the files, by HF peft's own loader, on a plain timm model; rank 2r on the fused qkv."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import save_file

    phi_D = init_head(32, 7, rng(3, "x"))
    config, tensors = to_peft(theta, phi_D, 32, backbone.scale, "tiny")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "adapter_model.safetensors")
    plain = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=7)
    plain.load_state_dict({**backbone.vit.state_dict(), **plain.head.state_dict(prefix="head.")})
    model = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    ours = logits(backbone, theta, phi_D, IMAGES)
    close(model(IMAGES), ours, 1e-5)
    assert float((model(IMAGES) - logits(backbone, None, phi_D, IMAGES)).detach().abs().max()) > 1e-2  # LoRA acts
    k_rows = tensors["base_model.model.blocks.0.attn.qkv.lora_B.weight"][32:64]
    assert not k_rows.any()


def test_timm_opens_the_merged_folder(backbone: Backbone, theta: Tensor, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    phi_D = init_head(32, 7, rng(3, "x"))
    arch = ARCH.model_copy(update={"mlp_ratio": 4.0})
    about, state = to_timm(backbone, theta, phi_D, "vit_tiny_patch16_224", arch, ((0.5,) * 3, (0.5,) * 3))
    (tmp_path / "config.json").write_text(json.dumps(about))
    save_file(state, tmp_path / "model.safetensors")
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    close(model(IMAGES), logits(backbone, theta, phi_D, IMAGES), 1e-5)
    assert list(model.pretrained_cfg["mean"]) == [0.5, 0.5, 0.5]


def test_a_batchnorm_head_is_exported_as_the_linear_layer_it_is(theta: Tensor, tmp_path: Path) -> None:
    """An I-JEPA backbone, whose head has statistics: both layouts predict what ours does."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import save_file

    from lora import build_vit

    arch = Arch(image_size=32, patch_size=8, dim=32, depth=3, heads=4, class_token=False)
    torch.manual_seed(0)
    backbone = Backbone(build_vit(arch))
    phi_D = init_head(32, 7, rng(3, "x"), batchnorm=True)
    phi_D |= {"norm.mean": torch.randn(32), "norm.var": torch.rand(32) + 0.5, "norm.bias": torch.randn(32)}
    ours = logits(backbone, theta, phi_D, IMAGES)
    about, state = to_timm(backbone, theta, phi_D, "vit_tiny_patch16_224", arch, ((0.5,) * 3, (0.5,) * 3))
    (tmp_path / "config.json").write_text(json.dumps(about))
    save_file(state, tmp_path / "model.safetensors")
    close(timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(IMAGES), ours, 1e-5)
    config, tensors = to_peft(theta, phi_D, 32, 1.0, None)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "adapter_model.safetensors")
    plain = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=7, class_token=False,
        global_pool="avg", fc_norm=False,
    )  # fmt: skip
    plain.load_state_dict({**backbone.vit.state_dict(), **plain.head.state_dict(prefix="head.")})
    close(peft.PeftModel.from_pretrained(plain, tmp_path).eval()(IMAGES), ours, 1e-5)


def test_the_released_layout_goes_there_and_back(theta: Tensor, tmp_path: Path) -> None:
    state = to_released(theta, 32, 1.0)
    assert len(state) == 12
    assert state["base_model.model.blocks.2.attn.qkv.v.lora_B.default.weight"].shape == (32, 4)
    (tmp_path / "lora.pth.tar").write_bytes(to_bytes(state))
    back, about = load_theta(tmp_path / "lora.pth.tar", 32)
    assert torch.equal(back, theta)
    assert about == {}
    doubled = from_released(to_released(theta, 32, 2.0), tmp_path, 32)
    close(doubled.view(3, 4, -1)[:, 1::2], 2 * theta.view(3, 4, -1)[:, 1::2], 1e-7)


def test_a_recorded_lora_in_the_released_layout_is_read() -> None:
    """Its arrays are named by block, part and matrix; the order of θ is checked against the recorded flattening."""
    rec = recorded("official/bisslight_tiny_adamw_f64.npz")
    r = model_of(rec)
    state = {f"base_model.model.{name}.default.weight": tensor for name, tensor in rec.group("lora_init").items()}
    flat = torch.cat([tensor.flatten() for tensor in state.values()]).double()
    assert torch.equal(from_released(state, Path("x"), r.arch.dim).double(), to_theta(flat, r.arch.depth, r.arch.dim))


WRONG: list[tuple[Any, str]] = [
    (lambda s: {}, "holds no LoRA tensors"),
    (lambda s: [1], "holds no LoRA tensors"),
    (lambda s: {k: v for k, v in s.items() if "blocks.1.attn.qkv.q.lora_A" not in k}, "incomplete set of layers"),
    (lambda s: s | {"base_model.model.head.weight": torch.zeros(2)}, r"layout \(base_model.model.head.weight\)"),
    (lambda s: {k.replace("qkv.q", "qkv"): v for k, v in s.items()}, "is not a LoRA file on q and v"),
    (lambda s: {k: v[:, :16] if "blocks.1" in k and "A" in k else v for k, v in s.items()}, "rank 4 on width 32"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_other_layouts_are_refused(theta: Tensor, change: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_released(change(to_released(theta, 32, 1.0)), Path("x"), 32)


def test_a_run_is_exported_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Align, fine-tune, export; the merged folder predicts what the run's own tensors predict, and the released file
    can start another fine-tuning.
    """
    from data import quilts
    from lora import load_adapter
    from mae import load

    monkeypatch.chdir(tmp_path)
    small, own = "--epochs 1 --batch 40 --lr 1e-2 --quiet", "--backbone vit_mini --weights pre --dataset quilts"
    for line in (
        "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 500 --quiet --out pre",
        "align --backbone vit_mini --weights pre --dataset quilts --alternations 1 --lower-steps 2 --upper-steps 1 "
        "--p-batch 8 --d-batch 8 --probe-epochs 0 --out a --quiet",
        f"finetune --from a --seeds 2 {small} --out f",
        "export f --seed 1",
        "export a --out e --no-merged",
        f"finetune --from e/released/lora.pth {own} {small} --seeds 1 --out g",
        "finetune --from a --seeds 1 --out h " + small,
    ):
        assert cli.run(line.split()) == 0, capsys.readouterr().err
    theta, phi_D, _ = load_adapter(Path("f/adapter-s1.safetensors"))
    vit, _, _ = load(Path("pre/backbone.pth"), "vit_mini")
    images = quilts(0)[1].test.images[:20]
    assert isinstance(images, Tensor)
    merged = timm.create_model("local-dir:f/export/timm", pretrained=True).eval()
    close(merged(images), logits(Backbone(vit), theta, phi_D, images), 1e-5)
    card = Path("f/export/README.md").read_text()
    for said in (
        "| aligned by | mfac |",
        "| test top-1 accuracy |",
        "vit_mini",
        '"epochs"',
    ):
        assert said in card
    assert str(tmp_path) not in card
    assert not Path("e/timm").exists()
    left, right = (load_file(f"{name}/adapter-s0.safetensors") for name in "gh")
    assert all(torch.equal(left[key], right[key]) for key in left)  # a released file starts the same fine-tuning
    capsys.readouterr()
    for line, message in (
        ("export pre", "is neither an align nor a finetune run"),
        ("export f --seed 7", "has no adapter-s7.safetensors"),
        ("export nowhere", "is not a finished run"),
        (
            "finetune --from e/released/lora.pth --backbone vit_mini --weights pre --dataset quilts --rank 4 --lr 1",
            "4 layers of rank 8, this run has 4 of rank 4",
        ),
        ("finetune --from e/released/lora.pth", "--backbone is needed"),
    ):
        assert cli.run(line.split()) == 2
        assert message in capsys.readouterr().err
