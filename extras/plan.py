"""What a run would do, for `--dry-run`: settings unlike the paper's, images, steps, memory."""

from pkgutil import resolve_name
from typing import Any

from config import AlignConfig, Command, Record
from extras import MEMORY
from support.checkpoints import OFFICIAL, arch_of, weights_of
from support.errors import checking
from support.experiment import Model, device_of, named


def dry_run(name: str, cfg: Any, layers: dict[str, Record], every: bool) -> Record:
    """What command `name` would do; the settings unlike the paper's, or, with `every`, all."""
    module = "extras.plan" if name in ("align", "finetune") else f"extras.{name}"
    recipe = "MAE or I-JEPA" if name == "pretrain" else "the paper"
    rows = table(cfg, layers, every) or "nothing"
    return dict(resolve_name(f"{module}:plan")(cfg)) | {
        "settings" if every else f"differs from {recipe}": rows
    }


def table(cfg: Any, layers: dict[str, Record], every: bool) -> list[Record]:
    """A row a setting: its value, the layer that set it (the last that has it), and the paper's."""
    paper = layers["default"]
    sources = {name: source for source, layer in layers.items() for name in layer}
    own = {"backbone", "dataset", "pool", "start", "pretext", "weights", *Command.model_fields}
    return [
        {"setting": name, "value": value, "set by": sources.get(name, ""), "paper": paper.get(name)}
        for name, value in cfg
        if every or (value != paper.get(name) and name not in own)
    ]


def plan(cfg: Any) -> Record:
    """What `align` or `finetune` would do; weights that are not downloaded yet go unchecked."""
    task, there, pool = named(cfg, "dataset"), weights_of(cfg).exists(), None
    sizes = task.sizes()
    if isinstance(cfg, AlignConfig):
        pool, memory = named(cfg, "pool"), MEMORY.get(cfg.hypergrad, {})
        sizes["pool"] = len(pool.images)
        steps = {
            "lower": cfg.alternations * cfg.lower_steps,
            "upper": cfg.alternations * cfg.upper_steps,
            "probe": cfg.probe_epochs * -(-sizes["train"] // cfg.d_batch),
        }
    else:
        memory = MEMORY.get(f"{cfg.batch}", {})
        runs = len(cfg.grid) * cfg.grid_seeds + cfg.seeds - cfg.grid_seeds
        steps = {"runs": runs, "in all": runs * cfg.epochs * -(-sizes["train"] // cfg.batch)}
    with checking(f"--backbone {cfg.backbone}"):
        m = Model(cfg, task, pool) if there else None
        arch = m.arch if m else arch_of({}, cfg)
    if m and pool:
        m.pretext_task(m.theta())
    return {
        "device": str(device_of(cfg)),
        "images": sizes,
        "steps": steps,
        "LoRA parameters": arch.depth * 4 * cfg.rank * arch.dim,
        "weights": None
        if there
        else "{1} MB to download from {0}".format(*OFFICIAL[cfg.backbone, cfg.pretext]),
        # the paper has no figures for I-JEPA
        "the paper's memory, GB and GPUs": memory.get(cfg.backbone if cfg.pretext == "mae" else ""),
    }
