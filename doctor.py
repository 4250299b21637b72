"""Is this machine ready? What each check found, and where it is not well, what to do.

Leaves out: digests of weight files, unless asked for (10 GB take a minute), and the images of datasets (`data check`).
torch is imported inside, since its absence is one of the findings.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Finding(NamedTuple):
    """One line. `bad` is what no command can work with; missing and damaged things concern some commands only."""

    what: str
    state: str  # ok, missing, low, damaged or bad
    detail: str  # what is there, or what to do


def examine(data_root: Path | None, digests: bool) -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    found = network()
    yield found
    yield pictures()
    if found.state == "ok":
        yield from devices()
    yield room("disk", Path.cwd(), "a ViT-H run wants 5", "make room, or give --out on another disk")
    yield writable("runs/", Path.cwd() / "runs", "give --out")
    if found.state != "ok":
        return
    import torch

    cache = Path(torch.hub.get_dir()) / "checkpoints"
    yield writable("cache", cache, "set TORCH_HOME")
    yield room("cache disk", cache, "the largest weights are 10 GB", "make room, or set TORCH_HOME to another disk")
    yield from weights(digests)
    yield from datasets(data_root)


def network() -> Finding:
    """Torch and torchvision import, and belong together: torchvision's operators exist only if they do."""
    try:
        import torch
        import torchvision

        torch.ops.torchvision.nms  # noqa: B018
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        how = "install torch and torchvision together: pip install -U torch torchvision"
        return Finding("torch", "bad", f"{why}; {how}")
    return Finding("torch", "ok", f"{torch.__version__}, torchvision {torchvision.__version__}")


def pictures() -> Finding:
    try:
        import matplotlib
    except ImportError:
        return Finding("pictures", "missing", "pip install 'bisslight[plot]' for the demo and evaluate --picture")
    return Finding("pictures", "ok", f"matplotlib {matplotlib.__version__}")


def devices() -> Iterator[Finding]:
    """Where the commands will compute, and whether in bfloat16."""
    import torch

    if not torch.cuda.is_available():
        threads = f"CPU, {torch.get_num_threads()} threads"
        if torch.version.cuda is None and shutil.which("nvidia-smi"):
            how = "there is an NVIDIA driver, but this torch is without CUDA: install one with it"
            yield Finding("device", "missing", f"{threads}; {how}")
        else:
            yield Finding("device", "ok", f"{threads}; a GPU is needed for the paper's sizes")
        yield Finding("bfloat16", "ok", "not used on a CPU")
        return
    for i in range(torch.cuda.device_count()):
        free, total = (x / 1e9 for x in torch.cuda.mem_get_info(i))
        name = torch.cuda.get_device_name(i)
        yield Finding(f"cuda:{i}", "ok", f"{name}, {free:.0f} of {total:.0f} GB free")
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    how = "autocast works in bfloat16" if bf16 else "this GPU has none: give --no-amp for float32"
    yield Finding("bfloat16", "ok" if bf16 else "missing", how)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def room(what: str, path: Path, need: str, how: str) -> Finding:
    """Free space where a path is or would be."""
    free = shutil.disk_usage(existing(path)).free / 1e9
    low = free < 5
    return Finding(what, "low" if low else "ok", f"{free:.0f} GB free in {existing(path)}, {need}{f'; {how}' * low}")


def writable(what: str, path: Path, how: str) -> Finding:
    """Whether a folder is there, or can be made, and written."""
    at = existing(path)
    good = at.is_dir() and os.access(at, os.W_OK | os.X_OK)
    why = "is read-only" if at.is_dir() else "is a file"
    return Finding(what, "ok" if good else "bad", f"{path} can be written" if good else f"{at} {why}, {how}")


def weights(digests: bool) -> Iterator[Finding]:
    """The official files: there or not, their size, and whether they are what was downloaded."""
    from config import Shape, UsageError
    from fetch import verify
    from loading import OFFICIAL, cached
    from runtime import sha256

    for (backbone, pretext), (url, size) in OFFICIAL.items():
        what = f"{backbone} {pretext}"
        path = cached(Shape(backbone=backbone, pretext=pretext))
        assert path is not None
        flags = f"--backbone {backbone}" + (" --pretext ijepa" if pretext == "ijepa" else "")
        if not path.exists():
            part = path.with_name(f"{path.name}.part")
            done = f", {part.stat().st_size / 1e9:.2f} GB have arrived" if part.exists() else ""
            how = f"{size / 1e9:.2f} GB, fetched on first use of {flags}{done}; or put {url} at {path}"
            yield Finding(what, "missing", how)
            continue
        is_ = path.stat().st_size
        if abs(is_ - size) > size / 100:
            how = f"{path} has {is_} bytes, about {size} are expected; delete it, it will be fetched again"
            yield Finding(what, "damaged", how)
            continue
        known = path.with_name(f"{path.name}.sha256").exists()
        digest = "digest not checked, --digests does" if known else "no digest was recorded, it was put there by hand"
        if known and digests:
            try:
                verify(path, sha256(path))
            except UsageError as error:
                yield Finding(what, "damaged", str(error))
                continue
            digest = "digest verified"
        yield Finding(what, "ok", f"{path}, {is_ / 1e9:.2f} GB, {digest}")


def datasets(data_root: Path | None) -> Iterator[Finding]:
    """The benchmarks and the pool, by their lists and file names."""
    from config import Machine
    from loading import resolved_machine
    from tasks import BENCHMARKS, state_of

    root = resolved_machine(Machine(data_root=data_root)).data_root
    assert root is not None
    for name in (*BENCHMARKS, "imagenet"):
        state, detail = state_of(name, root)
        how = {"partial": "; give --partial, or move it away and `bisslight data download` it", "there": ""}.get(
            state, ""
        )
        yield Finding(name, {"there": "ok"}.get(state, state), detail + how)
