"""Backbone and LoRA against timm and plain algebra."""

import copy
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath, SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import head
import lora
from bisslight import Passes
from config import BACKBONES, AlignConfig
from data import rng
from head import Examples, init_head
from lora import Backbone, drop_path, init_theta
from support import checkpoints


def tiny_vit(**more: Any) -> VisionTransformer:
    """Three blocks of width 24 on 4 x 4 patches, float64."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 4}
    return VisionTransformer(**sizes, num_classes=0, **more).double().requires_grad_(False)


VIT = tiny_vit()
THETA = (torch.randn(3, 4 * 4 * 24, generator=rng(1)) * 0.2).double()  # its B is not zero
IMAGES = torch.randn(5, 3, 16, 16, generator=rng(2)).double()


FAMILIES: dict[str, dict[str, Any]] = {  # of Vision Transformers in timm, in small
    "supervised": {},
    "CLIP": {"pre_norm": True, "act_layer": "quick_gelu"},
    "DINOv2": {"init_values": 0.5},
    "DINOv2 with registers": {"init_values": 0.5, "reg_tokens": 4, "no_embed_class": True},
    "DINOv2 giant": {"init_values": 0.5, "mlp_layer": SwiGLUPacked, "mlp_ratio": 4},
    "positions of registers": {"reg_tokens": 2},
    "mean of patches": {"global_pool": "avg", "class_token": False},
    "mean of patches, with registers": {
        "global_pool": "avg", "class_token": False, "reg_tokens": 3, "no_embed_class": True,
    },
    "mean of patches, class token too": {"global_pool": "avg", "fc_norm": False},
    "normalised queries and keys": {"qk_norm": True, "qkv_bias": False},
    "normalised attention": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "any image size": {"dynamic_img_size": True, "reg_tokens": 1},
    "without positions": {"pos_embed": "none"},
}  # fmt: skip


DROPOUTS = ("drop_rate", "proj_drop_rate", "pos_drop_rate", "attn_drop_rate", "drop_path_rate")


@pytest.mark.parametrize("first", ["vit", "backbone"])
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_train_of_a_module_around_it_turns_no_dropout_on(dropout: str, first: str) -> None:
    """Also where the module has the network as a part of its own, before the backbone or after."""
    vit = tiny_vit(**{dropout: 0.5})
    expected = vit.eval()(IMAGES)
    parts = {"vit": vit, "backbone": Backbone(vit)}
    names = sorted(parts, key=lambda name: name != first)
    net = nn.ModuleDict({name: parts[name] for name in names}).train()
    assert net.training and not net["backbone"].training
    for _ in range(2):
        assert torch.equal(head.features(net["backbone"], None, IMAGES), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_timm_is_computed_as_by_timm(family: str) -> None:
    """At B = 0 tokens and pooled features are timm's own; at other B those of the merged weights.

    All tensors are random, so that none is left out unseen, and masked patches are really gone.
    """
    vit = tiny_vit(**FAMILIES[family])
    g = rng(5)
    for tensor in vit.state_dict().values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=g))
    backbone = Backbone(vit)
    start = init_theta(3, 4, 24, rng(0)).double()
    expected = vit.forward_features(IMAGES)
    assert float(expected.std()) > 1e-2
    torch.testing.assert_close(backbone(IMAGES, start), expected, rtol=0, atol=1e-10)
    pooled = vit.forward_head(expected, pre_logits=True)
    torch.testing.assert_close(head.features(backbone, start, IMAGES), pooled, rtol=0, atol=1e-10)

    merged = copy.deepcopy(vit)
    merged.load_state_dict(lora.merge(backbone, THETA))
    actual = backbone(IMAGES, THETA)
    assert float((actual - expected).abs().max()) > 1e-3
    torch.testing.assert_close(actual, merged.forward_features(IMAGES), rtol=0, atol=1e-10)

    prefix = vit.num_prefix_tokens
    order = torch.randperm(16, generator=g).expand(5, -1)
    shuffled = backbone(IMAGES, THETA, order)
    torch.testing.assert_close(shuffled[:, :prefix], actual[:, :prefix])
    torch.testing.assert_close(shuffled[:, prefix:], actual[:, prefix:][:, order[0]])
    keep = order[:, :3]
    visible = torch.zeros(16, dtype=torch.bool)
    visible[keep[0]] = True
    hidden = (~visible).view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    other = torch.where(hidden, torch.randn(5, 3, 16, 16, generator=g).double(), IMAGES)
    seen = backbone(IMAGES, THETA, keep)
    assert seen.shape == (5, prefix + 3, 24)
    torch.testing.assert_close(backbone(other, THETA, keep), seen)


def test_theta_adds_s_BA_to_q_and_v_and_leaves_k() -> None:
    """Weights added by hand into plain timm give the same tokens, and `merge` gives the weights."""
    backbone, plain = Backbone(VIT, scale=0.5), tiny_vit()
    for block, row in zip(plain.blocks, THETA.view(3, 4, 4, 24), strict=True):
        A_q, B_qT, A_v, B_vT = row
        block.attn.qkv.weight[:24] += 0.5 * B_qT.T @ A_q
        block.attn.qkv.weight[48:] += 0.5 * B_vT.T @ A_v
    torch.testing.assert_close(backbone(IMAGES, THETA), plain.forward_features(IMAGES))
    merged = lora.merge(backbone, THETA)
    torch.testing.assert_close(merged, dict(plain.state_dict()))
    name = "blocks.1.attn.qkv.weight"
    assert torch.equal(merged[name][24:48], VIT.state_dict()[name][24:48])


@pytest.mark.parametrize(
    ("vit", "named"),
    [
        (lambda: tiny_vit(global_pool="map"), "map"),
        (lambda: tiny_vit(attn_layer="diff"), "DiffAttention"),
        (lambda: timm.create_model("vit_tiny_r_s16_p8_224"), "HybridEmbed"),
        (lambda: VisionTransformerDistilled(depth=1), "VisionTransformerDistilled"),  # type: ignore[no-untyped-call]
    ],
)
def test_a_network_that_would_be_computed_otherwise_is_refused_by_what_it_has(
    vit: Any, named: str
) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=named):
        Backbone(vit())


def test_drop_path_has_timms_rates_and_keeps_the_mean() -> None:
    drawn = drop_path(0.2, 5, 4000, rng(0))
    model = timm.create_model("vit_tiny_patch16_224", depth=5, drop_path_rate=0.2, num_classes=0)
    for k, block in enumerate(model.blocks):
        rate = block.drop_path1.drop_prob if isinstance(block.drop_path1, DropPath) else 0.0
        kept, zeros = drawn[:, k][drawn[:, k] > 0], float((drawn[:, k] == 0).float().mean())
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
        # 8000 draws: five standard deviations of the share of zeros
        assert zeros == pytest.approx(rate, abs=5 * (0.2 * 0.8 / 8000) ** 0.5)
    assert drop_path(0.0, 5, 4, rng(0)).eq(1).all()


def test_dropped_branches_are_gone() -> None:
    """Image 2 loses every branch, and is its embedding; image 3 the attention of layer 1."""
    drop = torch.ones(5, 3, 2, dtype=torch.float64)
    drop[2], drop[3, 1, 0] = 0, 0
    out, whole = Backbone(VIT)(IMAGES, THETA, drop=drop), Backbone(VIT)(IMAGES, THETA)
    embedded = VIT.norm(VIT._pos_embed(VIT.patch_embed(IMAGES)))
    torch.testing.assert_close(out[2], embedded[2])
    torch.testing.assert_close(out[[0, 1, 4]], whole[[0, 1, 4]])
    other = copy.deepcopy(VIT)
    for tensor in other.blocks[1].attn.proj.parameters():
        tensor.zero_()
    torch.testing.assert_close(out[3], Backbone(other)(IMAGES, THETA)[3])


def lower_level(pretext: str, count: int) -> tuple[Any, Tensor, Tensor, Any]:
    """A pretext task on a random network, θ, so many images, and what the task draws for them."""
    g = rng(3)
    arch = BACKBONES["vit_mini"]._replace(class_token=pretext == "mae")
    vit, head = checkpoints.build_vit(arch), checkpoints.build_head(arch, pretext)
    checkpoints.initialise([vit, head], pretext, g)
    backbone = Backbone(vit).requires_grad_(False)
    theta = 0.1 * torch.randn(arch.depth, 4 * 8 * arch.dim, generator=g)
    theta.requires_grad_()
    own: Any = {"backbone": "vit_mini", "dataset": "own", "pool": "own", "min_keep": 0}
    cfg = AlignConfig(pretext=pretext, **own)
    task: Any = checkpoints.build_pretext_task(cfg, backbone, head, 5, theta)
    return task, theta, torch.randn(count, 3, 16, 16, generator=g), task.draw(count, g)


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
def test_weights_kept_in_bfloat16_change_no_bit_under_autocast(pretext: str) -> None:
    """Losses of both levels and their gradients, with drop path; half of the bytes are gone."""
    task, theta, images, drawn = lower_level(pretext, 6)
    examples = Examples(images, torch.arange(6), drop_path(0.5, len(theta), 6, rng(4)))
    phi_D = {k: x.requires_grad_() for k, x in init_head(64, 6, rng(4)).items()}
    loss_D = partial(head.downstream_loss, task.backbone, drop_path=True)
    passes = Passes(amp=True)

    def numbers() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            batch = task.prepare(images, *drawn)
        lower = passes.gradients(task.loss, theta, task.phi, batch)
        upper = passes.gradients(loss_D, theta, phi_D, examples)
        assert float(lower.theta.abs().max()) > 0
        values = [lower.value, lower.theta, upper.value, upper.theta]
        return [*values, *lower.phi.values(), *upper.phi.values()]

    def size() -> int:
        return sum(x.numel() * x.element_size() for x in task.backbone.parameters())

    before = numbers()
    bytes_before = size()
    lora.keep_in_bfloat16(task.backbone)
    assert all(torch.equal(x, y) for x, y in zip(before, numbers(), strict=True))
    assert size() < 0.55 * bytes_before
    norms = [x for x in task.backbone.vit.modules() if isinstance(x, nn.LayerNorm)]
    assert {norm.weight.dtype for norm in norms} == {torch.float32}


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
def test_under_autocast_the_loss_and_each_gradient_are_near_those_in_float32(pretext: str) -> None:
    """To 2 percent, five steps of bfloat16; LayerNorms too, of which a head has small tensors."""
    task, theta, images, drawn = lower_level(pretext, 64)
    batch = task.prepare(images, *drawn)
    exact = Passes().gradients(task.loss, theta, task.phi, batch)
    rounded = Passes(amp=True).gradients(task.loss, theta, task.phi, batch)
    pairs = {name: (rounded.phi[name], exact.phi[name]) for name in task.phi}
    pairs |= {"theta": (rounded.theta, exact.theta), "loss": (rounded.value, exact.value)}
    for name, (found, expected) in pairs.items():
        assert found.dtype == torch.float32, name
        error = float((found - expected).norm() / expected.norm())
        assert 0 < error < 0.02, name


def test_autocast_of_the_caller_reaches_only_passes_that_ask_for_it() -> None:
    """Products with the Hessian, whole and in parts, and gradients without amp: the same bits."""
    task, theta, images, drawn = lower_level("mae", 5)
    batch = task.prepare(images, *drawn)

    def numbers() -> list[Tensor]:
        whole = Passes().hessian(task.loss, theta, task.phi, batch)(theta.detach())
        parts = Passes(2).hessian(task.loss, theta, task.phi, batch)(theta.detach())
        value, g, _ = Passes().gradients(task.loss, theta, task.phi, batch)
        return [whole, parts, value, g]

    expected = numbers()
    with torch.autocast("cpu", torch.bfloat16):
        found = numbers()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
