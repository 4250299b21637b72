"""`bisslight align` (App. C.3): linear probing of φ_D, then Algorithm 1."""

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

import hypergradients
import mfac
from bisslight import Diverged, Hypergradient, Loss, Passes, Phi, PretextTask, State, algorithm_1
from config import AlignConfig, Record, unlike_paper
from data import Pool, Task
from support.checkpoints import save_adapter
from support.errors import UsageError
from support.experiment import Model, own_names, pretext_batches
from support.metrics import Score
from support.optim import Group, Optimiser, Schedule, decay_groups, train_epochs, trainable
from support.runs import LOG, Run, RunResult, Track, check_directory, untracked

EXACT_LIMIT = 5000  # entries of θ: as many Hessian-vector products, and 200 MB in float64


class AlignResult(RunResult, frozen=True):
    """What an align run ended with."""

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


def align(
    cfg: AlignConfig,
    out: Path,
    *,
    task: Task | None = None,
    pool: Pool | None = None,
    force: bool = False,
    track: Track = untracked,
) -> AlignResult:
    """Run BiSSLight into the run directory `out`; `force` starts over, `track` shows progress.

    `task`, `pool`: data of your own. UsageError before the long work; Diverged where it diverges.
    """
    cfg = cfg.replace(**own_names(task, pool)) if task or pool else cfg
    check_directory(out, "align", cfg, force)
    found = aligned(Model(cfg, task, pool), out, force, track)
    if "diverged" in found:
        raise Diverged(found["diverged"])
    return AlignResult(**found)


def aligned(m: Model, out: Path, force: bool, track: Track, watched: bool = False) -> Record:
    """Result for one upper rate, or {"diverged": why}; `watched` ends a run that is `unstable`."""
    cfg: Any = m.cfg
    T = cfg.alternations
    theta = m.theta()  # l.2
    pretext = m.pretext_task(theta)
    inverse = hypergradient(cfg, theta)
    m.check("--d-batch", cfg.d_batch, check_directory(out, "align", cfg, force))
    with Run(out, "align", cfg, force, m.about) as run:
        if run.result:
            return run.result
        phi_D, loss_D, head = m.head("align head")
        s, optimisers = begin(cfg, theta, pretext, phi_D)
        tensors = {"theta_P": s.theta_P, "theta_D": s.theta_D}
        for part, named in (("phi_P", s.phi_P), ("phi_D", head), ("pretext", pretext.state)):
            tensors |= {f"{part}.{name}": tensor for name, tensor in named.items()}
        run.restore(tensors, optimisers)
        s.done = optimisers["opt_P"].step // cfg.lower_steps
        try:
            if not run.records and cfg.probe_epochs:  # with 0 epochs, nothing to score
                probe(m, s, loss_D, head, optimisers["probe"], run, track)
            lower, upper = (range(s.done * n, T * n) for n in (cfg.lower_steps, cfg.upper_steps))
            batches = pretext_batches(cfg, m.pool, pretext, m.arch.image_size, cfg.p_batch, lower)
            examples = m.examples("downstream", cfg.d_batch, upper, cfg.drop_path)
            passes = Passes(cfg.micro_batch, m.amp)
            store = "cpu" if cfg.mfac_device == "cpu" else None
            logs = algorithm_1(
                s, cfg, pretext, loss_D, inverse, batches, examples, passes=passes, store=store
            )
            told = ({"step": log.alternation, **log._asdict()} for log in logs)
            records = m.validated(told, cfg.eval_every, T, head, val_P=s.theta_P, val_D=s.theta_D)
            for record in track(records, T, "align", s.done):
                run.log(record)
                if watched and (why := unstable(run.records)):
                    raise Diverged(f"alternation {s.done}: {why}")
                run.checkpoint(f"alternation {s.done} of {T}", "val_P" in record)
        except Diverged as error:
            return run.finish({"diverged": str(error)})
        how, last = cfg.hypergrad if cfg.upper_steps else "lower only", run.records[-1]
        about = {"stage": "align", "d_lr": cfg.d_lr, "hypergrad": how}
        about["unlike_paper"] = unlike_paper(cfg)
        run.write("adapter.safetensors", save_adapter(s.theta_P, {}, m.origin | about))  # l.17
        return run.finish({
            "d_lr": cfg.d_lr, "unstable": {}, "pretext": m.origin["pretext"], "metric": m.metric,
            **{key: (last[key] or [0.0])[-1] for key in ("distance", "q_over_g", "cosine")},
            "val_P": last["val_P"], "val_D": last["val_D"],
        })  # fmt: skip


def probe(
    m: Model, s: State, loss_D: Loss, head: Phi, opt: Optimiser, run: Run, track: Track
) -> None:
    """Linear probing of φ_D at the fresh θ, before line 3 (App. C.3)."""
    cfg: Any = m.cfg
    rate = cfg.drop_path if cfg.probe_drop_path else 0.0
    loss = partial(loss_D, s.theta_D.detach(), s.phi_D, regularise=True)
    per_epoch = -(-len(m.task.train.targets) // cfg.d_batch)
    left = range(opt.step, cfg.probe_epochs * per_epoch)
    examples = m.examples("probe", cfg.d_batch, left, rate, passes=True)
    records = train_epochs(loss, opt, examples, per_epoch, "probe", Passes(cfg.micro_batch, m.amp))
    for record in track(records, cfg.probe_epochs, "probe"):
        run.checkpoint(f"probe epoch {record.step}")
    score = m.score(m.task.val, s.theta_D, head)
    run.log({"step": 0, "probe_val": score.model_dump()})
    LOG.info("linear probe: validation %s %.1f %%", m.metric, score.accuracy)


def begin(
    cfg: AlignConfig, theta: Tensor, pretext: PretextTask, phi_D: Phi
) -> tuple[State, dict[str, Optimiser]]:
    """θ_P = θ_D = θ (l.2), φ_P from its task; and opt_P, opt_D and the probe's optimiser."""
    theta_P, theta_D = trainable({"P": theta, "D": theta}, theta.device).values()
    phi_P = trainable(pretext.phi, theta.device)
    steps, T = (cfg.lower_steps, cfg.upper_steps), cfg.alternations
    lower, upper = (Schedule(T * n, cfg.warmup * n + 1, cfg.end_lr) for n in steps)
    below = Group([theta_P], cfg.p_lr, cfg.p_weight_decay)
    decoder = decay_groups(phi_P, cfg.phi_p_lr, cfg.p_weight_decay)
    opt_P = Optimiser([below, *decoder], lower, (0.9, 0.95), cfg.clip)
    betas = None if cfg.d_optimizer == "sgd" else (0.9, 0.999)
    head = Group([*phi_D.values()], cfg.d_lr, cfg.d_weight_decay)
    both = head._replace(tensors=[theta_D, *head.tensors])  # bias too: App. C.2 names no exception
    opt_D = Optimiser([both], upper, betas, cfg.clip)
    probe = Optimiser([head], None, betas)
    optimisers = {"opt_P": opt_P, "opt_D": opt_D, "probe": probe}
    return State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D), optimisers


def hypergradient(cfg: AlignConfig, theta: Tensor) -> Hypergradient:
    """The function of lines 10 and 13 that the settings name (UsageError: too large for it)."""
    if cfg.hypergrad == "exact" and theta.numel() > EXACT_LIMIT:
        raise UsageError(
            f"--hypergrad exact: θ has {theta.numel()} entries, more than {EXACT_LIMIT}; use mfac"
        )
    K, p = theta.shape
    known: dict[str, Hypergradient] = {
        "mfac": partial(mfac.mfac, partition=cfg.partition),
        "recursion": partial(mfac.recursion, partition=cfg.partition),
        "identity": hypergradients.identity,
        "exact": hypergradients.exact,
        "cg": partial(hypergradients.cg, iterations=cfg.cg_iterations, damping=cfg.cg_damping,
                      prefactor=cfg.cg_prefactor,
                      sizes=[p // 4] * 4 * K if cfg.cg_steps == "tensor" else None),
    }  # fmt: skip
    return known[cfg.hypergrad]


def unstable(records: list[Record]) -> str | None:
    """Why a run is not stable so far, None if it is. Paper silent: it does not define "stable".

    Here no loss, averaged over an alternation, may rise above 3 times its running minimum; a
    minimum below a quarter of the first alternation's loss counts as that quarter.

    >>> unstable([{"loss_D_at_D": [2.0]}, {"loss_D_at_D": [1.0]}, {"loss_D_at_D": [3.5]}])
    'loss_D_at_D rose to 3.5, more than 3 times its minimum'
    >>> unstable([{"loss_P": [4.0]}, {"loss_P": [0.1]}, {"loss_P": [2.9]}])  # less than 3 · 4 / 4
    """
    for name in ("loss_P", "loss_D_at_P", "loss_D_at_D"):
        values = [fmean(record[name]) for record in records if record.get(name)] or [0.0]
        if values[-1] > 3 * max(min(values), values[0] / 4):
            return f"{name} rose to {values[-1]:.4g}, more than 3 times its minimum"
    return None
