"""`bisslight doctor`: is this machine ready? What is there, and what to do where it is not.

torch is imported inside, since its absence is one of the findings. Leaves out the images of
datasets, which `bisslight data check` opens.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

Row = tuple[str, str, str]  # what, state, detail
NEED = 5  # GB that a run may want; the largest weights are 10


def doctor(data_root: Path | None = None) -> dict[str, list[dict[str, str]]]:
    """A row a finding: what, state (ok, missing, low, damaged; bad: nothing works), detail.

    Args:
        data_root: where the benchmarks are; None: $BISSLIGHT_DATA, else ./data.
    """
    found = examine(data_root or Path(os.environ.get("BISSLIGHT_DATA", "data")))
    rows = [dict(zip(("what", "state", "detail"), row, strict=True)) for row in found]
    return {"machine": rows, "problems": [row for row in rows if row["state"] == "bad"]}


def examine(root: Path) -> Iterator[Row]:
    """All findings; nothing more where torch does not work."""
    yield folder("runs/", Path.cwd() / "runs", "give --out")
    try:
        import torch
        import torchvision

        torch.ops.torchvision.nms  # noqa: B018  # is there only if the two belong together
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        how = "install torch and torchvision together: pip install -U torch torchvision"
        yield "torch", "bad", f"{' '.join(str(error).split())}; {how}"
        return
    from extras.datasets import list_all

    yield "torch", "ok", f"{torch.__version__}, torchvision {torchvision.__version__}"
    device = f"CPU, {torch.get_num_threads()} threads; the paper's sizes need a GPU that torch sees"
    if torch.cuda.is_available():
        free, total = (x / 1e9 for x in torch.cuda.mem_get_info())
        device = f"{torch.cuda.get_device_name()}, {free:.0f} of {total:.0f} GB free"
    yield "device", "ok", device
    yield folder("cache", Path(torch.hub.get_dir()) / "checkpoints", "set TORCH_HOME")
    yield from weights()
    for dataset in list_all(root):
        state = dataset["state"].replace("there", "ok").partition(":")[0]
        how = "; give --partial" if state == "partial" else ""
        yield dataset["name"], state, dataset["detail"] + how


def folder(what: str, path: Path, how: str) -> Row:
    """Whether a folder is there or can be made, and the room on its disk."""
    at = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(at).free / 1e9
    if not (at.is_dir() and os.access(at, os.W_OK | os.X_OK)):
        return what, "bad", f"{at} {'is read-only' if at.is_dir() else 'is a file'}, {how}"
    state, more = ("low", f"; make room, or {how}") if free < NEED else ("ok", "")
    return what, state, f"{path} can be written, {free:.0f} GB free{more}"


def weights() -> Iterator[Row]:
    """The official files: there or not, and of the right size."""
    from config import Model
    from weights import OFFICIAL, weights_of

    for (backbone, pretext), (url, size) in OFFICIAL.items():
        path = weights_of(Model(backbone=backbone, pretext=pretext, rank=1, alpha=1, drop_path=0))
        found = path.stat().st_size / 1e6 if path.exists() else 0.0
        state, detail = "ok", f"{path}, {found:.0f} MB"
        if not path.exists():
            state, detail = "missing", f"{size:.0f} MB, fetched on first use from {url}"
        elif abs(found - size) > size / 100:
            state, detail = "damaged", f"{detail} of {size:.0f}; delete it, it is fetched again"
        yield f"{backbone} {pretext}", state, detail
