"""What an alternation of `bisslight.algorithm_1` costs, with M-FAC, CG and no curvature.

Weights and images are random, since times do not depend on their values. A method's time minus that
of `identity` is what lines 10 and 13 cost. On a GPU the passes are in bfloat16 unless --no-amp, the
Hessian-vector products of CG in float32.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, repeat
from statistics import median
from typing import Any

import torch

from align import begin, hypergradient
from bisslight import Passes, algorithm_1
from config import AlignConfig, Record, make
from extras import MEMORY
from lora import Backbone, Examples, downstream_loss, init_head, init_theta
from support.checkpoints import arch_of, build_head, build_vit, pretext_task
from support.errors import UsageError
from support.experiment import device_of

CLASSES = 200  # CUB-200's, which the paper timed


def bench(backbone: str, *, repeats: int = 3, **settings: Any) -> Record:
    """Medians of `repeats` alternations of each method, after one that warms up (UsageError).

    `settings` are those of `align`: sizes of the batches, steps, rank, seed, device, precision.
    """
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: should be greater than 0")
    given = settings | {"backbone": backbone, "dataset": "own", "pool": "own"}
    rows: list[Record] = []
    for method in ("mfac", "cg", "identity"):
        cfg = make(AlignConfig, given | {"alternations": repeats + 1, "hypergrad": method})
        logging.getLogger("bisslight").info("bench: %s", method)
        try:
            rows.append({"method": method} | alternation(cfg))
        except torch.OutOfMemoryError:
            rows.append({"method": method, "failed": "out of memory; see --micro-batch"})
    return {"backbone": backbone, "rows": rows}


def alternation(cfg: AlignConfig) -> Record:
    """Median seconds of an alternation; on a GPU its memory, and beside it the paper's."""
    device, paper = device_of(cfg), MEMORY.get(cfg.hypergrad, {}).get(cfg.backbone)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    # a log's numbers are read from the device, so when it arrives, all work is done
    ends = [time.perf_counter() for _ in alternations(cfg, device)]
    return {
        "seconds": median(end - begin for begin, end in pairwise(ends)),  # the first warms up
        "peak_GB": torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None,
        "paper_GB": paper and paper[0],
    }


def alternations(cfg: AlignConfig, device: torch.device) -> Iterator[Any]:
    """Algorithm 1 on a random network and random images; yields a Log per alternation."""
    arch, g = arch_of({}, cfg), torch.Generator().manual_seed(cfg.seed)
    with device:
        network = Backbone(build_vit(arch), recompute=cfg.recompute).requires_grad_(False)
        decoder = build_head(arch, cfg.pretext)
    theta = init_theta(arch.depth, cfg.rank, arch.dim, g).to(device)
    task: Any = pretext_task(cfg, network, decoder, cfg.alternations * cfg.lower_steps, theta)
    head = init_head(arch.dim, CLASSES, g)
    s, _ = begin(cfg, theta, task, {k: x.to(device).requires_grad_() for k, x in head.items()})
    side, labels = arch.image_size, torch.arange(cfg.d_batch, device=device) % CLASSES
    images = torch.randn(max(cfg.p_batch, cfg.d_batch), 3, side, side, device=device)
    drawn = [x.to(device) for x in task.draw(cfg.p_batch, g)]
    lower = repeat(task.prepare(images[: cfg.p_batch], *drawn))
    upper = repeat(Examples(images[: cfg.d_batch], labels))
    inverse, loss_D = hypergradient(cfg, theta), partial(downstream_loss, network)
    amp = cfg.amp and device.type == "cuda"
    return algorithm_1(s, cfg, task, loss_D, inverse, lower, upper, Passes(cfg.micro_batch, amp))
