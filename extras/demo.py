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
import torch.nn.functional as F

import mae
from align import align
from benchmarks import quilts
from commands import AlignConfig, FinetuneConfig
from data import rng
from evaluate import evaluate
from extras.figures import draw_arms, pyplot, save
from extras.pretrain import pretrain
from extras.settings import PretrainConfig
from finetune import finetune
from run import jobs as run_jobs
from training import Track, untracked
from weights import load_backbone

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
    arms, files = evaluate([out / "aligned", out / "direct"]).arms, ("arms.png", "quilts.png")
    draw_arms(arms, out / files[0])
    draw_quilts(cfgs[0], out / files[1])
    probe = "of the checkpoint, on validation; near chance, 12.5, pretraining did not take"
    told = {"arms": arms, "linear probe": f"{fmean(probes):.1f} % {probe}"}
    return told | {"pictures": [out / file for file in files]}


def aligned(unit: tuple[AlignConfig, Path, bool]) -> float:
    """One align run; validation accuracy of its linear probe, before Algorithm 1."""
    cfg, out, force = unit
    align(cfg, out, force=force)
    first = (out / "metrics.jsonl").read_text().splitlines()[0]
    return float(json.loads(first)["probe_val"]["accuracy"])


@torch.no_grad()
def draw_quilts(cfg: AlignConfig, path: Path) -> None:
    """What a class is, and what pretraining learned to fill in."""
    loaded, (pool, task) = load_backbone(cfg), quilts(cfg.data_seed)
    mask = mae.MAE(loaded.backbone, loaded.pretext_head, cfg.mask_ratio)  # type: ignore[arg-type]
    shift, scale = (torch.tensor(x).view(3, 1, 1) for x in (task.mean, task.std))
    true, examples = torch.as_tensor(pool.images)[:7], torch.as_tensor(task.test.images)
    batch = mask.prepare((true - shift) / scale, *mask.draw(7, rng(0, "picture")))
    masked, filled = mae.reconstruct(mask, None, mask.phi, batch)
    pool_rows = [masked * scale + shift, filled * scale + shift, true]
    rows = torch.stack([examples[task.test.targets == 0][:7], *pool_rows])  # (4, 7, 3, 16, 16)
    image = F.pad(rows, (1, 1, 1, 1), value=1.0).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    figure, axes = pyplot().subplots()
    axes.imshow(image.clamp(0, 1).numpy())
    axes.axis("off")
    words = "seven quilts of one class: which tiles are equal; seven of the pool, masked; filled in; true"
    axes.set_title(words, wrap=True)
    save(figure, f"From above: {words}.", path)
