"""What an alternation costs: M-FAC, CG, no curvature, and plain PEFT steps.

Weights and images are random, since times do not depend on their values. The loop that is timed is
`bisslight.algorithm_1` itself; a clock that waits for the device measures it, and lines 10 and 13.
Each method runs at its natural precision: bfloat16 on a GPU (--no-amp: float32), but for the
Hessian-vector products of CG, which need float32.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

import mae
from align import begin, hypergradient
from bisslight import State, algorithm_1, gradients, pairs
from commands import AlignConfig
from config import BACKBONES
from data import rng
from extras.settings import BenchConfig
from lora import Backbone, DownstreamLoss, Examples, init_head, init_theta
from paper import memory_of
from run import Run, checking
from training import Track, pick_device, trainable, untracked
from weights import build_head, build_vit

METHODS = ("mfac", "cg", "identity", "peft")
CLASSES = 200  # CUB-200's, which the paper timed
Row = dict[str, Any]


def bench(cfg: BenchConfig, out: Path, *, force: bool = False, track: Track = untracked) -> Row:
    """Measure all methods, one after the other, into the run directory `out`."""
    backbone = size(cfg)
    with Run(out, "bench", cfg, force) as run:
        if run.result:
            return run.result
        rows: list[Row] = []
        for method in track(iter(METHODS), len(METHODS), "bench"):
            try:
                rows.append({"method": method} | alternation(cfg, backbone, method))
            except torch.OutOfMemoryError:
                rows.append({"method": method, "failed": "out of memory; see --micro-batch"})
            run.checkpoint(method)
        found = {"backbone": backbone, "rows": rows, "out": str(out)} | ratios(rows)
        return run.finish(found)


def size(cfg: BenchConfig) -> str:
    """The backbone: as asked, else what a GPU, or a CPU, does in minutes (UsageError)."""
    with checking(f"--device {cfg.device}"):
        gpu = pick_device(cfg.device).type == "cuda"
    return cfg.backbone or ("vit_b16" if gpu else "vit_mini")


def plan(cfg: BenchConfig) -> Row:
    """What there is to do, for --dry-run."""
    return {"backbone": size(cfg), "methods": METHODS, "alternations of each": cfg.repeats + 1}


def alternation(cfg: BenchConfig, backbone: str, method: str) -> Row:
    """Median seconds of an alternation (for peft: of N_U steps), of lines 10 and 13; its memory."""
    device = pick_device(cfg.device)
    gpu, ends, times = device.type == "cuda", [], defaultdict(list)

    def timed(line: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            began = now(device)
            found = function(*given)
            times[line].append(now(device) - began)
            return found

        return called

    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in alternations(cfg, backbone, method, device, timed):
        ends.append(now(device))
    seconds = median(end - begin for begin, end in pairwise(ends))  # the first warms up
    lines = {line: median(found) * len(found) / len(ends) for line, found in times.items()}
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None
    row = {"seconds": seconds, **lines, "hours_500": seconds * 500 / 3600, "peak_GB": peak}
    return row | {"paper_GB": (memory_of(method, backbone) or [None])[0]}


def now(device: torch.device) -> float:
    """The time at which the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def alternations(
    cfg: BenchConfig, backbone: str, method: str, device: torch.device, timed: Callable[..., Any]
) -> Iterator[Any]:
    """Algorithm 1 on a random network and images; `timed` notes what lines 10 and 13 take."""
    given = {name: getattr(cfg, name) for name in AlignConfig.model_fields if hasattr(cfg, name)}
    given |= {"backbone": backbone, "dataset": "own", "pool": "own"}
    given |= {"alternations": cfg.repeats + 1, "hypergrad": method.replace("peft", "mfac")}
    c, arch, g = AlignConfig(**given), BACKBONES[backbone], rng(cfg.seed, "bench")
    with device:
        vit, decoder = build_vit(arch), cast(mae.Decoder, build_head(arch, "mae"))
    network = Backbone(vit, recompute=cfg.recompute).requires_grad_(False)
    task, loss_D = mae.MAE(network, decoder), DownstreamLoss(network)
    theta = init_theta(arch.depth, cfg.rank, arch.dim, g).to(device)
    s, _ = begin(c, theta, task, trainable(init_head(arch.dim, CLASSES, g), device))
    side, labels = arch.image_size, torch.arange(cfg.d_batch, device=device) % CLASSES
    images = torch.randn(max(cfg.p_batch, cfg.d_batch), 3, side, side, device=device)
    lower = repeat(mae.Batch(images[: cfg.p_batch], task.draw(cfg.p_batch, g)[0].to(device)))
    upper = repeat(Examples(images[: cfg.d_batch], labels))
    rest: Any = {"micro": cfg.micro_batch, "amp": cfg.amp and device.type == "cuda"}
    if method == "peft":
        return peft(s, c, loss_D, upper, rest)
    line_10 = timed("line 10", hypergradient(c, theta))
    return algorithm_1(
        s, c, task, loss_D, lambda *g: timed("line 13", line_10(*g)), lower, upper, **rest
    )


def peft(
    s: State, c: AlignConfig, loss_D: DownstreamLoss, batches: Iterator[Any], rest: Any
) -> Iterator[None]:
    """Plain fine-tuning: as many steps as an alternation has at the upper level."""
    for _ in range(c.alternations):
        for _ in range(c.upper_steps):
            _, g, g_phi = gradients(loss_D, s.theta_D, s.phi_D, next(batches), **rest)
            s.opt_D.update([(s.theta_D, g), *pairs(s.phi_D, g_phi)])
        yield


def ratios(rows: Sequence[Row]) -> Row:
    """CG over M-FAC, and M-FAC's own share of an alternation."""
    mfac, cg, *_ = rows  # as in METHODS
    if "failed" in mfac | cg:
        return {}
    keys = [key for key in ("seconds", "peak_GB") if mfac[key]]
    share = (mfac["line 10"] + mfac["line 13"]) / mfac["seconds"]
    return {"cg_over_mfac": {key: cg[key] / mfac[key] for key in keys}, "mfac_share": share}
