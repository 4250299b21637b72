"""Does aligning help a network that was pretrained for longer? ViT-S at 64 px, on one GPU.

    python -m experiments.gpu_study DATA OUT --minutes 16 --jobs 8

DATA holds tiny-imagenet/train (the unlabelled pool) and, as torchvision lays them out, flowers-102,
dtd and CUB_200_2011, or parts of them. One pretraining of vit_s16 with patches of 8 takes the first
two fifths of the time. Then, set by set, with as many runs at a time as --jobs says:

    aligned      BiSSLight, then PEFT
    lower only   the same number of pretext steps without an upper level, then PEFT
    direct       PEFT from the pretrained backbone

PEFT's rate is the best of three on validation, for each run; the upper rate of BiSSLight is 2/3 of
what is best for `direct` (App. C.3). All arms share the pretrained backbone. A set begins only if
the last one's time is left; the same command goes on where it stopped.
"""

import json
import os
import time
from pathlib import Path
from statistics import fmean, multimode, stdev
from typing import Annotated, NamedTuple

import torch
import typer

from align import align
from config import AlignConfig, FinetuneConfig, Record
from evaluate import compare
from experiments.recipe import markdown
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from support.processes import jobs, start
from support.runs import read_json, read_json_if_there, write_atomic

SETS = ("flowers", "dtd", "cub200")
PRETRAINING = 0.4  # share of the time
TRIAL = 2  # epochs that are timed, after one that warms up
PRETRAIN: Record = {"batch": 512, "base_lr": 6e-4, "beta2": 0.95}
ALIGN: Record = {
    "alternations": 40, "lower_steps": 20, "upper_steps": 8, "p_batch": 128, "d_batch": 32,
    "warmup": 4, "probe_epochs": 10, "eval_every": 40, "p_lr": 3e-3,
}  # fmt: skip
PEFT: Record = {
    "epochs": 50, "warmup_epochs": 3, "batch": 64, "eval_epochs": 5, "grid": (1e-3, 3e-3, 1e-2),
    "seeds": 1,
}  # fmt: skip
TINY_ALIGN: Record = {
    "alternations": 2, "lower_steps": 2, "upper_steps": 1, "warmup": 0, "probe_epochs": 1,
    "eval_every": 2, "p_batch": 16, "d_batch": 16,
}  # fmt: skip
TINY_PEFT: Record = {"epochs": 1, "warmup_epochs": 0, "eval_epochs": 1, "grid": (3e-3, 1e-2)}
ALIGNED: dict[str, Record] = {"aligned": {}, "lower only": {"upper_steps": 0}}
ARMS = ("aligned", "lower only", "direct")


class Unit(NamedTuple):
    """A run and where it is."""

    cfg: AlignConfig | FinetuneConfig
    out: Path


class Study(NamedTuple):
    """What all runs have in common."""

    data: Path
    out: Path
    jobs: int
    seeds: int
    device: str
    tiny: bool

    @property
    def backbone(self) -> Record:
        """The network: ViT-S, or vit_mini in a rehearsal."""
        name = "vit_mini" if self.tiny else "vit_s16"
        return {"backbone": name, "image_size": 64, "patch_size": 8}

    @property
    def machine(self) -> Record:
        """Each of the runs that share the machine has its part of the cores."""
        workers = max(1, (os.cpu_count() or 1) // self.jobs)
        workers = 0 if self.tiny else workers
        return {"device": self.device, "workers": workers, "save_minutes": 1.0}


def main(
    data: Path,
    out: Path,
    minutes: float = 16.0,
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 8,
    seeds: int = 4,
    device: str = "cuda",
    tiny: Annotated[bool, typer.Option(help="A rehearsal.")] = False,
) -> None:
    """Do all of it; prints a table."""
    start()
    where = torch.device(device)
    print(markdown(run(data, out, minutes, jobs, where, tiny, seeds)))


def run(
    data: Path,
    out: Path,
    minutes: float,
    jobs: int,
    device: torch.device,
    tiny: bool,
    seeds: int = 4,
) -> list[Record]:
    """A row for each set and arm, of the sets that there was time for."""
    began = time.monotonic()
    study = Study(data.resolve(), out / "study", jobs, 2 if tiny else seeds, str(device), tiny)
    study.out.mkdir(parents=True, exist_ok=True)
    weights = pretrain_backbone(study, 60 * minutes * PRETRAINING)
    rows: list[Record] = []
    longest = 0.0
    for name in SETS[:1] if tiny else SETS:
        left = 60 * minutes - (time.monotonic() - began)
        if rows and longest > left:
            print(f"{name}: a set takes {longest:.0f} s, {left:.0f} s are left", flush=True)
            break
        began_set = time.monotonic()
        rows += compare_arms(study, name, weights)
        longest = max(longest, time.monotonic() - began_set)
        print(markdown(rows), flush=True)
    return rows


def pretrain_backbone(study: Study, seconds: float) -> Path:
    """The pretrained backbone; as many epochs as there is time for, by the time of a short run."""
    pool = str(study.data / "tiny-imagenet/train")
    machine = study.machine | {"workers": 0 if study.tiny else min(16, os.cpu_count() or 1)}
    settings = study.backbone | PRETRAIN | machine | {"pool": pool}
    plan = study.out / "plan.json"
    if not plan.exists():  # the number of epochs decides the schedule, so it is kept
        times = []
        for epochs in (1, 1 + TRIAL):
            trial = PretrainConfig(**settings | {"epochs": epochs, "warmup_epochs": 0})
            result = pretrain(trial, study.out / f"trial-{epochs}")
            times.append(result.seconds)
        epoch_seconds = max(1e-3, (times[1] - times[0]) / TRIAL)
        epochs = max(2, int((seconds - sum(times)) / epoch_seconds))
        write_atomic(plan, json.dumps({"epochs": epochs, "epoch_seconds": epoch_seconds}))
    epochs = read_json(plan)["epochs"]
    cfg = PretrainConfig(**settings | {"epochs": epochs, "warmup_epochs": epochs // 20})
    out = study.out / "pretrained"
    result = pretrain(cfg, out)
    print(
        f"pretrained {epochs} epochs in {result.seconds:.0f} s, loss {result.loss:.4f}", flush=True
    )
    return out


def compare_arms(study: Study, name: str, weights: Path) -> list[Record]:
    """The arms on one set; differences and exact permutation tests are to `aligned`."""
    folder = study.out / name
    task: Record = study.machine | {
        "backbone": study.backbone["backbone"], "weights": weights, "dataset": name,
        "partial": True, "data_root": study.data, "min_crop": 0.5,
    }  # fmt: skip
    peft = task | PEFT | (TINY_PEFT if study.tiny else {})
    seeds = range(study.seeds)

    direct = [Unit(FinetuneConfig(**peft, seed=seed), folder / f"direct-{seed}") for seed in seeds]
    results = {"direct": run_all(study, direct)}
    rate = min(multimode(result["lr"] for result in results["direct"]))

    align_settings = task | ALIGN | (TINY_ALIGN if study.tiny else {})
    align_settings |= {"pool": str(study.data / "tiny-imagenet/train"), "d_lr": 2 / 3 * rate}
    aligned = []
    tuned = []
    for arm, changes in ALIGNED.items():
        for seed in seeds:
            place = folder / f"{arm.replace(' ', '-')}-{seed}"
            cfg = AlignConfig(**align_settings | changes | {"seed": seed})
            aligned.append(Unit(cfg, place))
            after = FinetuneConfig(**peft | {"seed": seed, "start": place})
            tuned.append(Unit(after, place.with_name(f"{place.name}-peft")))
    run_all(study, aligned)
    found = run_all(study, tuned)
    for number, arm in enumerate(ALIGNED):
        results[arm] = found[number * study.seeds : (number + 1) * study.seeds]

    rows = []
    for arm in ARMS:
        test = [result["test"][0] for result in results[arm]]
        first = [result["right"][0] for result in results["aligned"]]
        right = [result["right"][0] for result in results[arm]]
        ahead = fmean(result["test"][0] for result in results["aligned"]) - fmean(test)
        rows.append({
            "set": name,
            "arm": arm,
            "test %": f"{fmean(test):.2f} ± {stdev(test):.2f}",
            "aligned minus this": "" if arm == "aligned" else f"{ahead:+.2f}",
            "p": "" if arm == "aligned" else f"{compare(first, right).p:.3g}",
            "rates": ", ".join(f"{result['lr']:g}" for result in results[arm]),
            "right": ", ".join(map(str, right)),
        })  # fmt: skip
    return rows


def run_all(study: Study, units: list[Unit]) -> list[Record]:
    """The results of runs, those that are not finished --jobs at a time."""
    began = time.monotonic()
    left = [unit for unit in units if read_json_if_there(unit.out / "result.json") is None]
    if study.jobs > 1 and len(left) > 1:
        list(jobs(run_one, left, min(study.jobs, len(left))))
    else:
        for unit in left:
            run_one(unit)
    seconds = time.monotonic() - began
    print(f"{units[0].out} and {len(units) - 1} more: {seconds:.0f} s", flush=True)
    return [read_json(unit.out / "result.json") for unit in units]


def run_one(unit: Unit) -> None:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    cfg, out = unit
    if isinstance(cfg, AlignConfig):
        align(cfg, out)
    else:
        finetune(cfg, out)


if __name__ == "__main__":
    typer.run(main)
