"""Accuracy against LoRA rank (fig:lora_rank_var), and against λ, N_L, T or a learning rate: a grid of ordinary runs.

    OUT/config.json             the sweep's own settings, a valid `--config`
    OUT/rank-4/align            an `align` run
    OUT/rank-4/finetune         `finetune --from` it, all seeds
    OUT/rank-4/direct           `finetune` from the backbone, the other curve
    OUT/sweep.json, sweep.png   table and picture of what is finished

A run's directory is named after those swept settings that it depends on, and only those: `--lr` has one align run,
OUT/align; `--lam` one direct run, OUT/direct. Each is good for `evaluate`, `report`, `export` and `finetune --from`.

Processes share the work without talking to each other. A *chain* is an align run and the PEFT runs that start from it,
or a direct run alone; shard i/n does every n-th, and no two chains write to the same directory. What is shared is
written whole: config.json by whoever is first, the table by whoever ends, who looks again before leaving.
A point has one align run, as in the paper: error bars are over PEFT seeds.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import stages
import tuning
from config import SWEPT, AlignConfig, Diverged, FinetuneConfig, RunError, Shape, SweepConfig, UsageError, put
from evaluate import read_arm, versus
from figures import COLOURS, pyplot, rendered
from loading import default_out, resolved_data, resolved_machine, resolved_model
from parallel import world
from runtime import check_out, differences, read_from, read_json, write_atomic

AXES = {
    "rank": "LoRA rank r", "lam": "λ",
    "lr": "learning rate of PEFT", "d_lr": "learning rate of θ_D", "p_lr": "learning rate of θ_P",
    "lower_steps": "N_L, pretext steps an alternation", "alternations": "T, alternations",
}  # fmt: skip
ALIGNED = {"mfac": "BiSSLight + PEFT", "cg": "BiSSL + PEFT"}


class Job(NamedTuple):
    """One ordinary run: where it goes below OUT, the swept settings it depends on, and all of its settings."""

    name: str
    point: dict[str, Any]
    config: AlignConfig | FinetuneConfig


Chain = list[Job]  # an align run and the PEFT runs that start from it, or one direct PEFT run


# --- the plan --------------------------------------------------------------------------------------------------------


def plan(cfg: SweepConfig, out: Path) -> list[Chain]:
    """All runs of a sweep, every setting checked (UsageError or ValidationError): aligned chains, then direct runs."""
    aligned: dict[str, Chain] = {}
    direct: dict[str, Chain] = {}
    for values in product(*cfg.swept.values()):
        point = dict(zip(cfg.swept, values, strict=True))
        align = job("align", AlignConfig, cfg, point)
        chain = aligned.setdefault(align.name, [align])
        chain.append(job("finetune", FinetuneConfig, cfg, point, start=(out / align.name).absolute()))
        alone = job("direct", FinetuneConfig, cfg, {k: v for k, v in point.items() if has(FinetuneConfig, k)})
        direct.setdefault(alone.name, [alone])
    return [*aligned.values(), *direct.values()]


def has(model: type[AlignConfig] | type[FinetuneConfig], name: str) -> bool:
    """Whether a command has a setting."""
    return SWEPT[name][0] in model.model_fields


def job(
    kind: str,
    model: type[AlignConfig] | type[FinetuneConfig],
    cfg: SweepConfig,
    point: dict[str, Any],
    start: Path | None = None,
) -> Job:
    """One run of a point, its settings resolved. A run that starts from another depends on all that this depends on."""
    point = point if start else {name: value for name, value in point.items() if has(model, name)}
    table = cfg.model_dump()
    for name, value in point.items():
        put(table, SWEPT[name], value)
    resolved = model.model_validate({name: table[name] for name in model.model_fields if name in table})
    update: dict[str, Any] = {"model": resolved_model(resolved.model), "data": resolved_data(cfg.data, True)}
    update |= {"start": start} if start else {}
    folder = "-".join(f"{name.replace('_', '-')}-{value}" for name, value in point.items())
    return Job(f"{folder}/{kind}" if folder else kind, point, resolved.model_copy(update=update))


def share(chains: list[Chain], shard: str | None) -> list[Chain]:
    """Every n-th chain from the i-th on, for a shard i/n; all without one (UsageError where it is no such thing).

    >>> [len(share([[]] * 5, f"{i}/2")) for i in (0, 1)]
    [3, 2]
    """
    if shard is None:
        return chains
    i, slash, n = shard.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise UsageError(f"--shard {shard}: is i/n with i from 0 to n - 1, 0/2 and 1/2 for two processes")
    return chains[int(i) :: int(n)]


def budget(chains: list[Chain], out: Path) -> dict[str, Any]:
    """What all runs together cost, after every check that each of them makes before it starts."""
    runs: list[dict[str, Any]] = []
    remarks: dict[str, str] = {}  # the same one is told once, with the first run that it is about
    for item in (item for chain in chains for item in chain):
        nowhere = stages.Options(out=out / item.name / "dry-run", dry_run=True)
        if isinstance(item.config, AlignConfig):
            about = stages.align(item.config, nowhere)
            runs.append({"run": item.name, "steps": sum(about["steps"].values()), "TFLOP": about["TFLOP"]})
        else:  # the align run that it will start from is not there yet
            about = tuning.finetune(item.config.model_copy(update={"start": None}), nowhere)
            runs.append({"run": item.name, "steps": about["steps"], "PEFT runs": about["runs"]})
        if about["remark"]:
            remarks.setdefault(about["remark"], item.name)
    total = {key: sum(run.get(key, 0) for run in runs) for key in ("steps", "TFLOP", "PEFT runs")}
    remark = "; ".join(f"{name}: {text}" for text, name in remarks.items()) or None
    return {"runs": runs, "chains": len(chains), "total": {"runs": len(runs), **total}, "remark": remark}


# --- the work --------------------------------------------------------------------------------------------------------


def sweep(
    cfg: SweepConfig, options: stages.Options, shard: str | None = None, pool: Executor | None = None
) -> dict[str, Any]:
    """Run what is not finished of a sweep, or of a shard of it; returns the table of all that is there."""
    if world().size > 1:
        raise UsageError(
            "sweep: runs in one process each, give --shard i/n to each instead of starting it with torchrun"
        )
    if options.force:
        raise UsageError("--force: a sweep is not started over, remove its directory or give another --out")
    weights, source = cfg.model.weights, cfg.upper.d_lr_from
    update: dict[str, Any] = {"model": cfg.model.model_copy(update={"weights": weights and weights.absolute()})}
    update |= {"upper": cfg.upper.model_copy(update={"d_lr_from": source and source.absolute()})}
    cfg = cfg.model_copy(update=update | {"data": resolved_data(cfg.data, True)})
    shape = Shape(backbone=cfg.model.backbone)
    names = (cfg.model.pretext, *(name.replace("_", "-") for name in cfg.swept))
    out = options.out or default_out("sweep", cfg.data.dataset, shape, cfg.seed, *names)
    chains = plan(cfg, out)
    mine = share(chains, shard)
    if options.dry_run:
        data = resolved_data(cfg.data, True)
        machine = resolved_machine(cfg.machine, data.dataset, data.pool)
        return budget(mine, out) | {"config": cfg.model_copy(update={"machine": machine}), "out": str(out)}
    pyplot()
    check_sweep(out, cfg, options.resume, shard)
    for item in (item for chain in mine for item in chain):
        check_run(out / item.name, item.config, options.resume)
    claim(out, cfg)
    todo = [(chain, item) for chain in mine for item in chain if not ended(out / item.name)]
    for k, (chain, item) in enumerate(todo):
        if item is chain[0] or (out / chain[0].name / "result.json").exists():
            options.announce(f"run {k + 1} of {len(todo)}: {item.name}")
            run(item, out / item.name, options, pool)
    return conclude(cfg, out, chains) | {"out": str(out)}


def run(item: Job, where: Path, options: stages.Options, pool: Executor | None) -> None:
    """One run, from its start or from where it was; that it diverged is written beside it, and the sweep goes on."""
    own = options._replace(out=where, resume=(where / "config.json").exists())
    try:
        if isinstance(item.config, AlignConfig):
            stages.align(item.config, own)
        else:
            tuning.finetune(item.config, own, pool)
    except Diverged as error:
        write_atomic(diverged(where), f"{error}\n")
        options.announce(f"{item.name} diverged: {error}")


def diverged(where: Path) -> Path:
    """The file that says that a run diverged."""
    return where.with_name(f"{where.name}.diverged")


def ended(where: Path) -> bool:
    """Whether there is nothing left to do in a run's directory."""
    return (where / "result.json").exists() or diverged(where).exists()


def check_sweep(out: Path, cfg: SweepConfig, resume: bool, shard: str | None) -> None:
    """Refuse (UsageError) a directory of something else, and one of other settings. Shards may find one of theirs."""
    file = out / "config.json"
    if not file.exists():
        if resume and shard is None:
            raise UsageError(f"--resume: there is no sweep in {out}")
        if out.exists() and (not out.is_dir() or any(not path.name.startswith(".") for path in out.iterdir())):
            raise UsageError(f"--out {out}: holds something else, choose an empty or new directory")
    elif "swept" not in read_json(file):
        raise UsageError(f"--out {out}: is a run, not a sweep, choose another --out")
    elif changed := differences(out, cfg):
        raise UsageError(f"--out {out}: is a sweep with other settings: {', '.join(changed)}; choose another --out")
    elif not resume and shard is None:
        raise UsageError(f"--out {out}: a sweep, --resume continues it, or choose another --out")


def check_run(where: Path, config: AlignConfig | FinetuneConfig, resume: bool) -> None:
    """Refuse (UsageError), before the first run starts, a run directory that could not be used when its turn comes."""
    begun = resume and (where / "config.json").exists()
    if begun and (changed := differences(where, config)):
        raise UsageError(f"{where}: differs from this sweep in {', '.join(changed)}; remove it or choose another --out")
    if not resume and (where / "config.json").exists():
        raise UsageError(f"{where}: is there already, --resume continues it")
    if not (begun and ended(where)):
        check_out(where, "align" if isinstance(config, AlignConfig) else "finetune", begun, False)


def claim(out: Path, cfg: SweepConfig) -> None:
    """Write OUT/config.json if nobody has; whole, and only once (UsageError where it then has other settings)."""
    text = json.dumps(cfg.model_dump(mode="json"), indent=1)
    try:
        out.mkdir(parents=True, exist_ok=True)
        mine = out / f".config.{os.uname().nodename}.{os.getpid()}.json"
        write_atomic(mine, text)
        try:
            os.link(mine, out / "config.json")  # fails where the name is taken
        except FileExistsError:
            if changed := differences(out, cfg):
                raise UsageError(f"--out {out}: is a sweep with other settings: {', '.join(changed)}") from None
        finally:
            mine.unlink()
    except OSError as error:
        raise RunError(f"--out {out}: cannot be written ({error.strerror}), choose another --out") from error


def again(out: Path) -> dict[str, Any]:
    """The table of a sweep's directory, whatever is finished in it (UsageError where its settings cannot be read)."""
    with read_from(out):
        cfg = SweepConfig.model_validate(read_json(out / "config.json"))
        return table(cfg, out, plan(cfg, out))


# --- table and picture -----------------------------------------------------------------------------------------------


def conclude(cfg: SweepConfig, out: Path, chains: list[Chain]) -> dict[str, Any]:
    """Write sweep.json and sweep.png, again if another process has finished a run meanwhile."""
    result = table(cfg, out, chains)
    while True:
        write_atomic(out / "sweep.json", json.dumps(result, indent=1))
        write_atomic(out / "sweep.png", rendered(draw(result)))
        before, result = result, table(cfg, out, chains)
        if result == before:
            return result


def table(cfg: SweepConfig, out: Path, chains: list[Chain]) -> dict[str, Any]:
    """A row for each finished PEFT run, what is missing, what diverged. The same whoever ran them; no times."""
    align = {item.name: item for chain in chains for item in chain if isinstance(item.config, AlignConfig)}
    runs = [item for chain in chains for item in chain if item.name not in align]
    direct = {item.name: item for item in runs if item.config.start is None}  # type: ignore[union-attr]
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    failed = {name: diverged(out / name).read_text().strip() for name in align if diverged(out / name).exists()}
    first: dict[str, Any] = {}
    for chain in chains:
        for item in chain:
            where = out / item.name
            if item.name in align:
                continue
            if diverged(where).exists():
                failed[item.name] = diverged(where).read_text().strip()
            elif not (where / "result.json").exists():
                missing += [] if chain[0].name in failed else [item.name]
            else:
                same(where, first)
                rows.append(row(item, where, None if item.name in direct else chain[0], out))
    for line in rows:
        other = next((r for r in rows if r["run"] in direct and r["point"].items() <= line["point"].items()), None)
        pair = [read_arm(out / one["run"]) for one in (line, other)] if other and other is not line else None
        line["minus_direct"] = versus(*pair)._asdict() if pair else None
        line["direct"] = other["run"] if pair and other else None
    about = {"dataset": cfg.data.dataset, "backbone": cfg.model.backbone, "pretext": cfg.model.pretext, **first}
    return {"swept": cfg.swept, **about, "rows": rows, "missing": missing, "diverged": failed}


def same(where: Path, first: dict[str, Any]) -> None:
    """Refuse (UsageError) runs of one sweep that had other weights or other data than its first one."""
    env = read_json(where / "env.json")
    for key in ("weights_sha256", "data_sha256"):
        if first.setdefault(key, env[key]) != env[key]:
            raise UsageError(f"{where}: has {key} {env[key]}, other runs of this sweep {first[key]}; remove it")


def row(item: Job, where: Path, start: Job | None, out: Path) -> dict[str, Any]:
    """One point of a curve, and for an aligned one what its align run ended with."""
    arm, result = read_arm(where), read_json(where / "result.json")
    name, ended_with = "PEFT", None
    if start is not None:
        assert isinstance(start.config, AlignConfig)
        bilevel, done = start.config.bilevel, read_json(out / start.name / "result.json")
        name = (
            ALIGNED.get(bilevel.hypergrad, f"{bilevel.hypergrad} + PEFT")
            if bilevel.upper_steps
            else "lower only + PEFT"
        )
        ended_with = {"d_lr": done["d_lr"], "distance": done["distance"]}
        ended_with |= {key: mean(done[key]) for key in ("q_over_g", "cosine")}
        ended_with |= {key: done[key]["accuracy"] for key in ("val_P", "val_D")}
    line = {"arm": name, "run": item.name, "point": item.point, "metric": arm.metric, "seeds": len(arm.accuracies)}
    line |= {"unit": arm.unit, "mean": arm.mean, "std": arm.std, "accuracies": arm.accuracies, "lr": result["lr"]}
    line |= {"paper": arm.published._asdict() if arm.published else None, "align": ended_with}
    return line | {"start": start.name if start else None}


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def curves(result: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each line of the picture: an arm, and a value of the second swept setting where it depends on one."""
    second = [*result["swept"]][1:]
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in result["rows"]:
        own = [f", {name} {line['point'][name]}" for name in second if name in line["point"]]
        lines.setdefault(line["arm"] + "".join(own), []).append(line)
    yield from lines.items()


def draw(result: dict[str, Any]) -> Any:
    """Accuracy against the first swept setting, mean ± standard deviation; a level line where it does not matter."""
    figure, axes = pyplot().subplots(figsize=(6, 4))
    x, values = next(iter(result["swept"].items()))
    numbers = sorted(value for value in values if not isinstance(value, str))
    base = 2 if all(isinstance(value, int) for value in numbers) else 10
    for k, (name, rows) in enumerate(curves(result)):
        colour, alone = COLOURS[k % len(COLOURS)], rows[0]["arm"] == "PEFT"
        style = {"color": colour, "linestyle": "--" if alone else "-", "label": name}
        if x not in rows[0]["point"]:
            axes.axhline(rows[0]["mean"], **style)
            spread = rows[0]["std"] or 0.0
            axes.axhspan(rows[0]["mean"] - spread, rows[0]["mean"] + spread, color=colour, alpha=0.12, linewidth=0)
            continue
        rows = sorted(rows, key=lambda line: line["point"][x])
        aside = base ** (0.04 * k)  # a little to the right, or bars hide each other
        at, means = [line["point"][x] * aside for line in rows], [line["mean"] for line in rows]
        marker = "s" if alone else "o"
        axes.errorbar(at, means, [line["std"] or 0.0 for line in rows], marker=marker, capsize=3, **style)
    axes.set_xscale("log", base=base)
    axes.set_xticks(numbers, [f"{value:g}" for value in numbers])
    axes.minorticks_off()
    axes.set_xlabel(AXES[x])
    metric = result["rows"][0]["metric"] if result["rows"] else "accuracy"
    axes.set_ylabel(f"test {metric} (%)")
    seeds = sorted({line["seeds"] for line in result["rows"]})
    what = f"{result['dataset'].rpartition('/')[2]}, {result['backbone']}"
    axes.set_title(f"{what}: mean ± std of {', '.join(map(str, seeds)) or 'no'} PEFT seeds, one align run a point")
    axes.grid(alpha=0.3)
    if result["rows"]:
        axes.legend()
    return figure
