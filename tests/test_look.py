"""Rollout, CKA and RSA: against plain algebra and scipy, and of finished runs as commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import cli
from benchmarks import quilts
from config import Arch, UsageError
from data import rng
from extras import look
from lora import Backbone, features, init_head, load_adapter, merge, predict
from weights import build_vit

MAE = Arch(24, 3, 4, image_size=16, patch_size=4)
JEPA = Arch(24, 3, 2, image_size=24, patch_size=4, class_token=False)
BOTH = pytest.mark.parametrize("arch", [MAE, JEPA], ids=["class token", "mean of patches"])


def network(arch: Arch) -> Backbone:
    """Random, with attention far from uniform."""
    torch.manual_seed(0)
    vit = build_vit(arch).requires_grad_(False)
    for block in vit.blocks:
        block.attn.qkv.weight *= 20
    return Backbone(vit, scale=0.5)


def images(arch: Arch, count: int = 5) -> Tensor:
    return torch.randn(count, 3, arch.image_size, arch.image_size, generator=rng(1))


def theta_of(arch: Arch) -> Tensor:
    return torch.randn(arch.depth, 4 * 4 * arch.dim, generator=rng(2)) * 0.2


# --- rollout --------------------------------------------------------------------------------------


def test_layers_multiply_as_matrices_do() -> None:
    """Five hand-made layers against numpy's product of (mean + I) / 2, the last one on the left."""
    layers = torch.rand(5, 2, 3, 7, 7, generator=rng(0), dtype=torch.float64)  # layer, image, head
    layers /= layers.sum(-1, keepdim=True)
    rolled = torch.eye(7, dtype=torch.float64)
    for layer in layers:
        rolled = look.add_layer(rolled, layer)
    for b in range(2):
        steps = [(np.mean([np.asarray(h) for h in x[b]], 0) + np.eye(7)) / 2 for x in layers]
        np.testing.assert_allclose(rolled[b], np.linalg.multi_dot(steps[::-1]), rtol=0, atol=1e-14)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 7).double(), rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("patch", [0, 6])
def test_a_planted_patch_lights_up(arch: Arch, patch: int) -> None:
    """All queries are one vector, and only the planted patch has a key along it.

    So Â sends half of each row to that patch and half to itself: after K layers 1 − 2^−K and 2^−K.
    """
    vit, prefix, K = build_vit(arch).requires_grad_(False), int(arch.class_token), arch.depth
    for tensor in vit.parameters():
        tensor.zero_()
    vit.pos_embed[0, prefix + patch, : arch.dim // 2] = 1.0
    for block in vit.blocks:
        block.norm1.weight.fill_(1.0)
        block.attn.qkv.bias[: arch.dim] = 1e3  # q, in every head ...
        half = torch.arange(arch.dim) < arch.dim // 2
        block.attn.qkv.weight[arch.dim : 2 * arch.dim] = 1e3 * half  # ... and k
    maps = look.attention_maps(Backbone(vit), None, images(arch, 2)).flatten(1)
    n, stays = (arch.image_size // arch.patch_size) ** 2, 2.0**-K
    expected = torch.full((n,), 0.0 if arch.class_token else stays / n)
    expected[patch] = 1 - stays if arch.class_token else (1 + (n - 1) * (1 - stays)) / n
    torch.testing.assert_close(maps, expected.expand(2, -1), rtol=0, atol=1e-6)


@BOTH
def test_maps_are_rows_of_the_product_of_timms_attention(arch: Arch) -> None:
    """Timm's own unfused path, layer by layer, on weights that LoRA is merged into; any batch."""
    backbone, x, theta = network(arch).double(), images(arch).double(), theta_of(arch).double()
    plain = build_vit(arch).double().requires_grad_(False)
    plain.load_state_dict(merge(backbone, theta))
    seen: list[Tensor] = []
    for block in plain.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    plain.eval().forward_features(x)
    assert max(float(attention.max()) for attention in seen) > 0.9  # not near uniform
    side, prefix = arch.image_size // arch.patch_size, int(arch.class_token)
    product = np.eye(prefix + side**2)
    for attention in seen:
        mean = np.asarray(attention[3]).mean(0)
        product = (mean + np.eye(len(product))) / 2 @ product
    maps = look.attention_maps(backbone, theta, x)
    expected = product[0] if prefix else product.mean(0)
    np.testing.assert_allclose(maps[3].flatten(), expected[prefix:], rtol=0, atol=1e-6)
    parts = [look.attention_maps(backbone, theta, part) for part in x.split(2)]
    torch.testing.assert_close(torch.cat(parts), maps)
    assert maps.shape == (5, side, side)


@BOTH
def test_rollout_changes_no_later_prediction(arch: Arch) -> None:
    backbone, x, theta = network(arch), images(arch), theta_of(arch)
    phi_D = init_head(arch.dim, 7, rng(5))
    state = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    before = predict(backbone, theta, phi_D, x)
    assert not look.attention_maps(backbone, theta, x).requires_grad
    assert torch.equal(predict(backbone, theta, phi_D, x), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in backbone.state_dict().items())


def test_registers_are_no_patches() -> None:
    """A timm network with a class token and four registers."""
    torch.manual_seed(0)
    sizes: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
    vit = VisionTransformer(**sizes, num_classes=0, reg_tokens=4).requires_grad_(False)
    backbone, x = Backbone(vit), images(MAE)
    rolled = look.rolled_out(backbone, None, x)
    assert rolled.shape == (5, 21, 21)
    maps = look.attention_maps(backbone, None, x).flatten(1)
    torch.testing.assert_close(maps, rolled[:, 0, 5:], rtol=0, atol=0)


def test_the_product_is_float32_under_autocast() -> None:
    """bfloat16 has 8 bits: a product computed in it would miss these sums by some 1e-3."""
    with torch.autocast("cpu", torch.bfloat16):
        rolled = look.rolled_out(network(MAE), None, images(MAE))
    assert rolled.dtype == torch.float32
    torch.testing.assert_close(rolled.sum(-1), torch.ones(5, 17), rtol=0, atol=1e-6)


def test_images_are_spread_over_the_classes() -> None:
    targets = torch.tensor([0] * 50 + [1] * 5 + [2] * 5)
    assert sorted(targets[look.spread(targets, 3, 0)].tolist()) == [0, 1, 2]
    assert torch.bincount(targets[look.spread(targets, 7, 1)]).sort().values.tolist() == [2, 2, 3]
    assert look.spread(targets, 7, 1) != look.spread(targets, 7, 2)
    assert look.spread(targets, 3, 1) == look.spread(targets, 7, 1)[:3]
    assert sorted(look.spread(targets, 60, 0)) == list(range(60))
    several = torch.tensor([[1, -1, 1], [1, 0, -1], [-1, 1, -1], [-1, 0, 1]])
    assert {*look.spread(several, 3, 0)} in ({0, 2, 3}, {1, 2, 3})
    assert [look.classes_of(row) for row in several] == [[0, 2], [0], [1], [2]]


def test_an_image_has_one_colour_scale_for_all_networks() -> None:
    maps = torch.rand(2, 2, 4, 4, generator=rng(0))
    shown = {"direct": maps[0], "aligned": maps[1]}
    said = {name: ["✓ cat", "✗ a dog"] for name in shown}
    pictures = torch.rand(2, 3, 16, 16, generator=rng(1))
    figure, words = look.draw_rollout(pictures, ["cat", "a cow, " * 20], shown, said)
    grid = np.array(figure.axes).reshape(4, 2)
    for k in range(2):
        shown_in = [axes.images[-1] for axes in grid[1:3, k]]
        limits = (float(maps[:, k].min()), float(maps[:, k].max()))
        assert [image.get_clim() for image in shown_in] == [limits, limits]
        for i, image in enumerate(shown_in):
            np.testing.assert_array_equal(image.get_array(), maps[i, k])
    assert [axes.get_ylabel() for axes in grid[:3, 0]] == ["input", "direct", "aligned"]
    assert [axes.get_title() for axes in grid[1]] == ["✓ cat", "✗ a dog"]
    assert grid[0, 1].get_title().endswith("...")
    assert "direct is right 1 times" in words


# --- CKA and RSA ----------------------------------------------------------------------------------


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


def test_cka_equals_the_gram_form() -> None:
    models = [drawn(40, d, d) for d in (5, 60, 12)]
    models.append(models[0] @ drawn(5, 9, 1))  # one that is near another
    for x in models:
        for y in models:
            assert look.cka(x, y) == pytest.approx(hsic_cka(x, y), abs=1e-10)
    assert 0.05 < look.cka(models[0], models[1]) < look.cka(models[0], models[3]) < 0.999


def test_cka_ignores_rotation_one_scale_and_shift_but_not_a_scale_a_channel() -> None:
    x, y = drawn(50, 8, 1), drawn(50, 8, 2)
    turn = torch.linalg.qr(drawn(8, 8, 3))[0]
    before = look.cka(x, y)
    for changed in (x @ turn, 37 * x, x + torch.arange(8) * 1e4):
        assert look.cka(changed, y) == pytest.approx(before, abs=1e-10)
    assert look.cka(x, 2 * x @ turn - 5) == pytest.approx(1, abs=1e-12)
    assert abs(look.cka(x * torch.linspace(0.1, 9, 8), y) - before) > 1e-3


def test_rsa_equals_explicit_matrices_and_ignores_rotation_and_a_scale_of_each_image() -> None:
    x, y = drawn(60, 8, 1), drawn(60, 8, 2)
    y[:, :4] = x[:, :4]
    before = look.rsa(x, y)
    assert before == pytest.approx(plain_rsa(x, y), abs=1e-10)
    turn = torch.linalg.qr(drawn(8, 8, 3))[0]
    for changed in (x @ turn, x * torch.rand(60, 1, generator=rng(4)) + 1e-3 * x):
        assert look.rsa(changed, y) == pytest.approx(before, abs=1e-10)
    assert look.rsa(x, 3 * x @ turn) == pytest.approx(1, abs=1e-10)
    assert abs(look.rsa(x + 3, y) - before) > 1e-3
    one_hot = torch.eye(4)[torch.arange(60) % 4]  # every distance is exactly 0 or 1
    assert look.rsa(one_hot, y) == pytest.approx(plain_rsa(one_hot.double(), y), abs=1e-10)


# --- finished runs --------------------------------------------------------------------------------

PEFT = "--epochs 4 --batch 40 --warmup-epochs 1 --lr 3e-2 --quiet"
ALIGN = "--alternations 2 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1"


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    code = cli.run(line.split())
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def finished(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of vit_mini on quilts; what they learned does not matter here."""
    at = tmp_path_factory.mktemp("runs")
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    for line in (
        f"align {own} {ALIGN} --d-lr 1e-2 --warmup 0 --quiet --out {at}/a",
        f"finetune --from {at}/a {PEFT} --seeds 1 --out {at}/aligned",
        f"finetune {own} {PEFT} --seeds 2 --out {at}/direct",
        f"finetune {own} {PEFT} --seeds 1 --data-seed 1 --out {at}/other",
    ):
        assert cli.run(line.split()) == 0
    return at


def quilts_val(weights: Path) -> tuple[Backbone, Tensor, Tensor]:
    """Backbone and validation split, read apart from the program's own way."""
    _, task = quilts(0)
    shift, scale = (torch.tensor(x).view(3, 1, 1) for x in (task.mean, task.std))
    vit = build_vit(Arch(64, 4, 4, 16, 4, 2.0))
    state = torch.load(weights / "backbone.pth", weights_only=True)["model"]
    vit.load_state_dict({name: state[name] for name in vit.state_dict()})
    return Backbone(vit), (torch.as_tensor(task.val.images) - shift) / scale, task.val.targets


def test_the_rollout_of_runs_is_drawn_beside_what_they_predict(
    finished: Path, weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows are input, aligned, direct; maps and predictions are those of the adapter files."""
    seen: list[Any] = []
    draw = look.draw_rollout

    def watched(*given: Any) -> Any:
        seen.append(given)
        return draw(*given)

    monkeypatch.setattr(look, "draw_rollout", watched)
    line = f"evaluate {finished}/aligned --against {finished}/direct --rollout 10 --json"
    code, out, err = run(f"{line} --picture {tmp_path}/r.png", capsys)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["picture"], result["dataset"]) == (f"{tmp_path}/r.png", "quilts")
    with Image.open(tmp_path / "r.png") as picture:
        assert picture.size[0] > picture.size[1] > 300
        assert "10 validation images" in picture.info["Description"]
    index = [row["image"] for row in result["images"]]
    backbone, val, targets = quilts_val(weights)
    assert sorted(targets[index[:8]].tolist()) == list(range(8))
    assert [r["label"] for r in result["images"]] == [f"layout {targets[i]}" for i in index]
    shown = seen[0][2]  # name -> maps
    for name in ("aligned", "direct"):
        theta, phi_D, _ = load_adapter(finished / name / "adapter-s0.safetensors")
        top = predict(backbone, theta, phi_D, val[index]).argmax(1)
        right = ["✓" if ok else "✗" for ok in (top == targets[index]).tolist()]
        expected = [f"{mark} layout {k}" for mark, k in zip(right, top, strict=True)]
        assert [row[name] for row in result["images"]] == expected
        maps = look.attention_maps(backbone, theta, val[index])
        torch.testing.assert_close(shown[name], maps, rtol=0, atol=1e-6)
    assert run(line, capsys)[0] == 0
    assert (finished / "aligned/rollout.png").is_file()  # the report shows it
    assert run(line, capsys)[0] == 0  # our own picture may be written again


def test_the_similarities_of_runs_are_those_of_their_features(
    finished: Path, weights: Path, capsys: Any, tmp_path: Path
) -> None:
    """The pretrained backbone, an align run, a finetune run's seed, on features read by hand."""
    line = f"evaluate {finished}/a --against {finished}/direct --similarity --seed 1"
    code, out, err = run(f"{line} --picture {tmp_path}/s.svg --json", capsys)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["dataset"], result["images"]) == ("quilts", 160)
    backbone, val, _ = quilts_val(weights)
    files = {"a": "a/adapter", "direct": "direct/adapter-s1"}
    x = {"pretrained": features(backbone, None, val).detach().double()}
    for name, file in files.items():
        theta = load_adapter(finished / f"{file}.safetensors")[0]
        x[name] = features(backbone, theta, val).detach().double()
    pairs = [("pretrained", "a"), ("pretrained", "direct"), ("a", "direct")]
    assert [(row["network"], row["and"]) for row in result["pairs"]] == pairs
    for (a, b), row in zip(pairs, result["pairs"], strict=True):
        # features are float32, and of other batches: they agree to some 1e-6
        assert row["CKA"] == pytest.approx(hsic_cka(x[a], x[b]), abs=1e-5)
        assert row["RSA"] == pytest.approx(plain_rsa(x[a], x[b]), abs=1e-4)
    assert result["pairs"][1]["CKA"] < 0.999  # it learned something
    assert f"{result['pairs'][1]['CKA']:.3f}" in (tmp_path / "s.svg").read_text()


WRONG = [
    ("{at}/direct --rollout 0", "--rollout 0: give 1 to 64 images"),
    ("{at}/a --rollout 2", "a is an align run, it predicts nothing"),
    ("{weights} --rollout 2", "holds no adapter"),
    ("{at}/direct --similarity --seed 7", "direct: holds no adapter of seed 7"),
    ("{at}/direct --against {at}/other --rollout 2", "other: has other weights, data"),
    ("{at}/direct --against {at}/direct --similarity", "one run twice"),
    ("{at}/direct --similarity --limit 2", "--limit 2: give 3 to"),
    ("{at}/direct --rollout 2 --picture {at}/r.gif2", "take .png, .svg, .pdf"),
    ("{at}/direct --rollout 2 --picture {at}/mine.png", "mine.png: was not made by this program"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_input_gets_one_clear_line(
    finished: Path, weights: Path, capsys: Any, line: str, message: str
) -> None:
    Image.new("RGB", (4, 4)).save(finished / "mine.png")
    before = {*finished.rglob("*")}
    code, out, err = run(f"evaluate {line.format(at=finished, weights=weights)}", capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert {*finished.rglob("*")} == before


def test_other_weights_and_changed_images_are_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "direct", tmp_path / "direct")
    for key in ("weights_sha256", "data_sha256"):
        env = json.loads((finished / "direct/env.json").read_text())
        env["about"][key] = "f00"
        (tmp_path / "direct/env.json").write_text(json.dumps(env))
        with pytest.raises(UsageError, match=f"was made with {key} f00"):
            look.similarity([tmp_path / "direct"])


def test_i_jepa_runs_are_seen_before_their_batchnorm(pretrained: Path, tmp_path: Path) -> None:
    own = f"--backbone vit_mini --pretext ijepa --weights {pretrained}/ijepa --dataset quilts"
    assert cli.run(f"finetune {own} {PEFT} --seeds 1 --out {tmp_path}/f".split()) == 0
    look.rollout([tmp_path / "f"], 3)
    found = look.similarity([tmp_path / "f"])
    theta, phi_D, _ = load_adapter(tmp_path / "f/adapter-s0.safetensors")
    assert "norm.mean" in phi_D
    m = look.open_run(tmp_path / "f", None, {}).m
    x = torch.cat([*look.looked_at(m, range(160))])
    a, b = (m.backbone(x, t).detach().mean(1).double() for t in (None, theta))
    assert found["pairs"][0]["CKA"] == pytest.approx(hsic_cka(a, b), abs=1e-5)
