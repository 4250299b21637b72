"""`bisslight align`: linear probing of φ_D, then Algorithm 1; θ_P ends in adapter.safetensors.

    from align import align
    align(AlignConfig(backbone="vit_l16", dataset="cub200"), Path("runs/cub"))

The same call goes on with an unfinished run and reads a finished one (App. C.3).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cg
import mfac
from bisslight import Diverged, Hypergradient, Phi, PretextTask, State, algorithm_1
from commands import AlignConfig
from config import Bilevel, Lower, Pretext, RunError, Upper, UsageError
from data import Pool, Task, epochs, rng, stream
from evaluate import Score
from lora import DownstreamLoss, init_theta, save_adapter
from model import Model, own_names
from run import Run, check_directory, checking, read_json, reading
from training import (
    Group,
    Optimiser,
    Schedule,
    Track,
    constant,
    decay_groups,
    put_back,
    snapshot,
    trainable,
    untracked,
    world_size,
)

LOG = logging.getLogger("bisslight")
EXACT_LIMIT = 5000  # entries of θ: its Hessian takes as many double passes, and 200 MB in float64
SHARES = (2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 7, 1 / 10)  # App. C.3: 2/3, 1/2, 1/3, then less
ABOVE, FLOOR, COLLAPSE = 3.0, 0.25, 0.5  # see `unstable`


class AlignResult(NamedTuple):
    """What an align run ended with."""

    out: str
    adapter: str  # θ_P's file
    d_lr: float  # rate of the upper level
    unstable: dict[str, str]  # upper rates that were given up, and why
    pretext: str
    metric: str
    distance: float  # |θ_P − θ_D|
    q_over_g: float  # |q| / |g| of the last upper step
    cosine: float  # of q and g there
    val_P: Score  # of θ_P on the validation split
    val_D: Score
    cpu_seconds: float
    seconds: float

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "AlignResult":
        """From result.json."""
        scores = {key: Score(**found[key]) for key in ("val_P", "val_D")}
        return cls(**{key: found[key] for key in cls._fields} | scores)


def align(
    cfg: AlignConfig,
    out: Path,
    *,
    task: Task | None = None,
    pool: Pool | None = None,
    force: bool = False,
    track: Track = untracked,
) -> AlignResult:
    """Run BiSSLight into the run directory `out`.

    Args:
        task, pool: a labelled task and unlabelled images of one's own, instead of names in `cfg`.
        force: start the run in `out` over.
        track: shows progress; wraps what is done epoch by epoch and alternation by alternation.
    Raises UsageError before the long work starts, Diverged where a loss is not finite.
    """
    cfg = cfg.but(**own_names(task, pool))
    check_directory(out, "align", cfg, force)
    things = task, pool
    if cfg.d_lr_from is None:
        return AlignResult.of(aligned(cfg, out, things, force, track).result or {})
    rates = upper_rates(cfg)
    run = Run(out, "align", cfg, force, upper_rates=rates)
    given_up: dict[str, str] = {}
    for d_lr in [] if run.result else rates:
        one = cfg.but(d_lr=d_lr, d_lr_from=None)
        tried = aligned(one, out / f"dlr{d_lr:g}", things, force, track, watched=True)
        found = tried.result or {}
        if "diverged" in found:
            given_up[f"{d_lr:g}"] = found["diverged"]
            LOG.warning("--d-lr %g is not stable: %s", d_lr, found["diverged"])
            continue
        run.write("adapter.safetensors", (tried.path / "adapter.safetensors").read_bytes())
        place = {"out": str(out), "adapter": str(out / "adapter.safetensors")}
        run.finish(found | place | {"unstable": given_up})
        break
    if not run.result:
        raise RunError(f"--d-lr-from: none of {', '.join(given_up)} is stable, see {out}")
    return AlignResult.of(run.result)


def aligned(
    cfg: AlignConfig,
    out: Path,
    things: tuple[Task | None, Pool | None],
    force: bool,
    track: Track,
    watched: bool = False,
) -> Run:
    """A finished run with one upper rate; if `watched`, given up as soon as it is `unstable`."""
    m = Model(cfg, *things)
    with checking(f"--rank {cfg.rank}"):
        g = rng(cfg.seed, "lora")
        theta = init_theta(m.backbone.depth, cfg.rank, m.backbone.dim, g).to(m.device)  # l.2
    pretext = m.pretext_task(theta)
    refuse(cfg, m, pretext, theta)
    m.read_all(out)
    run = Run(out, "align", cfg, force, **m.about())
    if run.result:
        return run
    phi_D, loss_D, stats = m.head(cfg.seed, "align head")
    s = begin(cfg, theta, pretext, phi_D)
    opt = opt_downstream(cfg, [*phi_D.values()], constant)
    tensors = {"theta": {"P": s.theta_P, "D": s.theta_D}, "phi_P": s.phi_P, "phi_D": s.phi_D}
    tensors |= {"stats": stats, "pretext": pretext.state}
    optimisers = {"P": s.opt_P, "D": s.opt_D, "probe": opt}
    if saved := run.restore():
        with reading(out / "checkpoint.pt", "--force starts the run over"):
            put_back(saved, tensors, optimisers)
            s.done = saved["done"]
    try:
        steps = probe(cfg, m, s, opt, loss_D), alternate(cfg, m, s, loss_D, pretext)
        for epoch, _ in enumerate(track(steps[0], cfg.probe_epochs, "probe"), 1):
            run.checkpoint(snapshot(tensors, optimisers) | {"done": 0}, f"probe epoch {epoch}")
        if not run.records:
            score = m.score(m.task.val, s.theta_D, phi_D | stats)
            run.log({"step": 0, "probe_val": score._asdict()})
            LOG.info("linear probe: validation %s %.1f %%", m.task.metric, score.accuracy)
        for record in track(steps[1], cfg.alternations, "align", s.done):
            run.log(record)
            if watched and (why := unstable(run.records)):
                raise Diverged(f"alternation {s.done}: {why}")
            state = snapshot(tensors, optimisers) | {"done": s.done}
            where = f"alternation {s.done} of {cfg.alternations}"
            run.checkpoint(state, where, due="val_P" in record)
    except Diverged as error:
        if not watched:
            raise
        run.finish({"diverged": str(error)})
        return run
    finish(cfg, m, s, run)
    return run


def finish(cfg: AlignConfig, m: Model, s: State, run: Run) -> None:
    """Write θ_P (l.17) and the result."""
    how = cfg.hypergrad if cfg.upper_steps else "lower only"
    about = m.adapter_about(stage="align", d_lr=cfg.d_lr, hypergrad=how)
    about["unlike_paper"] = unlike_paper(cfg)
    run.write("adapter.safetensors", save_adapter(s.theta_P, {}, about))
    last = run.records[-1]
    result = {key: (last[key] or [0.0])[-1] for key in ("distance", "q_over_g", "cosine")}
    result |= {"val_P": last["val_P"], "val_D": last["val_D"], "metric": m.task.metric}
    result |= {"out": str(run.path), "adapter": str(run.path / "adapter.safetensors")}
    run.finish(result | {"d_lr": cfg.d_lr, "unstable": {}, "pretext": about["pretext"]})


def begin(cfg: AlignConfig, theta: Tensor, pretext: PretextTask, phi_D: Phi) -> State:
    """θ_P = θ_D = θ (l.2), φ_P from its task, and the optimisers of both levels (App. C.3)."""
    leaves = trainable({"P": theta, "D": theta}, theta.device)
    phi_P = trainable(pretext.phi, theta.device)
    lower, upper = (
        Schedule(cfg.alternations * n, cfg.warmup * n, cfg.end_lr)
        for n in (cfg.lower_steps, cfg.upper_steps)
    )
    groups = [Group([leaves["P"]], cfg.p_lr, cfg.p_weight_decay)]
    groups += decay_groups(phi_P, cfg.phi_p_lr, cfg.p_weight_decay)
    opt_P = Optimiser(groups, lower, (0.9, 0.95), cfg.clip)
    opt_D = opt_downstream(cfg, [leaves["D"], *phi_D.values()], upper, cfg.clip)
    return State(leaves["P"], leaves["D"], phi_P, phi_D, opt_P, opt_D)


def opt_downstream(
    cfg: AlignConfig,
    tensors: list[Tensor],
    schedule: Callable[[int, float], float],
    clip: float | None = None,
) -> Optimiser:
    """AdamW 0.9/0.999 on θ_D and φ_D, bias included, or SGD as released (App. C.3)."""
    betas = None if cfg.d_optimizer == "sgd" else (0.9, 0.999)
    return Optimiser([Group(tensors, cfg.d_lr, cfg.d_weight_decay)], schedule, betas, clip)


def probe(
    cfg: AlignConfig, m: Model, s: State, opt: Optimiser, loss_D: DownstreamLoss
) -> Iterator[str]:
    """Linear probing of φ_D at θ_D's start, before line 3 (App. C.3); yields a line an epoch."""
    n = len(m.task.train.targets)
    per_epoch = -(-n // cfg.d_batch)
    draws = epochs(n, cfg.d_batch, cfg.seed, "probe", cfg.probe_epochs, opt.step)
    rate = cfg.drop_path if cfg.probe_drop_path else 0.0
    examples = m.examples(draws, cfg.seed, "probe", rate, opt.step)
    loss = partial(loss_D, s.theta_D.detach(), s.phi_D, regularise=True)
    tensors = [*s.phi_D.values()]
    for mean in m.epochs_of(loss, tensors, opt, examples, per_epoch, cfg.probe_epochs, "probe"):
        yield f"loss {mean:.4f}"


def alternate(
    cfg: AlignConfig, m: Model, s: State, loss_D: DownstreamLoss, pretext: PretextTask
) -> Iterator[dict[str, Any]]:
    """Algorithm 1 from `s` on; yields each alternation's log, with validation where it is due."""
    n, T = len(m.task.train.targets), cfg.alternations
    first, last = s.done * cfg.upper_steps, T * cfg.upper_steps
    draws = stream(n, cfg.d_batch, cfg.seed, "downstream", first, last)
    examples = m.examples(draws, cfg.seed, "downstream", cfg.drop_path, first)
    batches = m.pretext_batches(pretext, s.done * cfg.lower_steps, T * cfg.lower_steps)
    store = torch.device("cpu") if cfg.mfac_device == "cpu" else None
    inverse = hypergradient(cfg, s.theta_P)
    for log in algorithm_1(
        s, cfg, pretext, loss_D, inverse, batches, examples, cfg.micro_batch, m.amp, store
    ):
        record: dict[str, Any] = {"step": log.alternation, **log._asdict()}
        if log.alternation % cfg.eval_every == 0 or log.alternation == T:
            for level, theta in (("P", s.theta_P), ("D", s.theta_D)):
                score = m.score(m.task.val, theta, s.phi_D | (loss_D.stats or {}))
                record[f"val_{level}"] = score._asdict()
        yield record


def hypergradient(cfg: AlignConfig, theta: Tensor) -> Hypergradient:
    """The function of lines 10 and 13 that the settings name."""
    K, p = theta.shape
    sizes = [p // 4] * 4 * K if cfg.cg_steps == "tensor" else None
    known: dict[str, Hypergradient] = {
        "mfac": partial(mfac.mfac, partition=cfg.partition),
        "recursion": partial(mfac.recursion, partition=cfg.partition),
        "identity": mfac.identity,
        "exact": mfac.exact,
        "cg": partial(
            cg.cg,
            iterations=cfg.cg_iterations,
            damping=cfg.cg_damping,
            prefactor=cfg.cg_prefactor,
            sizes=sizes,
        ),
    }
    return known[cfg.hypergrad]


def refuse(cfg: AlignConfig, m: Model, pretext: PretextTask, theta: Tensor) -> None:
    """Refuse (UsageError) what would fail, or silently mean something else, hours later."""
    m.refuse("--d-batch", cfg.d_batch)
    if cfg.p_batch < world_size():
        raise UsageError(
            f"--p-batch {cfg.p_batch}: there are {world_size()} processes, give each one"
        )
    if cfg.hypergrad == "exact" and theta.numel() > EXACT_LIMIT:
        raise UsageError(
            f"--hypergrad exact: θ has {theta.numel()} entries, a dense Hessian of more than "
            f"{EXACT_LIMIT} is out of reach; lower --rank or use mfac"
        )
    pieces = (cfg.micro_batch or cfg.p_batch) < cfg.p_batch or world_size() > 1
    if pieces and not getattr(pretext, "mean_over_images", True):
        raise UsageError(
            f"--pretext {cfg.pretext}: its loss compares the images of a batch with each other, so "
            "a batch cannot be cut; leave --micro-batch out and start one process"
        )
    if cfg.warmup >= cfg.alternations:
        LOG.warning(
            "the warm-up of %d alternations is not shorter than the run: no rate gets to its base, "
            "see --warmup", cfg.warmup,
        )  # fmt: skip


def unlike_paper(cfg: AlignConfig) -> dict[str, Any]:
    """Settings of Algorithm 1 and its tasks that are not the paper's, by name.

    Not the upper rate, for which the paper searches, and not the inverse, which makes the arm.
    """
    groups = (Lower, Upper, Bilevel, Pretext)
    usual = {name: field.default for group in groups for name, field in group.model_fields.items()}
    usual |= {"pool": "imagenet"} | (cfg.ijepa if cfg.pretext == "ijepa" else {})
    free = {"d_lr", "d_lr_from", "hypergrad", "eval_every", "mfac_device", "head", "min_crop"}
    names = (usual.keys() - free) & AlignConfig.model_fields.keys()
    return {name: getattr(cfg, name) for name in names if getattr(cfg, name) != usual[name]}


# --- the upper level's rate (App. C.3) ------------------------------------------------------------


def upper_rates(cfg: AlignConfig) -> list[float]:
    """Candidates from the best rate of a finished direct PEFT run, the largest first."""
    run = cfg.d_lr_from
    assert run is not None
    result = read_json(run / "result.json") if (run / "result.json").exists() else {}
    if len(result.get("grid", ())) < 2 or result.get("aligned_by"):
        raise UsageError(f"--d-lr-from {run}: is not a finished `finetune` grid from the backbone")
    if result["dataset"] != cfg.dataset:
        raise UsageError(f"--d-lr-from {run}: is about {result['dataset']}, not {cfg.dataset}")
    return shares(result["lr"])


def shares(best: float) -> list[float]:
    """2/3, 1/2, 1/3 and less of a rate, to three digits.

    >>> shares(1e-3)[:3]
    [0.000667, 0.0005, 0.000333]
    """
    return [float(f"{best * share:.3g}") for share in SHARES]


def unstable(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a run is not stable so far, None if it is.

    Paper silent: it does not define "stable optimization". Here a run is stable as long as

    - every loss and gradient is finite, which the loop itself sees to;
    - no loss, averaged over an alternation, is above 3 times its running minimum, where a minimum
      below a quarter of the first alternation's loss counts as that quarter;
    - no validation score of θ_D is below half of the best one so far.

    >>> unstable([{"loss_D_at_D": [2.0]}, {"loss_D_at_D": [1.0]}, {"loss_D_at_D": [3.5]}])
    'loss_D_at_D rose to 3.5, more than 3 times its minimum 1'
    """
    for name in ("loss_P", "loss_D_at_P", "loss_D_at_D"):
        values = [fmean(record[name]) for record in records if record.get(name)]
        least = max(min(values), FLOOR * values[0]) if values else 0.0
        if values and values[-1] > ABOVE * least:
            what = f"more than {ABOVE:g} times its minimum {least:.4g}"
            return f"{name} rose to {values[-1]:.4g}, {what}"
    scores = [record["val_D"]["accuracy"] for record in records if "val_D" in record]
    if scores and scores[-1] < COLLAPSE * max(scores):
        return f"validation fell to {scores[-1]:.1f} from {max(scores):.1f}"
    return None
