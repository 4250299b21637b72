"""Program: `bisslight align`, linear probing of φ_D, then Algorithm 1 (App. C.3)."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import hypergradients
import mfac
from bisslight import Diverged, Hypergradient, Phi, PretextTask, State, algorithm_1
from config import AlignConfig, Record, unlike_paper
from data import Pool, Task, name_own_data, steps_per_epoch
from lora import Examples
from support.checkpoints import save_adapter
from support.errors import UsageError
from support.experiment import (
    AlignExperiment,
    Head,
    open_align_experiment,
    pool_images,
    pretext_batches,
)
from support.metrics import Score
from support.optim import (
    EpochRecord,
    Group,
    Optimiser,
    Schedule,
    decay_groups,
    train_epochs,
    trainable,
)
from support.runs import LOG, Run, RunResult, Track, check_directory, read_json, untracked
from support.screen import Answer, count, percent

EXACT_LIMIT = 5000  # entries of θ: as many Hessian-vector products, and 200 MB in float64


class AlignResult(RunResult, frozen=True):
    """What an align run ended with."""

    adapter: Path  # θ_P's file
    d_lr: float  # rate of the upper level
    pretext: str
    metric: str
    distance: float  # |θ_P − θ_D|
    q_over_g: float  # |q| / |g| of the last upper step
    cosine: float  # of q and g there
    val_P: Score  # of θ_P on the validation split
    val_D: Score

    def in_words(self) -> Answer:
        """The accuracy of both adapters, and which of them is kept."""
        images = read_json(Path(self.out, "env.json"))["about"]["images"]["val"]
        kept = percent([self.val_P.accuracy])
        rows = [
            {"adapter": "lower level: kept, for finetune", "validation": kept},
            {"adapter": "upper level", "validation": percent([self.val_D.accuracy])},
        ]
        return Answer(
            f"aligned: validation {self.metric} {kept} ({count(images, 'image')})",
            rows,
            [
                "BiSSLight keeps the lower level's adapter, whichever of the two scores more;",
                "whether aligning helped, finetune and evaluate will tell",
                "",
                f"in {Path(self.out).resolve()}",
                f"next: bisslight finetune --from {shlex.quote(self.out)}",
            ],
        )


class Optimisers(NamedTuple):
    """All optimisers of an align run, by the names that checkpoints save them under."""

    opt_P: Optimiser  # of θ_P and φ_P; in `State`, too
    opt_D: Optimiser  # of θ_D and φ_D; in `State`, too
    probe: Optimiser  # of φ_D alone, before line 3


class Prepared(NamedTuple):
    """What Algorithm 1 gets besides batches, before its line 3."""

    state: State
    pretext_task: PretextTask[Any]
    head: Head  # h^D: φ_D is in `state`, too
    hypergrad: Hypergradient
    optimisers: Optimisers


class Batches(NamedTuple):
    """A batch for each lower step, and one for each upper step."""

    pretext: Iterator[Any]
    downstream: Iterator[Examples]


def align(
    cfg: AlignConfig,
    out: Path,
    *,
    task: Task | None = None,
    pool: Pool | None = None,
    force: bool = False,
    track: Track = untracked,
) -> AlignResult:
    """Run BiSSLight into the run directory `out`; the same call goes on after a stop.

    Args:
        cfg: the settings.
        out: is made if it is not there.
        task, pool: data of your own, instead of what the settings name.
        force: start the run over.
        track: shows progress.

    Raises UsageError before the long work, and Diverged where a loss or gradient is not finite.
    """
    if task:
        cfg = cfg.replace(dataset=name_own_data(*task.splits))
    if pool:
        cfg = cfg.replace(pool=name_own_data(pool))
    # A first look, at the settings alone; `Run` looks again with the digests, and under its lock.
    goes_on = check_directory(out, "align", cfg, force)
    experiment = open_align_experiment(cfg, task, pool)
    prepared = prepare(experiment)
    experiment.check_batches("--d-batch", cfg.d_batch)
    if not goes_on:  # a run that goes on has done this when it began
        # Validation and test images are read, to find damaged ones. Validation stays in memory;
        # align never scores the test.
        experiment.decode_held_out_images([experiment.task.val])
    with Run(out, "align", cfg, force, experiment.identity) as run:
        result = run.result or run_algorithm_1(experiment, prepared, run, track)
    if "diverged" in result:  # when the run was made
        raise Diverged(result["diverged"])
    return AlignResult(**result)


def run_algorithm_1(
    experiment: AlignExperiment, prepared: Prepared, run: Run, track: Track
) -> Record:
    """Linear probing and Algorithm 1, from where the run was stopped, with all that it writes.

    Returns what result.json says.
    """
    cfg = experiment.cfg
    state, pretext_task, head, hypergrad, optimisers = prepared
    run.restore(name_tensors(state, head, pretext_task.state), optimisers._asdict())
    if (
        run.records
    ):  # of the run before a stop; a record's step is its alternation, the probe's is 0
        state.done = run.records[-1]["step"]
    try:
        if cfg.probe_epochs and not run.records:
            done = optimisers.probe.step // probe_epoch(experiment)
            for epoch in track(probe(experiment, prepared), cfg.probe_epochs, "probe", done):
                run.checkpoint(f"probe epoch {epoch.step}")
            run.log({"step": 0, "probe_val": score_probe(experiment, prepared)})

        batches = batches_left(experiment, prepared)
        logs = algorithm_1(  # a generator: nothing runs before the loop below
            state,
            steps=cfg,
            task=pretext_task,
            loss_D=head.loss,
            hypergrad=hypergrad,
            pretext=batches.pretext,
            downstream=batches.downstream,
            passes=experiment.passes,
            store="cpu" if cfg.mfac_device == "cpu" else None,
        )
        for log in track(logs, cfg.alternations, "align", state.done):
            t = log.alternation
            record = {"step": t, **log._asdict()}
            due = t % cfg.eval_every == 0 or t == cfg.alternations
            if due:
                record |= validate(experiment, state, head)
            run.log(record)
            run.checkpoint(f"alternation {t} of {cfg.alternations}", due)
    except Diverged as error:
        run.finish({"diverged": str(error)})
        raise
    run.write("adapter.safetensors", adapter_file(experiment, state.theta_P))  # l.17
    return run.finish(summary(experiment, run.records[-1]))


# --- what Algorithm 1 gets ----------------------------------------------------------------------


def prepare(experiment: AlignExperiment, hypergrad: Hypergradient | None = None) -> Prepared:
    """Make what Algorithm 1 starts from (l.1, l.2), on fresh θ and heads. Raises UsageError.

    This, `probe` and `batches_left` are all that a script needs to run it without a directory:

        prepared = prepare(experiment)
        for _ in probe(experiment, prepared):
            pass
        state, task, head, hypergrad, _ = prepared
        pretext, downstream = batches_left(experiment, prepared)
        passes = experiment.passes
        for log in algorithm_1(
            state, cfg, task, head.loss, hypergrad, pretext, downstream, passes
        ):
            ...

    Args:
        experiment: data, networks and settings; it stays as it is.
        hypergrad: lines 10 and 13 of one's own, instead of what the settings name.
    """
    cfg = experiment.cfg
    theta = experiment.new_theta(cfg.seed)  # l.2
    pretext_task = experiment.new_pretext_task(theta)
    hypergrad = hypergrad or hypergradient(cfg, theta)
    head = experiment.new_head("align head", cfg.seed)
    state, optimisers = start_state(cfg, theta, pretext_task.phi, head.phi)
    return Prepared(state, pretext_task, head, hypergrad, optimisers)


def batches_left(experiment: AlignExperiment, prepared: Prepared) -> Batches:
    """Batches for the alternations that are left to do."""
    cfg = experiment.cfg
    done = prepared.state.done
    lower_steps = range(done * cfg.lower_steps, cfg.alternations * cfg.lower_steps)
    upper_steps = range(done * cfg.upper_steps, cfg.alternations * cfg.upper_steps)
    images = pool_images(experiment.pool, experiment.arch.image_size, cfg)
    unlabelled = pretext_batches(
        prepared.pretext_task, images, cfg.p_batch, lower_steps, cfg, experiment.device
    )
    examples = experiment.examples("downstream", cfg.seed, cfg.d_batch, upper_steps, cfg.drop_path)
    return Batches(unlabelled, examples)


def start_state(
    cfg: AlignConfig, theta: Tensor, phi_P: Phi, phi_D: Phi
) -> tuple[State, Optimisers]:
    """Algorithm 1's state before its line 3, and its optimisers with that of the probe.

    θ_P and θ_D are copies of θ (l.2). So is φ_P, of the tensors in the task's networks. φ_D, which
    `new_head` has made for this run alone, is used as it is.
    """
    theta_P = theta.detach().clone().requires_grad_()  # l.2
    theta_D = theta.detach().clone().requires_grad_()  # l.2
    phi_P = trainable(phi_P, theta.device)

    T = cfg.alternations
    # + 1: the released program's W steps of warm-up end below the peak, see `Schedule`.
    lower_rate = Schedule(T * cfg.lower_steps, cfg.warmup * cfg.lower_steps + 1, cfg.end_lr)
    upper_rate = Schedule(T * cfg.upper_steps, cfg.warmup * cfg.upper_steps + 1, cfg.end_lr)
    betas = None if cfg.d_optimizer == "sgd" else (0.9, 0.999)  # None is SGD

    lower_groups = [
        Group([theta_P], cfg.p_lr, cfg.p_weight_decay),
        *decay_groups(phi_P, cfg.phi_p_lr, cfg.p_weight_decay),
    ]
    # One group, so that biases are decayed, too: App. C.2 names no exception.
    upper_group = Group([theta_D, *phi_D.values()], cfg.d_lr, cfg.d_weight_decay)
    probe_group = Group([*phi_D.values()], cfg.d_lr, cfg.d_weight_decay)
    optimisers = Optimisers(
        opt_P=Optimiser(lower_groups, lower_rate, (0.9, 0.95), cfg.clip),
        opt_D=Optimiser([upper_group], upper_rate, betas, cfg.clip),
        probe=Optimiser([probe_group], rate=None, betas=betas),  # at a constant rate, not clipped
    )
    state = State(theta_P, theta_D, phi_P, phi_D, optimisers.opt_P, optimisers.opt_D)
    return state, optimisers


def name_tensors(state: State, head: Head, pretext_state: Phi) -> dict[str, Tensor]:
    """What a checkpoint holds besides the optimisers, by name."""
    tensors = {"theta_P": state.theta_P, "theta_D": state.theta_D}
    parts = {"phi_P": state.phi_P, "phi_D": head.with_stats, "pretext": pretext_state}
    for part, named in parts.items():
        for name, tensor in named.items():
            tensors[f"{part}.{name}"] = tensor
    return tensors


def probe(experiment: AlignExperiment, prepared: Prepared) -> Iterator[EpochRecord]:
    """Linear probing: train φ_D at the fresh θ, at the upper level's rate, constant (App. C.3).

    Yields each epoch's number and loss, from where the probe's optimiser is.
    """
    cfg = experiment.cfg
    state = prepared.state
    opt = prepared.optimisers.probe
    drop_path = cfg.drop_path if cfg.probe_drop_path else 0.0
    # detached: θ stays as it is, and no gradient is computed for it
    loss = partial(prepared.head.loss, state.theta_D.detach(), state.phi_D, regularise=True)
    epoch = probe_epoch(experiment)
    steps = range(opt.step, cfg.probe_epochs * epoch)
    examples = experiment.examples("probe", cfg.seed, cfg.d_batch, steps, drop_path, by_epoch=True)
    return train_epochs(loss, opt, examples, epoch, "probe", experiment.passes)


def probe_epoch(experiment: AlignExperiment) -> int:
    """The steps of an epoch of linear probing."""
    return steps_per_epoch(len(experiment.task.train.targets), experiment.cfg.d_batch)


def score_probe(experiment: AlignExperiment, prepared: Prepared) -> Record:
    """The score of the probed head on the validation split."""
    val = experiment.task.val
    score = experiment.score(val, prepared.state.theta_D, prepared.head.with_stats)
    LOG.info("linear probe: validation %s %.2f %%", experiment.metric, score.accuracy)
    return score.model_dump()


def validate(experiment: AlignExperiment, state: State, head: Head) -> Record:
    """The scores of θ_P and of θ_D on the validation split, both with φ_D."""
    val = experiment.task.val
    score_P = experiment.score(val, state.theta_P, head.with_stats)
    score_D = experiment.score(val, state.theta_D, head.with_stats)
    LOG.info(
        "alternation %d: validation %s %.2f %% with θ_P, %.2f %% with θ_D",
        state.done,
        experiment.metric,
        score_P.accuracy,
        score_D.accuracy,
    )
    return {"val_P": score_P.model_dump(), "val_D": score_D.model_dump()}


def hypergradient(cfg: AlignConfig, theta: Tensor) -> Hypergradient:
    """The function of lines 10 and 13 that the settings name. Raises UsageError: θ is too large."""
    if cfg.hypergrad == "mfac":
        return partial(mfac.mfac, partition=cfg.partition)
    if cfg.hypergrad == "recursion":
        return partial(mfac.recursion, partition=cfg.partition)
    if cfg.hypergrad == "cg":
        K, p = theta.shape
        sizes = None
        if cfg.cg_steps == "tensor":
            sizes = [p // 4] * 4 * K  # A_q, B_q, A_v and B_v of each layer, as θ holds them
        return partial(
            hypergradients.cg,
            iterations=cfg.cg_iterations,
            damping=cfg.cg_damping,
            prefactor=cfg.cg_prefactor,
            sizes=sizes,
        )
    if cfg.hypergrad == "identity":
        return hypergradients.identity
    if theta.numel() > EXACT_LIMIT:
        raise UsageError(
            f"--hypergrad exact: θ has {theta.numel()} entries, more than {EXACT_LIMIT}; use mfac"
        )
    return hypergradients.exact


def adapter_file(experiment: AlignExperiment, theta_P: Tensor) -> bytes:
    """θ_P (l.17) as a file, with what it was trained on and how."""
    cfg = experiment.cfg
    of_align = {
        "stage": "align",
        "d_lr": cfg.d_lr,
        "hypergrad": cfg.hypergrad if cfg.upper_steps else "lower only",
        "unlike_paper": unlike_paper(cfg),
    }
    return save_adapter(theta_P, {}, experiment.origin.model_copy(update=of_align))


def summary(experiment: AlignExperiment, last: Record) -> Record:
    """What result.json says, from the record of the last alternation."""
    result: Record = {
        "d_lr": experiment.cfg.d_lr,
        "pretext": experiment.origin.pretext,
        "metric": experiment.metric,
    }
    for name in ("distance", "q_over_g", "cosine"):
        steps = last[name] or [0.0]  # with --upper-steps 0 there are none
        result[name] = steps[-1]
    return result | {"val_P": last["val_P"], "val_D": last["val_D"]}
