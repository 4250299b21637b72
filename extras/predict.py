"""`bisslight predict`: which classes a finished finetune run sees in images of one's own.

The labelled images of the run need not be on this machine: its adapter file names the classes, the
size of the images and how they are normalised. The backbone's weights need be.
"""

import csv
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

import lora
from config import FinetuneConfig
from data import Transform, cut_centre, find_images, normalise, read_image
from extras.export import is_whole, load_networks, open_run
from support.errors import UsageError, checking
from support.experiment import device_of

BATCH = 64  # images that pass the network at once


class Guess(NamedTuple):
    """A class that an image may show."""

    image: str
    rank: int  # 1: the most likely class
    label: str
    probability: float


class Predictor:
    """A finished finetune run, opened once to classify any number of images.

    Args:
        run: its directory.
        seed: whose adapter is taken; None: the run's first.
        weights: where the backbone's file is now; None: where the run had it.
        device: auto, cpu or cuda.

    Raises UsageError where the run has no classifier or its weights are not there.
    """

    def __init__(
        self,
        run: Path,
        *,
        seed: int | None = None,
        weights: Path | None = None,
        device: str = "auto",
    ) -> None:
        cfg, adapter = open_run(run, seed, weights)
        origin = adapter.origin
        if not adapter.phi_D:
            raise UsageError(f"{run}: is an align run, without a classifier; give a finetune run")
        for name in ("classes", "channels"):
            if name not in origin:
                raise UsageError(f"{run}: its adapter does not name its {name}; fine-tune again")
        self.cfg: FinetuneConfig = cfg.replace(device=device)
        self.classes: list[str] = origin["classes"]
        self.device = device_of(self.cfg)
        loaded = load_networks(run, cfg, adapter)
        self.backbone = loaded.backbone.to(self.device)
        self.theta = adapter.theta.to(self.device)
        self.phi_D = {name: tensor.to(self.device) for name, tensor in adapter.phi_D.items()}
        mean, std = origin["channels"]
        self.mean = torch.tensor(mean, device=self.device).view(3, 1, 1)
        self.std = torch.tensor(std, device=self.device).view(3, 1, 1)
        size = loaded.arch.image_size
        transform = Transform(size, mean, std, interpolation=cfg.d_interpolation)
        self.read = partial(read_pixels, transform=transform, whole=is_whole(origin))

    @torch.no_grad()
    def logits(self, files: Sequence[Path]) -> Tensor:
        """Logits (n, C) of n image files, on the CPU."""
        amp = self.cfg.amp and self.device.type == "cuda"
        parts = []
        with ThreadPoolExecutor(8) as threads:  # decoding lets others run
            for start in range(0, len(files), BATCH):
                pixels = [*threads.map(self.read, files[start : start + BATCH])]
                images = normalise(torch.stack(pixels).to(self.device), self.mean, self.std)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=amp):
                    x = lora.features(self.backbone, self.theta, images)
                    parts.append(lora.logits(x, self.phi_D).float().cpu())
        return torch.cat(parts)

    def probabilities(self, files: Sequence[Path]) -> Tensor:
        """Probabilities (n, C) of the classes; of several in an image, each one's own with bce."""
        logits = self.logits(files)
        if self.cfg.dataset == "voc07" and self.cfg.voc_loss == "bce":
            return logits.sigmoid()
        return logits.softmax(1)

    def guess(self, files: Sequence[Path], top: int = 1) -> list[Guess]:
        """The `top` most likely classes of each image, the most likely first."""
        guesses = []
        count = min(top, len(self.classes))
        best, labels = self.probabilities(files).topk(count)  # (n, count) each
        for file, of_image, numbers in zip(files, best.tolist(), labels.tolist(), strict=True):
            for k in range(count):
                guesses.append(Guess(str(file), k + 1, self.classes[numbers[k]], of_image[k]))
        return guesses


def read_pixels(file: Path, transform: Transform, whole: bool) -> Tensor:
    """An image file as the run took its test images, uint8 (3, size, size)."""
    image = cut_centre(read_image(file), transform, whole)
    if isinstance(image, Tensor):
        return image
    pixels: Tensor = pil_to_tensor(image)
    return pixels


def list_images(places: Sequence[Path]) -> list[Path]:
    """These files, and all images in these folders (UsageError where there are none)."""
    files: list[Path] = []
    for place in places:
        with checking(str(place)):
            found = find_images(place) if place.is_dir() else [place]
        if not found or not found[0].is_file():
            raise UsageError(f"{place}: is no image and no folder of images")
        files += found
    return files


def write_csv(guesses: Sequence[Guess]) -> str:
    """A line for each guess, below a line of names."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Guess._fields)
    table.writerows(guesses)
    return text.getvalue()
