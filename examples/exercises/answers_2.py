"""Sheet 2: the network, low-rank adaptation (LoRA) and the masked autoencoder (MAE).

The tasks, with hints, are in examples/exercises/sheet_2.md. Which functions are right, tells

    python examples/exercises/check.py examples/blanks/sheet_2.py

    B         number of images of a batch (B_q, with an index, is a matrix)
    tokens    number of tokens of an image; a token is a row of dim numbers
    r, s      rank of LoRA, and its scale (`scale` in the code)
    patches   number of patches of an image, of which `kept` stay
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def lora_forward(
    x: Tensor, W_q: Tensor, bias: Tensor, A_q: Tensor, B_q: Tensor, scale: float
) -> Tensor:
    """(W_q + s B_q A_q) x + bias of every token, without making the dim x dim matrix B_q A_q.

    x (B, tokens, dim), W_q (dim, dim), bias (dim,), A_q (r, dim), B_q (dim, r). The result has the
    shape of x.
    """
    # blank: the frozen layer, plus two thin products
    low = x @ A_q.T  # (B, tokens, r)
    return F.linear(x, W_q, bias) + scale * low @ B_q.T
    # end of blank


def merge(
    W_qkv: Tensor, A_q: Tensor, B_q: Tensor, A_v: Tensor, B_v: Tensor, scale: float
) -> Tensor:
    """The weight (3 dim, dim) of a layer without LoRA that computes the same q, k and v.

    W_qkv (3 dim, dim) has the rows of the query matrix first, then those of keys and of values. A_q
    and A_v are (r, dim), B_q and B_v (dim, r). W_qkv stays as it is.
    """
    # blank: add s B_q A_q to the rows of the queries, and s B_v A_v to those of the values
    q_change = scale * B_q @ A_q  # (dim, dim)
    v_change = scale * B_v @ A_v
    change = torch.cat([q_change, torch.zeros_like(q_change), v_change])
    return W_qkv + change
    # end of blank


def masking(noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor]:
    """Which patches stay: keep (B, kept) and restore (B, patches), from noise (B, patches).

    kept is int(patches · (1 − mask_ratio)). keep has the numbers of the patches with the least
    noise, in the order of their noise. restore says where each patch stands in the list "kept
    patches, then removed ones", which is the list of all patches in the order of their noise.
    """
    # blank: the two index lists
    kept = int(noise.shape[1] * (1 - mask_ratio))
    order = noise.argsort(1)  # place -> patch
    restore = order.argsort(1)  # patch -> place: the inverse permutation
    return order[:, :kept], restore
    # end of blank


def mae_loss(prediction: Tensor, patches: Tensor, removed: Tensor) -> Tensor:
    """MAE's loss, a scalar: mean squared error on the removed patches.

    prediction and patches are (B, patches, pixels), removed (B, patches) is true where a patch was
    removed. The target is `patches`, standardised in each patch: minus its mean, divided by the
    root of its variance plus 1e-6. The variance is divided by the number of pixels minus 1.
    """
    # blank: the target, the error of each patch, the mean over the removed ones
    mean = patches.mean(-1, keepdim=True)
    variance = patches.var(-1, keepdim=True)  # torch divides by pixels − 1 unless told otherwise
    target = (patches - mean) / (variance + 1e-6).sqrt()
    per_patch = (prediction - target).square().mean(-1)  # (B, patches)
    return per_patch[removed].mean()
    # end of blank
