"""Checks of sheet 2: LoRA against merged matrices and whole networks, MAE against plain loops."""

from statistics import fmean, variance
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from witness import Watch, Wrong, any_type, guarded, random, same, same_slopes, several

import lora


def check_lora_forward(lora_forward: Any) -> list[str]:
    """Against one product with W_q + s B_q A_q; and no tensor of the size of W_q is made."""
    answer = guarded(lora_forward, "x W_q bias A_q B_q scale")
    for dim, r, scale in ((5, 2, 0.5), (4, 1, 3.0)):
        x = random(2, 3, dim)
        W_q = random(dim, dim, seed=1)
        bias = random(dim, seed=2)
        A_q = random(r, dim, seed=3)
        B_q = random(dim, r, seed=4)
        plain = F.linear(x, W_q, bias)
        change = F.linear(x, B_q @ A_q)
        merged = W_q + scale * B_q @ A_q
        found = answer(x, W_q, bias, A_q, B_q, scale)
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
    same_slopes("the result", found, expected, tensors, random(*x.shape, seed=5))
    dim = 300
    wide = random(1, 2, dim), random(dim, dim), random(dim)
    thin = random(2, dim), random(dim, 2)
    with Watch() as made:
        lora_forward(*wide, *thin, scale)
    remarks = any_type(lora_forward, x.detach(), W_q, bias, A_q.detach(), B_q.detach(), scale)
    for big in made.tensors:
        if big.numel() < dim * dim:
            continue
        if not bool(torch.isin(wide[1], big).all()):  # it is no copy of W_q
            raise Wrong(
                "the numbers are right, but a dim x dim matrix is made; two thin products, with "
                "A_q and then with B_q, are enough"
            )
        remarks.append("W_q is copied in each call; two thin products need no copy of it")
    return remarks


def check_merge(merge: Any) -> list[str]:
    """A plain timm network with the merged weights against `lora.Backbone` with θ."""
    answer = guarded(merge, "W_qkv A_q B_q A_v B_v scale")
    for dim, r, scale in ((12, 2, 0.5), (8, 3, 2.0)):
        torch.manual_seed(0)
        sizes = {"img_size": 8, "patch_size": 4, "embed_dim": dim, "depth": 1, "num_heads": 2}
        vit = VisionTransformer(num_classes=0, **sizes).double().eval().requires_grad_(False)  # type: ignore[arg-type]
        theta = random(1, 4 * r * dim, seed=3)
        images = random(2, 3, 8, 8, seed=4)
        expected = lora.Backbone(vit, scale=scale)(images, theta)
        A_q, B_q, A_v, B_v = (x[0] for x in lora.factors(theta, dim))
        W_qkv = vit.blocks[0].attn.qkv.weight.detach().clone()  # type: ignore[union-attr, operator]
        merged = answer(W_qkv, A_q, B_q, A_v, B_v, scale)
        q_change = scale * B_q @ A_q
        v_change = scale * B_v @ A_v
        zero = torch.zeros_like(q_change)
        same("the weight", merged, W_qkv + torch.cat([q_change, zero, v_change]), {
            "the scale s is missing": W_qkv + torch.cat([q_change, zero, v_change]) / scale,
            "the values are added to the rows of the keys; the order is queries, keys, values":
                W_qkv + torch.cat([q_change, v_change, zero]),
            "the product is turned; it is B_q A_q, so that it acts on x as the weight does":
                W_qkv + torch.cat([q_change.T, zero, v_change.T]),
            "only the queries are changed": W_qkv + torch.cat([q_change, zero, zero]),
        })  # fmt: skip
        vit.load_state_dict(vit.state_dict() | {"blocks.0.attn.qkv.weight": merged.detach()})
        same("tokens of the merged network", vit.forward_features(images), expected)
    return any_type(merge, W_qkv, A_q, B_q, A_v, B_v, scale)


def check_masking(masking: Any) -> list[str]:
    """Each image by itself, with Python's sorted."""
    answer = guarded(masking, "noise mask_ratio")
    # of 14 patches 3.5 would stay, of 9 patches 5.4; int says 3 and 5
    for images, patches, ratio, kept in ((3, 14, 0.75, 3), (2, 9, 0.4, 5)):
        noise = random(images, patches, seed=7).sigmoid()  # between 0 and 1
        keep, restore = several("masking", answer(noise, ratio), ["keep", "restore"])
        order = []
        places = []
        for row in noise.tolist():
            by_noise = sorted(range(patches), key=row.__getitem__)
            order.append(by_noise)
            places.append([by_noise.index(patch) for patch in range(patches)])
        all_in_order = torch.tensor(order)
        if isinstance(keep, Tensor) and keep.shape == (images, kept + 1):
            raise Wrong(
                f"keep has {kept + 1} patches: int(patches · (1 − mask_ratio)) rounds down to "
                f"{kept}"
            )
        removed = patches - kept
        if isinstance(keep, Tensor) and keep.shape in ((images, removed), (images, removed - 1)):
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
    noise = 0.5 + 1e-9 * torch.tensor([[3.0, 1, 4, 2]]).double()
    keep, _ = masking(noise, 0.5)
    if not torch.equal(keep, torch.tensor([[1, 3]])):
        raise Wrong("noise that is nearly equal is sorted wrongly: is it rounded on the way?")
    return any_type(masking, random(3, 14).sigmoid(), 0.75)


def check_mae_loss(mae_loss: Any) -> list[str]:
    """Patch by patch, with Python's statistics."""
    answer = guarded(mae_loss, "prediction patches removed")
    few = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]).bool()
    more = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]]).bool()
    for removed, pixels in ((few, 5), (more, 7)):
        prediction = random(*removed.shape, pixels)
        patches = random(*removed.shape, pixels, seed=1)
        patches[:, 2] *= 1e-3  # nearly of one shade: there the 1e-6 matters
        right, mistakes = losses(prediction, patches, removed)
        same("the loss", answer(prediction, patches, removed), right, mistakes)
    prediction.requires_grad_()
    spread, middle = torch.var_mean(patches, -1, keepdim=True)
    expected = (prediction - (patches - middle) / (spread + 1e-6).sqrt()).square()[removed].mean()
    found = mae_loss(prediction, patches, removed)
    same_slopes("the loss", found, expected, {"prediction": prediction}, scalar(1))
    return any_type(mae_loss, prediction, random(*removed.shape, 7, seed=1), removed)


def losses(
    prediction: Tensor, patches: Tensor, removed: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what it becomes by the usual mistakes."""
    hidden = []
    shown = []
    raw = []
    biased = []
    outside = []
    means = []
    for image in range(len(patches)):
        of_image = []
        for k in range(patches.shape[1]):
            pixels = patches[image, k].tolist()
            guess = prediction[image, k].tolist()
            sample = error(guess, pixels, variance(pixels))
            if not removed[image, k]:
                shown.append(sample)
                continue
            of_image.append(sample)
            biased.append(error(guess, pixels, variance(pixels) * (1 - 1 / len(pixels))))
            root = variance(pixels) ** 0.5 + 1e-6
            outside.append(error(guess, pixels, root**2 - 1e-6))
            raw.append(fmean((a - b) ** 2 for a, b in zip(guess, pixels, strict=True)))
        hidden += of_image
        means.append(fmean(of_image))
    mistakes = {
        "this is the mean over all patches; only the removed ones count": fmean(hidden + shown),
        "this is the loss on the visible patches": fmean(shown),
        "the error of removed patches is divided by the number of all patches":
            sum(hidden) / removed.numel(),
        "the target is not standardised": fmean(raw),
        "the variance is divided by the number of pixels; it must be by that number minus 1":
            fmean(biased),
        "1e-6 is added to the variance, before the root": fmean(outside),
        "this is a mean of the images' means; it must be over all removed patches at once":
            fmean(means),
    }  # fmt: skip
    return scalar(fmean(hidden)), {what: scalar(value) for what, value in mistakes.items()}


def error(guess: list[float], pixels: list[float], spread: float) -> float:
    """Mean squared error of a patch whose pixels are standardised with this variance."""
    mean = fmean(pixels)
    target = [(pixel - mean) / (spread + 1e-6) ** 0.5 for pixel in pixels]
    return fmean((a - b) ** 2 for a, b in zip(guess, target, strict=True))


def scalar(value: float) -> Tensor:
    """A number as a tensor of float64."""
    return torch.tensor(value, dtype=torch.float64)
