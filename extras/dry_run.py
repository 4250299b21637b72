"""What a command would do, for `--dry-run`: images, steps, memory, and all that is missing."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

from config import (
    FILE,
    TIMM,
    AlignConfig,
    Arch,
    Command,
    FinetuneConfig,
    Network,
    PretrainConfig,
    Record,
    paper_values,
    unlike_paper,
)
from data import Pool, Task
from extras import pretrain
from finetune import starts_of_seeds
from support import timm_models
from support.checkpoints import OFFICIAL, arch_of, weights_of
from support.errors import checking
from support.experiment import AlignExperiment, Experiment, device_of, open_pool, open_task
from support.missing import Steps, Tried, try_all
from support.runs import check_directory

# tab:memory_single_gpu: GB and A40 GPUs, on the fewest GPUs of the table; GB sum each GPU's peak.
# The paper has no figures for I-JEPA.
MEMORY = {  # by hypergradient, or by the batch of PEFT
    "cg": {"vit_b16": (58, 2), "vit_l16": (77, 2), "vit_h14": (141, 4)},
    "mfac": {"vit_b16": (13, 1), "vit_l16": (19, 1), "vit_h14": (33, 1)},
    "256": {"vit_b16": (14, 1), "vit_l16": (36, 1), "vit_h14": (80, 2)},
    "64": {"vit_b16": (4, 1), "vit_l16": (10, 1), "vit_h14": (22, 1)},
}


class Plan(NamedTuple):
    """What a command would do, and what keeps it from doing so."""

    work: Record
    problems: list[str]


def plan_run(command: str, cfg: Command, out: Path, force: bool) -> Plan:
    """Plan a run, whatever is missing; nothing is downloaded or written."""
    # All is tried, so that one dry run names all that is missing, not the first thing.
    steps: Steps = {
        "out": partial(check_directory, out, command, cfg, force),
        "device": partial(device_of, cfg),
    }
    if isinstance(cfg, PretrainConfig):
        steps["work"] = partial(pretrain.plan, cfg)
    results, problems = try_all(steps)
    device = results.get("device")
    work: Record = {"out": out, "device": str(device) if device else None}
    if isinstance(cfg, PretrainConfig):
        work |= results.get("work", {})
    elif isinstance(cfg, AlignConfig | FinetuneConfig):
        opened = open_all(cfg)
        work |= describe_peft(cfg, opened.results)
        problems += opened.problems
    recipe = "MAE or I-JEPA" if command == "pretrain" else "the paper"
    work[f"differs from {recipe}"] = list_unlike_paper(cfg) or "nothing"
    return Plan(work, problems)


def list_unlike_paper(cfg: Command) -> list[Record]:
    """A row for each setting that is not the paper's: its value, the paper's, and its source."""
    rows = []
    values = paper_values(type(cfg), dict(cfg))
    for name, value in unlike_paper(cfg).items():
        source = "given" if name in cfg.model_fields_set else "our default"
        row = {"setting": name, "value": value, "recipe": values[name], "from": source}
        rows.append(row)
    return rows


def open_all(cfg: AlignConfig | FinetuneConfig) -> Tried:
    """Open what `align` or `finetune` needs, all that is there; `arch` has the network's sizes."""
    steps: Steps = {"task": partial(open_task, cfg)}
    if isinstance(cfg, AlignConfig):
        steps["pool"] = partial(open_pool, cfg.pool, cfg.data_root, cfg.data_seed)
    else:
        steps["starts"] = partial(starts_of_seeds, cfg)  # the align runs have to be finished
    steps["weights"] = partial(weights_of, cfg)
    results, problems = try_all(steps)
    weights = results.get("weights")
    # Networks are tried where nothing is missing; otherwise their sizes are all there is to say.
    step: Steps = {"arch": partial(official_arch, cfg)}
    if weights and weights.exists() and not problems:
        step = {"arch": partial(try_networks, cfg, results["task"], results.get("pool"))}
    networks = try_all(step)
    return Tried(results | networks.results, problems + networks.problems)


def describe_peft(cfg: AlignConfig | FinetuneConfig, opened: Record) -> Record:
    """What `align` or `finetune` would do, as far as what could be opened tells."""
    task: Task | None = opened.get("task")
    pool: Pool | None = opened.get("pool")
    images: Record = task.sizes() if task else {}
    if pool:
        images["pool"] = len(pool.images)
    weights: Path | None = opened.get("weights")
    fetched = None
    if weights and not weights.exists():
        url, megabytes = OFFICIAL[cfg.backbone, cfg.pretext]
        fetched = f"{megabytes:.0f} MB to download from {url}"
    if weights is None and cfg.backbone.startswith(TIMM):
        fetched = "timm's, from the Hugging Face hub or its cache"
    arch: Arch | None = opened.get("arch")
    parameters = None
    if arch:
        parameters = arch.depth * 4 * cfg.rank * arch.dim  # A and B, of q and of v
    return {
        "images": images,
        "steps": count_align(cfg, task) if isinstance(cfg, AlignConfig) else count_peft(cfg, task),
        "LoRA parameters": parameters,
        "weights": fetched,
        "the paper's memory, GB and GPUs": paper_memory(cfg),
    }


def try_networks(cfg: AlignConfig | FinetuneConfig, task: Task | None, pool: Pool | None) -> Arch:
    """Load the networks and make the pretext task, as a run does; their sizes (UsageError)."""
    if isinstance(cfg, FinetuneConfig):
        return Experiment(cfg, task).arch
    experiment = AlignExperiment(cfg, task, pool)
    experiment.pretext_task(experiment.new_theta())
    return experiment.arch


def official_arch(cfg: Network) -> Arch | None:
    """Sizes of the official file or of timm's network, where there is no file to look at.

    None where only the file could say. (UsageError)
    """
    if cfg.backbone == FILE:
        return None
    with checking(f"--backbone {cfg.backbone}"):
        if cfg.backbone.startswith(TIMM):
            return timm_models.read_arch(cfg)
        return arch_of({}, cfg)


def count_align(cfg: AlignConfig, task: Task | None) -> Record:
    """Steps of both levels, and of the linear probe if the number of images is known."""
    steps = {
        "lower": cfg.alternations * cfg.lower_steps,
        "upper": cfg.alternations * cfg.upper_steps,
    }
    if task:
        steps_per_epoch = math.ceil(len(task.train.targets) / cfg.d_batch)
        steps["probe"] = cfg.probe_epochs * steps_per_epoch
    return steps


def count_peft(cfg: FinetuneConfig, task: Task | None) -> Record:
    """Runs of one rate and one seed, and the steps of all of them."""
    steps = {"runs": cfg.runs}
    if task:
        steps_per_epoch = math.ceil(len(task.train.targets) / cfg.batch)
        steps["in all"] = cfg.runs * cfg.epochs * steps_per_epoch
    return steps


def paper_memory(cfg: AlignConfig | FinetuneConfig) -> tuple[int, int] | None:
    """The paper's memory for such a run."""
    if cfg.pretext != "mae":
        return None
    kind = cfg.hypergrad if isinstance(cfg, AlignConfig) else str(cfg.batch)
    return MEMORY.get(kind, {}).get(cfg.backbone)
