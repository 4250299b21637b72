"""Recorded numbers are in tests/data; photographs and the paper lie beside the checkout."""

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quilts
import torch
from golden import make_data
from loopback import Server
from torch import Tensor

import cli
from config import PretrainConfig
from extras.pretrain import pretrain
from support.processes import stop

# A card in the machine is hidden before torch asks for one: `--device auto` would move the recorded
# runs to it, and to bfloat16. `make gpu` sets BISSLIGHT_GPU.
if not os.environ.get("BISSLIGHT_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

quilts.register()  # before a test makes settings that name them
HERE = Path(__file__).parent
SHARED = Path(os.environ.get("BISSLIGHT_SHARED", HERE.parent.parent / "shared"))


class Recorded:
    """An .npz of recorded numbers: rec["name"] is a tensor, rec.meta its settings."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.arrays = {name: file[name] for name in file.files}
        self.meta: dict[str, Any] = json.loads(bytes(self.arrays.get("meta_json", b"{}")))

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(np.asarray(self.arrays[name]))

    def group(self, prefix: str) -> dict[str, Tensor]:
        """All arrays under prefix/, by the rest of their names."""
        return {
            k.removeprefix(f"{prefix}/"): self[k] for k in self.arrays if k.startswith(f"{prefix}/")
        }


def fixture(name: str) -> Path:
    """A recorded file, tests/data/NAME."""
    return HERE / "data" / name


def recorded(name: str) -> Recorded:
    """The recorded run tests/data/NAME."""
    return Recorded(fixture(name))


def shared(path: str) -> Path:
    """Photographs, or the paper's text; the test skips where they are missing."""
    if not (SHARED / path).exists():
        pytest.skip(f"{SHARED / path} is not here (see BISSLIGHT_SHARED)")
    return SHARED / path


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest difference over the largest reference value stays below the tolerance."""
    a, b = actual.detach().double(), expected.detach().double()
    error = float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))
    assert a.shape == b.shape and error <= tolerance, f"relative error {error:.3g} > {tolerance}"


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    """Forget a signal that an earlier test sent."""
    stop.reset()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def once(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder that all test processes share, while none of the others is at it."""
    base = factory.getbasetemp()
    where = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    where.mkdir(exist_ok=True)
    with (where / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield where


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of `pretrain` of one epoch, mae/ and ijepa/; what they learned does not matter."""
    with once(tmp_path_factory, "pretrained") as where:
        whole = quilts.quilts_pool(0)
        some = whole._replace(images=whole.images[:160])
        about = {"pool": "own", "epochs": 1, "warmup_epochs": 0, "batch": 20}
        for pretext in ("mae", "ijepa"):
            cfg = PretrainConfig(backbone="vit_mini", pretext=pretext, **about)
            pretrain(cfg, where / pretext, pool=some)
    return where


@pytest.fixture(scope="session")
def weights(pretrained: Path) -> Path:
    """A run of `pretrain` with MAE."""
    return pretrained / "mae"


@pytest.fixture(scope="session")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy runs on quilts, to be read or copied: `aligned`, and PEFT `with` and `without` it."""
    peft = "--epochs 2 --batch 40 --seeds 2 --warmup-epochs 0"
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    steps = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8"
    with once(tmp_path_factory, "runs") as where:
        for line in (
            f"align {own} {steps} --probe-epochs 1 --eval-every 1 --warmup 0 --out {where}/aligned",
            f"finetune --from {where}/aligned {peft} --lr 1e-2 --out {where}/with",
            f"finetune {own} {peft} --grid 1e-3,1e-2 --out {where}/without",
        ):
            assert cli.run([*line.split(), "--quiet"]) == 0
    return where


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drawn images, data/, and the golden runs, runs/, of all test processes together."""
    with once(tmp_path_factory, "golden") as where:
        if not (where / "data").exists():
            make_data(where / "data")
    return where


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on loopback."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
