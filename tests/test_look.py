"""Rollout, CKA and RSA: against plain algebra and scipy, and of finished runs as commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image
from scipy.stats import spearmanr
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import cli
from config import Arch
from data import quilts, rng
from extras import look
from lora import Backbone, features, logits, merge
from support.checkpoints import build_vit, load_adapter

SIZES: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 4}


@pytest.mark.parametrize("kind", ["class token", "registers", "mean of patches"])
def test_maps_are_rows_of_the_product_of_timms_attention(kind: str) -> None:
    """Timm's own unfused path, layer by layer, on weights that LoRA is merged into; any batch."""
    own: Any = {"class token": {}, "registers": {"reg_tokens": 4}}
    own["mean of patches"] = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    torch.manual_seed(0)
    vit, plain = (
        VisionTransformer(**SIZES, **own[kind], num_classes=0).double().requires_grad_(False)
        for _ in range(2)
    )
    for block in vit.blocks:
        block.attn.qkv.weight *= 20  # attention far from uniform
    backbone, theta = Backbone(vit, scale=0.5), torch.randn(3, 4 * 4 * 24, generator=rng(2)) * 0.2
    theta, x = theta.double(), torch.randn(5, 3, 16, 16, generator=rng(1)).double()
    plain.load_state_dict(merge(backbone, theta))
    seen: list[Tensor] = []
    for block in plain.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    plain.eval().forward_features(x)
    assert max(float(attention.max()) for attention in seen) > 0.9  # not near uniform
    prefix = {"class token": 1, "registers": 5, "mean of patches": 0}[kind]
    product = np.eye(prefix + 16)
    for attention in seen:
        mean = np.asarray(attention[3]).mean(0)
        product = (mean + np.eye(len(product))) / 2 @ product
    maps = look.attention_maps(backbone, theta, x)
    assert maps.shape == (5, 4, 4) and not maps.requires_grad
    expected = product[0] if prefix else product.mean(0)
    np.testing.assert_allclose(maps[3].flatten(), expected[prefix:], rtol=0, atol=1e-6)
    parts = [look.attention_maps(backbone, theta, part) for part in x.split(2)]
    torch.testing.assert_close(torch.cat(parts), maps)


def drawn(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=rng(seed), dtype=torch.float64) + 0.5


def hsic_cka(x: Tensor, y: Tensor) -> float:
    """The Gram form: tr(K H L H) / sqrt(tr(K H K H) tr(L H L H)), H = I − 1/N."""
    H = np.eye(len(x)) - 1 / len(x)
    K, L = (H @ np.asarray(z @ z.mT) @ H for z in (x, y))
    return float(np.trace(K @ L) / np.sqrt(np.trace(K @ K) * np.trace(L @ L)))


def plain_rsa(x: Tensor, y: Tensor) -> float:
    """Cosine distances of all pairs by hand, ranked with ties at their mean."""
    above = np.triu_indices(len(x), 1)
    unit = [np.asarray(z / z.norm(dim=1, keepdim=True)) for z in (x, y)]
    return float(spearmanr(*((1 - z @ z.T)[above] for z in unit)).statistic)


def test_cka_and_rsa_equal_plain_algebra_and_ignore_what_they_should() -> None:
    """Rotations, for CKA also one scale and a shift, for RSA a scale of each image."""
    x, y, turn = drawn(60, 8, 1), drawn(60, 8, 2), torch.linalg.qr(drawn(8, 8, 3))[0]
    y[:, :4] = x[:, :4]
    cka, rsa = look.cka(x, y[:, :5]), look.rsa(x, y)
    assert cka == pytest.approx(hsic_cka(x, y[:, :5]), abs=1e-10)
    assert rsa == pytest.approx(plain_rsa(x, y), abs=1e-10)
    for changed in (x @ turn, 37 * x, x + torch.arange(8) * 1e4):
        assert look.cka(changed, y[:, :5]) == pytest.approx(cka, abs=1e-10)
    for changed in (x @ turn, x * torch.rand(60, 1, generator=rng(4)) + 1e-3 * x):
        assert look.rsa(changed, y) == pytest.approx(rsa, abs=1e-10)
    assert look.cka(x, 2 * x @ turn - 5) == pytest.approx(1, abs=1e-12)
    assert look.rsa(x, 3 * x @ turn) == pytest.approx(1, abs=1e-10)
    assert abs(look.cka(x * torch.linspace(0.1, 9, 8), y[:, :5]) - cka) > 1e-3
    assert abs(look.rsa(x + 3, y) - rsa) > 1e-3


@pytest.fixture(scope="module")
def finished(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(runs, tmp_path_factory.mktemp("looked") / "runs"))


def quilts_val(weights: Path) -> tuple[Backbone, Tensor, Tensor]:
    """Backbone and validation split, read apart from the program's own way."""
    _, task = quilts(0)
    shift, scale = (torch.tensor(x).view(3, 1, 1) for x in (task.mean, task.std))
    vit = build_vit(Arch(64, 4, 4, 16, 4, 2.0))
    state = torch.load(weights / "backbone.pth", weights_only=True)["model"]
    vit.load_state_dict({name: state[name] for name in vit.state_dict()})
    return Backbone(vit), (torch.as_tensor(task.val.images) - shift) / scale, task.val.targets


def test_the_rollout_of_runs_is_drawn_beside_what_they_predict(
    finished: Path, weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps and predictions are those of the adapter files."""
    shown, maps_of = list[Tensor](), look.attention_maps

    def seen(*given: Any) -> Tensor:
        shown.append(maps_of(*given))
        return shown[-1]

    scales = list[Any]()
    monkeypatch.setattr(look, "attention_maps", seen)
    monkeypatch.setattr(Axes, "imshow", lambda _, x, **w: scales.append(w.get("clim")))
    line = f"evaluate {finished}/with --against {finished}/without --rollout 3 --json"
    for _ in range(2):  # our own picture may be written again
        assert cli.run(line.split()) == 0
        result = json.loads(capsys.readouterr().out)
    assert result["picture"] == f"{finished}/with/rollout.png"  # where the report finds it
    with Image.open(result["picture"]) as picture:
        assert "3 validation images" in picture.info["Description"]
    ends = [[float(x.min()), float(x.max())] for x in torch.stack(shown[-2:], 1)]
    assert [x for x in scales if x][-6:] == [x for x in ends for _ in range(2)]  # one an image
    index = [row["image"] for row in result["images"]]
    backbone, val, targets = quilts_val(weights)
    assert len({*index}) == 3
    assert [r["label"] for r in result["images"]] == [f"layout {targets[i]}" for i in index]
    for name, drawn in zip(("with", "without"), shown, strict=False):
        theta, phi_D, _ = load_adapter(finished / name / "adapter-s0.safetensors")
        top = logits(features(backbone, theta, val[index]), phi_D).argmax(1)
        right = ["✓" if ok else "✗" for ok in (top == targets[index]).tolist()]
        expected = [f"{mark} layout {k}" for mark, k in zip(right, top, strict=True)]
        assert [row[name] for row in result["images"]] == expected
        torch.testing.assert_close(drawn, maps_of(backbone, theta, val[index]), rtol=0, atol=1e-6)


def test_the_similarities_of_runs_are_those_of_their_features(
    finished: Path, weights: Path, capsys: Any
) -> None:
    """The pretrained backbone, an align run, a finetune run's seed, on features read by hand."""
    line = f"evaluate {finished}/aligned --against {finished}/without --similarity --seed 1 --json"
    assert cli.run(line.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["dataset"], result["images"]) == ("quilts", 160)
    backbone, val, _ = quilts_val(weights)
    x = {"pretrained": features(backbone, None, val).detach().double()}
    for name, file in (("aligned", "aligned/adapter"), ("without", "without/adapter-s1")):
        theta = load_adapter(finished / f"{file}.safetensors")[0]
        x[name] = features(backbone, theta, val).detach().double()
    pairs = [("pretrained", "aligned"), ("pretrained", "without"), ("aligned", "without")]
    assert [(row["network"], row["and"]) for row in result["pairs"]] == pairs
    for (a, b), row in zip(pairs, result["pairs"], strict=True):
        # features are float32, and of other batches: they agree to some 1e-6
        assert row["CKA"] == pytest.approx(hsic_cka(x[a], x[b]), abs=1e-5)
        assert row["RSA"] == pytest.approx(plain_rsa(x[a], x[b]), abs=1e-4)
    assert result["pairs"][1]["CKA"] < 0.9999  # it learned something
