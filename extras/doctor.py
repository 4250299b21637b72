"""`bisslight doctor`: is this machine ready? What is there, and what to do where it is not.

torch is imported inside, since its absence is one of the findings. Leaves out the images of
datasets, which `bisslight data check` opens.
"""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

Row = dict[str, str]  # what, state (ok, missing, low, damaged, or bad: nothing works), detail
NEED = 5  # GB that a run may want; the largest weights are 10


def doctor(data_root: Path | None = None, digests: bool = False) -> list[Row]:
    """A row a finding.

    Args:
        data_root: where the benchmarks are; None: $BISSLIGHT_DATA, else ./data.
        digests: tell the weight files' sha256, which takes a minute for 10 GB.
    """
    plot = "pip install 'bisslight[plot]' for the demo and --picture"
    found = ("ok", "matplotlib") if find_spec("matplotlib") else ("missing", plot)
    rows = [row("pictures", *found), folder("runs/", Path.cwd() / "runs", "give --out")]
    try:
        import torch
        import torchvision

        torch.ops.torchvision.nms  # noqa: B018  # is there only if the two belong together
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        how = "install torch and torchvision together: pip install -U torch torchvision"
        return [row("torch", "bad", f"{why}; {how}"), *rows]
    from extras.datasets import list_all

    cache = Path(torch.hub.get_dir()) / "checkpoints"
    root = data_root or Path(os.environ.get("BISSLIGHT_DATA", "data"))
    told = f"{torch.__version__}, torchvision {torchvision.__version__}"
    rows = [row("torch", "ok", told), *devices(), *rows]
    rows += [folder("cache", cache, "set TORCH_HOME"), *weights(digests)]
    for dataset in list_all(root):
        state = str(dataset["state"]).replace("there", "ok")
        how = "; give --partial" if state.startswith("partial") else ""
        rows.append(row(dataset["name"], state.partition(":")[0], dataset["detail"] + how))
    return rows


def row(what: str, state: str, detail: str) -> Row:
    return {"what": what, "state": state, "detail": detail}


def devices() -> Iterator[Row]:
    """Where the commands will compute, and whether in bfloat16."""
    import torch

    if not torch.cuda.is_available():
        lacking = torch.version.cuda is None and shutil.which("nvidia-smi")
        how = "there is an NVIDIA driver, but this torch is without CUDA: install one with it"
        how = how if lacking else "a GPU is needed for the paper's sizes"
        threads = f"CPU, {torch.get_num_threads()} threads"
        yield row("device", "missing" if lacking else "ok", f"{threads}; {how}")
        return
    for i in range(torch.cuda.device_count()):
        free, total = (x / 1e9 for x in torch.cuda.mem_get_info(i))
        name = torch.cuda.get_device_name(i)
        yield row(f"cuda:{i}", "ok", f"{name}, {free:.0f} of {total:.0f} GB free")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield row("bfloat16", "missing", "this GPU has none: give --no-amp for float32")


def folder(what: str, path: Path, how: str) -> Row:
    """Whether a folder is there or can be made, and the room on its disk."""
    at = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(at).free / 1e9
    if not (at.is_dir() and os.access(at, os.W_OK | os.X_OK)):
        return row(what, "bad", f"{at} {'is read-only' if at.is_dir() else 'is a file'}, {how}")
    if free < NEED:
        return row(what, "low", f"{free:.0f} GB free in {at}; make room, or {how}")
    return row(what, "ok", f"{path} can be written, {free:.0f} GB free")


def weights(digests: bool) -> Iterator[Row]:
    """The official files: there or not, and of the right size."""
    from config import Model
    from run import sha256
    from weights import OFFICIAL, weights_of

    for (backbone, pretext), (url, size) in OFFICIAL.items():
        path = weights_of(Model(backbone=backbone, pretext=pretext, rank=1, alpha=1, drop_path=0))
        found = path.stat().st_size / 1e6 if path.exists() else 0.0
        state, detail = "ok", f"{path}, {found:.0f} MB"
        if not path.exists():
            state, detail = (
                "missing",
                f"{size:.0f} MB, fetched on first use; or put {url} at {path}",
            )
        elif abs(found - size) > size / 100:
            state, detail = (
                "damaged",
                f"{detail} of {size:.0f}; delete it, it will be fetched again",
            )
        elif digests:
            detail += f", sha256 {sha256(path)}"
        yield row(f"{backbone} {pretext}", state, detail)
