"""Does aligning help on real photographs? Three arms on one set; the same command goes on.

    python -m experiments.photographs DATA --name flowers --seeds 4

DATA holds tiny-imagenet/train (the unlabelled pool) and, as torchvision lays them out, flowers-102,
CUB_200_2011 or VOCdevkit; a part of a set will do. vit_mini is pretrained at 64 px, twice, and even
seeds start from the first of these networks, odd ones from the second.

    aligned    BiSSLight, then PEFT
    peft       PEFT alone
    longer     PEFT with the CPU time of `aligned`

The rates were chosen on other photographs. photographs.md has more arms and sets.
"""

from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from align import align
from config import AlignConfig, FinetuneConfig, PretrainConfig, Record
from evaluate import compare
from experiments.recipe import markdown, progress, run_script
from extras.pretrain import pretrain
from finetune import finetune
from support.results import FinetuneResult

PRETRAININGS = 2
PRETRAIN: Record = {
    "backbone": "vit_mini", "image_size": 64, "patch_size": 8, "batch": 128, "beta2": 0.999,
    "epochs": 40, "warmup_epochs": 4, "base_lr": 4e-3,
}  # fmt: skip
ALIGN: Record = {
    "alternations": 12, "lower_steps": 5, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
    "warmup": 2, "probe_epochs": 5, "eval_every": 12, "p_lr": 1e-3, "d_lr": 3e-3,
}  # fmt: skip
PEFT: Record = {
    "epochs": 8, "warmup_epochs": 1, "batch": 32, "eval_epochs": 8, "lr": (3e-2,), "seeds": 1
}  # fmt: skip


def main(
    data: Path,
    name: Annotated[str, typer.Option(help="flowers, cub200 or voc07.")] = "flowers",
    seeds: int = 8,
    out: Path = Path("runs/photographs"),
) -> None:
    """Run the arms, and print a table of them."""
    pool: Record = {"pool": str(data / "tiny-imagenet/train")}
    for number in range(PRETRAININGS):
        pretrain(PretrainConfig(**PRETRAIN, **pool, seed=number), out / f"pretrain-{number}")

    def settings_of(seed: int) -> Record:
        weights = out / f"pretrain-{seed % PRETRAININGS}"
        task = {"dataset": name, "data_root": data, "partial": True}
        return task | {"backbone": "vit_mini", "weights": weights, "seed": seed}

    def fine_tune(arm: str, seed: int, **changes: Any) -> FinetuneResult:
        cfg = FinetuneConfig(**settings_of(seed) | PEFT | changes)
        return finetune(cfg, out / name / f"{arm}-s{seed}")

    results: dict[str, list[FinetuneResult]] = {"aligned": [], "peft": [], "longer": []}
    seconds: dict[str, list[float]] = {arm: [] for arm in results}
    for seed in progress(range(seeds), seeds, "seeds"):
        run = align(
            AlignConfig(**settings_of(seed), **pool, **ALIGN), out / name / f"align-s{seed}"
        )
        results["aligned"].append(fine_tune("aligned", seed, start=run.out))
        results["peft"].append(fine_tune("peft", seed))
        seconds["aligned"].append(run.cpu_seconds + results["aligned"][-1].cpu_seconds)
        seconds["peft"].append(results["peft"][-1].cpu_seconds)
    # all seeds are timed before, so that `longer` has one length
    ratio = fmean(seconds["aligned"]) / fmean(seconds["peft"])
    epochs = round(PEFT["epochs"] * ratio)
    for seed in progress(range(seeds), seeds, "longer"):
        results["longer"].append(fine_tune("longer", seed, epochs=epochs))
        seconds["longer"].append(results["longer"][-1].cpu_seconds)
    print(markdown([row_of(arm, results, seconds) for arm in results]))


def row_of(
    arm: str, results: dict[str, list[FinetuneResult]], seconds: dict[str, list[float]]
) -> Record:
    """An arm: its accuracy, and how far `aligned` is ahead."""
    test = [result.tests[0].accuracy for result in results[arm]]
    aligned = [result.tests[0].accuracy for result in results["aligned"]]
    comparison = compare(counts(results["aligned"]), counts(results[arm]))
    return {
        "arm": arm,
        "test": f"{fmean(test):.2f} ± {stdev(test):.2f}",
        "aligned minus this": f"{fmean(aligned) - fmean(test):+.2f}",
        "p": f"{comparison.p or 1:.3g}",
        "CPU-s": f"{fmean(seconds[arm]):.0f}",
    }


def counts(results: list[FinetuneResult]) -> list[int]:
    """Right test images of each run; hundredths of a point of mAP on VOC07."""
    tests = [result.tests[0] for result in results]
    return [test.right or round(100 * test.accuracy) for test in tests]


if __name__ == "__main__":
    run_script(main)
