"""The functional backbone and LoRA on q and v, against HF peft, timm and plain algebra."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from config import BACKBONES, Arch, UsageError
from lora import (
    Backbone,
    adapter_bytes,
    adapter_metadata,
    build_vit,
    drop_path,
    factors,
    from_factors,
    init_head,
    init_theta,
    load_adapter,
    logits,
    merge,
)
from runtime import rng

ARCH = Arch(image_size=16, patch_size=4, dim=24, depth=3, heads=4)


@pytest.fixture
def vit() -> VisionTransformer:
    torch.manual_seed(0)
    return build_vit(ARCH).double().requires_grad_(False)


@pytest.fixture
def theta() -> Tensor:
    """A θ whose B is not zero."""
    return (torch.randn(3, 4 * 4 * 24, generator=rng(1)) * 0.2).double()


IMAGES = torch.randn(5, 3, 16, 16, generator=rng(2)).double()


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32, 64, 128])
def test_parameter_counts_match_the_papers_table(rank: int) -> None:
    """Table of App. C.4 as exact integers, 4 r dim depth; its ViT-B r = 8 cell prints 0.30 where 294,912 is 0.29."""
    table = {  # millions, two decimals, as printed
        "vit_b16": (0.04, 0.07, 0.15, 0.30, 0.59, 1.18, 2.36, 4.72),
        "vit_l16": (0.10, 0.20, 0.39, 0.79, 1.57, 3.15, 6.29, 12.58),
        "vit_h14": (0.16, 0.33, 0.66, 1.31, 2.62, 5.24, 10.49, 20.97),
    }
    sizes = {"vit_b16": (768, 12), "vit_l16": (1024, 24), "vit_h14": (1280, 32)}
    for name, (dim, depth) in sizes.items():
        arch = BACKBONES[name].arch
        count = init_theta(arch.depth, rank, arch.dim, rng(0)).numel()
        assert count == 4 * rank * dim * depth
        printed = table[name][rank.bit_length() - 1]
        assert round(count / 1e6, 2) == printed or (name, rank, count) == ("vit_b16", 8, 294_912)


def test_full_backbone_counts_match_the_papers_table() -> None:
    for name, millions in (("vit_b16", 85.80), ("vit_l16", 303.30), ("vit_h14", 630.77)):
        with torch.device("meta"):  # the paper's table rounds 630.7648 up
            count = sum(p.numel() for p in build_vit(BACKBONES[name].arch).parameters())
        assert count / 1e6 == pytest.approx(millions, abs=0.006)


class SplitQkv(nn.Module):
    """timm's fused qkv as three Linears, the form in which HF peft can adapt q and v alone."""

    def __init__(self, qkv: nn.Linear) -> None:
        super().__init__()
        dim = qkv.in_features
        for i, name in enumerate("qkv"):
            part = nn.Linear(dim, dim).double()
            part.weight.data, part.bias.data = qkv.weight[i * dim : (i + 1) * dim], qkv.bias[i * dim : (i + 1) * dim]
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


@pytest.mark.filterwarnings("ignore")
def test_forward_and_gradients_equal_hf_peft_on_split_qkv(vit: VisionTransformer, theta: Tensor) -> None:
    """An independent LoRA (peft, alpha = 2r, so scale 2) with our factors: outputs and gradients to 1e-6."""
    peft = pytest.importorskip("peft")
    split = copy.deepcopy(vit)
    for block in split.blocks:
        block.attn.qkv = SplitQkv(block.attn.qkv)
    model = peft.get_peft_model(split, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["qkv.q", "qkv.v"])).double()
    leaf = theta.clone().requires_grad_()
    state: dict[str, Tensor] = {}
    for k, (A_q, B_q, A_v, B_v) in enumerate(zip(*factors(theta, 24), strict=True)):
        for name, A, B in (("q", A_q, B_q), ("v", A_v, B_v)):
            key = f"base_model.model.blocks.{k}.attn.qkv.{name}"
            state |= {f"{key}.lora_A.default.weight": A.clone(), f"{key}.lora_B.default.weight": B.clone()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    ours, theirs = Backbone(vit, scale=2.0)(IMAGES, leaf), model.base_model.model.forward_features(IMAGES)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    named = dict(model.named_parameters())
    grads = [
        torch.stack([named[f"base_model.model.blocks.{k}.attn.qkv.{x}.lora_{f}.default.weight"].grad for k in range(3)])
        for x, f in (("q", "A"), ("q", "B"), ("v", "A"), ("v", "B"))
    ]
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, from_factors(*grads), rtol=1e-6, atol=1e-6)


def test_without_theta_it_is_timms_forward(vit: VisionTransformer) -> None:
    torch.testing.assert_close(Backbone(vit)(IMAGES), vit.forward_features(IMAGES), rtol=0, atol=1e-12)


def test_zero_b_leaves_the_output_unchanged(vit: VisionTransformer) -> None:
    start = init_theta(3, 4, 24, rng(0)).double()
    assert torch.equal(Backbone(vit)(IMAGES, start), Backbone(vit)(IMAGES))
    A_q, B_q, _, B_v = factors(start, 24)
    assert not B_q.any()
    assert not B_v.any()
    assert A_q.abs().max() <= 24**-0.5
    assert A_q.abs().max() > 0.9 * 24**-0.5


def test_k_is_untouched(vit: VisionTransformer, theta: Tensor) -> None:
    """The k rows of the merged weight are bit-equal to the backbone's; q and v rows are not."""
    merged = merge(Backbone(vit), theta)
    for k in range(3):
        before, after = vit.blocks[k].attn.qkv.weight, merged[f"blocks.{k}.attn.qkv.weight"]
        assert torch.equal(after[24:48], before[24:48])
        assert not torch.isclose(after[:24], before[:24]).all()
        assert not torch.isclose(after[48:], before[48:]).all()


def test_merged_weights_in_plain_timm_give_the_same_tokens(vit: VisionTransformer, theta: Tensor) -> None:
    plain = build_vit(ARCH).double()
    plain.load_state_dict(merge(Backbone(vit, scale=0.5), theta))
    torch.testing.assert_close(plain.forward_features(IMAGES), Backbone(vit, scale=0.5)(IMAGES, theta))


def test_two_parameter_sets_share_one_backbone(vit: VisionTransformer, theta: Tensor) -> None:
    backbone = Backbone(vit)
    before = {name: p.clone() for name, p in vit.named_parameters()}
    other = (theta * 2).requires_grad_()
    backbone(IMAGES, theta)
    backbone(IMAGES, other).sum().backward()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in vit.named_parameters())
    assert sum(p.numel() for p in backbone.parameters()) == sum(p.numel() for p in vit.parameters())


def test_a_subset_of_tokens_equals_timms_own_patch_dropping(vit: VisionTransformer) -> None:
    keep = torch.stack([torch.randperm(16, generator=rng(i))[:6] for i in range(5)])

    class Gather(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:, :1], x[:, 1:].gather(1, keep[..., None].expand(-1, -1, 24))], 1)

    other = copy.deepcopy(vit)
    other.patch_drop = Gather()
    torch.testing.assert_close(Backbone(vit)(IMAGES, keep=keep), other.forward_features(IMAGES))


def test_recomputing_activations_sees_the_right_theta_and_drop_path(vit: VisionTransformer, theta: Tensor) -> None:
    """Two θ and two drop-path masks in flight before backward: gradients equal those without checkpointing."""
    drops = [drop_path(0.5, 3, 5, rng(i)) for i in range(2)]
    results = []
    for recompute in (False, True):
        backbone = Backbone(vit, recompute=recompute)
        leaves = [theta.clone().requires_grad_(), (-theta).clone().requires_grad_()]
        outputs = [backbone(IMAGES, leaf, drop=drop) for leaf, drop in zip(leaves, drops, strict=True)]
        (outputs[0].sin().sum() + outputs[1].cos().sum()).backward()
        results.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(results[0], results[1])


def test_drop_path_has_timms_rates_and_keeps_the_mean() -> None:
    factors_ = drop_path(0.2, 5, 4000, rng(0))
    assert factors_ is not None
    reference = timm.create_model("vit_tiny_patch16_224", depth=5, drop_path_rate=0.2, num_classes=0)
    rates = [b.drop_path1.drop_prob if isinstance(b.drop_path1, DropPath) else 0.0 for b in reference.blocks]
    for k, rate in enumerate(rates):
        kept = factors_[k][factors_[k] > 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
        # 8000 draws: five standard deviations of the share of zeros
        assert float((factors_[k] == 0).float().mean()) == pytest.approx(rate, abs=5 * (0.2 * 0.8 / 8000) ** 0.5)
    assert drop_path(0.0, 5, 4, rng(0)) is None


def test_a_dropped_branch_is_gone(vit: VisionTransformer, theta: Tensor) -> None:
    """With every residual branch of a sample dropped, its tokens are the embedded ones, normalised."""
    drop = torch.ones(3, 2, 5, dtype=torch.float64)
    drop[:, :, 2] = 0
    out = Backbone(vit)(IMAGES, theta, drop=drop)
    embedded = vit.norm(vit._pos_embed(vit.patch_embed(IMAGES)))
    torch.testing.assert_close(out[2], embedded[2])
    torch.testing.assert_close(out[0], Backbone(vit)(IMAGES, theta)[0])


def test_forward_is_twice_differentiable(vit: VisionTransformer, theta: Tensor) -> None:
    """Conjugate gradients and exact Hessians need it; fused attention must be off for that."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def f(x: Tensor) -> Tensor:
        return Backbone(vit)(IMAGES[:1], x.view_as(theta))[:, 0].sum()

    v = torch.randn(theta.numel(), generator=rng(5)).double()
    with sdpa_kernel(SDPBackend.MATH):
        product = torch.autograd.functional.hvp(f, theta.flatten(), v)[1]
        eps = 1e-5
        g = [torch.autograd.functional.vjp(f, theta.flatten() + s * eps * v)[1] for s in (1, -1)]
    torch.testing.assert_close(product, (g[0] - g[1]) / (2 * eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: timm.create_model("resnet18"), "ResNet"),
        (lambda: timm.create_model("vit_relpos_small_patch16_224"), "VisionTransformerRelPos"),
        (lambda: timm.create_model("vit_tiny_patch16_224", qkv_bias=False, block_fn=Parallel), "Parallel"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_backbone_of_another_kind_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Backbone(make())


class Parallel(nn.Module):
    """A block that is not timm's plain one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


@pytest.mark.parametrize("rank", [0, 25])
def test_a_rank_outside_1_to_dim_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank}.*from 1 to 24"):
        init_theta(3, rank, 24, rng(0))


def test_saved_adapters_come_back_bit_equal_with_their_head(
    tmp_path: Path, vit: VisionTransformer, theta: Tensor
) -> None:
    head = {name: tensor.double() for name, tensor in init_head(24, 7, rng(3)).items()}
    about = adapter_metadata(ARCH, "tiny", 4, 4.0, pretext="mae", dataset="quilts")
    (tmp_path / "a.safetensors").write_bytes(adapter_bytes(theta, head, about))
    theta2, head2, about2 = load_adapter(tmp_path / "a.safetensors")
    backbone = Backbone(vit)
    assert torch.equal(logits(backbone, theta, head, IMAGES), logits(backbone, theta2, head2, IMAGES))
    assert about2["rank"] == "4"
    assert about2["pretext"] == "mae"
    assert about2["format"] == "bisslight-adapter-1"


def test_a_file_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="not a readable safetensors"):
        load_adapter(tmp_path / "x")
    with pytest.raises(UsageError, match="not a readable safetensors"):
        load_adapter(tmp_path / "missing")
