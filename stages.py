"""The commands without their command line: settings in, a run directory out. Here rooms are wired to each other.

    pretrain   mae           -> backbone.pth
    align      bisslight     with mae's task and mfac's inverse -> adapter.safetensors (θ_P)
    finetune   finetune      from the backbone or from align runs -> adapter-s*.safetensors (θ and head), result.json

Each function resolves the settings, checks inputs before the long work, and is quiet: progress goes to `report`.
"""

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import bisslight
import finetune as ft
import mae
import mfac
from config import (
    BACKBONES,
    AlignConfig,
    Arch,
    Common,
    Data,
    Diverged,
    FinetuneConfig,
    Machine,
    Model,
    PretrainConfig,
    RunError,
    Shape,
    UsageError,
)
from data import Images, Split, Task, View, batches, epochs, in_order, load_pool, load_task, stream
from evaluate import score
from lora import Backbone, Phi, adapter_bytes, adapter_metadata, drop_path, init_head, init_theta, load_adapter, logits
from runtime import (
    Group,
    Optimiser,
    Run,
    Schedule,
    Score,
    autocast,
    constant,
    decay_groups,
    open_run,
    pick_device,
    rng,
    runs_in,
    sha256,
    to_bytes,
    trainable,
    write_atomic,
)

Report = Callable[[str, int, int, str], None]  # (stage, done, total, live numbers)


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


# --- settings that depend on backbone and dataset --------------------------------------------------------------------


def resolved_model(model: Model) -> Model:
    """Fill in what is set by backbone, and find the weights (UsageError where there are none)."""
    default = BACKBONES[model.backbone]
    rank = model.rank or default.rank
    if rank > default.arch.dim:
        raise UsageError(f"--rank {rank}: is larger than the width {default.arch.dim} of {model.backbone}")
    weights = model.weights
    if weights is not None and weights.is_dir():  # a pretrain run
        if not (weights / "result.json").exists():
            raise UsageError(f"--weights {weights}: is not a finished pretrain run")
        weights = weights / "backbone.pth"
    if weights is not None and not weights.is_file():
        raise UsageError(f"--weights {weights}: there is no such file")
    if weights is None:
        how = "`bisslight pretrain` makes one" if model.backbone == "vit_mini" else f"take {official(model.backbone)}"
        raise UsageError(f"--weights FILE: {model.backbone} needs a checkpoint with its decoder, {how}")
    drop = default.drop_path if model.drop_path is None else model.drop_path
    return model.model_copy(
        update={"rank": rank, "alpha": model.alpha or float(rank), "weights": weights.resolve(), "drop_path": drop}
    )


def official(backbone: str) -> str:
    """Where the MAE authors keep encoder and decoder for normalised pixels."""
    size = {"vit_b16": "base", "vit_l16": "large", "vit_h14": "huge"}[backbone]
    return f"https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_{size}_full.pth"


def resolved_data(data: Data, needs_pool: bool) -> Data:
    """Fill in the pool and the augmentation of the embedded dataset."""
    quilts = data.dataset == "quilts"
    pool = data.pool or ("quilts" if quilts else None)
    if needs_pool and pool is None:
        raise UsageError("--pool: give a folder of unlabelled images (the paper's is ImageNet-1k without its labels)")
    return data.model_copy(update={"pool": pool, "augment": data.augment or ("none" if quilts else "crop")})


def default_out(command: str, dataset: str, model: Shape, seed: int, *more: str) -> Path:
    """runs/align-cub200-vit_l16-mae-r64-s0"""
    rank = [f"r{model.rank}"] if isinstance(model, Model) else []
    name = Path(dataset.removeprefix("folder:")).resolve().name
    return Path("runs") / "-".join([command, name, model.backbone, *more, *rank, f"s{seed}"])


# --- loaded things ---------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A backbone with its pretext head on a device, and where it came from."""

    backbone: Backbone
    decoder: mae.Decoder
    arch: Arch
    digest: str  # sha256 of the weight file


@lru_cache(maxsize=1)
def load_backbone(model: Model, device: torch.device) -> Loaded:
    """ψ, frozen, and its decoder; kept, so that the seeds of a process share one copy."""
    assert model.weights is not None and model.rank is not None and model.alpha is not None  # resolved
    vit, decoder, arch = mae.load(model.weights, model.backbone, model.image_size, model.patch_size)
    backbone = Backbone(vit, model.alpha / model.rank, model.recompute).requires_grad_(False).to(device)
    return Loaded(backbone, decoder.to(device), arch, sha256(model.weights))


def view_of(data: Data, task: Task, arch: Arch) -> View:
    """How labelled images are cut (UsageError where quilts meet another size)."""
    fits(data.dataset, arch)
    assert data.augment is not None
    return View(arch.image_size, task.mean, task.std, data.augment, data.min_crop, data.d_interpolation)


def fits(name: str, arch: Arch) -> None:
    """Quilts are drawn at 16 px and not scaled."""
    if name == "quilts" and arch.image_size != 16:
        raise UsageError(
            f"quilts are images of 16 px, the backbone wants {arch.image_size}; use another dataset or pool"
        )


class Downstream(NamedTuple):
    """Everything that D^D and f_θ give the loops: batches, losses, scores."""

    loaded: Loaded
    task: Task
    view: View
    device: torch.device
    workers: int
    amp: bool

    def loss(self) -> Callable[..., Tensor]:
        return autocast(ft.downstream_loss(self.loaded.backbone), self.device, self.amp)

    def train(self, draws: Iterator[Any], seed: int, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(Images(self.task.train, self.view, True, seed, purpose), draws, self.workers, self.device)

    def with_drop(self, examples: Iterable[Any], rate: float, seed: int, purpose: str, start: int) -> Iterator[Any]:
        """Pair each batch with its drop-path factors, a function of the step."""
        depth = self.loaded.backbone.depth
        for step, batch in enumerate(examples, start):
            drop = drop_path(rate, depth, len(batch[1]), rng(seed, purpose, "drop", step))
            yield batch, None if drop is None else drop.to(self.device, non_blocking=True)

    def score(self, split: Split, theta: Tensor, phi_D: Phi, batch: int = 256) -> Score:
        predict = autocast(partial(logits, self.loaded.backbone, theta, phi_D), self.device, self.amp)
        images = Images(split, self.view, False, 0, "eval")
        return score(predict, batches(images, in_order(len(split.targets), batch), self.workers, self.device))


def downstream(model: Model, data: Data, task: Task, machine: Machine, amp: bool) -> Downstream:
    """f_θ on its device, beside D^D; model and data are resolved."""
    device = pick_device(machine.device)
    loaded = load_backbone(model, device)
    return Downstream(loaded, task, view_of(data, task, loaded.arch), device, machine.workers, amp)


def pretext_batches(
    task: mae.MAE, images: Any, view: View, cfg: Common, batch: int, start: int, stop: int, device: torch.device
) -> Iterator[mae.Batch]:
    """Prepared pretext batches of steps start .. stop − 1; masks are functions of the step."""
    pool = Images(Split(images, torch.zeros(len(images), dtype=torch.long)), view, True, cfg.seed, "pretext")
    draws = stream(len(images), batch, cfg.seed, "pretext", start, stop)
    for step, (x, _) in enumerate(batches(pool, draws, cfg.machine.workers, device), start):
        yield task.prepare(x, rng(cfg.seed, "mask", step))


def clocks() -> tuple[float, float]:
    """CPU seconds of this process, all threads, and wall seconds."""
    return time.process_time(), time.perf_counter()


def spent(began: tuple[float, float]) -> dict[str, float]:
    """What has passed since."""
    cpu, wall = clocks()
    return {"cpu_seconds": cpu - began[0], "seconds": wall - began[1]}


# --- pretrain --------------------------------------------------------------------------------------------------------


def pretrain(cfg: PretrainConfig, options: Options) -> dict[str, Any]:
    """Train a backbone and its decoder from scratch with MAE; writes backbone.pth in the official layout."""
    arch = BACKBONES[cfg.model.backbone].arch
    sizes = {k: v for k, v in (("image_size", cfg.model.image_size), ("patch_size", cfg.model.patch_size)) if v}
    arch = Arch.model_validate(arch.model_dump() | sizes)
    device = pick_device(cfg.machine.device)
    fits(cfg.pool, arch)
    images, mean, std = load_pool(cfg.pool, cfg.data_seed)
    cfg = cfg.model_copy(update={"augment": cfg.augment or ("none" if cfg.pool == "quilts" else "crop")})
    assert cfg.augment is not None
    per_epoch = max(1, len(images) // cfg.batch)
    total = per_epoch * cfg.epochs
    about = {"images": len(images), "steps": total, "patches": arch.patches}
    vit, decoder = mae.init(arch, rng(cfg.seed, "init"))
    task = mae.MAE(Backbone(vit.to(device), recompute=cfg.model.recompute), decoder.to(device), cfg.mask_ratio)
    named = {**mae.psi_of(vit), **task.phi}
    about["parameters"] = sum(tensor.numel() for tensor in named.values())
    if options.dry_run:
        return about | {"config": cfg}
    out = options.out or default_out("pretrain", cfg.pool, cfg.model, cfg.seed, "mae")
    run = open_run(out, "pretrain", cfg, options.resume, options.force, **about)
    options.announce(f"seed {cfg.seed}, device {device}, {total} steps, {about['parameters']:,} parameters -> {out}")
    schedule = mae.schedule(cfg.epochs, cfg.warmup_epochs, per_epoch, cfg.min_lr)
    opt = Optimiser(decay_groups(named, cfg.base_lr * cfg.batch / 256, cfg.weight_decay), schedule, (0.9, cfg.beta2))
    if state := run.restore(lambda record: record["step"] * per_epoch <= record["checkpoint"], device):
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(state["tensors"][name])
        opt.load_state_dict(state["opt"])

    view = View(arch.image_size, mean, std, cfg.augment, cfg.min_crop)
    prepared = pretext_batches(task, images, view, cfg, cfg.batch, opt.step, total, device)
    losses: list[float] = []
    saved, began = time.monotonic(), clocks()

    def after(step: int, loss: float) -> None:
        nonlocal saved
        losses.append(loss)
        if step % per_epoch:
            return
        mean_loss = sum(losses) / len(losses)
        losses.clear()
        run.metric({"step": step // per_epoch, "loss": mean_loss})
        options.report("pretrain", step // per_epoch, cfg.epochs, f"loss {mean_loss:.4f}")
        if time.monotonic() - saved > 60:
            tensors = {name: tensor.detach() for name, tensor in named.items()}
            run.save({"tensors": tensors, "opt": opt.state_dict(), "done": step})
            saved = time.monotonic()

    mae.pretrain(task, autocast(task.loss, device, cfg.amp), opt, prepared, after)
    write_atomic(out / "backbone.pth", to_bytes(mae.checkpoint(task, arch, cfg.model.backbone)))
    last = list(run.metrics())[-1]["loss"]
    result = {"out": str(out), "weights": str(out / "backbone.pth"), "loss": last, **about, **spent(began)}
    run.finish(result)
    return result


# --- align -----------------------------------------------------------------------------------------------------------


EXACT_LIMIT = 5000  # entries of θ: its Hessian takes as many double passes, and 200 MB in float64


def align(cfg: AlignConfig, options: Options) -> dict[str, Any]:
    """BiSSLight: probe φ_D, run Algorithm 1, keep θ_P as adapter.safetensors."""
    labelled = load_task(cfg.data.dataset, cfg.data.data_seed)
    cfg = cfg.model_copy(update={"model": resolved_model(cfg.model), "data": resolved_data(cfg.data, True)})
    model, b = cfg.model, cfg.bilevel
    assert model.rank is not None and model.drop_path is not None and cfg.data.pool is not None
    images, mean, std = load_pool(cfg.data.pool, cfg.data.data_seed)
    d = downstream(model, cfg.data, labelled, cfg.machine, cfg.amp)
    arch, device, backbone = d.loaded.arch, d.device, d.loaded.backbone
    fits(cfg.data.pool, arch)
    task = mae.MAE(backbone, d.loaded.decoder, cfg.lower.mask_ratio)
    view = View(arch.image_size, mean, std, cfg.data.augment or "crop", cfg.data.min_crop)
    task.check(next(pretext_batches(task, images, view, cfg, 32, 0, 1, device)))
    about = budget(cfg, arch, d.task, len(images))
    if b.hypergrad == "exact" and about["lora_parameters"] > EXACT_LIMIT:
        raise UsageError(
            f"--hypergrad exact: θ has {about['lora_parameters']} entries, a dense Hessian of more than "
            f"{EXACT_LIMIT} is out of reach; lower --rank or use mfac"
        )
    if options.dry_run:
        return about | {"config": cfg}
    out = options.out or default_out("align", cfg.data.dataset, model, cfg.seed, cfg.lower.pretext)
    defining = {"weights_sha256": d.loaded.digest, "images": about["images"]}
    run = open_run(out, "align", cfg, options.resume, options.force, **defining)
    steps = f"{about['steps']['lower']} + {about['steps']['upper']} steps, {about['lora_parameters']:,} LoRA parameters"
    options.announce(f"seed {cfg.seed}, device {device}, {steps} -> {out}")

    theta = init_theta(arch.depth, model.rank, arch.dim, rng(cfg.seed, "lora"))
    init = {"P": theta, "D": theta}  # l.2: θ_P and θ_D start equal
    s = state(cfg, trainable(init, device), trainable(task.phi, device), head(d, cfg.seed, "align head"))
    loss_D, began = d.loss(), clocks()
    restored = run.restore(lambda record: record["step"] <= record["checkpoint"], device)
    if restored is not None:
        s.load_state_dict(restored)
        task.load_state_dict(restored["task"])
    else:
        probing(cfg, d, loss_D, s, run, options.report)

    start, stop = s.done * b.lower_steps, b.alternations * b.lower_steps
    pretext = pretext_batches(task, images, view, cfg, cfg.lower.p_batch, start, stop, device)
    start, stop = s.done * b.upper_steps, b.alternations * b.upper_steps
    draws = stream(len(d.task.train.targets), cfg.upper.d_batch, cfg.seed, "downstream", start, stop)
    with_drop = d.with_drop(d.train(draws, cfg.seed, "downstream"), model.drop_path, cfg.seed, "downstream", start)

    def after(s: bisslight.State, log: bisslight.Log) -> None:
        t = log.alternation
        record = {"step": t, **log._asdict()}
        text = f"L^P {log.loss_P[-1]:.4f}"
        if log.loss_D_at_D:
            text += f"  L^D(D) {log.loss_D_at_D[-1]:.4f}  L^D(P) {log.loss_D_at_P[-1]:.4f}"
            text += f"  |q|/|g| {log.q_over_g[-1]:.3f}"
        if t % b.eval_every == 0 or t == b.alternations:
            for level, theta in (("P", s.theta_P), ("D", s.theta_D)):
                val = d.score(d.task.val, theta, s.phi_D)
                record[f"val_{level}"] = val._asdict()
                text += f"  val({level}) {val.accuracy:.1f}"
            run.metric(record)
            run.save(s.state_dict() | {"task": task.state_dict()})
        else:
            run.metric(record)
        options.report("align", t, b.alternations, text)
        run.log(f"alternation {t}: {text}")

    inverses: dict[str, bisslight.Hypergradient] = {
        "mfac": partial(mfac.mfac, partition=b.partition), "identity": mfac.identity, "exact": mfac.exact,
    }  # fmt: skip
    loss_P = autocast(task.loss, device, cfg.amp and b.hypergrad != "exact")  # the exact Hessian in full precision
    theta_P = bisslight.align(s, b, loss_P, loss_D, inverses[b.hypergrad], pretext, with_drop, task.after_step, after)

    metadata = adapter_metadata(
        arch, model.backbone, model.rank, model.alpha or model.rank, pretext=cfg.lower.pretext,
        dataset=cfg.data.dataset, weights_sha256=d.loaded.digest, stage="align",
    )  # fmt: skip
    write_atomic(out / "adapter.safetensors", adapter_bytes(theta_P, {}, metadata))
    last = list(run.metrics())[-1]
    numbers = {key: last[key] for key in ("distance", "q_over_g", "cosine", "val_P", "val_D")}
    result = {"out": str(out), "adapter": str(out / "adapter.safetensors"), **numbers, **spent(began)}
    run.finish(result)
    return result


def state(cfg: AlignConfig, theta: dict[str, Tensor], phi_P: Phi, phi_D: Phi) -> bisslight.State:
    """The optimisers of both levels (App. C.3) over fresh leaf tensors."""
    b, low, up = cfg.bilevel, cfg.lower, cfg.upper
    schedule = [Schedule(b.alternations * n, b.warmup * n, b.end_lr) for n in (b.lower_steps, b.upper_steps)]
    groups = [Group([theta["P"]], low.p_lr, low.p_weight_decay)]
    groups += decay_groups(phi_P, low.decoder_lr, low.p_weight_decay)
    opt_P = Optimiser(groups, schedule[0], (0.9, 0.95), b.clip)
    tensors = [theta["D"], *phi_D.values()]
    opt_D = ft.optimiser(tensors, up.d_lr, up.d_weight_decay, schedule[1], up.d_optimizer == "sgd", b.clip)
    return bisslight.State(theta["P"], theta["D"], phi_P, phi_D, opt_P, opt_D)


def head(d: Downstream, seed: int, purpose: str) -> Phi:
    """A fresh φ_D."""
    return trainable(init_head(d.loaded.backbone.dim, len(d.task.classes), rng(seed, purpose)), d.device)


def probing(
    cfg: AlignConfig, d: Downstream, loss_D: Callable[..., Tensor], s: bisslight.State, run: Run, report: Report
) -> None:
    """Linear probing of φ_D before Algorithm 1 (App. C.3), and its validation accuracy."""
    up, n = cfg.upper, len(d.task.train.targets)
    opt = ft.optimiser(s.phi_D.values(), up.d_lr, up.d_weight_decay, constant, up.d_optimizer == "sgd")
    draws = epochs(n, up.d_batch, cfg.seed, "probe", up.probe_epochs)
    per_epoch = -(-n // up.d_batch)
    losses = ft.probe(loss_D, s.theta_D, s.phi_D, opt, d.train(draws, cfg.seed, "probe"))
    for step, loss in enumerate(losses, 1):
        if step % per_epoch == 0:
            report("probe", step // per_epoch, up.probe_epochs, f"loss {loss:.4f}")
    val = d.score(d.task.val, s.theta_D, s.phi_D)
    run.metric({"step": 0, "probe_val": val._asdict()})
    run.log(f"linear probe: validation accuracy {val.accuracy:.1f} %")


def budget(cfg: AlignConfig, arch: Arch, task: Task, pool: int) -> dict[str, Any]:
    """What a run will cost, before it starts: steps, parameters, memory, work (2 operations a multiply-add)."""
    b, r = cfg.bilevel, cfg.model.rank or 0
    D, depth, L = arch.dim, arch.depth, arch.patches
    store = 4 * b.lower_steps * depth * 4 * r * D

    def passes(n: int, dim: int, layers: int, rank: int) -> float:
        """Forward and backward of transformer blocks on n tokens, weights frozen."""
        return layers * (48 * n * dim**2 + 12 * n**2 * dim + 24 * n * dim * rank) * (arch.mlp_ratio + 2) / 6

    lower = passes(1 + int(L * (1 - cfg.lower.mask_ratio)), D, depth, r)
    lower += 1.5 * passes(1 + L, arch.decoder_dim, arch.decoder_depth, 0)  # the decoder's weights get gradients too
    upper = 2 * passes(1 + L, D, depth, r)
    work = b.lower_steps * cfg.lower.p_batch * lower + b.upper_steps * cfg.upper.d_batch * upper
    return {
        "images": {"pool": pool, **{part: len(getattr(task, part).targets) for part in ("train", "val", "test")}},
        "steps": {"lower": b.alternations * b.lower_steps, "upper": b.alternations * b.upper_steps},
        "lora_parameters": 4 * r * D * depth,
        "gradient_store_MB": store / 1e6,
        "checkpoint_MB": 12 * (2 * 4 * r * D * depth + 13 * arch.decoder_depth * arch.decoder_dim**2) / 1e6,
        "TFLOP": b.alternations * work / 1e12,
        "disk_free_GB": shutil.disk_usage(Path.cwd()).free / 1e9,
    }


# --- finetune --------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """One PEFT run to be done: what a worker process needs to know."""

    cfg: str  # FinetuneConfig as JSON, resolved
    start: Path | None  # align run that θ comes from
    lr: float
    seed: int


def run_unit(unit: Unit, report: Report = silent) -> dict[str, Any]:
    """PEFT with one rate and one seed. Returns numbers, and the best epoch's tensors under "theta" and "phi_D"."""
    cfg = FinetuneConfig.model_validate_json(unit.cfg)
    p, n_seed = cfg.peft, unit.seed
    d = downstream(cfg.model, cfg.data, load_task(cfg.data.dataset, cfg.data.data_seed), cfg.machine, cfg.amp)
    began = clocks()
    if unit.start is not None:
        theta = load_adapter(unit.start / "adapter.safetensors")[0]
    else:
        assert cfg.model.rank is not None
        theta = init_theta(d.loaded.arch.depth, cfg.model.rank, d.loaded.arch.dim, rng(n_seed, "lora"))
    leaf = theta.to(d.device, copy=True).requires_grad_()
    phi_D = head(d, n_seed, "peft head")
    n = len(d.task.train.targets)
    per_epoch = -(-n // p.batch)
    schedule = Schedule(p.epochs * per_epoch, p.warmup_epochs * per_epoch, p.end_lr)
    opt = ft.optimiser([leaf, *phi_D.values()], unit.lr, p.weight_decay, schedule)
    examples = d.train(epochs(n, p.batch, n_seed, "peft", p.epochs), n_seed, "peft")
    assert cfg.model.drop_path is not None
    with_drop = d.with_drop(examples, cfg.model.drop_path, n_seed, "peft", 0)
    curve: list[dict[str, Any]] = []

    def after(epoch: int, loss: float, val: Score | None) -> None:
        curve.append({"step": epoch, "loss": loss, "val": val._asdict() if val else None})
        text = f"lr {unit.lr:g} seed {n_seed} loss {loss:.4f}" + (f" val {val.accuracy:.1f}" if val else "")
        report("finetune", epoch, p.epochs, text)

    validate = partial(d.score, d.task.val)
    done: dict[str, Any] = {"lr": unit.lr, "seed": n_seed}
    try:
        best = ft.peft(d.loss(), leaf, phi_D, opt, with_drop, p.epochs, per_epoch, validate, p.eval_every, after)
    except Diverged as error:
        return done | {"val": None, "diverged": str(error), "curve": curve}
    done |= {"val": best.val._asdict(), "epoch": best.epoch, "curve": curve, **spent(began)}
    return done | {"theta": best.theta.cpu(), "phi_D": {k: v.cpu() for k, v in best.phi_D.items()}}


class Map(Protocol):
    """map, in this process or in several."""

    def __call__(self, fn: Callable[..., Any], items: Iterable[Any], /) -> Iterable[Any]: ...


@contextmanager
def worker_pool(jobs: int) -> Iterator[Map | None]:
    """A `map` over processes, each with its share of the cores; None for one job. Results come in order."""
    if jobs == 1:
        yield None
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,))
    try:
        yield pool.map
        pool.shutdown()
    except BaseException as error:  # Ctrl-C and SIGTERM too: what is queued or running is not waited for
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RunError("a worker process died, perhaps for want of memory; lower --jobs, then --resume") from error
        raise


def starts_of(start: Path | None, seeds: int) -> tuple[list[Path | None], str]:
    """The align run each seed starts from, and what a seed therefore repeats (the unit of the p-value)."""
    if start is None:
        return [None] * seeds, "PEFT seed"
    runs = runs_in(start)
    if len(runs) not in (1, seeds):
        raise UsageError(f"--from {start}: holds {len(runs)} align runs, --seeds {seeds} wants 1 or {seeds}")
    for run in runs:
        if not (run / "result.json").exists():
            raise UsageError(f"--from {run}: the align run is not finished, `align --resume --out {run}` first")
        if not (run / "adapter.safetensors").exists():
            raise UsageError(f"--from {run}: is not an align run (no adapter.safetensors)")
    if len(runs) > 1:
        return [*runs], "align run and PEFT"
    return [runs[0]] * seeds, "PEFT seed on one align run"


def finetune(cfg: FinetuneConfig, options: Options, mapper: Map | None = None) -> dict[str, Any]:
    """PEFT over seeds (and rates), the rate chosen on mean validation, the chosen runs tested once."""
    task, model = load_task(cfg.data.dataset, cfg.data.data_seed), resolved_model(cfg.model)
    cfg = cfg.model_copy(update={"model": model, "data": resolved_data(cfg.data, False)})
    p = cfg.peft
    starts, unit = starts_of(cfg.start, p.seeds)
    d = downstream(model, cfg.data, task, cfg.machine, cfg.amp)
    for start in {s for s in starts if s}:
        check_adapter(start, model, d.loaded, cfg.data.dataset)
    grid = p.grid or (ft.DIRECT_GRID if cfg.start is None else ft.ALIGNED_GRID)
    rates = grid if p.lr_grid else (p.lr or (1e-3 if cfg.start is None else 3e-4),)
    n = len(d.task.train.targets)
    about = {"runs": len(rates) * p.seeds, "rates": rates, "steps": len(rates) * p.seeds * p.epochs * -(-n // p.batch)}
    if options.dry_run:
        return about | {"config": cfg}
    arm = "aligned" if cfg.start else "direct"
    out = options.out or default_out("finetune", cfg.data.dataset, model, cfg.seed, arm)
    defining = {"weights_sha256": d.loaded.digest, "images": n}
    run = open_run(out, "finetune", cfg, options.resume, options.force, **defining)
    options.announce(f"seed {cfg.seed}, device {d.device}, {about['runs']} runs, {about['steps']} steps -> {out}")

    text = cfg.model_dump_json()
    units = [Unit(text, start, lr, cfg.seed + i) for lr in rates for i, start in enumerate(starts)]
    done: dict[tuple[float, int], dict[str, Any]] = {}
    if run.resumed:
        run.cut(lambda record: True)
        done = {(m["lr"], m["seed"]): m for m in run.metrics()}
    todo = [unit for unit in units if (unit.lr, unit.seed) not in done]
    results = mapper(run_unit, todo) if mapper else map(partial(run_unit, report=options.report), todo)
    for outcome in results:
        theta, phi_D = outcome.pop("theta", None), outcome.pop("phi_D", {})
        if theta is not None:
            metadata = adapter_metadata(
                d.loaded.arch, model.backbone, model.rank or 0, model.alpha or 0.0,
                dataset=cfg.data.dataset, weights_sha256=d.loaded.digest, stage="finetune",
                lr=outcome["lr"], seed=outcome["seed"], classes=json.dumps(d.task.classes),
            )  # fmt: skip
            write_atomic(adapter_file(out, outcome), adapter_bytes(theta, phi_D, metadata))
        run.metric({"step": len(done), **outcome})
        done[outcome["lr"], outcome["seed"]] = outcome
        val = outcome["val"]
        said = f"val {val['accuracy']:.1f} at epoch {outcome['epoch']}" if val else outcome["diverged"]
        run.log(f"lr {outcome['lr']:g} seed {outcome['seed']}: {said}")
        options.report("runs", len(done), len(units), f"lr {outcome['lr']:g} seed {outcome['seed']} {said}")

    vals = {lr: [Score(**v) if (v := done[lr, u.seed]["val"]) else None for u in units if u.lr == lr] for lr in rates}
    lr = ft.choose(vals)
    chosen = [done[lr, cfg.seed + i] for i in range(p.seeds)]
    tests = []
    for outcome in chosen:
        theta, phi_D, _ = load_adapter(adapter_file(out, outcome))
        tests.append(d.score(d.task.test, theta.to(d.device), {k: v.to(d.device) for k, v in phi_D.items()}))
        write_atomic(out / f"adapter-s{outcome['seed']}.safetensors", adapter_file(out, outcome).read_bytes())
    result = {
        "out": str(out), "dataset": cfg.data.dataset, "backbone": model.backbone, "unit": unit, "lr": lr,
        "test": [t.accuracy for t in tests], "test_loss": [t.loss for t in tests],
        "val": [o["val"]["accuracy"] for o in chosen], "epochs": [o["epoch"] for o in chosen],
        "grid": {str(k): [v.accuracy if v else None for v in scores] for k, scores in vals.items()},
        "cpu_seconds": [o["cpu_seconds"] for o in chosen],
    }  # fmt: skip
    run.finish(result)
    for file in out.glob("adapter-lr*.safetensors"):
        file.unlink()
    return result


def adapter_file(out: Path, outcome: dict[str, Any]) -> Path:
    """Where a unit's tensors wait until the rate is chosen."""
    return out / f"adapter-lr{outcome['lr']:g}-s{outcome['seed']}.safetensors"


def check_adapter(start: Path, model: Model, loaded: Loaded, dataset: str) -> None:
    """Refuse an adapter that was trained on another backbone or aligned with another task (UsageError)."""
    _, _, about = load_adapter(start / "adapter.safetensors")
    now = adapter_metadata(
        loaded.arch, model.backbone, model.rank or 0, model.alpha or 0, weights_sha256=loaded.digest, dataset=dataset
    )
    for key in ("backbone", "rank", "alpha", "weights_sha256", "dataset"):
        if about.get(key) != now[key]:
            raise UsageError(f"--from {start}: its adapter has {key} {about.get(key)}, this run has {now[key]}")
