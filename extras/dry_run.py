"""Program: `--dry-run`: what a command would do, and everything that is missing for it."""

from pathlib import Path
from typing import NamedTuple

from config import (
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
from data import Pool, Task, steps_per_epoch
from extras import pretrain
from finetune import starts_of_seeds
from support import timm_models
from support.checkpoints import OFFICIAL_FILES, arch_of, find_weights
from support.errors import as_usage_error, try_and_collect
from support.experiment import (
    find_device,
    open_align_experiment,
    open_experiment,
    open_pool,
    open_task,
)
from support.runs import check_directory

# The paper's table tab:memory_single_gpu: (GB, number of A40 GPUs), where several numbers of GPUs
# are listed the fewest; GB is the sum over GPUs of each one's peak. It has nothing on I-JEPA. The
# first key is the method of the hypergradient for align, and the batch size for PEFT.
MEMORY = {
    "cg": {"vit_b16": (58, 2), "vit_l16": (77, 2), "vit_h14": (141, 4)},
    "mfac": {"vit_b16": (13, 1), "vit_l16": (19, 1), "vit_h14": (33, 1)},
    "256": {"vit_b16": (14, 1), "vit_l16": (36, 1), "vit_h14": (80, 2)},
    "64": {"vit_b16": (4, 1), "vit_l16": (10, 1), "vit_h14": (22, 1)},
}


class Plan(NamedTuple):
    """What a command would do, and what keeps it from doing so."""

    work: Record  # such as {"out": ..., "device": "cpu", "images": {...}, "steps": {...}, ...}
    problems: list[str]  # a line each, which names the thing and the remedy


def plan_run(
    command: str, cfg: AlignConfig | FinetuneConfig | PretrainConfig, out: Path, force: bool
) -> Plan:
    """Find out what a command with these settings would do; nothing is downloaded or written.

    1. Check the directory and the device.
    2. Count the work of the command, and check its data and networks.
    3. List the settings that are not the paper's.

    `command` is "align", "finetune" or "pretrain". One dry run names everything that is missing,
    not the first thing alone: `try_and_collect(problems, f, ...)` calls f(...), and where that
    raises UsageError, it adds the text to `problems` and returns None.
    """
    problems: list[str] = []
    try_and_collect(problems, check_directory, out, command, cfg, force)
    device = try_and_collect(problems, find_device, cfg.device)
    work: Record = {"out": out, "device": str(device) if device else None}

    if isinstance(cfg, PretrainConfig):
        recipe = "MAE or I-JEPA"
        # such as {"images": 2580, "steps": 4000}
        work |= try_and_collect(problems, pretrain.plan, cfg) or {}
    else:
        recipe = "the paper"
        work |= plan_training(cfg, problems)

    work[f"differs from {recipe}"] = list_unlike_paper(cfg) or "nothing"
    return Plan(work, problems)


def list_unlike_paper(cfg: Command) -> list[Record]:
    """List the settings that are not the paper's, with the paper's value and who set them.

    Such as [{"setting": "rank", "value": 8, "recipe": 64, "from": "our default"}].
    """
    rows = []
    of_paper = paper_values(type(cfg), dict(cfg))
    for name, value in unlike_paper(cfg).items():
        source = "given" if name in cfg.model_fields_set else "our default"
        rows.append({"setting": name, "value": value, "recipe": of_paper[name], "from": source})
    return rows


def plan_training(cfg: AlignConfig | FinetuneConfig, problems: list[str]) -> Record:
    """Find out what `align` or `finetune` would do: images, steps, parameters, weights and memory.

    1. Open the data, and count images and steps.
    2. Find the weights and the networks' sizes, see `find_arch`.
    3. Count the parameters of LoRA, and return the plan.

    Everything that is missing is added to `problems`, see `plan_run`.
    """
    task: Task | None = try_and_collect(problems, open_task, cfg)
    pool: Pool | None = None  # finetune has none
    if isinstance(cfg, AlignConfig):
        pool = try_and_collect(problems, open_pool, cfg.pool, cfg.data_root, cfg.data_seed)
        steps = count_align_steps(cfg, task)
    else:
        # Called for its problems alone: the align runs of --from have to be finished.
        try_and_collect(problems, starts_of_seeds, cfg)
        steps = count_trials(cfg, task)

    # the path of their file; None: timm has the weights, or `problems` says why there is none
    weights = try_and_collect(problems, find_weights, cfg)
    arch = find_arch(cfg, task, pool, weights, problems)
    return {
        "images": count_images(task, pool),
        "steps": steps,
        "LoRA parameters": count_lora_parameters(arch, cfg.rank) if arch else None,
        "weights": describe_download(cfg, weights),
        "the paper's memory, GB and GPUs": paper_memory(cfg),
    }


def count_images(task: Task | None, pool: Pool | None) -> Record:
    """Count the images of a task's splits and of a pool, such as {"train": 60, ..., "pool": 90}."""
    sizes: Record = task.sizes() if task else {}
    if pool:
        sizes["pool"] = len(pool.images)
    return sizes


def count_lora_parameters(arch: Arch, rank: int) -> int:
    """How many numbers θ has: A_q, B_q, A_v and B_v of each layer, rank x dim each."""
    return arch.depth * 4 * rank * arch.dim


def describe_download(cfg: Network, weights: Path | None) -> str | None:
    """Where the weights come from if they have to be fetched; None if they are here or unknown.

    `weights` is the path that `find_weights` has found. It is None for timm's own weights, and
    where `find_weights` has raised an error.
    """
    if weights and not weights.exists():  # only an official file may be absent
        url, megabytes = OFFICIAL_FILES[cfg.backbone, cfg.pretext]
        return f"{megabytes:.0f} MB to download from {url}"
    if weights is None and cfg.backbone.startswith(TIMM):
        return "timm's, from the Hugging Face hub or its cache"
    return None


def find_arch(
    cfg: AlignConfig | FinetuneConfig,
    task: Task | None,
    pool: Pool | None,
    weights: Path | None,
    problems: list[str],
) -> Arch | None:
    """Find the networks' sizes; None if that is impossible, which is then one of the `problems`.

    If nothing is missing so far, and the file `weights` is here, the networks are loaded, to see
    whether they fit. Otherwise the sizes are those that the name of the backbone stands for.
    """
    file_is_here = weights is not None and weights.exists()
    if file_is_here and not problems:
        return try_and_collect(problems, try_networks, cfg, task, pool)
    return try_and_collect(problems, arch_from_name, cfg)


def try_networks(cfg: AlignConfig | FinetuneConfig, task: Task | None, pool: Pool | None) -> Arch:
    """Load the networks and make the pretext task, as a run does, and return the networks' sizes.

    Raises UsageError if they do not fit each other or the settings.
    """
    if isinstance(cfg, FinetuneConfig):
        return open_experiment(cfg, task).arch
    experiment = open_align_experiment(cfg, task, pool)
    experiment.new_pretext_task(experiment.new_theta(cfg.seed))
    return experiment.arch


def arch_from_name(cfg: Network) -> Arch:
    """The sizes of the network that --backbone names, without its weights. Raises UsageError."""
    with as_usage_error(f"--backbone {cfg.backbone}"):
        if cfg.backbone.startswith(TIMM):
            return timm_models.read_arch(cfg)
        return arch_of({}, cfg)  # {}: no file that says its sizes


def count_align_steps(cfg: AlignConfig, task: Task | None) -> Record:
    """Count the training steps: of both levels, and of the linear probe if the task is there.

    Such as {"lower": 10000, "upper": 4000, "probe": 1500}.
    """
    steps = {
        "lower": cfg.alternations * cfg.lower_steps,
        "upper": cfg.alternations * cfg.upper_steps,
    }
    if task:
        steps["probe"] = cfg.probe_epochs * steps_per_epoch(len(task.train.targets), cfg.d_batch)
    return steps


def count_trials(cfg: FinetuneConfig, task: Task | None) -> Record:
    """Count the trials, each with one rate and one seed, and the steps of all if the task is there.

    Such as {"trials": 13, "all trials": 49400}.
    """
    counts = {"trials": cfg.trials}
    if task:
        steps_of_trial = cfg.epochs * steps_per_epoch(len(task.train.targets), cfg.batch)
        counts["all trials"] = cfg.trials * steps_of_trial
    return counts


def paper_memory(cfg: AlignConfig | FinetuneConfig) -> tuple[int, int] | None:
    """The memory that the paper lists for such a run, (GB, GPUs); None if it lists none."""
    if cfg.pretext != "mae":
        return None
    row = cfg.hypergrad if isinstance(cfg, AlignConfig) else str(cfg.batch)
    return MEMORY.get(row, {}).get(cfg.backbone)
