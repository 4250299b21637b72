"""The commands without their command line: settings in, a run directory out. Here rooms are wired to each other.

    pretrain   mae or ijepa  -> backbone.pth
    align      bisslight     with a pretext task and an inverse -> adapter.safetensors (θ_P)
    export     export        a finished run's adapter for other programs

Each function resolves the settings, checks inputs before the long work, and is quiet: progress goes to `report`.
Leaves out: fine-tuning, which is in `tuning`.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bisslight
import cg
import export
import finetune as ft
import ijepa
import mae
import mfac
from bisslight import PretextTask
from config import (
    BACKBONES,
    AlignConfig,
    Arch,
    Diverged,
    FinetuneConfig,
    Model,
    PretrainConfig,
    RunError,
    UsageError,
)
from cost import budget, memory, noting_what_fits
from data import IMAGENET, Augment, Task, epochs, quilts, stream
from evaluate import accuracies
from loading import (
    Downstream,
    Loaded,
    Pool,
    Report,
    cached,
    check_weights,
    decode_scored,
    default_out,
    downstream,
    fetch_weights,
    fits,
    load_backbone,
    pool_of,
    pretext_task,
    read_run,
    resolved_data,
    resolved_machine,
    resolved_model,
    to_download,
)
from lora import Backbone, Phi, adapter_bytes, adapter_metadata, init_head, init_stats, init_theta, psi_of
from parallel import Parts, World, world
from runtime import (
    AGAIN,
    Group,
    Optimiser,
    Run,
    Schedule,
    autocast,
    check_out,
    constant,
    decay_groups,
    open_run,
    pick_device,
    read_from,
    read_json,
    rng,
    to_bytes,
    trainable,
)
from stopping import Stopped, signals
from tasks import BENCHMARKS, load_task

MakeTask = Callable[[AlignConfig, Loaded, Tensor], PretextTask[Any]]


def silent(stage: str, done: int, total: int, text: str) -> None:
    """No progress."""


class Options(NamedTuple):
    """What a command is asked besides its experiment."""

    out: Path | None = None
    resume: bool = False
    force: bool = False
    dry_run: bool = False
    report: Report = silent
    announce: Callable[[str], None] = lambda line: None  # what a run is about, once its inputs have been checked
    sources: Mapping[str, str] = {}  # settings that were given, by name: a flag, a file, a preset


def remind(run: Run, options: Options) -> None:
    """Say what a resumed run will not do as it did before."""
    if not run.resumed:
        return
    threads = read_json(run.path / "env.json").get("threads")
    if threads not in (None, torch.get_num_threads()):
        now = f"--resume: {threads} threads before, {torch.get_num_threads()} now"
        options.announce(f"{now}; sums round differently, see OMP_NUM_THREADS")
    if run.records and "lr" not in run.records[0] and not (run.path / "checkpoint.pt").exists():
        options.announce(f"--resume: there is no checkpoint in {run.path}, the run starts over")


def may_write(out: Path, command: str, options: Options) -> None:
    """`check_out`, but not for a --dry-run that names no directory."""
    if options.out or not options.dry_run:
        check_out(out, command, options.resume, options.force)


# --- pretrain --------------------------------------------------------------------------------------------------------


def pretrain(cfg: PretrainConfig, options: Options) -> dict[str, Any]:
    """Train a backbone and its pretext head from scratch; writes backbone.pth in the official layout."""
    if cfg.model.backbone not in BACKBONES:
        raise UsageError(f"--backbone {cfg.model.backbone}: pretrain makes {', '.join(BACKBONES)}; timm has its own")
    arch, jepa = BACKBONES[cfg.model.backbone].arch, cfg.model.pretext == "ijepa"
    sizes = {k: v for k, v in (("image_size", cfg.model.image_size), ("patch_size", cfg.model.patch_size)) if v}
    arch = Arch.model_validate(arch.model_dump() | sizes | {"class_token": not jepa})
    device = pick_device(cfg.machine.device)
    fits(cfg.pool, arch)
    augment: Augment = cfg.augment or ("none" if cfg.pool == "quilts" else "crop")
    cfg = cfg.model_copy(update={"machine": resolved_machine(cfg.machine, cfg.pool), "augment": augment})
    pool = pool_of(cfg, cfg.pool, cfg.data_seed, augment, cfg.min_crop, arch.image_size)
    per_epoch = max(1, len(pool.images) // cfg.batch)
    total = per_epoch * cfg.epochs
    task, schedule = scratch(cfg, arch, device, per_epoch)
    psi = psi_of(task.backbone.vit)
    named = psi | task.phi
    about: dict[str, Any] = {"images": len(pool.images), "steps": total, "patches": arch.patches}
    about["parameters"] = sum(tensor.numel() for tensor in named.values())
    out = options.out or default_out("pretrain", cfg.pool, cfg.model, cfg.seed, cfg.model.pretext)
    peers = world()
    peers.first(partial(may_write, out, "pretrain", options))
    late = [*late_warmup(cfg.warmup_epochs, cfg.epochs, "epochs", "--warmup-epochs")]
    if options.dry_run:
        return about | remarked(late) | {"config": cfg}
    about["pool_sha256"] = pool.fingerprint()
    run = open_run(out, "pretrain", cfg, options.resume, options.force, **about, sources=options.sources)
    remind(run, options)
    options.announce(f"seed {cfg.seed}, device {device}, {total} steps, {about['parameters']:,} parameters -> {out}")
    for line in late:
        options.announce(line)
    groups = decay_groups(named, cfg.base_lr * cfg.batch / 256, cfg.weight_decay)
    last = cfg.final_weight_decay
    decay = constant if last is None else ijepa.decay_schedule(total, cfg.weight_decay, last)
    opt = Optimiser(groups, schedule, (0.9, cfg.beta2), decay=decay)
    losses: list[float] = []
    if state := run.restore(lambda record: record["step"] * per_epoch <= record["checkpoint"], device):
        with torch.no_grad(), read_from(run.path / "checkpoint.pt", AGAIN):
            for name, tensor in named.items():
                tensor.copy_(state["tensors"][name])
            opt.load_state_dict(state["opt"])
            task.load_state_dict(state["task"])
            losses = [*state["losses"]]
    del state  # what was read is a second copy

    def save() -> None:
        tensors = {name: tensor.detach() for name, tensor in named.items()}
        parts = {"tensors": tensors, "opt": opt.state_dict(), "task": task.state_dict()}
        run.save(parts | {"done": opt.step, "losses": losses})

    def after(step: int, loss: float) -> None:
        losses.append(loss)
        if step % per_epoch:
            return
        average = mean(losses)
        losses.clear()
        run.metric({"step": step // per_epoch, "loss": average})
        options.report("pretrain", step // per_epoch, cfg.epochs, f"loss {average:.4f}")
        run.log(f"epoch {step // per_epoch}: loss {average:.4f}")

    def pause() -> None:
        if number := peers.asked():
            save()
            raise Stopped(number, f"stopped after step {opt.step} of {total}; {run.path}: --resume goes on")
        if (opt.step % 20 == 0 or opt.step % per_epoch == 0) and run.due(cfg.machine.save_minutes):
            save()

    loss_P = autocast(task.loss, device, cfg.amp)
    batches = pool.batches(task, cfg.batch, opt.step, total)
    try:
        with signals.listening():
            bisslight.pretrain(
                psi, task.phi, loss_P, opt, batches, task.after_step, after, how=peers.gradients, pause=pause
            )
    except bisslight.NotFinite as error:
        raise Diverged(f"{error.what}try a lower --base-lr or a longer warm-up, --warmup-epochs") from error
    run.write("backbone.pth", to_bytes(task.checkpoint(arch, cfg.model.backbone)))
    loss = run.records[-1]["loss"]
    result = {"out": str(out), "weights": str(out / "backbone.pth"), "loss": loss, **about, **run.spent()}
    run.finish(result)
    return result


def scratch(
    cfg: PretrainConfig, arch: Arch, device: torch.device, per_epoch: int
) -> tuple[mae.MAE | ijepa.IJEPA, Callable[[int, float], float]]:
    """A pretext task around freshly initialised networks, and the learning rate its authors give it."""
    total, g = per_epoch * cfg.epochs, rng(cfg.seed, "init")
    if cfg.model.pretext == "mae":
        vit, decoder = mae.init(arch, g)
        backbone = Backbone(vit.to(device), recompute=cfg.model.recompute)
        schedule = mae.schedule(cfg.epochs, cfg.warmup_epochs, per_epoch, cfg.min_lr, cfg.warmup_from)
        return mae.MAE(backbone, decoder.to(device), cfg.mask_ratio), schedule
    vit, predictor = ijepa.init(arch, g)
    teacher = Backbone(copy.deepcopy(vit).to(device)).requires_grad_(False)
    backbone = Backbone(vit.to(device), recompute=cfg.model.recompute)
    schedule = ijepa.schedule(total, cfg.warmup_epochs * per_epoch, cfg.warmup_from, cfg.min_lr)
    return ijepa.IJEPA(backbone, predictor.to(device), cfg.masks, (cfg.ema, total), None, teacher), schedule


# --- align -----------------------------------------------------------------------------------------------------------


EXACT_LIMIT = 5000  # entries of θ: its Hessian takes as many double passes, and 200 MB in float64


def align(cfg: AlignConfig, options: Options, make_task: MakeTask = pretext_task) -> dict[str, Any]:
    """BiSSLight: probe φ_D, run Algorithm 1, keep θ_P as adapter.safetensors.

    Args:
        make_task: (settings, backbone with its head, θ_P's start) -> the pretext task; MAE or I-JEPA by the settings.
    """
    if cfg.model.backbone.startswith("timm:"):
        raise UsageError(
            f"--backbone {cfg.model.backbone}: align needs a checkpoint with its pretext head, so vit_b16, vit_l16, "
            "vit_h14 or a pretrain run's vit_mini; any timm ViT can be fine-tuned"
        )
    model, data = resolved_model(cfg.model), resolved_data(cfg.data, True)
    machine = resolved_machine(cfg.machine, data.dataset, data.pool)
    upper = cfg.upper.model_copy(update={"d_lr_from": cfg.upper.d_lr_from and cfg.upper.d_lr_from.absolute()})
    cfg = cfg.model_copy(update={"model": model, "data": data, "machine": machine, "upper": upper})
    assert machine.data_root is not None and data.pool is not None and data.augment and model.rank is not None
    labelled = load_task(data, machine.data_root)
    sizes = BACKBONES[model.backbone].arch
    pool = pool_of(cfg, data.pool, data.data_seed, data.augment, data.min_crop, sizes.image_size)
    rates = d_rates(cfg)
    what = model.pretext if make_task is pretext_task else getattr(make_task, "__name__", "own-task")
    out = options.out or default_out("align", data.dataset, model, cfg.seed, what)
    peers = world()
    peers.first(partial(may_write, out, "align", options))
    if missing := to_download(model):  # what can be told before the download
        for name in (data.dataset, data.pool):
            fits(name, sizes)
        if options.dry_run:
            needs = memory(cfg, sizes, labelled, pool.device)
            about = budget(cfg, sizes, labelled, len(pool.images)) | {"memory_MB": needs} | missing
            return about | remarked(remarks(cfg, labelled)) | {"config": cfg}
    fetch_weights(model, options.report)
    d = downstream(model, data, machine, cfg.amp, labelled)
    arch, device = d.loaded.arch, d.device
    fits(data.pool, arch)
    pool = pool._replace(view=pool.view._replace(size=arch.image_size))
    theta = init_theta(arch.depth, model.rank, arch.dim, rng(cfg.seed, "lora"))
    task = make_task(cfg, d.loaded, theta.to(device))
    refuse_pieces(cfg, task, peers)
    ((_, first),) = next(pool._replace(peers=World(), micro=None, workers=0).batches(task, 32, 0, 1))
    task.check(first)
    refuse_batches(cfg, d, [cfg.upper.d_batch, len(labelled.train.targets) % cfg.upper.d_batch])
    about = budget(cfg, arch, labelled, len(pool.images))
    if cfg.bilevel.hypergrad == "exact" and about["lora_parameters"] > EXACT_LIMIT:
        raise UsageError(
            f"--hypergrad exact: θ has {about['lora_parameters']} entries, a dense Hessian of more than "
            f"{EXACT_LIMIT} is out of reach; lower --rank or use mfac"
        )
    if cfg.lower.p_batch < peers.size:
        raise UsageError(f"--p-batch {cfg.lower.p_batch}: fewer images than processes ({peers.size})")
    if cfg.bilevel.hypergrad == "exact" and peers.size > 1:
        raise UsageError("--hypergrad exact: runs in one process, start it without torchrun")
    if options.dry_run:
        about |= {"memory_MB": memory(cfg, arch, labelled, device)}
        return about | remarked(remarks(cfg, labelled)) | {"config": cfg}
    peers.first(partial(decode_scored, labelled, options.report))
    defining = {"weights_sha256": d.loaded.digest, "data_sha256": labelled.fingerprint(), "images": about["images"]}
    defining |= {"pool_sha256": pool.fingerprint(), "upper_rates": rates, "pretext_task": name_of(task)}
    if options.resume and out.is_dir():
        same_task(out, defining["pretext_task"])
    run = open_run(out, "align", cfg, options.resume, options.force, **defining, sources=options.sources)
    steps = f"{about['steps']['lower']} + {about['steps']['upper']} steps, {about['lora_parameters']:,} LoRA parameters"
    options.announce(f"seed {cfg.seed}, device {device}, {steps} -> {out}")
    for line in remarks(cfg, labelled):
        options.announce(line)
    remind(run, options)

    tried = Tried(run)
    for d_lr in tried.left(rates):
        chosen = cfg.model_copy(update={"upper": cfg.upper.model_copy(update={"d_lr": d_lr, "d_lr_from": None})})
        task = make_task(chosen, d.loaded, theta.to(device))
        try:
            with signals.listening(), noting_what_fits(cfg, arch, labelled, device):
                theta_P = attempt(chosen, d, task, theta, pool, run, options.report, watched=len(rates) > 1)
            break
        except Diverged as error:
            if len(rates) == 1 and isinstance(error, bisslight.NotFinite):
                remedy = "Lower --p-lr or --d-lr, or raise --lam, in a new run (another --out)"
                raise Diverged(f"{error.what}{remedy}; checkpoints are from before this step") from error
            if len(rates) == 1:
                raise
            tried.failed(d_lr, str(error))
            options.announce(f"--d-lr {d_lr:g} is not stable: {error}")
    else:
        raise RunError(
            f"--d-lr auto: none of {', '.join(f'{lr:g}' for lr in rates)} is stable; see {run.path}/train.log"
        )

    metadata = adapter_metadata(
        arch, model.backbone, model.rank, model.alpha or 0.0, pretext=name_of(task), dataset=data.dataset,
        data_seed=data.data_seed, data_sha256=defining["data_sha256"], weights_sha256=d.loaded.digest,
        stage="align", d_lr=d_lr,
        hypergrad=cfg.bilevel.hypergrad if cfg.bilevel.upper_steps else "lower only",
    )  # fmt: skip
    run.write("adapter.safetensors", adapter_bytes(theta_P, {}, metadata))
    last = run.records[-1]
    numbers = {key: last[key] for key in ("distance", "q_over_g", "cosine", "val_P", "val_D")}
    result = {"out": str(out), "adapter": str(out / "adapter.safetensors"), "d_lr": d_lr, "unstable": tried.why}
    result |= {"metric": labelled.metric, "pretext": name_of(task), **numbers, **run.spent()}
    run.finish(result)
    return result


def name_of(task: PretextTask[Any]) -> str:
    """mae, ijepa, or the name of the class of a task of one's own."""
    own = type(task).__name__.lower()
    known = {mae.MAE: "mae", ijepa.IJEPA: "ijepa"}
    return known.get(type(task)) or (f"own-{own}" if own in known.values() else own)


def same_task(out: Path, now: str) -> None:
    """Refuse (UsageError) to resume a run of one pretext task with another: what it left would look damaged."""
    if not (out / "env.json").exists():
        return
    before = read_json(out / "env.json").get("pretext_task", now)
    if before != now:
        raise UsageError(
            f"--resume: {out} has the pretext task {before}, this is {now}; resume it with the program that made it"
        )


def attempt(
    cfg: AlignConfig,
    d: Downstream,
    task: PretextTask[Any],
    theta: Tensor,
    pool: Pool,
    run: Run,
    report: Report,
    watched: bool,
) -> Tensor:
    """Algorithm 1 with one upper rate, from its start or its checkpoint, to θ_P.

    Args:
        theta: where θ_P and θ_D start.
        watched: end with Diverged as soon as training is `ft.unstable`.
    """
    model, b, d_lr, device = cfg.model, cfg.bilevel, cfg.upper.d_lr, d.device
    assert model.drop_path is not None
    init = {"P": theta, "D": theta}  # l.2: θ_P and θ_D start equal
    phi_D, stats = head(d, cfg.model, cfg.seed, "align head")
    s = state(cfg, trainable(init, device), trainable(task.phi, device), phi_D)
    loss_D, peers = d.loss(), d.peers
    restored = run.restore(lambda record: record["step"] <= record["checkpoint"], device)
    with read_from(run.path / "checkpoint.pt", AGAIN):
        if restored is not None and restored["d_lr"] != d_lr:
            if not watched:
                raise ValueError(f"d_lr {restored['d_lr']}, the run's is {d_lr}")
            restored = None  # of a rate that has been given up
    if restored is not None and "probe" not in restored:
        with read_from(run.path / "checkpoint.pt", AGAIN):
            s.load_state_dict(restored)
            task.load_state_dict(restored["task"])
            stats.update(restored["stats"])
            if not 0 <= s.done <= b.alternations:
                raise ValueError(f"{s.done} alternations of {b.alternations}")
    else:
        run.cut(lambda record: False)
        probing(cfg, d, loss_D, s, stats, run, report, restored)
    curves: dict[str, list[float]] = {"L^P": [], "L^D(P)": [], "L^D(D)": []}
    vals: list[float] = []

    def watch(record: dict[str, Any]) -> None:
        for name, key in (("L^P", "loss_P"), ("L^D(P)", "loss_D_at_P"), ("L^D(D)", "loss_D_at_D")):
            if record[key]:
                curves[name].append(mean(record[key]))
        if "val_D" in record:
            vals.append(record["val_D"]["accuracy"])

    with read_from(run.path / "metrics.jsonl", AGAIN):
        for record in run.records:
            if record["step"]:
                watch(record)

    start, stop = s.done * b.upper_steps + len(s.upper), b.alternations * b.upper_steps
    draws = stream(len(d.task.train.targets), cfg.upper.d_batch, cfg.seed, "downstream", start, stop)
    examples = d.train(draws, cfg.seed, "downstream", model.drop_path, stats, start)

    def after(s: bisslight.State, log: bisslight.Log) -> None:
        t = log.alternation
        record = {"step": t, **log._asdict()}
        text = f"L^P {log.loss_P[-1]:.4f}"
        if log.loss_D_at_D:
            text += f"  L^D(D) {log.loss_D_at_D[-1]:.4f}  L^D(P) {log.loss_D_at_P[-1]:.4f}"
            text += f"  |q|/|g| {log.q_over_g[-1]:.3f}"
        validated = t % b.eval_every == 0 or t == b.alternations
        for level, theta in (("P", s.theta_P), ("D", s.theta_D)) if validated else ():
            val = d.score(d.task.val, theta, s.phi_D | stats)
            record[f"val_{level}"] = val._asdict()
            text += f"  val({level}) {val.accuracy:.1f}"
        run.metric(record)
        watch(record)
        if watched and (why := ft.unstable({k: v for k, v in curves.items() if v}, vals)):
            raise Diverged(f"alternation {t}: {why}")
        if validated or run.due(cfg.machine.save_minutes):
            save()
        report("align", t, b.alternations, text)
        run.log(f"alternation {t}: {text}")

    def save() -> None:
        run.save(s.state_dict() | unfinished(s, cfg, peers) | {"task": task.state_dict(), "stats": stats, "d_lr": d_lr})

    def pause(s: bisslight.State) -> None:
        # several processes have CG's batch in pieces: they go on until the upper level is done
        whole = len(s.lower) < b.lower_steps or b.hypergrad in ("mfac", "identity") or peers.size == 1
        if (number := peers.asked()) and whole:
            for level, steps in (("lower", s.lower), ("upper", s.upper)):
                if steps:
                    bisslight.finite(s.done, level, len(steps), steps[-1][:3])
            save()
            where = f"upper step {len(s.upper)}" if s.upper else f"lower step {len(s.lower)}"
            raise Stopped(
                number, f"stopped in alternation {s.done + 1} after {where}; {run.path}: --resume goes on from there"
            )

    inverses: dict[str, bisslight.Hypergradient] = {
        "mfac": partial(mfac.mfac, partition=b.partition), "identity": mfac.identity, "exact": mfac.exact,
        "cg": partial(
            cg.cg, iterations=b.cg_iterations, damping=b.cg_damping, prefactor=b.cg_prefactor,
            sizes=[theta[0].numel() // 4] * 4 * len(theta) if b.cg_steps == "tensor" else None,
            fresh=b.cg_batch == "first", total=peers.total,
            pieces=part_by_part if b.cg_batch == "last" else undivided,
        ),
    }  # fmt: skip
    rows = peers.rows(len(theta), b.partition == "global")
    inverse = inverses[b.hypergrad]
    if b.hypergrad == "mfac" and peers.size > 1:
        inverse = shared_out(inverse, peers, rows, {"layer": 1, "projection": 2, "matrix": 4, "global": 1}[b.partition])
    loss_P = autocast(task.loss, device, cfg.amp)
    products = (s.done * b.upper_steps + len(s.upper)) * b.cg_iterations
    loss_H = of_parts(task.loss)  # full precision
    if b.cg_batch == "first":
        loss_H = on_first_batch(loss_H, task, pool, cfg, products)
    steps = s.done * b.lower_steps + len(s.lower)
    if again := restored is not None and "last" in restored:  # the lower level was done: a batch to differentiate twice
        steps -= 1
    pretext = pool.batches(task, cfg.lower.p_batch, steps, b.alternations * b.lower_steps)
    if again and restored:
        form = type(next(pretext)[0][1])
        s.last = [(weight / peers.size, form(*tensors)) for weight, *tensors in restored["last"]]
    if cfg.machine.mfac_device == "cpu" and b.hypergrad == "mfac":
        s.G = on_host_store(b.lower_steps, theta[rows], device)
    if restored is not None and "G" in restored:
        G = restored["G"][rows]
        s.G = s.theta_P.detach().new_empty(G.shape[0], b.lower_steps, G.shape[2]) if s.G is None else s.G
        s.G[:, : G.shape[1]] = G
        del G
    del restored  # what was read is a second copy of all that has been put in its place
    return bisslight.align(
        s, b, loss_P, loss_D, inverse, pretext, examples, task.after_step, after, loss_H,
        how=peers.gradients, rows=rows, pause=pause, stored=b.hypergrad == "mfac",
    )  # fmt: skip


def on_host_store(steps: int, theta: Tensor, device: torch.device) -> Tensor:
    """G (K, steps, p) in host memory.

    Pinned, and a step's gradient in one piece: each leaves a GPU in one copy that nothing waits for.
    """
    return torch.empty((steps, *theta.shape), pin_memory=device.type == "cuda").transpose(0, 1)


def unfinished(s: bisslight.State, cfg: AlignConfig, peers: World) -> dict[str, Any]:
    """What an alternation that was begun needs besides the state: G as far as it goes, or the batch of CG's products.

    Rows of θ that other processes keep come by a sum. The batch is saved, since a teacher has moved on since.
    """
    if not s.lower:
        return {}
    if cfg.bilevel.hypergrad == "mfac":
        assert s.G is not None
        K, steps = len(s.theta_P), len(s.lower)
        G = s.G.new_zeros(K, steps, s.G.shape[2])
        G[peers.rows(K, cfg.bilevel.partition == "global")] = s.G[:, :steps]
        return {"G": peers.total([G])[0]}
    if len(s.lower) == cfg.bilevel.lower_steps and cfg.bilevel.hypergrad != "identity":
        return {"last": [[weight, *batch] for weight, batch in s.last]}
    return {}


def of_parts(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of a batch in parts; this process's share of it."""

    def whole(theta: Tensor, phi: Phi, batch: Parts) -> Tensor:
        return sum((weight * loss(theta, phi, part) for weight, part in batch), 0 * theta.sum())

    return whole


def part_by_part(loss: Any) -> list[Callable[[Tensor], Tensor]]:
    """A loss `of_parts` that wants nothing but θ any more, as one such loss a part of its batch."""
    return [partial(loss.func, **loss.keywords | {"batch": [part]}) for part in loss.keywords["batch"]]


def undivided(loss: Any) -> list[Callable[[Tensor], Tensor]]:
    return [loss]


def on_first_batch(
    loss_H: Callable[..., Tensor], task: PretextTask[Any], pool: Pool, cfg: AlignConfig, done: int
) -> Callable[..., Tensor]:
    """L^P on the first batch of the current pass over the pool, prepared anew at each call: as released.

    Whatever batch is given. `done` products have been computed before a resumed run goes on.
    """
    calls, b, size = itertools.count(done), cfg.bilevel, cfg.lower.p_batch

    @lru_cache(maxsize=1)
    def first(step: int) -> tuple[Tensor, range, int]:
        return next(pool._replace(workers=0).arrived(size, step, step + 1))

    def loss(theta: Tensor, phi: Phi, batch: Any) -> Tensor:
        call = next(calls)
        seen = call // (b.upper_steps * b.cg_iterations) * b.lower_steps * size  # images, before this alternation
        n = len(pool.images)
        x, share, whole = first(-(-(seen // n * n) // size))  # the first step that begins in this pass
        return loss_H(theta, phi, pool.prepared(task, x, share, whole, "cg mask", call))

    return loss


def shared_out(inverse: bisslight.Hypergradient, peers: World, rows: slice, per_row: int) -> bisslight.Hypergradient:
    """M-FAC with each process's blocks inverted there, and q summed up; `per_row` blocks a layer."""

    def hypergrad(G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor]) -> mfac.Solve:
        solve = inverse(G, lam, theta_P[rows], loss_P) if len(G) else None
        bad = G.new_zeros(len(theta_P) * per_row)
        if solve:
            first = rows.start * per_row
            bad[first : first + len(solve.ok)] = (~solve.ok).to(bad)

        def apply(g: Tensor) -> Tensor:
            q = torch.zeros_like(g)
            if solve:
                q[rows] = solve.apply(g[rows])
            return peers.total([q])[0]

        return mfac.Solve(apply, peers.total([bad])[0] == 0)

    return hypergrad


def refuse_pieces(cfg: AlignConfig, task: PretextTask[Any], peers: World) -> None:
    """Refuse (UsageError) to divide the batches of a task whose loss is not a mean over images."""
    micro = cfg.machine.micro_batch
    if getattr(task, "mean_over_images", True) or (peers.size == 1 and (micro is None or micro >= cfg.lower.p_batch)):
        return
    what, instead = "several processes", "run one process"
    if peers.size == 1:
        what, instead = f"--micro-batch {micro}", f"leave it out or give at least --p-batch {cfg.lower.p_batch}"
    name = type(task).__name__
    raise UsageError(
        f"{what}: the loss of {name} is not a mean over images (its mean_over_images is False), so in pieces it would "
        f"be another loss; {instead}; --recompute needs less memory, too"
    )


def refuse_batches(cfg: AlignConfig | FinetuneConfig, d: Downstream, sizes: Sequence[int]) -> None:
    """Refuse (UsageError) what BatchNorm cannot do: pieces of a batch, and batches of fewer than two images."""
    if cfg.model.head != "batchnorm":
        return
    if cfg.machine.micro_batch:
        raise UsageError("--micro-batch: a BatchNorm head needs the moments of whole batches; use --recompute instead")
    least = max(2, d.peers.size)
    for size in sizes:
        if 0 < size < least:
            what = f"the last batch of a pass has {size} image{'s' if size > 1 else ''}, BatchNorm needs {least}"
            raise UsageError(f"--batch, --d-batch: {what} at least; choose another size")


@torch.no_grad()
def copy_into(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Put saved values into tensors that exist."""
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Tried:
    """Upper rates that were not stable, kept in d_lr.json, so that a resumed run does not try them again."""

    def __init__(self, run: Run) -> None:
        self.run, file = run, run.path / "d_lr.json"
        self.why: dict[str, str] = run.peers.first(lambda: read_json(file) if run.resumed and file.exists() else {})

    def left(self, rates: Sequence[float]) -> Iterator[float]:
        return (rate for rate in rates if f"{rate:g}" not in self.why)

    def failed(self, rate: float, why: str) -> None:
        self.why[f"{rate:g}"] = why
        self.run.write("d_lr.json", json.dumps(self.why, indent=1))
        self.run.log(f"upper rate {rate:g} is not stable: {why}")


def d_rates(cfg: AlignConfig) -> list[float]:
    """The upper rate, or for auto the candidates from a finished direct PEFT run (UsageError where it is none)."""
    if cfg.upper.d_lr != "auto":
        return [cfg.upper.d_lr]
    run = cfg.upper.d_lr_from
    assert run is not None
    wanted = f"--d-lr-from {run}: is not a finished grid of `finetune` from the backbone"
    if not (run / "result.json").exists():
        raise UsageError(wanted)
    config, result = read_json(run / "config.json"), read_json(run / "result.json")
    if "peft" not in config or config["start"] is not None or len(result["grid"]) < 2:
        raise UsageError(wanted)
    if config["data"]["dataset"] != cfg.data.dataset:
        raise UsageError(f"--d-lr-from {run}: is about {config['data']['dataset']}, not about {cfg.data.dataset}")
    return ft.upper_rates(result["lr"])


def remarks(cfg: AlignConfig | FinetuneConfig, task: Task) -> Iterator[str]:
    """What a person should know before the run."""
    if cfg.data.partial:
        n = sum(len(split.targets) for split in (task.train, task.val, task.test))
        whole = sum(BENCHMARKS[task.name].sizes)
        absent = f"; {task.missing} listed ones are not there" if task.missing else ", all that its lists name"
        yield f"{task.name} is a partial copy: {n} of {whole} images{absent}"
    if isinstance(cfg, AlignConfig) and cfg.upper.d_lr_from:
        source = read_json(cfg.upper.d_lr_from / "config.json")
        what = f"{source['model']['backbone']}{', a partial copy' if source['data']['partial'] else ''}"
        yield f"upper rates come from {cfg.upper.d_lr_from} ({what}); the paper takes them from ViT-L for all backbones"
    if isinstance(cfg, AlignConfig):
        yield from late_warmup(cfg.bilevel.warmup, cfg.bilevel.alternations, "alternations", "--warmup")
    else:
        yield from late_warmup(cfg.peft.warmup_epochs, cfg.peft.epochs, "epochs", "--warmup-epochs")


def late_warmup(warmup: int, length: int, unit: str, flag: str) -> Iterator[str]:
    """A line where no step of a run has the learning rate that was asked for, because its warm-up lasts as long."""
    if warmup >= length:
        long = f"the warm-up of {warmup} {unit} is not shorter than the run of {length}"
        yield f"{long}: no rate gets to its base, lower {flag}"


def remarked(lines: Iterable[str]) -> dict[str, str | None]:
    """What --dry-run shows of them."""
    return {"remark": "; ".join(lines) or None}


def state(cfg: AlignConfig, theta: dict[str, Tensor], phi_P: Phi, phi_D: Phi) -> bisslight.State:
    """The optimisers of both levels (App. C.3) over fresh leaf tensors."""
    b, low, up = cfg.bilevel, cfg.lower, cfg.upper
    assert up.d_lr != "auto"
    schedule = [Schedule(b.alternations * n, b.warmup * n, b.end_lr) for n in (b.lower_steps, b.upper_steps)]
    groups = [Group([theta["P"]], low.p_lr, low.p_weight_decay)]
    groups += decay_groups(phi_P, low.decoder_lr, low.p_weight_decay)
    opt_P = Optimiser(groups, schedule[0], (0.9, 0.95), b.clip)
    tensors = [theta["D"], *phi_D.values()]
    opt_D = ft.optimiser(tensors, up.d_lr, up.d_weight_decay, schedule[1], up.d_optimizer == "sgd", b.clip)
    return bisslight.State(theta["P"], theta["D"], phi_P, phi_D, opt_P, opt_D)


def head(d: Downstream, model: Model, seed: int, purpose: str) -> tuple[Phi, Phi]:
    """A fresh φ_D, and its BatchNorm's statistics (empty without one)."""
    phi_D = init_head(d.loaded.backbone.dim, len(d.task.classes), rng(seed, purpose), model.head == "batchnorm")
    leaves = trainable(phi_D, d.device)
    return leaves, init_stats({name: tensor.detach() for name, tensor in leaves.items()})


def probing(
    cfg: AlignConfig,
    d: Downstream,
    loss_D: Callable[..., Tensor],
    s: bisslight.State,
    stats: Phi,
    run: Run,
    report: Report,
    restored: dict[str, Any] | None,
) -> None:
    """Linear probing of φ_D before Algorithm 1 (App. C.3), from its checkpoint on, and its validation accuracy."""
    up, n = cfg.upper, len(d.task.train.targets)
    assert up.d_lr != "auto"
    opt = ft.optimiser(s.phi_D.values(), up.d_lr, up.d_weight_decay, constant, up.d_optimizer == "sgd")
    if restored:
        copy_into(s.phi_D | stats, restored["probe"])
        opt.load_state_dict(restored["opt"])
    draws = epochs(n, up.d_batch, cfg.seed, "probe", up.probe_epochs, opt.step)
    per_epoch = -(-n // up.d_batch)
    rate = cfg.model.drop_path if up.probe_drop_path and cfg.model.drop_path else 0.0
    examples = d.train(draws, cfg.seed, "probe", rate, stats, opt.step)
    for loss in ft.probe(loss_D, s.theta_D, s.phi_D, opt, examples, d.peers.gradients):
        full = opt.step % per_epoch == 0
        if full:
            report("probe", opt.step // per_epoch, up.probe_epochs, f"loss {loss:.4f}")
        number = d.peers.asked()
        if number or (full and run.due(cfg.machine.save_minutes)):
            head = {name: tensor.detach() for name, tensor in (s.phi_D | stats).items()}
            run.save({"probe": head, "opt": opt.state_dict(), "done": -1, "d_lr": up.d_lr})
        if number:
            raise Stopped(
                number, f"stopped in linear probing after step {opt.step}; {run.path}: --resume goes on from there"
            )
    val = d.score(d.task.val, s.theta_D, s.phi_D | stats)
    run.metric({"step": 0, "probe_val": val._asdict()})
    run.log(f"linear probe: validation {d.task.metric} {val.accuracy:.1f} %")


# --- export ----------------------------------------------------------------------------------------------------------


def export_run(path: Path, out: Path | None, seed: int | None, merged: bool) -> list[Path]:
    """A finished run's adapter in other programs' layouts, and a model card (UsageError where there is no such run)."""
    run = read_run(path, seed)
    cfg = run.cfg
    fetch_weights(cfg.model, silent)
    d = load_backbone(cfg.model, torch.device("cpu"))
    check_weights(run, d)
    quilts_task = quilts(cfg.data.data_seed)[1]
    channels = d.channels or ((quilts_task.mean, quilts_task.std) if cfg.data.dataset == "quilts" else IMAGENET)
    terms = BENCHMARKS[cfg.data.dataset].terms if cfg.data.dataset in BENCHMARKS else "the user's own"
    config, result = read_json(path / "config.json"), read_json(path / "result.json")
    if "test" in result:
        accuracies(path, result)
    with read_from(path):
        card = export.model_card(run.about, config, result, terms)
    where = out or path / "export"
    official = cfg.model.weights == cached(cfg.model)
    name = cfg.model.backbone
    return export.write_all(where, d.backbone, run.theta, run.phi_D, name, official, d.arch, channels, card, merged)
