"""Time and memory of an alternation and of PEFT (fig:compute_time_memory, tab:memory_single_gpu).

    python -m experiments.time_and_memory --backbone vit_l16
    python -m experiments.time_and_memory --backbone vit_h14 --methods cg --micro-batch 16 \\
      --lower-steps 2 --upper-steps 1 --repeats 1      # CG where the whole one is too long

Weights and images are random, since times do not depend on their values. A method's time minus that
of `identity` is what lines 10 and 13 of Algorithm 1 cost. On a GPU the passes are in bfloat16
(`--set amp=false`: float32), the Hessian-vector products of CG (conjugate gradients) in float32.
The loader of the images is not in these times.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from align import choose_hypergradient, start_state
from bisslight import Log, Passes, PretextTask, algorithm_1
from config import AlignConfig, Arch, FinetuneConfig, Record, keep_known
from experiments.recipe import Backbone, Set, read_settings, run_script, write_table
from lora import Backbone as Network
from lora import Examples, downstream_loss, drop_path, init_head, init_theta, keep_in_bfloat16
from support.checkpoints import build_head, build_pretext_task, build_vit
from support.experiment import keeps_weights_in_bfloat16, set_up_device, uses_autocast
from support.optim import Group, Optimiser, trainable

CLASSES = 200  # of CUB-200, which the paper timed
PAPER = {  # tab:memory_single_gpu: GB on the fewest GPUs of the table, and how many these are
    "mfac": {"vit_b16": "13 on 1", "vit_l16": "19 on 1", "vit_h14": "33 on 1"},
    "cg": {"vit_b16": "58 on 2", "vit_l16": "77 on 2", "vit_h14": "141 on 4"},
    "PEFT 256": {"vit_b16": "14 on 1", "vit_l16": "36 on 1", "vit_h14": "80 on 2"},
    "PEFT 64": {"vit_b16": "4 on 1", "vit_l16": "10 on 1", "vit_h14": "22 on 1"},
}


def main(
    backbone: Backbone = "vit_b16",
    methods: str = "mfac,cg,identity",
    peft: Annotated[str, typer.Option(help="Batches of PEFT; an empty text: none.")] = "256,64",
    device: str = "auto",
    repeats: Annotated[int, typer.Option(help="Timed, after one that warms up.", min=1)] = 3,
    p_batch: int = 256,
    d_batch: int = 64,
    lower_steps: int = 20,
    upper_steps: int = 8,
    micro_batch: int | None = None,
    out: Path = Path("runs/time_and_memory"),
    more: Set = None,
) -> None:
    """Measure each method, the paper's setting by default; the median of --repeats alternations."""
    names = {"backbone": backbone, "device": device, "dataset": "own", "pool": "own"}
    sizes = {"p_batch": p_batch, "d_batch": d_batch}
    steps = {"lower_steps": lower_steps, "upper_steps": upper_steps, "alternations": repeats + 1}
    # Rates change no cost, and a warm-up may not be longer than these few alternations.
    others = {"warmup": 0, "micro_batch": micro_batch}
    settings = names | sizes | steps | others | read_settings(more)
    rows = []
    for method in methods.split(","):
        cfg = AlignConfig(**keep_known(AlignConfig, settings | {"hypergrad": method}))
        where = set_up_device(cfg)
        what = f"an alternation of {lower_steps} + {upper_steps} steps"
        cost = measure(alternations(cfg, where), where)
        rows.append(row_of(method, what, cost, backbone))
    for batch in peft.split(",") if peft else []:
        peft_cfg = FinetuneConfig(**keep_known(FinetuneConfig, settings | {"batch": int(batch)}))
        where = set_up_device(peft_cfg)
        cost = measure(peft_steps(peft_cfg, where, repeats + 1), where)
        rows.append(row_of(f"PEFT {batch}", "a step", cost, backbone))
    out.mkdir(parents=True, exist_ok=True)
    write_table(rows, out / backbone)


class Cost(NamedTuple):
    """What one alternation, or one step of PEFT, takes."""

    seconds: float | None  # None: out of memory
    gigabytes: float | None  # None: not on a GPU


def row_of(method: str, what: str, cost: Cost, backbone: str) -> Record:
    """A row of the table, with the paper's figure beside ours; `what` says of what the cost is."""
    row = {"method": method, "of": what, "seconds": "out of memory, see --micro-batch"}
    if cost.seconds is not None:
        row["seconds"] = f"{cost.seconds:.3g}"
    row["peak GB"] = "" if cost.gigabytes is None else f"{cost.gigabytes:.1f}"
    row["the paper: GB on GPUs"] = PAPER.get(method, {}).get(backbone, "")
    return row


def measure(steps: Iterator[Log] | Iterator[Tensor], device: torch.device) -> Cost:
    """Median seconds of a step after the first one, and the peak memory of all."""
    gpu = device.type == "cuda"
    gc.collect()  # what the method before it left must not count
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    ends = []
    try:
        for _ in steps:  # a step's numbers are read from the device, so all its work is done
            ends.append(time.perf_counter())
    except torch.OutOfMemoryError:
        return Cost(None, None)
    gigabytes = torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None
    seconds = [end - begin for begin, end in pairwise(ends)]  # the first step only warms up
    return Cost(median(seconds), gigabytes)


def alternations(cfg: AlignConfig, device: torch.device) -> Iterator[Log]:
    """Run Algorithm 1 on a random network, with the same random images at every step."""
    g = torch.Generator().manual_seed(cfg.seed)
    network = random_network(cfg, device)
    if keeps_weights_in_bfloat16(cfg, device):
        keep_in_bfloat16(network)
    arch = cfg.arch()
    with device:
        decoder = build_head(arch, cfg.pretext)
    theta = init_theta(arch.depth, cfg.rank, arch.dim, g).to(device)
    lower_steps = cfg.alternations * cfg.lower_steps
    task: PretextTask[Any] = build_pretext_task(cfg, network, decoder, lower_steps, theta)
    phi_D = trainable(init_head(arch.dim, CLASSES, g), device)
    state, _ = start_state(cfg, theta, task.phi, phi_D)
    pretext, downstream = same_batches(cfg, task, arch, device, g)
    loss_D = partial(downstream_loss, network)
    train_D = partial(loss_D, drop_path=True)  # with drop path
    hypergrad = choose_hypergradient(cfg, theta)
    store = "cpu" if cfg.mfac_device == "cpu" else None
    passes = Passes(cfg.micro_batch, uses_autocast(cfg, device))
    yield from algorithm_1(
        state,
        steps=cfg,
        task=task,
        loss_D=loss_D,
        hypergrad=hypergrad,
        pretext=pretext,
        downstream=downstream,
        passes=passes,
        store=store,
        train_D=train_D,
    )


def same_batches(
    cfg: AlignConfig,
    task: PretextTask[Any],
    arch: Arch,
    device: torch.device,
    g: torch.Generator,
) -> tuple[Iterator[Any], Iterator[Examples]]:
    """A pretext batch and a labelled one of random images, each of them again and again."""
    images = random_images(arch.image_size, max(cfg.p_batch, cfg.d_batch), device)
    drawn = [tensor.to(device) for tensor in task.draw(cfg.p_batch, g)]
    amp = uses_autocast(cfg, device)
    with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
        prepared = task.prepare(images[: cfg.p_batch], *drawn)
    labels = torch.arange(cfg.d_batch, device=device) % CLASSES
    drop = drop_path(cfg.drop_path, arch.depth, cfg.d_batch, g).to(device)
    return repeat(prepared), repeat(Examples(images[: cfg.d_batch], labels, drop))


def peft_steps(cfg: FinetuneConfig, device: torch.device, steps: int) -> Iterator[Tensor]:
    """Take steps of PEFT on a random network, with the same random images; yields the losses."""
    g = torch.Generator().manual_seed(cfg.seed)
    network = random_network(cfg, device)
    arch = cfg.arch()
    theta = {"theta": init_theta(arch.depth, cfg.rank, arch.dim, g)}
    (theta_D,) = trainable(theta, device).values()
    phi_D = trainable(init_head(arch.dim, CLASSES, g), device)
    tensors = [theta_D, *phi_D.values()]
    optimiser = Optimiser([Group(tensors, 1e-3, cfg.weight_decay)], None, (0.9, 0.999))
    images = random_images(arch.image_size, cfg.batch, device)
    labels = torch.arange(cfg.batch, device=device) % CLASSES
    drop = drop_path(cfg.drop_path, arch.depth, cfg.batch, g).to(device)
    examples = Examples(images, labels, drop)
    loss = partial(downstream_loss, network, theta_D, phi_D, drop_path=True)
    passes = Passes(cfg.micro_batch, uses_autocast(cfg, device))
    for _ in range(steps):
        value, gradients = passes.value_and_gradients(loss, tensors, examples)
        optimiser.update(tensors, gradients)
        yield value.cpu()


def random_network(cfg: AlignConfig | FinetuneConfig, device: torch.device) -> Network:
    """A frozen backbone of these settings with random weights."""
    with device:
        vit = build_vit(cfg.arch())
    return Network(vit, recompute=cfg.recompute).requires_grad_(False)


def random_images(side: int, count: int, device: torch.device) -> Tensor:
    """Random network inputs (count, 3, side, side)."""
    return torch.randn(count, 3, side, side, device=device)


if __name__ == "__main__":
    run_script(main)
