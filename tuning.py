"""Fine-tuning as a command: learning rates and seeds, here or in worker processes, from a backbone or from align runs.

    Unit       one PEFT run: a rate and a seed; stopped, it leaves a checkpoint of its own
    finetune   rates on validation, seeds, one test -> adapter-s*.safetensors (θ and head), result.json

Like `stages`, quiet: progress goes to `report`. The mathematics is in `finetune`.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

import torch

import export
import finetune as ft
from config import (
    BACKBONES,
    AlignConfig,
    Data,
    Diverged,
    FinetuneConfig,
    Model,
    RunError,
    UsageError,
)
from cost import memory, noting_what_fits
from data import epochs
from evaluate import unlike_the_paper
from loading import (
    Downstream,
    Loaded,
    Report,
    decode_scored,
    default_out,
    downstream,
    fetch_weights,
    fits,
    resolved_data,
    resolved_machine,
    resolved_model,
    to_download,
)
from lora import adapter_bytes, adapter_metadata, init_theta, load_adapter
from parallel import world
from runtime import (
    AGAIN,
    Run,
    Schedule,
    Score,
    cores,
    load_tensors,
    moved,
    open_run,
    pick_device,
    read_from,
    read_json,
    rng,
    runs_in,
    spent,
    to_bytes,
    write_atomic,
)
from stages import Options, copy_into, head, may_write, refuse_batches, remarked, remarks, remind, silent
from stopping import Stopped, end_with_parent, held_back, let_in, signals
from tasks import load_task


class Unit(NamedTuple):
    """One PEFT run to be done: what a worker process needs to know."""

    cfg: str  # FinetuneConfig as JSON, resolved
    start: Path | None  # align run, or LoRA file, that θ comes from
    lr: float
    seed: int
    out: Path  # the run directory

    @property
    def file(self) -> Path:
        """Its checkpoint, while it is not finished."""
        return self.out / f"unit-lr{self.lr!r}-s{self.seed}.pt"


def run_unit(unit: Unit, report: Report = silent) -> dict[str, Any]:
    """PEFT with one rate and one seed. Returns numbers, and the best epoch's tensors under "theta" and "phi_D".

    Goes on from its checkpoint, if it has one; raises Stopped after writing one.
    """
    cfg = FinetuneConfig.model_validate_json(unit.cfg)
    p, n_seed = cfg.peft, unit.seed
    if signals.asked and world().size == 1:
        raise Stopped(signals.asked, f"stopped between runs; {unit.out}: --resume goes on from there")
    d = downstream(cfg.model, cfg.data, cfg.machine, cfg.amp)
    began, saved, peers = spent(), time.monotonic(), d.peers
    if unit.start is not None:
        theta = export.load_theta(unit.start, d.loaded.arch.dim)[0]
    else:
        assert cfg.model.rank is not None
        theta = init_theta(d.loaded.arch.depth, cfg.model.rank, d.loaded.arch.dim, rng(n_seed, "lora"))
    leaf = theta.to(d.device, copy=True).requires_grad_()
    phi_D, stats = head(d, cfg.model, n_seed, "peft head")
    n = len(d.task.train.targets)
    per_epoch = -(-n // p.batch)
    schedule = Schedule(p.epochs * per_epoch, p.warmup_epochs * per_epoch, p.end_lr)
    opt = ft.optimiser([leaf, *phi_D.values()], unit.lr, p.weight_decay, schedule, p.optimizer == "sgd")
    assert cfg.model.drop_path is not None
    curve: list[dict[str, Any]] = []
    now = ft.Progress()
    if state := peers.first(lambda: load_tensors(unit.file) if unit.file.exists() else None):
        with read_from(unit.file, "delete it, and this PEFT run starts over"):
            state = moved(state, d.device)
            copy_into({"theta": leaf} | phi_D | stats, state["tensors"])
            opt.load_state_dict(state["opt"])
            best = state["best"] and ft.Outcome(**state["best"] | {"val": Score(**state["best"]["val"])})
            curve, now = state["curve"], ft.Progress(state["losses"], best or None)
            began = spent(state["spent"])
    del state  # what was read is a second copy
    draws = epochs(n, p.batch, n_seed, "peft", p.epochs, opt.step)
    examples = d.train(draws, n_seed, "peft", cfg.model.drop_path, stats, opt.step)

    def save() -> None:
        nonlocal saved
        saved, best = time.monotonic(), now.best
        tensors = {name: tensor.detach() for name, tensor in ({"theta": leaf} | phi_D | stats).items()}
        progress = {"losses": now.losses, "best": best._asdict() | {"val": best.val._asdict()} if best else {}}
        progress |= {"tensors": tensors, "opt": opt.state_dict(), "curve": curve, "spent": spent(began)}
        if peers.rank == 0:
            write_atomic(unit.file, to_bytes(progress))

    def pause(now: ft.Progress) -> None:
        if number := peers.asked():
            save()
            where = f"stopped lr {unit.lr:g} seed {n_seed} after step {opt.step} of {p.epochs * per_epoch}"
            raise Stopped(number, f"{where}; {unit.out}: --resume goes on from there")

    def after(epoch: int, loss: float, val: Score | None) -> None:
        curve.append({"step": epoch, "loss": loss, "val": val._asdict() if val else None})
        text = f"lr {unit.lr:g} seed {n_seed} loss {loss:.4f}" + (f" val {val.accuracy:.1f}" if val else "")
        report("finetune", epoch, p.epochs, text)
        if peers.first(lambda: time.monotonic() - saved >= 60 * cfg.machine.save_minutes):
            save()

    validate = partial(d.score, d.task.val)
    done: dict[str, Any] = {"lr": unit.lr, "seed": n_seed}
    try:
        with signals.listening():
            best = ft.peft(
                d.loss(), leaf, phi_D, opt, examples, p.epochs, per_epoch, validate, p.eval_every, after, stats,
                now=now, how=peers.gradients, pause=pause,
            )  # fmt: skip
    except Diverged as error:
        return done | {"val": None, "diverged": str(error), "curve": curve}
    done |= {"val": best.val._asdict(), "epoch": best.epoch, "curve": curve, **spent(began)}
    return done | {"theta": best.theta.cpu(), "phi_D": {k: v.cpu() for k, v in best.phi_D.items()}}


@contextmanager
def worker_pool(jobs: int) -> Iterator[Executor | None]:
    """Processes, each with its share of the cores; None for one job."""
    if jobs == 1:
        yield None
        return
    threads = min(torch.get_num_threads(), max(1, cores() // jobs))
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), worker_started, (threads,))
    ensure_running()  # of the resource tracker, whose start would let signals in again
    with held_back():
        for _ in range(jobs):
            pool.submit(os.getpid)  # a task starts a process as long as none is idle

    def forward(number: int) -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, number)

    signals.forward = forward
    try:
        yield pool
        pool.shutdown()
    except Stopped:  # the others were told too, and have saved by the time they are done
        pool.shutdown(cancel_futures=True)
        raise
    except BaseException as error:  # what is queued or running is not waited for
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RunError("a worker process died, perhaps for want of memory; lower --jobs, then --resume") from error
        raise
    finally:
        signals.forward = lambda number: None


def worker_started(threads: int) -> None:
    """A worker process stops after its step when it is told to, and leaves the rest to its parent."""
    end_with_parent()
    torch.set_num_threads(threads)
    signals.patient = True
    signals.install()
    let_in()


def completed(pool: Executor, units: Iterable[Unit]) -> Iterator[dict[str, Any]]:
    """Outcomes in the order in which they are ready; at a stop, those that are ready or saved, then Stopped."""
    futures = [pool.submit(run_unit, unit) for unit in units]
    stopped: Stopped | None = None
    for future in as_completed(futures):
        try:
            yield future.result()
        except CancelledError:
            pass
        except Stopped as stop:
            stopped = stopped or stop  # the first is that of a run in progress
            for other in futures:
                other.cancel()
    if stopped:
        raise stopped


def starts_of(start: Path | None, seeds: int) -> tuple[list[Path | None], str]:
    """The align run each seed starts from, and what a seed therefore repeats (the unit of the p-value)."""
    if start is None:
        return [None] * seeds, "PEFT seed"
    if start.is_file():
        return [start] * seeds, "PEFT seed on one LoRA file"
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


def finetune(cfg: FinetuneConfig, options: Options, pool: Executor | None = None) -> dict[str, Any]:
    """PEFT over rates and seeds (App. C.2): the rate is chosen on validation, its seeds are run, and tested once."""
    model, data = resolved_model(cfg.model), resolved_data(cfg.data, False)
    machine = resolved_machine(cfg.machine, data.dataset)
    update = {"model": model, "data": data, "machine": machine, "start": cfg.start and cfg.start.absolute()}
    cfg = cfg.model_copy(update=update)
    assert machine.data_root is not None
    task, p = load_task(data, machine.data_root), cfg.peft
    starts, unit = starts_of(cfg.start, p.seeds)
    rates = (p.lr,) if p.lr else p.grid or (ft.DIRECT_GRID if cfg.start is None else ft.ALIGNED_GRID)
    tries = p.grid_seeds if len(rates) > 1 else p.seeds
    n, runs = len(task.train.targets), len(rates) * tries + p.seeds - tries
    about: dict[str, Any] = {"runs": runs, "rates": rates, "steps": runs * p.epochs * -(-n // p.batch)}
    about |= {"images": {part: len(getattr(task, part).targets) for part in ("train", "val", "test")}}
    about |= {"missing_images": task.missing}
    names = ["direct", *(["ijepa"] if model.pretext == "ijepa" else [])]
    own = default_out("finetune", data.dataset, model, cfg.seed, *names)
    out = options.out or (Path("runs") / f"finetune-from-{cfg.start.stem}-s{cfg.seed}" if cfg.start else own)
    peers = world()
    peers.first(partial(may_write, out, "finetune", options))
    if pool and peers.size > 1:
        raise UsageError("--jobs: under torchrun, runs follow each other and share out their batches; leave it at 1")
    if missing := to_download(model):  # what can be told before the download
        fits(data.dataset, BACKBONES[model.backbone].arch)
        if options.dry_run:
            sizes = BACKBONES[model.backbone].arch
            needs = memory(cfg, sizes, task, pick_device(machine.device))
            return about | {"memory_MB": needs} | missing | remarked(remarks(cfg, task)) | {"config": cfg}
    fetch_weights(model, options.report)
    d = downstream(model, data, machine, cfg.amp, task)
    origin: dict[str, str] = {}
    unlike: dict[str, Any] | None = {} if cfg.start else None
    said_of_start: set[str] = set()
    for start in {s for s in starts if s}:
        origin = check_adapter(start, model, d.loaded)
        said_of_start |= {line for line in [check_split(start, origin, data, task.fingerprint())] if line}
        found = unlike_paper(start)
        unlike = None if unlike is None or found is None else unlike | found
    refuse_batches(cfg, d, [p.batch, n % p.batch])
    if options.dry_run:
        about |= {"memory_MB": memory(cfg, d.loaded.arch, task, d.device)}
        return about | remarked(remarks(cfg, task)) | {"config": cfg}
    peers.first(partial(decode_scored, task, options.report))
    defining = {"weights_sha256": d.loaded.digest, "data_sha256": task.fingerprint(), "images": about["images"]}
    run = open_run(out, "finetune", cfg, options.resume, options.force, **defining, sources=options.sources)
    options.announce(f"seed {cfg.seed}, device {d.device}, {runs} runs, {about['steps']} steps -> {out}")
    for line in [*remarks(cfg, task), *sorted(said_of_start)]:
        options.announce(line)

    if run.resumed:
        run.cut(lambda record: True)
        remind(run, options)
    with read_from(run.path / "metrics.jsonl", AGAIN):
        done: dict[tuple[float, int], dict[str, Any]] = {(m["lr"], m["seed"]): m for m in run.records}
        for m in run.records:
            score_of(m)
    text = cfg.model_dump_json()

    def work(rates: Sequence[float], some: slice) -> None:
        """All seeds of a slice at all rates, but for what an interrupted run has finished."""
        seeds = list(enumerate(starts, cfg.seed))[some]
        todo = [
            Unit(text, start, lr, seed, run.path) for lr in rates for seed, start in seeds if (lr, seed) not in done
        ]
        if todo:
            options.report("runs", len(done), runs, "")
        results = completed(pool, todo) if pool else map(partial(run_unit, report=options.report), todo)
        with signals.listening(), noting_what_fits(cfg, d.loaded.arch, task, d.device):
            for outcome in results:
                keep(run, d, cfg, outcome)
                done[outcome["lr"], outcome["seed"]] = outcome
                options.report("runs", len(done), runs, said(outcome))

    work(rates, slice(0, tries))
    vals = {lr: [score_of(done[lr, cfg.seed + i]) for i in range(tries)] for lr in rates}
    chosen: list[dict[str, Any]] = []
    while not chosen:  # a rate at which a later seed diverges is given up for the next best
        try:
            lr = ft.choose(vals)
        except Diverged as error:
            raise Diverged("every learning rate diverged, lower --lr or extend --grid downwards") from error
        work([lr], slice(tries, None))
        chosen = [done[lr, cfg.seed + i] for i in range(p.seeds)]
        if any(outcome["val"] is None for outcome in chosen):
            vals, chosen = vals | {lr: [None]}, []
    tests = []
    for outcome in chosen:
        file = adapter_file(out, outcome)
        theta, phi_D, _ = moved([*peers.first(partial(load_adapter, file))], d.device)
        tests.append(d.score(task.test, theta, phi_D))
        if peers.rank == 0:
            run.write(f"adapter-s{outcome['seed']}.safetensors", file.read_bytes())
    result = {
        "out": str(out), "dataset": data.dataset, "backbone": model.backbone, "unit": unit, "lr": lr,
        "metric": task.metric, "aligned_by": origin.get("hypergrad", "unknown") if cfg.start else None,
        "pretext": origin.get("pretext", model.pretext), "align_unlike_paper": unlike,
        "aligned_on": origin.get("dataset") if cfg.start else None, "test": [t.accuracy for t in tests],
        "right": None if task.metric != "top-1 accuracy" else [t.right for t in tests],
        "test_images": len(task.test.targets),
        "test_loss": [t.loss for t in tests], "test_per_class": [t.per_class for t in tests],
        "val": [o["val"]["accuracy"] for o in chosen], "epochs": [o["epoch"] for o in chosen],
        "grid": {str(k): [v.accuracy if v else None for v in scores] for k, scores in vals.items()},
        "cpu_seconds": [o["cpu_seconds"] for o in chosen],
    }  # fmt: skip
    run.finish(result)
    for file in out.glob("adapter-lr*.safetensors") if peers.rank == 0 else ():
        file.unlink()
    return result


def keep(run: Run, d: Downstream, cfg: FinetuneConfig, outcome: dict[str, Any]) -> None:
    """Write down a finished PEFT run: its tensors as a file, its numbers as a line of metrics.jsonl."""
    theta, phi_D, model = outcome.pop("theta", None), outcome.pop("phi_D", {}), cfg.model
    if theta is not None:
        metadata = adapter_metadata(
            d.loaded.arch, model.backbone, model.rank or 0, model.alpha or 0.0,
            dataset=cfg.data.dataset, weights_sha256=d.loaded.digest, stage="finetune",
            lr=outcome["lr"], seed=outcome["seed"], classes=json.dumps(d.task.classes),
        )  # fmt: skip
        run.write(adapter_file(run.path, outcome).name, adapter_bytes(theta, phi_D, metadata))
    run.metric({"step": len(run.records), **outcome})
    run.log(said(outcome))
    if run.writes:
        run.path.joinpath(f"unit-lr{outcome['lr']!r}-s{outcome['seed']}.pt").unlink(missing_ok=True)


def said(outcome: dict[str, Any]) -> str:
    """A finished PEFT run in a line."""
    val = outcome["val"]
    how = f"val {val['accuracy']:.1f} at epoch {outcome['epoch']}" if val else outcome["diverged"]
    return f"lr {outcome['lr']:g} seed {outcome['seed']} {how}"


def score_of(outcome: dict[str, Any]) -> Score | None:
    """The validation score of a finished PEFT run, None if it diverged."""
    return Score(**outcome["val"]) if outcome["val"] else None


def adapter_file(out: Path, outcome: dict[str, Any]) -> Path:
    """Where a unit's tensors wait until the rate is chosen."""
    return out / f"adapter-lr{outcome['lr']!r}-s{outcome['seed']}.safetensors"


def unlike_paper(start: Path) -> dict[str, Any] | None:
    """`evaluate.unlike_the_paper` of an align run, None for a LoRA file, which does not say."""
    if not start.is_dir():
        return None
    with read_from(start):
        return unlike_the_paper(AlignConfig.model_validate(read_json(start / "config.json")))


def place(dataset: str) -> str:
    """A dataset's name; a folder's without links on the way."""
    path = dataset.removeprefix("folder:")
    return dataset if path == dataset else f"folder:{Path(path).expanduser().resolve()}"


def check_split(start: Path, about: Mapping[str, str], data: Data, digest: str) -> str | None:
    """Refuse (UsageError) a split other than align's of the same dataset: it may test what align was trained on.

    Returns a line about an align run on another dataset, or on one that its file does not tell.

    Args:
        about: the adapter's metadata.
        digest: of the images' names and labels that this run trains and tests on.
    """
    then: dict[str, Any] = dict(about)
    if start.is_dir():
        with read_from(start):
            then |= {**read_json(start / "config.json")["data"]}
            then["data_sha256"] = read_json(start / "env.json")["data_sha256"]
    if "dataset" not in then or "data_sha256" not in then:
        return f"--from {start}: does not say which images it was trained on; see that none is a test image here"
    if place(then["dataset"]) != place(data.dataset):
        what = f"was aligned with {then['dataset']}, this run is about {data.dataset}"
        return f"--from {start}: {what}; see that no test image here was a training image there"
    if then["data_sha256"] == digest:
        return None
    now = data.model_dump(mode="json")
    keys = ("data_seed", "split_file", "partial", "voc_difficult")
    other = [f"{key} was {then[key]}, is {now[key]}" for key in keys if str(then.get(key, now[key])) != str(now[key])]
    why = ", ".join(other) or "its files or labels have changed"
    raise UsageError(
        f"--from {start}: was aligned with another split of {data.dataset} ({why}), "
        "so that images it was trained on may be tested here; take align's, or align again"
    )


def check_adapter(start: Path, model: Model, loaded: Loaded) -> dict[str, str]:
    """Where a LoRA comes from; refuses one of another backbone or another rank (UsageError).

    A file of the released program does not say what it belongs to; only its shapes can be checked.
    """
    theta, about = export.load_theta(start, loaded.arch.dim)
    shape = (loaded.arch.depth, 4 * (model.rank or 0) * loaded.arch.dim)
    if theta.shape != shape:
        found = f"{theta.shape[0]} layers of rank {theta.shape[1] // (4 * loaded.arch.dim)}"
        raise UsageError(
            f"--from {start}: holds {found}, this run has {shape[0]} of rank {model.rank}; leave --rank out"
        )
    now = adapter_metadata(loaded.arch, model.backbone, model.rank or 0, model.alpha or 0, weights_sha256=loaded.digest)
    if about.get("stage", "align") != "align":
        raise UsageError(f"--from {start}: is fine-tuned already, give an align run or its adapter.safetensors")
    for key in ("backbone", "rank", "alpha", "weights_sha256"):
        if about and about.get(key) != now[key]:
            raise UsageError(f"--from {start}: its adapter has {key} {about.get(key)}, this run has {now[key]}")
    return about
