"""`bisslight demo`: the whole story on drawn images, offline, in minutes on a CPU.

Pretrain vit_mini on unlabelled quilts, align it with the labelled task, and fine-tune it with and
without, eight seeds an arm, each seed with an align run of its own. It shows that the method runs
and what it does here; it is no evidence about photographs or large models, and aligned seeds cost
more. `results/demo_full.py` adds controls.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from align import align
from commands import AlignConfig, FinetuneConfig
from evaluate import evaluate
from extras.figures import draw_arms, pyplot
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from run import jobs as run_jobs
from training import Track, untracked

SEEDS = 8
PRETRAIN: dict[str, Any] = {"base_lr": 8e-3, "beta2": 0.999, "mask_ratio": 0.3}
ALIGN: dict[str, Any] = {
    "alternations": 60, "lower_steps": 5, "lam": 1e-2, "p_lr": 1e-3, "d_lr": 1e-2, "mask_ratio": 0.3
}  # fmt: skip
PEFT: dict[str, Any] = {"lr": 1e-2, "warmup_epochs": 7, "eval_epochs": 2}


def demo(
    out: Path | None = None,
    *,
    data_seed: int = 0,
    jobs: int = 2,
    force: bool = False,
    track: Track = untracked,
) -> dict[str, Any]:
    """Run the story into `out`, or go on with it; the table of both arms, and remarks.

    Args:
        data_seed: of the drawn images and of their pretraining.
        jobs: runs at a time.
    """
    pyplot()  # tells that matplotlib is missing before the long work
    torch.set_num_threads(1)  # more gain little here, and lose much beside other work
    out = out or Path("runs/demo")
    about = {"backbone": "vit_mini", "data_seed": data_seed}
    cfg = PretrainConfig(pool="quilts", seed=data_seed, **about, **PRETRAIN)
    pre = pretrain(cfg, out / "pretrain", force=force, track=track)
    about |= {"dataset": "quilts", "weights": pre.weights}
    cfgs = [AlignConfig(seed=seed, **about, **ALIGN) for seed in range(SEEDS)]
    units = [(one, out / "align" / f"s{one.seed}", force) for one in cfgs]
    probes = [*track(run_jobs(aligned, units, jobs), SEEDS, "align")]
    peft = FinetuneConfig(seeds=SEEDS, jobs=jobs, **about, **PEFT)
    finetune(peft.but(start=out / "align"), out / "aligned", force=force, track=track)
    finetune(peft, out / "direct", force=force, track=track)
    arms = evaluate([out / "aligned", out / "direct"]).arms
    draw_arms(arms, out / "arms.png")
    probe = "of the checkpoint, on validation; near chance, 12.5, pretraining did not take"
    told = {"arms": arms, "linear probe": f"{fmean(probes):.1f} % {probe}"}
    return told | {"pictures": [out / "arms.png"]}


def aligned(unit: tuple[AlignConfig, Path, bool]) -> float:
    """One align run; validation accuracy of its linear probe, before Algorithm 1."""
    cfg, out, force = unit
    align(cfg, out, force=force)
    first = (out / "metrics.jsonl").read_text().splitlines()[0]
    return float(json.loads(first)["probe_val"]["accuracy"])
