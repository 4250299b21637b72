"""What a new GPU is asked first: stages of a few minutes each, which go on where they stopped.

    python -m experiments.first_gpu_hour --out runs/gpu --stages ceilings,tests,alternations,cg
    python -m experiments.first_gpu_hour --out runs/gpu --stages syncs,kernels,mfac,loader,bits
    python -m experiments.first_gpu_hour --out runs/gpu --stages compile,study --data DIR
    python -m experiments.first_gpu_hour --out runs/try --device cpu --tiny     # a rehearsal

    ceilings      how fast the card multiplies and copies: what all else is measured against
    tests         `make gpu`: does it compute what the CPU computes?
    alternations  time and memory of ViT-B, L, H with M-FAC and without curvature, beside the
                  forecast (experiments/memory_forecast.py) and tab:memory_single_gpu
    cg            the same with conjugate gradients: B whole, but for one upper step; L and H cut
                  and reduced; in float32 and with TF32
    syncs         where the CPU waits for the card in an alternation
    kernels       what the card does in an alternation
    mfac          lines 10 and 13 of Algorithm 1, and what is logged of them
    loader        photographs a second, from JPEG files to the card
    bits          are two runs, and a stopped and continued one, equal to the bit?
    compile       blocks by torch.compile against eager ones
    study         does aligning help a ViT-S? See `experiments/gpu_study.py`

A stage writes OUT/STAGE.json, and all that are done make OUT/summary.md. To do a stage again,
delete its file.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple, TypeVar

import torch
import typer
from PIL import Image

from align import align
from bisslight import Span, agreement
from config import BACKBONES, AlignConfig, Record
from data import Images, Split, Transform, batches, rng, stream
from experiments import compile as compilation
from experiments import gpu_study, time_and_memory
from experiments.recipe import markdown
from mfac import mfac
from support.checkpoints import arch_of, build_head, build_vit, initialise
from support.experiment import device_of
from support.processes import Stopped, start, stop
from support.runs import sha256, write_atomic

T = TypeVar("T")
HERE = Path(__file__).parent
FORECAST = HERE / "memory_forecast.json"  # experiments/memory_forecast.py writes it


class Card(NamedTuple):
    """What the stages are run on, and at which size."""

    out: Path
    device: torch.device
    tiny: bool  # a rehearsal
    data: Path | None
    minutes: float
    jobs: int

    @property
    def backbones(self) -> tuple[str, ...]:
        return ("vit_mini",) if self.tiny else ("vit_b16", "vit_l16", "vit_h14")

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"


def main(
    out: Path = Path("runs/first_gpu_hour"),
    stages: Annotated[str, typer.Option(help="Comma list; all by default.")] = "",
    device: str = "cuda",
    tiny: Annotated[bool, typer.Option(help="Toy sizes: a rehearsal, a CPU will do.")] = False,
    data: Annotated[Path | None, typer.Option(help="Photographs of the study.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for the study.")] = 16.0,
    jobs: Annotated[int, typer.Option(help="Runs of the study at a time.")] = 8,
) -> None:
    """Do the stages that have not been done."""
    known = [stage.__name__ for stage in STAGES]
    wanted = stages.split(",") if stages else known
    for name in wanted:
        if name not in known:
            raise typer.BadParameter(f"{name} is no stage; there are {', '.join(known)}")
    where = device_of(AlignConfig(backbone="vit_b16", dataset="own", pool="own", device=device))
    card = Card(out, where, tiny, data, minutes, jobs)
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for stage in STAGES:
        path = out / f"{stage.__name__}.json"
        if stage.__name__ not in wanted or path.exists():
            continue
        print(f"\n{stage.__name__} ...", flush=True)
        began = time.perf_counter()
        try:
            rows = stage(card)
        except Exception:  # the next stage may not need what is missing here
            failed.append(stage.__name__)
            write_atomic(out / f"{stage.__name__}.error.txt", traceback.format_exc())
            traceback.print_exc()
            continue
        finally:
            free_memory(card)
        seconds = time.perf_counter() - began
        heading = f"{stage.__name__}: {seconds:.0f} s on {name_of(card)}"
        write_atomic(path, json.dumps({"heading": heading, "rows": rows}, indent=1) + "\n")
        print(f"{heading}\n{markdown(rows)}", flush=True)
        summarise(card)
    if failed:
        print(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def free_memory(card: Card) -> None:
    """Give the card back what a stage took, for the processes of the next one."""
    gc.collect()
    if card.gpu:
        torch.cuda.empty_cache()


def summarise(card: Card) -> None:
    """Write OUT/summary.md from the stages that are done."""
    parts = ["# The first hour on a GPU"]
    if card.tiny or not card.gpu:
        parts.append("**A rehearsal at toy size: its figures say nothing about a GPU.**")
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    parts.append(f"{name_of(card)}; {os.cpu_count()} CPU cores; {versions}.")
    for stage in STAGES:
        path = card.out / f"{stage.__name__}.json"
        if path.exists():
            result = json.loads(path.read_text())
            parts += [f"## {result['heading']}", markdown(result["rows"])]
    write_atomic(card.out / "summary.md", "\n\n".join(parts) + "\n")


def name_of(card: Card) -> str:
    return torch.cuda.get_device_name(card.device) if card.gpu else "a CPU"


def seconds_of(step: Callable[[], object], card: Card, repeats: int = 10) -> float:
    """Median seconds of a step on the device, after two that warm up."""
    times: list[float] = []
    for _ in range(repeats + 2):
        if card.gpu:
            first = torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            first.record()
            step()
            last.record()
            torch.cuda.synchronize(card.device)
            times.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return median(times[2:])


# --- the card -------------------------------------------------------------------------------------


def ceilings(card: Card) -> list[Record]:
    """Matrix products in each precision, and a copy."""
    side = 256 if card.tiny else 8192
    rows: list[Record] = []
    kinds = {
        "bfloat16": (torch.bfloat16, False),
        "TF32": (torch.float32, True),
        "float32": (torch.float32, False),
        "float64": (torch.float64, False),
    }
    for name, (dtype, tf32) in kinds.items():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a = torch.randn(side, side, device=card.device).to(dtype)
        seconds = seconds_of(partial(torch.matmul, a, a), card)
        what = f"product {side} x {side}, {name}"
        rows.append({"what": what, "rate": f"{2 * side**3 / seconds / 1e12:.4g} TFLOP/s"})
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.empty(2**20 if card.tiny else 2**30, dtype=torch.uint8, device=card.device)
    y = torch.empty_like(x)
    seconds = seconds_of(partial(y.copy_, x), card)
    rate = f"{2 * x.numel() / seconds / 1e12:.3g} TB/s"
    rows.append({"what": "copy, read and written", "rate": rate})
    if card.gpu:
        pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        seconds = seconds_of(partial(y[: 2**28].copy_, pinned, non_blocking=True), card)
        rate = f"{2**28 / seconds / 1e9:.3g} GB/s"
        rows.append({"what": "copy from pinned memory", "rate": rate})
    return rows


def tests(card: Card) -> list[Record]:
    """The tests with the marker `gpu`, in a process of their own; OUT/tests.txt has all of it."""
    mark = "1" if card.gpu else "cpu"
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-s", "--durations=10", "-q"]
    call += ["-p", "no:cacheprovider", "-W", "default", "tests/test_gpu.py"]
    if card.tiny:  # the rest takes minutes
        call += ["-k", "pass or mfac or bfloat16 or stopped or memory"]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"BISSLIGHT_GPU": mark, "PYTHONPATH": path}
    outcome = subprocess.run(
        call, cwd=HERE.parent, env=env, capture_output=True, text=True, check=False
    )
    write_atomic(card.out / "tests.txt", outcome.stdout + outcome.stderr)
    lines = outcome.stdout.splitlines()
    said = [
        line
        for line in lines
        if re.match(r"FAILED|ERROR|E  |SKIPPED|\.?(bits|[a-z0-9-]+,? .*:)", line)
    ]
    told = [lines[-1] if lines else outcome.stderr[-300:], *said]
    return [{"pytest": line.replace("|", "/")} for line in told[:60]]


# --- time and memory ------------------------------------------------------------------------------


def alternations(card: Card) -> list[Record]:
    """The paper's batches and lengths; seconds are those of the second alternation or the third."""
    forecast: Record = json.loads(FORECAST.read_text()) if FORECAST.exists() else {}
    rows = []
    for backbone in card.backbones:
        for method in ("mfac", "identity"):
            expected = forecast.get(f"{backbone} {method}", {})
            row = cost(card, backbone, method, repeats=2)
            row["forecast s"] = expected.get("seconds", "")
            row["forecast GB"] = expected.get("peak_GB", "")
            rows.append(row)
            print(row, flush=True)
    return rows


def cg(card: Card) -> list[Record]:
    """One upper step: the seconds of a whole alternation are those of its parts, see identity's."""
    rows = []
    for backbone in card.backbones:
        whole = backbone in ("vit_b16", "vit_mini")
        lower = 20 if whole and not card.tiny else 2
        cut = {"micro_batch": None if whole else 64, "lower_steps": lower, "upper_steps": 1}
        for method, more in (("identity", {}), ("cg", {}), ("cg", {"tf32": True})):
            row = cost(card, backbone, method, repeats=1, **cut, **more)
            rows.append(row)
            print(row, flush=True)
    return rows


def cost(card: Card, backbone: str, method: str, repeats: int, **more: object) -> Record:
    """Seconds and peak memory of an alternation, by `time_and_memory`."""
    sizes: Record = {"p_batch": 16, "d_batch": 8, "rank": 4} if card.tiny else {}
    names = {"backbone": backbone, "hypergrad": method, "dataset": "own", "pool": "own"}
    settings = {"device": str(card.device), "alternations": repeats + 1} | sizes | more
    cfg = AlignConfig(**names, **settings)
    device = device_of(cfg)
    found = time_and_memory.measure(time_and_memory.alternations(cfg, device), device)
    name = f"{method} with TF32" if cfg.tf32 else method
    what = f"{cfg.lower_steps} + {cfg.upper_steps} steps"
    if cfg.micro_batch:
        what += f", micro-batches of {cfg.micro_batch}"
    row = time_and_memory.row_of(method, what, found, backbone)
    return {"backbone": backbone} | row | {"method": name}


def syncs(card: Card) -> list[Record]:
    """Waits of a second alternation by the place in the code, as torch's debug mode tells them."""
    steps = random_alternations(card)
    next(steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if card.gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            next(steps)
        finally:
            if card.gpu:
                torch.cuda.set_sync_debug_mode("default")
    places: Counter[str] = Counter()
    for warning in caught:
        if "synchroniz" in str(warning.message):
            places[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
    rows: list[Record] = []
    for place, count in places.most_common(20):
        rows.append({"place": place, "waits in an alternation": count})
    return rows or [{"place": "none", "waits in an alternation": 0}]


def kernels(card: Card) -> list[Record]:
    """Operations of an alternation by their time on the device; those above 1 %."""
    steps = random_alternations(card)
    next(steps)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if card.gpu:
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        next(steps)
    rows: list[Record] = []
    for event in profile.key_averages():
        micros = event.self_device_time_total if card.gpu else event.self_cpu_time_total
        rows.append(
            {"operation": event.key[:90].replace("|", "/"), "calls": event.count, "ms": micros}
        )
    total = sum(row["ms"] for row in rows)
    rows.sort(key=lambda row: -float(row["ms"]))
    largest = [row for row in rows if row["ms"] > 0.01 * total][:30]
    for row in largest:
        row["share"] = f"{100 * row['ms'] / total:.1f} %"
        row["ms"] = f"{row['ms'] / 1e3:.2f}"
    return largest


def random_alternations(card: Card) -> Iterator[object]:
    """Alternations of the smallest backbone, M-FAC, at the paper's size."""
    sizes: Record = {"p_batch": 16, "d_batch": 8, "rank": 4} if card.tiny else {}
    cfg = AlignConfig(
        backbone=card.backbones[0], dataset="own", pool="own", device=str(card.device),
        alternations=2, **sizes,
    )  # fmt: skip
    return time_and_memory.alternations(cfg, card.device)


def mfac_lines(card: Card) -> list[Record]:
    """Milliseconds at the paper's rank and N_L; per upper step, but for line 10."""
    rows: list[Record] = []
    for backbone in card.backbones:
        arch = BACKBONES[backbone]
        K = arch.depth
        p = 4 * 64 * arch.dim
        G = torch.randn(K, 20, p, device=card.device)
        g = torch.randn(K, p, device=card.device)
        inverse = mfac(G, 1e-3)
        q = inverse(g)
        span = Span(G, inverse)
        other = Span(G, torch.clone)  # as with identity: no products are known
        parts: dict[str, Callable[[], object]] = {
            "line 10": partial(mfac, G, 1e-3),
            "line 13": partial(inverse, g),
            "span, of an alternation": partial(Span, G, inverse),
            "agreement": partial(agreement, g, q, span),
            "agreement, identity": partial(agreement, g, q, other),
            "G to the CPU": G.cpu,
        }
        row: Record = {"backbone": backbone, "G": f"{K} x 20 x {p}"}
        for name, step in parts.items():
            row[f"{name}, ms"] = f"{1e3 * seconds_of(step, card):.3g}"
        rows.append(row)
    return rows


# --- photographs ----------------------------------------------------------------------------------


def draw_photographs(card: Card) -> list[Path]:
    """JPEG files with the size and weight of photographs: 500 x 375, about 90 kB."""
    count, size = (24, (60, 45)) if card.tiny else (512, (500, 375))
    g = torch.Generator().manual_seed(0)
    files = []
    for i in range(count):
        path = card.out / "photographs" / f"class{i % 2}" / f"{i}.jpg"
        files.append(path)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = torch.randint(256, (12, 16, 3), generator=g).byte().numpy()
        smooth = Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC)
        grain = torch.randint(256, (size[1], size[0], 3), generator=g).byte().numpy()
        image = Image.blend(smooth, Image.fromarray(grain), 0.12)
        image.save(path, quality=90)
    return files


def loader(card: Card) -> list[Record]:
    """Photographs a second through workers; an alternation of 20 + 8 steps takes 5,632 of them."""
    files = draw_photographs(card)
    arch = BACKBONES[card.backbones[0]]
    transform = Transform(arch.image_size, (0.5,) * 3, (0.25,) * 3, "crop")
    images = Images(Split(files, torch.zeros(len(files))), transform, True, 0, "loader")
    batch = 8 if card.tiny else 256
    rows: list[Record] = [{"what": "bytes of a file", "rate": f"{files[0].stat().st_size:,}"}]
    for workers in (1, 2) if card.tiny else (4, 8, 16):
        steps = 4 + (2 if card.tiny else 2 * workers)
        draws = stream(len(files), batch, 0, "loader", range(steps))
        ends = []
        for x, _, _ in batches(images, draws, workers, card.device):
            float(x[0, 0, 0, 0])  # waits until it has arrived
            ends.append(time.perf_counter())
        rate = batch * (steps - 4) / (ends[-1] - ends[3])  # workers start in the first batches
        rows.append({"what": f"photographs a second, {workers} workers", "rate": f"{rate:.0f}"})
    path = card.out / "alternations.json"
    if path.exists():
        for row in json.loads(path.read_text())["rows"]:
            if row["method"] == "mfac" and row["seconds"][0].isdigit():
                wanted = 5632 / float(row["seconds"])
                what = f"{row['backbone']} can take, a second"
                rows.append({"what": what, "rate": f"{wanted:.0f}"})
    return rows


def bits(card: Card) -> list[Record]:
    """The same run twice, and once stopped after its first alternation and continued."""
    draw_photographs(card)
    backbone = card.backbones[0]
    photographs = card.out / "photographs"
    weights = card.out / "random.pth"
    names = {"backbone": backbone, "dataset": f"folder:{photographs}", "pool": str(photographs)}
    sizes = {"p_batch": 8, "d_batch": 8} if card.tiny else {"p_batch": 64, "d_batch": 32}
    steps = {"alternations": 3, "lower_steps": 3, "upper_steps": 2, "warmup": 1}
    machine = {"device": str(card.device), "save_minutes": 0.0, "workers": 2, "weights": weights}
    cfg = AlignConfig(**names, **sizes, **steps, **machine, probe_epochs=1, eval_every=1)
    if not weights.exists():
        write_random_weights(cfg, weights)
    runs = [card.out / f"bits-{name}" for name in ("whole", "again", "stopped")]
    for run in runs[:2]:
        align(cfg, run, force=True)
    start()
    try:
        align(cfg, runs[2], force=True, track=stop_after_one)
    except Stopped:
        stop.flag.value = 0
    align(cfg, runs[2])
    weights.unlink()  # hundreds of megabytes
    digests = [sha256(run / "adapter.safetensors") for run in runs]
    logs = [(run / "metrics.jsonl").read_text() for run in runs]
    rows: list[Record] = []
    for name, k in (("run again", 1), ("stopped and continued", 2)):
        same = digests[k] == digests[0]
        rows.append({"run": name, "adapter": same, "all numbers": logs[k] == logs[0]})
    return rows


def stop_after_one(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
    """Follow a run and ask it to stop after its first alternation."""
    for item in items:
        if label == "align":
            stop.flag.value = signal.SIGTERM
        yield item


def write_random_weights(cfg: AlignConfig, path: Path) -> None:
    """A checkpoint of MAE's layout that has learned nothing."""
    arch = arch_of({}, cfg)
    vit = build_vit(arch)
    decoder = build_head(arch, "mae")
    initialise([vit, decoder], "mae", rng(0, "random"))
    torch.save({"model": vit.state_dict() | decoder.state_dict()}, path)


# --- what might be done ---------------------------------------------------------------------------


def compiled(card: Card) -> list[Record]:
    """A gradient step with compiled blocks against eager ones, at the paper's batches."""
    rows = []
    for backbone in card.backbones:
        lower, upper = (4, 4) if card.tiny else (256, 64)
        rows += compilation.compare(backbone, upper, lower, card.device)
    return rows


def study(card: Card) -> list[Record]:
    """Does aligning help a ViT-S? Pretraining, alignment and PEFT within --minutes."""
    if card.data is None:
        raise typer.BadParameter("--data: the study needs a directory of photographs")
    return gpu_study.run(card.data, card.out, card.minutes, card.jobs, card.device, card.tiny)


Stage = Callable[[Card], list[Record]]


def named(name: str, stage: Stage) -> Stage:
    """A stage with a name that a module or another function has."""
    stage.__name__ = name
    return stage


STAGES: list[Stage] = [
    ceilings, tests, alternations, cg, syncs, kernels, named("mfac", mfac_lines), loader, bits,
    named("compile", compiled), study,
]  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
