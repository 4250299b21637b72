"""What an alternation costs: M-FAC, CG and no curvature.

Weights and images are random, since times do not depend on their values. What is timed is
`bisslight.algorithm_1` itself. Lines 10 and 13 cost a method's time less that of `identity`.
Each method runs at its natural precision: bfloat16 on a GPU (--no-amp: float32), but for the
Hessian-vector products of CG, which need float32.
"""

import time
from collections.abc import Iterator
from itertools import pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import torch

import mae
from align import begin, hypergradient
from bisslight import algorithm_1
from commands import AlignConfig
from config import BACKBONES, Common, PositiveInt
from data import rng
from lora import Backbone, DownstreamLoss, Examples, init_head, init_theta
from paper import memory_of
from run import Run, checking
from training import Track, pick_device, trainable, untracked
from weights import build_head, build_vit

METHODS = ("mfac", "cg", "identity")
CLASSES = 200  # CUB-200's, which the paper timed
Row = dict[str, Any]


class BenchConfig(Common):
    """`bench`: what an alternation costs. Random weights and images."""

    backbone: Literal["vit_mini", "vit_b16", "vit_l16", "vit_h14"]
    """Its size: vit_mini takes a minute on a CPU, the others want a GPU. [App. C.1]"""
    rank: PositiveInt = 64
    """r. [App. C.3]"""
    p_batch: PositiveInt = 256
    """Images a pretext step. [App. C.3]"""
    d_batch: PositiveInt = 64
    """Images an upper step. [App. C.3]"""
    lower_steps: PositiveInt = 20
    """N_L. [App. C.3]"""
    upper_steps: PositiveInt = 8
    """N_U. [App. C.3]"""
    repeats: PositiveInt = 3
    """Timed alternations a method, after one that warms up; medians are reported. [here]"""


def bench(cfg: BenchConfig, out: Path, *, force: bool = False, track: Track = untracked) -> Row:
    """Measure all methods, one after the other, into the run directory `out`."""
    plan(cfg)
    with Run(out, "bench", cfg, force) as run:
        if run.result:
            return run.result
        rows: list[Row] = []
        for method in track(iter(METHODS), len(METHODS), "bench"):
            try:
                rows.append({"method": method} | alternation(cfg, method))
            except torch.OutOfMemoryError:
                rows.append({"method": method, "failed": "out of memory; see --micro-batch"})
            run.checkpoint(method)
        return run.finish({"backbone": cfg.backbone, "rows": rows, "out": str(out)})


def plan(cfg: BenchConfig) -> Row:
    """What there is to do, for --dry-run (UsageError)."""
    with checking(f"--device {cfg.device}"):
        pick_device(cfg.device)
    return {"backbone": cfg.backbone, "methods": METHODS, "alternations of each": cfg.repeats + 1}


def alternation(cfg: BenchConfig, method: str) -> Row:
    """Median seconds of an alternation; on a GPU its memory, and beside it the paper's."""
    device, ends = pick_device(cfg.device), []
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in alternations(cfg, method, device):
        if gpu:
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
    seconds = median(end - begin for begin, end in pairwise(ends))  # the first warms up
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None
    paper = memory_of(method, cfg.backbone)
    return {"seconds": seconds, "peak_GB": peak, "paper_GB": paper and paper[0]}


def alternations(cfg: BenchConfig, method: str, device: torch.device) -> Iterator[Any]:
    """Algorithm 1 on a random network and images."""
    given = {name: getattr(cfg, name) for name in AlignConfig.model_fields if hasattr(cfg, name)}
    given |= {"dataset": "own", "pool": "own", "hypergrad": method}
    given["alternations"] = cfg.repeats + 1
    c, arch, g = AlignConfig(**given), BACKBONES[cfg.backbone], rng(cfg.seed, "bench")
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
    return algorithm_1(s, c, task, loss_D, hypergradient(c, theta), lower, upper, **rest)
