"""Program: a small part of Omniglot, which comes with the program, and a backbone for it.

Lake, Salakhutdinov and Tenenbaum (2015) had 20 people draw each character of many alphabets. Eight
of these alphabets are in omniglot.npz: 242 characters, 4,840 images of 28 x 28 pixels. Three
alphabets are the unlabelled pool, as ImageNet is in the paper, and five are labelled tasks, as the
benchmarks are; no image is in both. `experiments/pack_omniglot.py` made the file; omniglot.LICENSE
is the licence of its images.
"""

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config import ALPHABETS
from data import Pool, Split, Task, seed_for

IMAGES = Path(__file__).with_name("omniglot.npz")
WEIGHTS = Path(__file__).with_name("omniglot.pth")  # vit_mini, pretrained on the pool
POOL = ("Japanese_(katakana)", "Korean", "Sanskrit")  # the alphabets of the pool
SIDE = 28  # pixels
DRAWERS = 20  # people; each drew each character once
TEST_DRAWERS = 7  # whose drawings are the test images
VAL_DRAWERS = 3  # whose drawings are the validation images


@lru_cache(maxsize=1)
def alphabets() -> dict[str, Tensor]:
    """The images of each alphabet, float (characters, drawers, 28, 28); paper is 0 and ink is 1.

    A byte of the file holds four pixels, which are taken apart here.
    """
    shades = torch.arange(4) / 3  # a pixel has 2 bits, for 0, 1/3, 2/3 and 1
    images = dict[str, Tensor]()
    with np.load(IMAGES) as file:
        for name in (*POOL, *ALPHABETS):
            packed = torch.from_numpy(file[name])  # uint8 (bytes,)
            # `& 3` keeps the last two bits. The four pixels of a byte go side by side: (bytes, 4).
            pixels = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], -1)
            numbers = pixels.view(-1, DRAWERS, SIDE, SIDE).long()  # 0 to 3
            images[name] = shades[numbers]
    return images


def as_rgb(images: Tensor) -> Tensor:
    """Repeat the grey images (..., 28, 28) in three channels: (N, 3, 28, 28)."""
    return images.reshape(-1, 1, SIDE, SIDE).repeat(1, 3, 1, 1)


@lru_cache(maxsize=1)
def pool() -> Pool:
    """The pool D^P: the characters of three alphabets, 2,580 images without labels."""
    images = as_rgb(torch.cat([alphabets()[name] for name in POOL]))
    mean = float(images.mean())
    std = float(images.std())
    return Pool(images, (mean,) * 3, (std,) * 3)


def task(alphabet: str, seed: int) -> Task:
    """The task D^D: which character of this alphabet is it? 10 drawers train, 3 validate, 7 test.

    1. Shuffle the drawers: they are sorted by the sha256 of seed/alphabet/number. The first ones
       are those of the test, then come those of validation.
    2. Make a split of all drawings of its drawers, so that nobody's handwriting is in two splits.
    """
    images = alphabets()[alphabet]  # (characters, drawers, 28, 28)
    characters = len(images)
    sort_key = partial(seed_for, seed, alphabet)  # number of a drawer -> int, as if random
    drawers = sorted(range(DRAWERS), key=sort_key)
    test_drawers = drawers[:TEST_DRAWERS]
    other_drawers = drawers[TEST_DRAWERS:]
    val_drawers = other_drawers[:VAL_DRAWERS]
    train_drawers = other_drawers[VAL_DRAWERS:]

    splits = []
    for people in (train_drawers, val_drawers, test_drawers):
        drawings = images[:, people]  # (characters, people, 28, 28)
        labels = torch.arange(characters).repeat_interleave(len(people))  # 0, 0, ..., 1, 1, ...
        splits.append(Split(as_rgb(drawings), labels))
    train, val, test = splits

    classes = [f"character {number + 1}" for number in range(characters)]
    mean, std = pool().mean, pool().std  # as in the pool, on which the backbone was pretrained
    return Task(f"omniglot:{alphabet}", train, val, test, classes, mean, std)
