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
    Group,
    Optimiser,
    Schedule,
    TrainRecord,
    decay_groups,
    train_epochs,
    trainable,
)
from support.runs import (
    LOG,
    Run,
    RunResult,
    RunState,
    Track,
    check_directory,
    read_json,
    untracked,
)
from support.screen import Answer, format_accuracies, format_count

EXACT_LIMIT = 5000  # entries of θ: as many Hessian-vector products, and 200 MB in float64


class AlignResult(RunResult, frozen=True):
    """What an align run ended with: its result.json. `RunResult` adds `out`, its directory."""

    adapter: Path  # θ_P's file
    d_lr: float  # learning rate of the upper level
    pretext: str  # pretext task, such as "mae"
    metric: str  # such as "top-1 accuracy"
    distance: float  # |θ_P − θ_D| after the last upper step, and so are the next two
    q_over_g: float  # |q| / |g|
    cosine: float  # between q and g
    val_P: Score  # θ_P on the validation split
    val_D: Score  # θ_D there

    def in_words(self) -> Answer:
        """The validation accuracy of both adapters, which of them is kept, and the next command."""
        identity = read_json(Path(self.out, "env.json"))["about"]
        images = format_count(identity["images"]["val"], "image")  # such as "200 images"
        accuracy_P = format_accuracies([self.val_P.accuracy])  # a text, such as "52.0 %"
        accuracy_D = format_accuracies([self.val_D.accuracy])
        return Answer(
            headline=f"aligned: validation {self.metric} {accuracy_P} ({images})",
            rows=[
                {"adapter": "lower level: kept, for finetune", "validation": accuracy_P},
                {"adapter": "upper level", "validation": accuracy_D},
            ],
            lines=[
                "BiSSLight keeps the lower level's adapter, whichever of the two scores more;",
                "whether aligning helped, finetune and evaluate will tell",
                "",
                f"in {Path(self.out).resolve()}",
                f"next: bisslight finetune --from {shlex.quote(self.out)}",
            ],
        )


class Optimisers(NamedTuple):
    """All optimisers of an align run; checkpoints save them under these names."""

    opt_P: Optimiser  # updates θ_P and φ_P; the same object as `State.opt_P`
    opt_D: Optimiser  # updates θ_D and φ_D; the same object as `State.opt_D`
    probe: Optimiser  # updates φ_D alone, in linear probing, before line 3


class Prepared(NamedTuple):
    """What Algorithm 1 needs besides batches, before its line 3."""

    state: State  # θ_P, θ_D, φ_P, φ_D and their optimisers
    pretext_task: PretextTask[Any]  # L^P
    head: Head  # h^D with L^D; `head.phi` and `state.phi_D` are the same tensors
    hypergrad: Hypergradient  # lines 10 and 13
    optimisers: Optimisers


class Batches(NamedTuple):
    """What Algorithm 1 draws from the data."""

    pretext: Iterator[Any]  # a batch for each lower step
    downstream: Iterator[Examples]  # a labelled batch for each upper step


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
        out: this directory is made if it is not there.
        task, pool: data in memory, instead of what --dataset and --pool name.
        force: start the run over.
        track: shows progress.

    Raises UsageError before the long work, and Diverged where a loss or gradient is not finite.
    """
    if task:
        cfg = cfg.replace(dataset=name_own_data(*task.splits))
    if pool:
        cfg = cfg.replace(pool=name_own_data(pool))
    # The settings are checked before the data are read, whose digests `Run` checks later.
    run_state = check_directory(out, "align", cfg, force)
    experiment = open_align_experiment(cfg, task, pool)
    experiment.check_batches("--d-batch", cfg.d_batch)
    experiment.check_pretext_batches()
    prepared = prepare(experiment)
    if run_state is RunState.NEW:  # a run that goes on has done this when it began
        experiment.check_held_out_images()
    with Run(out, "align", cfg, force, experiment.identity) as run:
        if run.result is None:
            return AlignResult(**run_algorithm_1(experiment, prepared, run, track))
    # A finished run is not done again: it ends as it ended before.
    if "diverged" in run.result:
        raise Diverged(run.result["diverged"])
    return AlignResult(**run.result)


def run_algorithm_1(
    experiment: AlignExperiment, prepared: Prepared, run: Run, track: Track
) -> Record:
    """Do linear probing and Algorithm 1 from where the run was stopped, and write all its files.

    Returns what result.json says.
    """
    cfg = experiment.cfg
    state, pretext_task, head, _, optimisers = prepared
    # Says what checkpoints hold. If there is one, it is filled into these tensors and optimisers,
    # and records that were logged after it are removed.
    run.restore(name_tensors(state, head, pretext_task.state), optimisers._asdict())
    # When the probe is finished, it logs a record with step 0; then each alternation logs one with
    # its number. So without records, the probe is not finished.
    probe_is_done = bool(run.records)
    if probe_is_done:
        state.done = run.records[-1]["step"]  # `batches_left` begins there
    try:
        if cfg.probe_epochs and not probe_is_done:
            run_probe(experiment, prepared, run, track)
        run_alternations(experiment, prepared, run, track)
    except Diverged as error:
        run.finish({"diverged": str(error)})
        raise
    run.write("adapter.safetensors", adapter_file(experiment, state.theta_P))  # l.17
    return run.finish(summary(experiment, run.records[-1]))


def run_probe(experiment: AlignExperiment, prepared: Prepared, run: Run, track: Track) -> None:
    """Do the epochs of linear probing that are left, and log the score after the last one."""
    done = prepared.optimisers.probe.step // steps_per_probe_epoch(experiment)  # epochs
    epochs = probe(experiment, prepared)  # lazy: the loop below trains
    for epoch, _ in track(epochs, experiment.cfg.probe_epochs, "probe", done):
        run.save_if_due(f"probe epoch {epoch}")
    run.log({"step": 0, "probe_val": score_probe(experiment, prepared)})


def run_alternations(
    experiment: AlignExperiment, prepared: Prepared, run: Run, track: Track
) -> None:
    """Do the alternations of Algorithm 1 that are left; log each, and validate some of them."""
    cfg = experiment.cfg
    state, pretext_task, head, hypergrad, _ = prepared
    batches = batches_left(experiment, prepared)
    logs = algorithm_1(  # a generator: nothing runs before the loop below
        state,
        steps=cfg,  # T, N_L, N_U and λ are read from it
        task=pretext_task,
        loss_D=head.loss,  # (θ, φ_D, batch, regularise=False) -> scalar
        hypergrad=hypergrad,
        pretext=batches.pretext,
        downstream=batches.downstream,
        passes=experiment.passes,
        store="cpu" if cfg.mfac_device == "cpu" else None,  # where G is; None: with θ
    )
    for log in track(logs, cfg.alternations, "align", state.done):
        t = log.alternation
        record = {"step": t, **log._asdict()}  # "step": in the records of every command
        validates = t % cfg.eval_every == 0 or t == cfg.alternations
        if validates:
            record |= validate(experiment, state, head)
        run.log(record)
        run.save_if_due(f"alternation {t} of {cfg.alternations}", due=validates)


# --- what Algorithm 1 gets ----------------------------------------------------------------------


def prepare(experiment: AlignExperiment, hypergrad: Hypergradient | None = None) -> Prepared:
    """Make what Algorithm 1 starts from (l.2): a fresh θ, both heads, and their optimisers.

    This, `probe` and `batches_left` are all that a script needs to run it without a directory:

        prepared = prepare(experiment)
        for _ in probe(experiment, prepared):
            pass
        state, pretext_task, head, hypergrad, _ = prepared
        pretext, downstream = batches_left(experiment, prepared)
        passes = experiment.passes
        for log in algorithm_1(
            state, cfg, pretext_task, head.loss, hypergrad, pretext, downstream, passes
        ):
            ...

    Args:
        experiment: data, networks and settings; it stays as it is.
        hypergrad: another function for lines 10 and 13 than the one that --hypergrad names.

    Raises UsageError.
    """
    cfg = experiment.cfg
    theta = experiment.new_theta(cfg.seed)  # l.2
    pretext_task = experiment.new_pretext_task(theta)  # a teacher, as I-JEPA's, starts from θ
    hypergrad = hypergrad or choose_hypergradient(cfg, theta)
    head = experiment.new_head("align head", cfg.seed)
    state, optimisers = start_state(cfg, theta, pretext_task.phi, head.phi)
    return Prepared(state, pretext_task, head, hypergrad, optimisers)


def batches_left(experiment: AlignExperiment, prepared: Prepared) -> Batches:
    """Batches for the alternations after the `prepared.state.done` ones that are finished."""
    cfg = experiment.cfg
    done = prepared.state.done
    # the numbers of the steps that are left, counted from 0 over the whole run
    lower_left = range(done * cfg.lower_steps, cfg.alternations * cfg.lower_steps)
    upper_left = range(done * cfg.upper_steps, cfg.alternations * cfg.upper_steps)
    images = pool_images(experiment.pool, experiment.arch.image_size, cfg)
    pretext = pretext_batches(
        prepared.pretext_task, images, cfg.p_batch, lower_left, cfg, experiment.device
    )
    downstream = experiment.examples("downstream", cfg.seed, cfg.d_batch, upper_left, cfg.drop_path)
    return Batches(pretext, downstream)


def start_state(
    cfg: AlignConfig, theta: Tensor, phi_P: Phi, phi_D: Phi
) -> tuple[State, Optimisers]:
    """Make Algorithm 1's state before its line 3, and all optimisers of an align run.

    φ_D is not copied: `state.phi_D` and `head.phi` are the same tensors, so that `head` scores what
    is trained. φ_P is copied: the loss of the pretext task takes φ_P as an argument, and the task's
    own tensors stay as they were loaded.
    """
    theta_P = theta.detach().clone().requires_grad_()  # l.2
    theta_D = theta.detach().clone().requires_grad_()  # l.2
    phi_P = trainable(phi_P, theta.device)  # copies that gradients can be taken for
    optimisers = make_optimisers(cfg, theta_P, theta_D, phi_P, phi_D)
    state = State(theta_P, theta_D, phi_P, phi_D, optimisers.opt_P, optimisers.opt_D)
    return state, optimisers


def make_optimisers(
    cfg: AlignConfig, theta_P: Tensor, theta_D: Tensor, phi_P: Phi, phi_D: Phi
) -> Optimisers:
    """Make the optimisers of both levels (App. C.2, C.3) and of linear probing."""
    T = cfg.alternations
    # Steps count from 1. + 1: as in the released program, the full rate is reached in the step
    # after the warm-up.
    lower_schedule = Schedule(T * cfg.lower_steps, cfg.warmup * cfg.lower_steps + 1, cfg.end_lr)
    upper_schedule = Schedule(T * cfg.upper_steps, cfg.warmup * cfg.upper_steps + 1, cfg.end_lr)
    betas_P = (0.9, 0.95)  # App. C.3, as in MAE
    betas_D = None if cfg.d_optimizer == "sgd" else (0.9, 0.999)  # `Optimiser` takes None for SGD

    lower_groups = [
        Group([theta_P], cfg.p_lr, cfg.p_weight_decay),
        *decay_groups(phi_P.values(), cfg.phi_p_lr, cfg.p_weight_decay),
    ]
    # One group, so that biases are decayed, too: App. C.2 names no exception.
    upper_group = Group([theta_D, *phi_D.values()], cfg.d_lr, cfg.d_weight_decay)
    probe_group = Group([*phi_D.values()], cfg.d_lr, cfg.d_weight_decay)
    return Optimisers(
        opt_P=Optimiser(lower_groups, lower_schedule, betas_P, cfg.clip),
        opt_D=Optimiser([upper_group], upper_schedule, betas_D, cfg.clip),
        probe=Optimiser([probe_group], rate=None, betas=betas_D),  # at a constant rate, not clipped
    )


def name_tensors(state: State, head: Head, pretext_state: Phi) -> dict[str, Tensor]:
    """All tensors that a checkpoint holds, by names such as phi_D.weight.

    `pretext_state` is what the task itself updates, such as I-JEPA's teacher.
    """
    tensors = {"theta_P": state.theta_P, "theta_D": state.theta_D}
    parts = {"phi_P": state.phi_P, "phi_D": head.with_stats, "pretext": pretext_state}
    for part, named in parts.items():
        for name, tensor in named.items():
            tensors[f"{part}.{name}"] = tensor
    return tensors


def probe(experiment: AlignExperiment, prepared: Prepared) -> Iterator[TrainRecord]:
    """Linear probing: train φ_D alone, at the upper level's learning rate, constant (App. C.3).

    Yields the number and loss of each epoch. It goes on where the probe's optimiser has stopped.
    """
    cfg = experiment.cfg
    state = prepared.state
    opt = prepared.optimisers.probe
    drop_path = cfg.drop_path if cfg.probe_drop_path else 0.0
    # θ_D, which equals θ_P here, is detached: it stays as it is, and gets no gradient.
    # regularise: with drop path, and BatchNorm updates its running statistics, as in training.
    loss = partial(prepared.head.loss, state.theta_D.detach(), state.phi_D, regularise=True)
    epoch_steps = steps_per_probe_epoch(experiment)
    steps_left = range(opt.step, cfg.probe_epochs * epoch_steps)
    examples = experiment.examples(  # by_epoch: every epoch takes each image once
        "probe", cfg.seed, cfg.d_batch, steps_left, drop_path, by_epoch=True
    )
    return train_epochs(loss, opt, examples, epoch_steps, "probe", experiment.passes)


def steps_per_probe_epoch(experiment: AlignExperiment) -> int:
    """How many steps an epoch of linear probing has."""
    return steps_per_epoch(len(experiment.task.train.targets), experiment.cfg.d_batch)


def score_probe(experiment: AlignExperiment, prepared: Prepared) -> Record:
    """Score the probed head on the validation split; returns the fields of a `Score`."""
    val = experiment.task.val
    score = experiment.score(val, prepared.state.theta_D, prepared.head.with_stats)
    LOG.info("linear probe: validation %s %.2f %%", experiment.metric, score.accuracy)
    return score.model_dump()


def validate(experiment: AlignExperiment, state: State, head: Head) -> Record:
    """Score θ_P and θ_D on the validation split, both with φ_D; the fields of two `Score`s."""
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


def choose_hypergradient(cfg: AlignConfig, theta: Tensor) -> Hypergradient:
    """The function for lines 10 and 13 that --hypergrad names.

    Raises UsageError where θ is too large for the exact one.
    """
    if cfg.hypergrad == "mfac":
        return partial(mfac.mfac, partition=cfg.partition)
    if cfg.hypergrad == "recursion":
        return partial(mfac.recursion, partition=cfg.partition)
    if cfg.hypergrad == "cg":
        lengths = None  # CG's steps have one size for the whole of θ
        if cfg.cg_steps == "tensor":  # they have one for each A_q, B_q, A_v, B_v of each layer
            K, p = theta.shape  # a row of θ holds these four, one after the other, equally long
            lengths = [p // 4] * 4 * K
        return partial(
            hypergradients.cg,
            iterations=cfg.cg_iterations,
            damping=cfg.cg_damping,
            prefactor=cfg.cg_prefactor,
            sizes=lengths,  # of the parts of θ that have a step size of their own
        )
    if cfg.hypergrad == "identity":
        return hypergradients.identity
    # what is left is "exact"
    if theta.numel() > EXACT_LIMIT:
        raise UsageError(
            f"--hypergrad exact: θ has {theta.numel()} entries, more than {EXACT_LIMIT}; use mfac"
        )
    return hypergradients.exact


def adapter_file(experiment: AlignExperiment, theta_P: Tensor) -> bytes:
    """The bytes of an adapter file with θ_P (l.17), what it was trained on, and how."""
    cfg = experiment.cfg
    of_align = {
        "stage": "align",
        "d_lr": cfg.d_lr,
        "hypergrad": cfg.hypergrad if cfg.upper_steps else "lower only",
        "unlike_paper": unlike_paper(cfg),
    }
    info = experiment.adapter_info.model_copy(update=of_align)
    return save_adapter(theta_P, phi_D={}, info=info)  # no head: fine-tuning starts a fresh one


def summary(experiment: AlignExperiment, last: Record) -> Record:
    """What result.json says; `last` is the record of the last alternation."""
    result: Record = {
        "d_lr": experiment.cfg.d_lr,
        "pretext": experiment.adapter_info.pretext,
        "metric": experiment.metric,
    }
    for name in ("distance", "q_over_g", "cosine"):
        values = last[name] or [0.0]  # one per upper step; there is none with --upper-steps 0
        result[name] = values[-1]
    return result | {"val_P": last["val_P"], "val_D": last["val_D"]}
