"""Attention rollout: hand-made attentions, planted ones, and what showing attention may not change."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import rollout as ro
from config import Arch
from lora import Backbone, build_vit, drop_path, features, init_head, logits
from runtime import rng

MAE = Arch(image_size=16, patch_size=4, dim=24, depth=3, heads=4)
JEPA = Arch(image_size=24, patch_size=4, dim=24, depth=3, heads=2, class_token=False)


def network(arch: Arch, seed: int = 0) -> Backbone:
    """Random, with attention far from uniform."""
    torch.manual_seed(seed)
    vit = build_vit(arch).requires_grad_(False)
    for block in vit.blocks:
        block.attn.qkv.weight *= 20
    return Backbone(vit, scale=0.5)


def images(arch: Arch, count: int = 5) -> Tensor:
    return torch.randn(count, 3, arch.image_size, arch.image_size, generator=rng(1))


def theta_of(arch: Arch) -> Tensor:
    return torch.randn(arch.depth, 4 * 4 * arch.dim, generator=rng(2)) * 0.2


def test_layers_multiply_as_matrices_do() -> None:
    """Five hand-made layers in float64, against numpy's product of (mean + I) / 2, the last layer on the left."""
    layers = torch.rand(5, 2, 3, 7, 7, generator=rng(0), dtype=torch.float64)  # layer, image, head
    layers /= layers.sum(-1, keepdim=True)
    rolled = torch.eye(7, dtype=torch.float64)
    for layer in layers:
        rolled = ro.add_layer(rolled, layer)
    for b in range(2):
        steps = [(np.mean([np.asarray(h) for h in layer[b]], 0) + np.eye(7)) / 2 for layer in layers]
        np.testing.assert_allclose(rolled[b], np.linalg.multi_dot(steps[::-1]), rtol=0, atol=1e-14)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 7).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", [MAE, JEPA], ids=["class token", "mean of patches"])
@pytest.mark.parametrize("patch", [0, 6])
def test_a_planted_patch_lights_up(arch: Arch, patch: int) -> None:
    """All queries are one vector, and only the planted patch has a key along it; blocks change no token.

    So Â sends half of each row to the planted patch and half to itself: after K layers 1 − 2^−K and 2^−K.
    """
    vit, prefix, K = build_vit(arch).requires_grad_(False), int(arch.class_token), arch.depth
    for tensor in vit.parameters():
        tensor.zero_()
    vit.pos_embed[0, prefix + patch, : arch.dim // 2] = 1.0
    for block in vit.blocks:
        block.norm1.weight.fill_(1.0)
        block.attn.qkv.bias[: arch.dim] = 1e3  # q, in every head ...
        block.attn.qkv.weight[arch.dim : 2 * arch.dim] = 1e3 * (torch.arange(arch.dim) < arch.dim // 2)  # ... and k
    maps = ro.rollout(Backbone(vit), None, images(arch, 2)).flatten(1)
    n, stays = arch.patches, 2.0**-K
    expected = torch.full((n,), 0.0 if arch.class_token else stays / n)
    expected[patch] = 1 - stays if arch.class_token else (1 + (n - 1) * (1 - stays)) / n
    torch.testing.assert_close(maps, expected.expand(2, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("arch", [MAE, JEPA], ids=["mae", "ijepa"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_attention_that_is_seen_gives_the_tokens_of_the_fused_kernel(
    arch: Arch, dtype: torch.dtype, tolerance: float
) -> None:
    backbone, x, theta = network(arch).to(dtype), images(arch).to(dtype), theta_of(arch).to(dtype)
    seen: list[Tensor] = []
    drop = drop_path(0.4, arch.depth, len(x), rng(3)).to(dtype)
    keep = torch.stack([torch.randperm(arch.patches, generator=rng(4))[:5]] * len(x))
    for given in ({}, {"theta": theta}, {"theta": theta, "keep": keep, "drop": drop}):
        seen.clear()
        found = backbone(x, **given, see=seen.append)
        torch.testing.assert_close(found, backbone(x, **given), rtol=0, atol=tolerance)
        n = found.shape[1]
        assert [tuple(a.shape) for a in seen] == [(len(x), arch.heads, n, n)] * arch.depth
    assert all(torch.allclose(a.sum(-1), torch.ones(()).to(dtype), atol=1e-6) for a in seen)
    assert max(float(a.max()) for a in seen) > 0.9  # not near uniform, where anything agrees


def test_seen_attention_is_that_of_timm() -> None:
    """Timm's own unfused path, layer by layer."""
    backbone, x = network(MAE).double(), images(MAE).double()
    theirs: list[Tensor] = []
    for block in backbone.vit.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: theirs.append(args[0]))
    backbone.vit.forward_features(x)
    ours: list[Tensor] = []
    backbone(x, see=ours.append)
    assert len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", [MAE, JEPA], ids=["mae", "ijepa"])
def test_rollout_changes_no_later_prediction(arch: Arch) -> None:
    backbone, x, theta = network(arch), images(arch), theta_of(arch)
    phi_D = init_head(arch.dim, 7, rng(5), batchnorm=False)
    state = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    before = logits(backbone, theta, phi_D, x)
    maps = ro.rollout(backbone, theta, x)
    assert torch.equal(logits(backbone, theta, phi_D, x), before)
    assert torch.equal(features(backbone, theta, x), features(backbone, theta, x))
    assert all(torch.equal(tensor, state[name]) for name, tensor in backbone.state_dict().items())
    assert not maps.requires_grad


@pytest.mark.parametrize("arch", [MAE, JEPA], ids=["mae", "ijepa"])
def test_maps_are_rows_of_the_product_for_any_size_and_batch(arch: Arch) -> None:
    backbone, x, theta = network(arch), images(arch), theta_of(arch)
    seen: list[Tensor] = []
    backbone(x, theta, see=seen.append)
    side, prefix = arch.image_size // arch.patch_size, int(arch.class_token)
    product = np.eye(prefix + side**2)
    for attention in seen:
        product = (np.asarray(attention[3].double()).mean(0) + np.eye(len(product))) / 2 @ product
    row = product[0] if prefix else product.mean(0)
    maps = ro.rollout(backbone, theta, x)
    assert maps.shape == (5, side, side)
    np.testing.assert_allclose(maps[3].flatten(), row[prefix:], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([ro.rollout(backbone, theta, part) for part in x.split(2)]), maps)
    rolled = ro.rolled_out(backbone, theta, x)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(rolled.shape[:2]), rtol=0, atol=1e-5)


def test_registers_are_no_patches() -> None:
    """A timm network with a class token and four registers."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=0, reg_tokens=4)
    backbone, x = Backbone(vit.requires_grad_(False)), images(MAE)
    rolled = ro.rolled_out(backbone, None, x)
    assert rolled.shape == (5, 21, 21)
    torch.testing.assert_close(ro.rollout(backbone, None, x).flatten(1), rolled[:, 0, 5:], rtol=0, atol=0)


def test_maps_are_float32_under_autocast_and_one_layer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, x = network(MAE), images(MAE)
    seen: list[Any] = []
    add = ro.add_layer

    def watched(rolled: Tensor, attention: Tensor) -> Tensor:
        assert attention.dtype == torch.float32
        assert [ref() for ref in seen] == [None] * len(seen)  # earlier layers are gone
        seen.append(weakref.ref(attention))
        return add(rolled, attention)

    monkeypatch.setattr(ro, "add_layer", watched)
    with torch.autocast("cpu", torch.bfloat16):
        rolled = ro.rolled_out(backbone, None, x)
    assert len(seen) == MAE.depth
    assert rolled.dtype == torch.float32
    # bfloat16 has 8 bits: a product computed in it would miss these sums by some 1e-3
    torch.testing.assert_close(rolled.sum(-1), torch.ones(5, 17), rtol=0, atol=1e-6)


def test_a_forward_that_shows_attention_recomputes_nothing() -> None:
    """With activation checkpointing on and a gradient wanted, each layer is shown once; same gradient."""
    theta, x = theta_of(MAE), images(MAE)
    gradients = []
    for recompute in (False, True):
        backbone, leaf = network(MAE), theta.clone().requires_grad_()
        seen: list[Tensor] = []
        backbone.recompute = recompute
        backbone(x, leaf, see=seen.append).square().sum().backward()
        gradients.append(leaf.grad)
        assert len(seen) == MAE.depth
    torch.testing.assert_close(*gradients)


def test_images_are_spread_over_the_classes() -> None:
    targets = torch.tensor([0] * 50 + [1] * 5 + [2] * 5)
    assert sorted(targets[ro.spread(targets, 3, 0)].tolist()) == [0, 1, 2]
    assert torch.bincount(targets[ro.spread(targets, 7, 1)]).sort().values.tolist() == [2, 2, 3]
    assert ro.spread(targets, 7, 1) == ro.spread(targets, 7, 1) != ro.spread(targets, 7, 2)
    assert ro.spread(targets, 3, 1) == ro.spread(targets, 7, 1)[:3]
    assert sorted(ro.spread(targets, 60, 0)) == list(range(60))
    several = torch.tensor([[1, -1, 1], [1, 0, -1], [-1, 1, -1], [-1, 0, 1]])
    assert {*ro.spread(several, 3, 0)} in ({0, 2, 3}, {1, 2, 3})


def test_an_image_has_one_colour_scale_for_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(ro, "save", lambda figure, path: kept.append(figure))
    maps = torch.rand(2, 2, 4, 4, generator=rng(0))
    models = {name: ro.Model(maps[i], ["cat", "a dog"], [True, False]) for i, name in enumerate(("direct", "aligned"))}
    pictures = torch.rand(2, 3, 16, 16, generator=rng(1))
    ro.draw(pictures, ["cat", "a_cow, " * 20], models, tmp_path / "r.png")
    grid = np.array(kept[0].axes).reshape(4, 2)
    for column in range(2):
        shown = [axes.images[-1] for axes in grid[1:3, column]]
        limits = (float(maps[:, column].min()), float(maps[:, column].max()))
        assert [image.get_clim() for image in shown] == [limits, limits]
        for row, image in enumerate(shown):
            np.testing.assert_array_equal(image.get_array(), maps[row, column])
        np.testing.assert_allclose(grid[0, column].images[0].get_array(), pictures[column].permute(1, 2, 0))
    assert [axes.get_ylabel() for axes in grid[:3, 0]] == ["input", "direct", "aligned"]
    assert [axes.get_title() for axes in grid[1]] == ["✓ cat", "✗ a dog"]
    assert grid[0, 1].get_title().count("\n") == 1
    assert grid[0, 1].get_title().endswith("...")
