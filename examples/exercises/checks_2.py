"""Checks of sheet 2: LoRA against merged matrices and whole networks, MAE against plain loops."""

from statistics import fmean, variance
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from witness import Watch, Wrong, random, same, same_slopes, several, untouched

import lora


def check_lora_forward(lora_forward: Any) -> None:
    """Against one product with W_q + s B_q A_q; and no tensor of the size of W_q is made."""
    x = random(2, 3, 5)
    W_q = random(5, 5, seed=1)
    bias = random(5, seed=2)
    A_q = random(2, 5, seed=3)
    B_q = random(5, 2, seed=4)
    scale = 0.5
    plain = F.linear(x, W_q, bias)
    change = F.linear(x, B_q @ A_q)
    merged = W_q + scale * B_q @ A_q
    found = lora_forward(x, W_q, bias, A_q, B_q, scale)
    same("the result", found, F.linear(x, merged, bias), {
        "the scale s is missing": plain + change,
        "the bias is missing": F.linear(x, merged),
        "the bias is scaled or added twice": plain + scale * change + bias,
        "W_q must be transposed, as in torch's Linear: a token x is a row, so it is x W_qᵀ":
            x @ W_q + bias + scale * change,
        "this is the frozen layer alone": plain,
    })  # fmt: skip
    tensors = {"x": x, "A_q": A_q, "B_q": B_q}
    for tensor in tensors.values():
        tensor.requires_grad_()
    found = lora_forward(x, W_q, bias, A_q, B_q, scale)
    expected = F.linear(x, W_q + scale * B_q @ A_q, bias)
    same_slopes("the result", found, expected, tensors, random(2, 3, 5, seed=5))
    dim = 300
    wide = random(1, 2, dim), random(dim, dim), random(dim)
    thin = random(2, dim), random(dim, 2)
    with Watch() as made:
        lora_forward(*wide, *thin, scale)
    if made.largest >= dim * dim:
        raise Wrong(
            "the numbers are right, but a dim x dim matrix is made; two thin products, with A_q "
            "and then with B_q, are enough"
        )


def check_merge(merge: Any) -> None:
    """A plain timm network with the merged weights against `lora.Backbone` with θ."""
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
    vit = VisionTransformer(num_classes=0, **sizes).double().eval().requires_grad_(False)  # type: ignore[arg-type]
    dim = 12
    r = 2
    scale = 0.5
    theta = random(1, 4 * r * dim, seed=3)
    images = random(2, 3, 8, 8, seed=4)
    expected = lora.Backbone(vit, scale=scale)(images, theta)
    A_q, B_q, A_v, B_v = (x[0] for x in lora.factors(theta, dim))
    W_qkv = vit.blocks[0].attn.qkv.weight.detach().clone()  # type: ignore[union-attr, operator]
    before = W_qkv.clone()
    merged = merge(W_qkv, A_q, B_q, A_v, B_v, scale)
    untouched("W_qkv", W_qkv, before)
    q_change = scale * B_q @ A_q
    v_change = scale * B_v @ A_v
    zero = torch.zeros_like(q_change)
    same("the weight", merged, before + torch.cat([q_change, zero, v_change]), {
        "the scale s is missing": before + torch.cat([q_change, zero, v_change]) / scale,
        "the values are added to the rows of the keys; the order is queries, keys, values":
            before + torch.cat([q_change, v_change, zero]),
        "the product is turned; it is B_q A_q, so that it acts on x as the weight does":
            before + torch.cat([q_change.T, zero, v_change.T]),
        "only the queries are changed": before + torch.cat([q_change, zero, zero]),
    })  # fmt: skip
    vit.load_state_dict(vit.state_dict() | {"blocks.0.attn.qkv.weight": merged.detach()})
    same("tokens of the merged network", vit.forward_features(images), expected)


def check_masking(masking: Any) -> None:
    """Each image by itself, with Python's sorted."""
    noise = torch.rand(3, 14, generator=torch.Generator().manual_seed(0))
    ratio = 0.75  # 3.5 of 14 patches would stay; int says 3
    kept = 3
    before = noise.clone()
    keep, restore = several("masking", masking(noise, ratio), ["keep", "restore"])
    untouched("noise", noise, before)
    order = []
    places = []
    for row in noise.tolist():
        patches = sorted(range(14), key=row.__getitem__)
        order.append(patches)
        places.append([patches.index(patch) for patch in range(14)])
    all_in_order = torch.tensor(order)
    if isinstance(keep, Tensor) and keep.shape == (3, 4):
        raise Wrong("keep has 4 patches: int(patches · (1 − mask_ratio)) rounds down to 3")
    if isinstance(keep, Tensor) and keep.shape in ((3, 10), (3, 11)):
        raise Wrong("keep has as many patches as are removed: mask_ratio is their share")
    same("keep", keep, all_in_order[:, :kept], {
        "these are the patches with the largest noise": all_in_order.flip(1)[:, :kept],
        "the patches are in the order of their numbers; it must be that of their noise":
            all_in_order[:, :kept].sort(1).values,
    })  # fmt: skip
    same("restore", restore, torch.tensor(places), {
        "this is the order itself, from place to patch; restore goes from patch to place":
            all_in_order,
    })  # fmt: skip


def check_mae_loss(mae_loss: Any) -> None:
    """Patch by patch, with Python's statistics."""
    prediction = random(2, 4, 5)
    patches = random(2, 4, 5, seed=1)
    patches[0, 0] *= 1e-3  # nearly of one shade: there the 1e-6 matters
    removed = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]).bool()
    hidden = []
    shown = []
    raw = []
    biased = []
    outside = []
    for image in range(2):
        for k in range(4):
            pixels = patches[image, k].tolist()
            guess = prediction[image, k].tolist()
            sample = error(guess, pixels, variance(pixels))
            if not removed[image, k]:
                shown.append(sample)
                continue
            hidden.append(sample)
            biased.append(error(guess, pixels, variance(pixels) * 4 / 5))
            root = variance(pixels) ** 0.5 + 1e-6
            outside.append(error(guess, pixels, root**2 - 1e-6))
            raw.append(fmean((a - b) ** 2 for a, b in zip(guess, pixels, strict=True)))
    same("the loss", mae_loss(prediction, patches, removed), scalar(fmean(hidden)), {
        "this is the mean over all patches; only the removed ones count":
            scalar(fmean(hidden + shown)),
        "this is the loss on the visible patches": scalar(fmean(shown)),
        "the error of removed patches is divided by the number of all patches":
            scalar(sum(hidden) / 8),
        "the target is not standardised": scalar(fmean(raw)),
        "the variance is divided by the number of pixels; it must be by that number minus 1":
            scalar(fmean(biased)),
        "1e-6 is added to the variance, before the root": scalar(fmean(outside)),
        "this is a mean of the images' means; it must be over all removed patches at once":
            scalar(fmean([fmean(hidden[:3]), fmean(hidden[3:])])),  # 3 and 1 are removed
    })  # fmt: skip
    prediction.requires_grad_()
    spread, middle = torch.var_mean(patches, -1, keepdim=True)
    expected = (prediction - (patches - middle) / (spread + 1e-6).sqrt()).square()[removed].mean()
    found = mae_loss(prediction, patches, removed)
    same_slopes("the loss", found, expected, {"prediction": prediction}, scalar(1))


def error(guess: list[float], pixels: list[float], spread: float) -> float:
    """Mean squared error of a patch whose pixels are standardised with this variance."""
    mean = fmean(pixels)
    target = [(pixel - mean) / (spread + 1e-6) ** 0.5 for pixel in pixels]
    return fmean((a - b) ** 2 for a, b in zip(guess, target, strict=True))


def scalar(value: float) -> Tensor:
    """A number as a tensor of float64."""
    return torch.tensor(value, dtype=torch.float64)
