"""Make support/omniglot.npz from two files of the Omniglot dataset.

    python -m experiments.pack_omniglot images_background_small1.zip images_background_small2.zip

The files are at https://github.com/brendenlake/omniglot, in the folder `python`. An image there has
105 x 105 pixels, black ink on white. Here it has 28 x 28, each the mean over its area, in four
shades; the darkest one begins at three quarters of full ink, since thin strokes never reach that.
"""

import hashlib
from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

import numpy as np
import torch
import torch.nn.functional as F
import typer
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from config import ALPHABETS
from experiments.recipe import run_script
from support.benchmarks import IMAGES, POOL
from support.errors import UsageError

SIDE = 28
DIGESTS = {
    "images_background_small1.zip": (
        "f38eb80f801274ac2b4dff5b24289016bfaba4a7d5bb50deebf27104ad6cb8a4"
    ),
    "images_background_small2.zip": (
        "3ccaa407515a8778e5d0861875af38b17e418f301ad5bb3b5a6b65d901a41c7f"
    ),
}
Archives = Annotated[list[Path], typer.Argument(help="The two zip files.", exists=True)]


def pack(archives: Archives, out: Path = IMAGES) -> None:
    """Read both archives and write the images of all alphabets, by character and drawer."""
    drawings = dict[str, Tensor]()  # by alphabet/character/image
    for archive in archives:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != DIGESTS.get(archive.name):
            raise UsageError(f"{archive}: is not the published file, its sha256 is {digest}")
        drawings |= read_archive(archive)  # Greek and Latin are in both archives
    packed = dict[str, NDArray[np.uint8]]()
    for alphabet in (*POOL, *ALPHABETS):
        # in the order of their names: character by character, and drawer by drawer
        names = sorted(name for name in drawings if name.startswith(f"{alphabet}/"))
        shades = torch.stack([shrink(drawings[name]) for name in names])
        packed[alphabet] = shades.view(-1, 20, SIDE, SIDE).numpy()  # 20 drawers of each character
        print(f"{alphabet}: {len(names)} images")
    with out.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **packed)
    print(f"{out}: {out.stat().st_size} bytes")


def read_archive(archive: Path) -> dict[str, Tensor]:
    """The drawings of an archive by "alphabet/character/image.png": (105, 105), ink 1, paper 0."""
    drawings = {}
    with ZipFile(archive) as files:
        for name in files.namelist():
            if not name.endswith(".png"):
                continue
            with files.open(name) as file, Image.open(file) as image:
                grey = np.array(image.convert("L"))
            below = name.partition("/")[2]  # without the first folder, the archive's name
            drawings[below] = 1 - torch.from_numpy(grey) / 255
    return drawings


def shrink(drawing: Tensor) -> Tensor:
    """A drawing in 28 x 28 pixels of four shades, 0 to 3."""
    small = F.adaptive_avg_pool2d(drawing[None, None], SIDE)[0, 0]
    return (small / 0.75 * 3).round().clamp(0, 3).to(torch.uint8)


if __name__ == "__main__":
    run_script(pack)
