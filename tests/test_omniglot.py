"""The handwriting that comes with the program: counts, roles, pixels, and how it is packed."""

from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from conftest import SHARED
from PIL import Image

from config import ALPHABETS
from experiments.pack_omniglot import pack
from support.benchmarks import IMAGES, omniglot_pool, omniglot_task, read_alphabet
from support.errors import UsageError


def test_no_image_is_in_two_splits_or_in_the_pool() -> None:
    pool = omniglot_pool()
    pixels = torch.as_tensor(pool.images).double()
    for given, found in ((pool.mean, pixels.mean()), (pool.std, pixels.std())):
        torch.testing.assert_close(given, (float(found),) * 3, rtol=1e-6, atol=0)
    seen = {image.numpy().tobytes() for image in pool.images}
    assert len(seen) == 2580
    images = 0
    for alphabet in ALPHABETS:
        task = omniglot_task(alphabet, 0)
        for split in task[1:4]:
            for image in torch.as_tensor(split.images):
                assert image.numpy().tobytes() not in seen
                seen.add(image.numpy().tobytes())
                images += 1
    assert images == 4840 - 2580


def test_each_character_has_ten_three_and_seven_drawers_who_change_with_the_seed() -> None:
    task = omniglot_task("Greek", 0)
    for split, drawers in zip(task[1:4], (10, 3, 7), strict=True):
        assert torch.equal(split.targets.bincount(), torch.full((24,), drawers))
    other = omniglot_task("Greek", 1)
    assert not torch.equal(torch.as_tensor(task.test.images), torch.as_tensor(other.test.images))


@pytest.mark.slow
def test_the_file_is_what_the_published_archives_make(tmp_path: Path) -> None:
    folder = SHARED / "data/omniglot"
    if not folder.exists():
        pytest.skip(f"needs the archives of Omniglot in {folder}")
    pack([folder / f"images_background_small{k}.zip" for k in (1, 2)], tmp_path / "packed.npz")
    with np.load(tmp_path / "packed.npz") as made, np.load(IMAGES) as shipped:
        assert set(made) == set(shipped)
        for name in made:
            assert (made[name] == shipped[name]).all()
    with ZipFile(folder / "images_background_small1.zip") as archive:  # a drawing, by Pillow
        name = "images_background_small1/Greek/character01/0394_01.png"
        with archive.open(name) as file, Image.open(file) as image:
            small = image.convert("L").resize((28, 28), Image.Resampling.BOX)
    ink = 1 - torch.from_numpy(np.array(small)) / 255
    shown = read_alphabet("Greek")[0, 0, 0]
    assert (ink / 0.75 - shown).clamp(0).max() < 0.5  # as good as four shades can be, or darker
    assert torch.corrcoef(torch.stack([ink.flatten(), shown.flatten()]))[0, 1] > 0.95


def test_another_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "images_background_small1.zip"
    archive.write_bytes(b"other")
    with pytest.raises(UsageError, match="images_background_small1"):
        pack([archive], tmp_path / "packed.npz")
