"""What an alternation costs, phase by phase: M-FAC, CG, no curvature, and plain PEFT steps.

Weights and images are random, since times do not depend on their values. The loop that is timed is
`bisslight.algorithm_1` itself: the functions that it is given are wrapped, and a clock that waits
for the device notes when each begins and ends; what lies between them are the passes. Each method
runs at its natural precision: bfloat16 on a GPU (--no-amp: float32), but for the Hessian-vector
products of CG, which need float32. Operations are counted by torch, so they are those that ran.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

import mae
from align import begin, hypergradient
from bisslight import State, algorithm_1, gradients, pairs
from commands import AlignConfig
from config import BACKBONES, UsageError
from data import rng
from extras.figures import COLOURS, Drawn, pyplot, save
from extras.settings import BenchConfig
from lora import Backbone, DownstreamLoss, Examples, init_head, init_theta
from paper import memory_of
from run import Run, checking, read_json
from training import Track, pick_device, trainable, untracked
from weights import build_head, build_vit

LOG = logging.getLogger("bisslight")
METHODS = ("mfac", "cg", "identity", "peft")
CLASSES = 200  # CUB-200's, which the paper timed
PHASES = ("lower passes", "line 10", "upper passes", "line 13", "optimisers")
Row = dict[str, Any]


def bench(
    cfg: BenchConfig,
    out: Path,
    *,
    force: bool = False,
    track: Track = untracked,
    against: Sequence[Path] | None = None,
) -> Row:
    """Measure all methods, one after the other, into the run directory `out`.

    Args:
        against: earlier benches, which are beside this one in the picture.
    """
    pyplot()
    results = [read_json(path / "result.json", "give a finished bench") for path in against or ()]
    if strange := [found for found in results if "rows" not in found]:
        raise UsageError(f"--against {strange[0].get('out')}: is not a bench")
    backbone = size(cfg)
    run = Run(out, "bench", cfg, force)
    found = run.result
    if found is None:
        run.close()  # a stop ends it at once: there is nothing to save
        LOG.info("%s", plan(cfg)["time"])
        rows: list[Row] = []
        for _ in track(measure(cfg, backbone, rows), len(METHODS), "bench"):
            pass
        found = {"backbone": backbone, "rows": rows, "out": str(out)} | ratios(rows)
        run.write("result.json", json.dumps(found, indent=1))
    save(draw([*results, found]), out / "cost.png")
    return found


def size(cfg: BenchConfig) -> str:
    """The backbone: as asked, else what a GPU, or a CPU, does in minutes (UsageError)."""
    with checking(f"--device {cfg.device}"):
        gpu = pick_device(cfg.device).type == "cuda"
    return cfg.backbone or ("vit_b16" if gpu else "vit_mini")


def plan(cfg: BenchConfig) -> Row:
    """What there is to do, for --dry-run, and roughly how long it takes."""
    backbone, n = size(cfg), cfg.repeats + 1
    arch, gpu = BACKBONES[backbone].arch, pick_device(cfg.device).type == "cuda"
    images = cfg.lower_steps * cfg.p_batch + 2 * cfg.upper_steps * cfg.d_batch
    forward = (
        24 * arch.depth * arch.dim**2 * (arch.image_size / arch.patch_size) ** 2
    )  # FLOP an image
    seconds = 4 * forward * images * n * len(METHODS) / (5e13 if gpu else 5e10)  # CG takes more
    about = f"roughly {seconds:.0f} s" if seconds < 120 else f"roughly {seconds / 60:.0f} min"
    return {"backbone": backbone, "methods": METHODS, "alternations of each": n, "time": about}


def measure(cfg: BenchConfig, backbone: str, rows: list[Row]) -> Iterator[str]:
    """Add a row a method; one that does not fit says so, and the others go on."""
    for method in METHODS:
        try:
            rows.append({"method": method} | alternation(cfg, backbone, method))
        except torch.OutOfMemoryError:
            rows.append({"method": method, "failed": "out of memory; see --micro-batch"})
        yield method


def alternation(cfg: BenchConfig, backbone: str, method: str) -> Row:
    """Median seconds of an alternation and of its phases (for peft: of N_U steps); its memory."""
    device, clock = pick_device(cfg.device), Clock()
    alternations = timed_alternations(cfg, backbone, method, device, clock)
    counter, gpu = FlopCounterMode(display=False), device.type == "cuda"
    kernels = nullcontext() if gpu else sdpa_kernel(SDPBackend.MATH)  # a CPU's are not counted
    with _FlopCounterMode(counter), kernels:  # the counter itself does not go with autograd.grad
        next(alternations)  # which also warms up
    if gpu:
        clock.wait = torch.cuda.synchronize
        torch.cuda.reset_peak_memory_stats(device)
    clock.lap()
    laps = [clock.lap() for _ in alternations]
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None
    seconds = median(sum(lap.values()) for lap in laps)
    paper, flop = memory_of(method, backbone), counter.get_total_flops() / 1e12
    row = {"seconds": seconds}
    row |= {key: median(lap[key] for lap in laps) for key in PHASES if key in laps[0]}
    row |= {"TFLOP": flop, "TFLOP_per_s": flop / seconds, "hours_500": seconds * 500 / 3600}
    return row | {"peak_GB": peak, "paper_GB": paper and paper[0]}


def timed_alternations(
    cfg: BenchConfig, backbone: str, method: str, device: torch.device, clock: "Clock"
) -> Iterator[Any]:
    """Algorithm 1 on a random network and random images, its functions wrapped for the clock."""
    given = {name: getattr(cfg, name) for name in AlignConfig.model_fields if hasattr(cfg, name)}
    given |= {"backbone": backbone, "dataset": "own", "pool": "own"}
    given |= {"alternations": cfg.repeats + 1, "hypergrad": method if method != "peft" else "mfac"}
    c, arch, g = AlignConfig(**given), BACKBONES[backbone].arch, rng(cfg.seed, "bench")
    with device:
        vit, decoder = build_vit(arch), cast(mae.Decoder, build_head(arch, "mae"))
    network = Backbone(vit, recompute=cfg.recompute).requires_grad_(False)
    task, loss_D = mae.MAE(network, decoder), DownstreamLoss(network)
    theta = init_theta(arch.depth, cfg.rank, arch.dim, g).to(device)
    s = begin(c, theta, task, trainable(init_head(arch.dim, CLASSES, g), device))
    optimiser, line_10, line_13 = map(clock.phase, ("optimisers", "line 10", "line 13"))
    s.opt_P, s.opt_D = (SimpleNamespace(update=optimiser(o.update)) for o in (s.opt_P, s.opt_D))
    images = torch.randn(max(cfg.p_batch, cfg.d_batch), 3, arch.image_size, arch.image_size)
    images, labels = images.to(device), torch.arange(cfg.d_batch, device=device) % CLASSES
    lower = mae.Batch(images[: cfg.p_batch], task.draw(cfg.p_batch, g)[0].to(device))
    pretext = clock.each("lower passes", lower)
    downstream = clock.each("upper passes", Examples(images[: cfg.d_batch], labels))
    rest: Any = {"micro": cfg.micro_batch, "amp": cfg.amp and device.type == "cuda"}
    if method == "peft":
        return peft(s, c, loss_D, downstream, rest)
    invert = line_10(hypergradient(c, theta))
    return algorithm_1(
        s, c, task, loss_D, lambda *given: line_13(invert(*given)), pretext, downstream, **rest
    )


def peft(
    s: State, c: AlignConfig, loss_D: DownstreamLoss, downstream: Iterator[Any], rest: Any
) -> Iterator[None]:
    """Plain fine-tuning: as many steps as an alternation has at the upper level."""
    for _ in range(c.alternations):
        for _ in range(c.upper_steps):
            _, g, g_phi = gradients(loss_D, s.theta_D, s.phi_D, next(downstream), **rest)
            s.opt_D.update([(s.theta_D, g), *pairs(s.phi_D, g_phi)])
        yield


class Clock:
    """Seconds by phase; a phase lasts until another one begins."""

    def __init__(self) -> None:
        self.now, self.began = "", time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.wait: Callable[[], Any] = lambda: None  # for what the device has still to do

    def enter(self, phase: str) -> None:
        """End the phase that is now, and begin another."""
        self.wait()
        time_now = time.perf_counter()
        self.seconds[self.now] += time_now - self.began
        self.now, self.began = phase, time_now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within another; it also decorates a function that is a phase of its own."""
        before = self.now
        self.enter(name)
        yield
        self.enter(before)

    def each(self, phase: str, batch: Any) -> Iterator[Any]:
        """The same batch for every step; a phase begins with each."""
        while True:
            self.enter(phase)
            yield batch

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap."""
        self.enter(self.now)
        seconds, self.seconds = self.seconds, defaultdict(float)
        return dict(seconds)


def ratios(rows: Sequence[Row]) -> Row:
    """CG over M-FAC, and M-FAC's own share of an alternation."""
    by = {row["method"]: row for row in rows if "failed" not in row}
    if not {"mfac", "cg"} <= by.keys():
        return {}
    mfac, cg = by["mfac"], by["cg"]
    keys = [key for key in ("seconds", "peak_GB") if mfac[key]]
    share = (mfac["line 10"] + mfac["line 13"]) / mfac["seconds"]
    return {"cg_over_mfac": {key: cg[key] / mfac[key] for key in keys}, "mfac_share": share}


def draw(results: Sequence[Row]) -> Drawn:
    """The paper's cost figure, seconds and memory by backbone."""
    figure, grid = pyplot().subplots(1, 2, figsize=(5 + 2 * len(results), 3.2))
    said = []
    for axes, key in zip(grid, ("seconds", "peak_GB"), strict=True):
        for i, method in enumerate(METHODS):
            rows = [row for found in results for row in found["rows"] if row["method"] == method]
            values = [row.get(key) or 0.0 for row in rows]
            at = [x + 0.2 * (i - 1.5) for x in range(len(rows))]
            axes.bar_label(axes.bar(at, values, 0.2, color=COLOURS[i], label=method), fmt="%.3g")
            said.append(f"{method} {key} {', '.join(f'{value:.3g}' for value in values)}")
        axes.set_xticks(range(len(results)), [found["backbone"] for found in results])
        axes.set_ylabel(f"{key.replace('_', ' ')} of an alternation")
    grid[0].legend()
    backbones = ", ".join(found["backbone"] for found in results)
    return figure, f"Cost of an alternation for {backbones}: {'; '.join(said)}."
