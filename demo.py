"""The whole story on one drawn dataset, offline, on a CPU: does aligning help the fine-tuning that follows?

`quick` pretrains vit_mini on unlabelled quilts, aligns it with the labelled task, and fine-tunes it with and without,
eight seeds an arm, each seed with an align run of its own. `full` adds what keeps the comparison honest: PEFT with as
many CPU-seconds as align and PEFT together, no curvature, no upper level, models without pretraining, several drawn
datasets, and a learning-rate grid for every arm.

It shows that the method runs and what it does here. It is no evidence about photographs or large models.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mae
import stages
import tuning
from config import (
    BACKBONES,
    AlignConfig,
    Bilevel,
    Data,
    FinetuneConfig,
    Lower,
    Model,
    Peft,
    PretrainConfig,
    Shape,
    Upper,
    UsageError,
)
from data import CLASSES, PER_CLASS, Task, quilts
from evaluate import Arm, right_images, score, table
from figures import draw_arms, pyplot, save
from finetune import choose
from loading import Report
from lora import Backbone, init_head, logits, psi_of
from runtime import Score, rng, trainable, write_atomic

SEEDS = 8
EPOCHS = 60
SCRATCH_EPOCHS = 100
PRETRAIN: dict[str, Any] = {
    "epochs": 30, "warmup_epochs": 4, "batch": 64, "base_lr": 8e-3, "beta2": 0.999, "mask_ratio": 0.3
}  # fmt: skip
LOWER = Lower(p_batch=64, p_lr=1e-3, mask_ratio=0.3)
UPPER = Upper(d_batch=32, d_lr=1e-2)
BILEVEL = Bilevel(alternations=60, lower_steps=5, upper_steps=5, lam=1e-2)
PEFT = Peft(lr=1e-2, epochs=EPOCHS, warmup_epochs=7, batch=32, eval_every=2, seeds=SEEDS)
GRID = (3e-3, 1e-2, 3e-2)

ARMS: dict[str, dict[str, Any]] = {
    "aligned + PEFT": {},
    "identity + PEFT": {"hypergrad": "identity"},
    "lower only + PEFT": {"upper_steps": 0},
}


class Story:
    """One drawn dataset, its backbone and the arms tried on it."""

    def __init__(self, out: Path, data_seed: int, force: bool, report: Report, pool: Executor | None) -> None:
        self.out, self.data_seed, self.force, self.report, self.pool = out, data_seed, force, report, pool
        self.seconds: dict[str, float] = {}
        self.data = Data(dataset="quilts", data_seed=data_seed)
        self.model = Model(backbone="vit_mini", weights=out / "pretrain" / "backbone.pth")

    def options(self, name: str) -> stages.Options:
        return stages.Options(out=self.out / name, force=self.force, report=self.report)

    def timed(self, what: str, began: float) -> None:
        self.seconds[what] = time.perf_counter() - began

    def pretrain(self) -> None:
        """ψ and the decoder from scratch."""
        began = time.perf_counter()
        model = Shape(backbone="vit_mini")
        cfg = PretrainConfig(model=model, pool="quilts", data_seed=self.data_seed, seed=self.data_seed, **PRETRAIN)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # two gain a quarter on idle cores, and lose a factor where something else is running
        stages.pretrain(cfg, self.options("pretrain"))
        torch.set_num_threads(threads)
        self.timed("pretrain", began)

    def align(self, arm: str) -> list[dict[str, Any]]:
        """Eight align runs, one a seed."""
        began, name = time.perf_counter(), arm.split()[0]
        bilevel = Bilevel.model_validate(BILEVEL.model_dump() | ARMS[arm])
        cfgs = [
            AlignConfig(model=self.model, data=self.data, lower=LOWER, upper=UPPER, bilevel=bilevel, seed=seed)
            for seed in range(SEEDS)
        ]
        jobs = [(cfg.model_dump_json(), self.out / f"align-{name}" / f"s{cfg.seed}", self.force) for cfg in cfgs]
        results: list[dict[str, Any]] = []
        self.report(f"align {name}", 0, SEEDS, "")
        for result in (self.pool.map if self.pool else map)(align_job, jobs):
            results.append(result)
            val = result["val_P"]["accuracy"]
            self.report(f"align {name}", len(results), SEEDS, f"seed {len(results) - 1} val {val:.1f}")
        self.timed(f"align {name}", began)
        return results

    def finetune(self, arm: str, peft: Peft, start: str | None) -> dict[str, Any]:
        """One arm's eight PEFT runs; the result also names the arm."""
        began = time.perf_counter()
        path = self.out / f"align-{start.split()[0]}" if start else None
        cfg = FinetuneConfig(start=path, model=self.model, data=self.data, peft=peft)
        result = tuning.finetune(cfg, self.options(f"finetune-{arm.split(' +')[0].replace(' ', '-')}"), self.pool)
        self.timed(f"PEFT {arm}", began)
        return result | {"arm": arm}

    def probe(self) -> float:
        """Validation accuracy of the linear probes of the checkpoint, mean over the align runs."""
        files = sorted(self.out.glob("align-aligned/s*/metrics.jsonl"))
        values: list[float] = [json.loads(file.read_text().splitlines()[0])["probe_val"]["accuracy"] for file in files]
        return sum(values) / len(values)


def align_job(job: tuple[str, Path, bool]) -> dict[str, Any]:
    """One align run, in whatever process."""
    text, out, force = job
    return stages.align(AlignConfig.model_validate_json(text), stages.Options(out=out, force=force))


def arms_of(results: Sequence[dict[str, Any]]) -> list[Arm]:
    return [arm_of(result["arm"], result["test"], result["unit"]) for result in results]


def arm_of(name: str, accuracies: list[float], unit: str) -> Arm:
    """An arm tested on a drawn dataset."""
    counts = [right_images(accuracy, CLASSES * PER_CLASS["test"]) for accuracy in accuracies]
    return Arm(name, accuracies, unit, counts=counts)


def quick(out: Path, data_seed: int, jobs: int, force: bool, report: Report) -> dict[str, Any]:
    """Pretrain, align, PEFT with and without; one rate for both arms, eight seeds an arm."""
    began = time.perf_counter()
    prepare(out, force)
    with tuning.worker_pool(jobs) as pool:
        story = Story(out, data_seed, force, report, pool)
        story.pretrain()
        aligns = story.align("aligned + PEFT")
        results = [story.finetune("aligned + PEFT", PEFT, "aligned"), story.finetune("PEFT", PEFT, None)]
    arms = arms_of(results)
    picture(story, arms, out / "demo.png")
    last, cost = aligns[-1], (mean(a["cpu_seconds"] for a in aligns), mean(results[0]["cpu_seconds"]))
    seconds = ", ".join(f"{what} {value:.0f}" for what, value in story.seconds.items())
    remarks = [
        f"linear probe of the checkpoint: {story.probe():.1f} % on validation; "
        "near chance (12.5) would mean that pretraining did not take",
        f"the inverse at the end of align: |q|/|g| {last['q_over_g'][-1]:.3f}, cosine {last['cosine'][-1]:.3f} "
        "(1 and 1: the curvature had no say)",
        f"CPU-seconds a seed: align {cost[0]:.0f}, PEFT {cost[1]:.0f}; aligned seeds therefore cost more, "
        "`--full` has PEFT with the same budget",
        f"seconds: {seconds}, in all {time.perf_counter() - began:.0f}",
        f"picture: {out / 'demo.png'}",
    ]
    tables = {f"drawn dataset {data_seed}, 80 labelled images, 8 classes, 480 test images": table(arms)}
    return finish(out, {"tables": tables, "remarks": remarks, "seconds": story.seconds})


def full(out: Path, data_seed: int, jobs: int, force: bool, report: Report) -> dict[str, Any]:
    """All arms and controls on three drawn datasets, every rate chosen on mean validation over the seeds."""
    began = time.perf_counter()
    prepare(out, force)
    tables, remarks = {}, []
    grid = PEFT.model_copy(update={"lr": None, "grid": GRID, "grid_seeds": SEEDS})
    with tuning.worker_pool(jobs) as pool:
        for seed in range(data_seed, data_seed + 3):
            story = Story(out / f"data{seed}", seed, force, report, pool)
            story.pretrain()
            aligns = story.align("aligned + PEFT")
            results = [story.finetune("aligned + PEFT", grid, "aligned"), story.finetune("PEFT", grid, None)]
            cost = [mean(result["cpu_seconds"]) for result in results]
            longer = round(EPOCHS * (mean(a["cpu_seconds"] for a in aligns) + cost[0]) / cost[1])
            results.append(story.finetune("longer PEFT", grid.model_copy(update={"epochs": longer}), None))
            for arm in ("identity + PEFT", "lower only + PEFT"):
                story.align(arm)
                results.append(story.finetune(arm, grid, arm))
            results += [without_pretraining(name, story) for name in ("small CNN", "ViT from scratch")]
            arms = [*arms_of(results), arm_of("pixel regression", [pixel_regression(quilts(seed)[1])], "deterministic")]
            tables[f"drawn dataset {seed}"] = table(arms)
            spent = mean(results[2]["cpu_seconds"]), mean(a["cpu_seconds"] for a in aligns) + cost[0]
            remarks += [
                f"dataset {seed}: linear probe {story.probe():.1f} % on validation; rates chosen on validation: "
                + ", ".join(f"{result['arm']} {result['lr']:g}" for result in results),
                f"dataset {seed}: longer PEFT is {longer} epochs, {spent[0]:.0f} CPU-seconds a seed "
                f"against {spent[1]:.0f} of align and PEFT",
            ]
            picture(story, arms, out / f"data{seed}" / "demo.png")
            finish(out, {"tables": tables, "remarks": remarks})
    remarks.append(f"seconds in all: {time.perf_counter() - began:.0f}")
    return finish(out, {"tables": tables, "remarks": remarks})


def prepare(out: Path, force: bool) -> None:
    """What should be told before the long work: no matplotlib, or a directory in use (UsageError)."""
    pyplot()
    mine = [name for name in ("demo.json", "pretrain", "data0", "data1", "data2") if (out / name).exists()]
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (mine and force))):
        what = "an earlier demo, --force starts it over" if mine else "something else is there"
        raise UsageError(f"--out {out}: {what}; choose another --out")


def mean(values: Any) -> float:
    values = list(values)
    return float(sum(values) / len(values))


def finish(out: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Keep the result beside the runs."""
    write_atomic(out / "demo.json", json.dumps(result, indent=1))
    return result


# --- controls without pretraining ------------------------------------------------------------------------------------


def pixel_regression(task: Task) -> float:
    """Test accuracy of a logistic regression on pixels; its weight decay is chosen on validation."""
    x = {part: getattr(task, part).images.flatten(1) - 0.5 for part in ("train", "val", "test")}
    best = (-1.0, 0.0)
    for decay in (1e-4, 1e-3, 1e-2, 1e-1):
        layer = nn.Linear(x["train"].shape[1], len(task.classes))
        for tensor in layer.parameters():
            nn.init.zeros_(tensor)
        opt = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def closure(layer: nn.Linear = layer, decay: float = decay, opt: torch.optim.Optimizer = opt) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(layer(x["train"]), task.train.targets) + decay / 2 * layer.weight.square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        right = {p: 100 * float((layer(x[p]).argmax(1) == getattr(task, p).targets).float().mean()) for p in x}
        if right["val"] > best[0]:
            best = right["val"], right["test"]
    return best[1]


def without_pretraining(name: str, story: Story) -> dict[str, Any]:
    """Eight seeds of a small network trained on the 80 labels alone; rate on mean validation, best epoch kept."""
    rates = (3e-4, 1e-3, 3e-3)
    jobs = [(name, story.data_seed, lr, seed) for lr in rates for seed in range(SEEDS)]
    runs: dict[float, list[tuple[Score, float]]] = {lr: [] for lr in rates}
    story.report(name, 0, len(jobs), "")
    for job, outcome in zip(jobs, (story.pool.map if story.pool else map)(scratch_job, jobs), strict=True):
        runs[job[2]].append(outcome)
        story.report(name, sum(map(len, runs.values())), len(jobs), f"lr {job[2]:g}")
    lr = choose({lr: [val for val, _ in outcomes] for lr, outcomes in runs.items()})
    return {"arm": name, "test": [test for _, test in runs[lr]], "unit": "training from scratch", "lr": lr}


def scratch_job(job: tuple[str, int, float, int]) -> tuple[Score, float]:
    """(best validation score, that epoch's test accuracy) of one training from scratch."""
    name, data_seed, lr, seed = job
    task = quilts(data_seed)[1]
    g = rng(seed, name)
    shift, scale = torch.tensor(task.mean).view(3, 1, 1), torch.tensor(task.std).view(3, 1, 1)
    parts = {p: ((getattr(task, p).images - shift) / scale, getattr(task, p).targets) for p in ("train", "val", "test")}
    network, tensors = cnn(len(task.classes), g) if name == "small CNN" else scratch_vit(len(task.classes), g)
    opt = torch.optim.AdamW(tensors, lr=lr, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=3 * SCRATCH_EPOCHS, pct_start=0.1)
    best, test = Score(-1.0, 0.0), 0.0
    x, y = parts["train"]
    for epoch in range(1, SCRATCH_EPOCHS + 1):
        for index in torch.randperm(len(y), generator=g).chunk(3):
            opt.zero_grad()
            F.cross_entropy(network(x[index], True), y[index]).backward()
            opt.step()
            rate.step()
        if epoch % 5 == 0:
            val = score(lambda images: network(images, False), [parts["val"]])
            if val.rank > best.rank:
                best, test = val, score(lambda images: network(images, False), [parts["test"]]).accuracy
    return best, test


Network = Callable[[Tensor, bool], Tensor]  # (images, training) -> logits


def cnn(classes: int, g: torch.Generator) -> tuple[Network, list[Tensor]]:
    """Five convolutions with batch normalisation, then the mean over positions."""
    widths = (3, 32, 32, 64, 64, 64)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [
            nn.Conv2d(a, b, 3, stride=2 if i in (1, 3) else 1, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(),
        ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    for tensor in net.parameters():
        if tensor.ndim > 1:
            nn.init.kaiming_normal_(tensor, generator=g)
    nn.init.zeros_(list(net.parameters())[-1])
    return lambda images, training: net.train(training)(images), list(net.parameters())


def scratch_vit(classes: int, g: torch.Generator) -> tuple[Network, list[Tensor]]:
    """vit_mini from a random initialisation, all of it trained."""
    arch = BACKBONES["vit_mini"].arch
    vit = mae.init(arch, g)[0]
    backbone, phi = Backbone(vit), trainable(init_head(arch.dim, classes, g))
    return lambda images, _: logits(backbone, None, phi, images), [*psi_of(vit).values(), *phi.values()]


# --- the picture -----------------------------------------------------------------------------------------------------


def picture(story: Story, arms: Sequence[Arm], path: Path) -> None:
    """What a class is, what pretraining learned to fill in, and every seed of every arm."""
    plt = pyplot()
    pool, task = quilts(story.data_seed)
    vit, decoder, _ = mae.load(story.out / "pretrain" / "backbone.pth", "vit_mini")
    shift, scale = torch.tensor(task.mean).view(3, 1, 1), torch.tensor(task.std).view(3, 1, 1)
    mask = mae.MAE(Backbone(vit), decoder, PRETRAIN["mask_ratio"])
    true, examples = pool[:7], task.test.images
    assert isinstance(examples, Tensor)
    masked, filled = mae.reconstruct(mask, None, mask.phi, mask.prepare((true - shift) / scale, rng(0, "picture")))
    same = examples[task.test.targets == 0][:7]
    rows: dict[str, Tensor] = {
        "one class: which\ntiles are equal": same,
        "pool, masked": masked * scale + shift,
        "filled in": filled * scale + shift,
        "true": true,
    }
    figure = plt.figure(figsize=(5.2 + max(5.2, 1.15 * len(arms)), 4.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5.2, max(5.2, 1.15 * len(arms))))
    for i, (axes, (name, images)) in enumerate(zip(left.subplots(len(rows), 1), rows.items(), strict=True)):
        strip = F.pad(torch.as_tensor(images), (1, 1, 1, 1), value=1.0).permute(2, 0, 3, 1).reshape(18, -1, 3)
        axes.imshow(strip.clamp(0, 1).numpy(), interpolation="nearest")
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)
        if i == 0:
            axes.set_title("pixel quilts", fontsize=10)
    axes = right.subplots()
    draw_arms(axes, {arm.name: arm.accuracies for arm in arms}, "accuracy", f"{SEEDS} seeds an arm, bar = mean")
    axes.axhline(100 / len(task.classes), color="black", linewidth=0.8, linestyle=":")
    axes.annotate("chance", (-0.55, 100 / len(task.classes)), va="bottom", fontsize=8)
    axes.set_ylim(0, 100)
    save(figure, path)
