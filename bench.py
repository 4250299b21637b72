"""What an alternation costs, phase by phase, for M-FAC, CG, no curvature, and a plain PEFT step; `bisslight bench`.

Weights and images are random: times do not depend on their values. The loop that is timed is `bisslight.align` itself,
with a clock that waits for the device after each phase. Each method has a process of its own, for the sake of its peak
memory, one right after the other, so ratios mean more than seconds. Two settings: `equal`, all methods in float32 with
math attention, and `natural`, each at its own precision and kernels (the paper's comparison): bfloat16 and fused
attention on a GPU, but full precision and math attention in CG's Hessian-vector products, which have no other choice.
"""

import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import bisslight
import cg
import mae
import mfac
from config import BACKBONES, AlignConfig, BenchConfig, Bilevel, Data, Lower, Model, Upper, UsageError
from cost import memory, work
from data import Images, Split, Task, View, batches, stream
from figures import COLOURS, pyplot
from finetune import downstream_loss
from lora import Backbone, Here, init_head, init_theta
from parallel import Parts, World, micro
from runtime import autocast, environment, pick_device, read_json, rng, trainable
from stages import of_parts, on_host_store, part_by_part, state
from stopping import end_with_parent, only_the_parent_decides

METHODS = ("mfac", "cg", "identity", "peft")
CLASSES = 200  # as CUB-200, which the paper timed


def run(cfg: BenchConfig, report: Callable[[str, int, int, str], None]) -> dict[str, Any]:
    """All measurements; a table of rows, ratios, and what they were measured with."""
    device = pick_device(cfg.machine.device)
    arch = BACKBONES[cfg.backbone].arch
    lower, upper = (flop / 1e12 for flop in work(arch, cfg.rank, 0.75))
    modes = ("equal", "natural")
    rows: list[dict[str, Any]] = []
    for i, (mode, method) in enumerate((mode, method) for mode in modes for method in METHODS):
        report("bench", i, 11, f"{mode} {method}")
        row = {"mode": mode, "method": method, **isolated(alternation, cfg.model_dump_json(), method, mode)}
        rows.append(row)
        if "failed" in row:
            continue
        passes = row["phases"].get("lower passes", 0.0), row["phases"].get("upper passes", 0.0)
        done = cfg.lower_steps * cfg.p_batch * lower * (passes[0] > 0), cfg.upper_steps * cfg.d_batch * upper
        done = (done[0], done[1] / (2 if method == "peft" else 1))
        row["TFLOP_per_s"] = sum(done) / sum(passes)
        seen = cfg.lower_steps * cfg.p_batch * (passes[0] > 0) + cfg.upper_steps * cfg.d_batch
        row["images_per_s"] = seen / row["seconds"]
        row["matrix_share"] = row["TFLOP_per_s"] / row["matrix_TFLOP_per_s"]
        row["hours_500"] = row["seconds"] * 500 / 3600
    report("bench", 8, 11, "matrix product")
    rates = {str(dtype).removeprefix("torch."): matrix_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    report("bench", 9, 11, "M-FAC against the recursion")
    closed_form = curvature(arch.depth, 4 * cfg.rank * arch.dim, cfg.stored, cfg.repeats)
    report("bench", 10, 11, "loader")
    loader = decoding(cfg, arch.image_size)
    report("bench", 11, 11, "done")
    by = {(row["mode"], row["method"]): row for row in rows if "failed" not in row}
    ratios = {
        f"cg over mfac, {what}, {mode}": by[mode, "cg"][what] / by[mode, "mfac"][what]
        for mode in modes
        if {(mode, "cg"), (mode, "mfac")} <= by.keys()
        for what in ("seconds", "peak_GB")
        if (by[mode, "mfac"][what] or 0) > 0.01  # below 10 MB, or unknown, a ratio says nothing
    }
    share = None
    if own := by.get(("natural", "mfac")):
        share = sum(own["phases"].get(phase, 0.0) for phase in ("store", "curvature", "apply")) / own["seconds"]
    return {
        "rows": rows, "ratios": ratios, "mfac_share": share, "matrix_TFLOP_per_s": rates, "mfac_method": closed_form,
        "decoded_images_per_s": loader, "device": str(device), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "environment": environment(),
    }  # fmt: skip


def budget(cfg: BenchConfig) -> dict[str, Any]:
    """What is to be run, and the memory of its largest parts, M-FAC and CG, for --dry-run."""
    arch = BACKBONES[cfg.backbone].arch
    lower, upper = work(arch, cfg.rank, 0.75)
    flop = cfg.lower_steps * cfg.p_batch * lower + cfg.upper_steps * cfg.d_batch * upper
    alternations = len(METHODS) * 2 * (cfg.repeats + 1)
    device, labels = pick_device(cfg.machine.device), torch.zeros(0, dtype=torch.long)
    nothing = Split([], labels)
    task = Task("bench", nothing, nothing, nothing, [""] * CLASSES)
    needs = {f"memory_MB_{m}": memory(setting(cfg, m), arch, task, device) for m in ("mfac", "cg")}
    return {"alternations": alternations, "TFLOP_an_alternation": flop / 1e12, **needs}


def setting(cfg: BenchConfig, method: str) -> AlignConfig:
    """The settings of Algorithm 1 that a method is timed with."""
    return AlignConfig(
        model=Model(backbone=cfg.backbone, rank=cfg.rank, recompute=cfg.recompute),
        data=Data(dataset="x"),
        lower=Lower(p_batch=cfg.p_batch),
        upper=Upper(d_batch=cfg.d_batch),
        bilevel=Bilevel.model_validate(
            {
                "alternations": cfg.repeats + 1, "lower_steps": cfg.lower_steps, "upper_steps": cfg.upper_steps,
                "hypergrad": "mfac" if method == "peft" else method,
            }
        ),
        machine=cfg.machine,
        amp=cfg.amp,
    )  # fmt: skip


def isolated(fn: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call a function in a process of its own; that it had not enough memory is a result, too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), obedient) as pool:
        try:
            return pool.submit(fn, *args).result()
        except BrokenProcessPool:
            return {"failed": "its process died, perhaps for want of memory"}
        except (torch.OutOfMemoryError, MemoryError):
            return {"failed": "out of memory"}
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            return {"failed": "out of memory"}


def obedient() -> None:
    """A process that hears no signals, and ends with its parent."""
    only_the_parent_decides()
    end_with_parent()


def network(cfg: BenchConfig, device: torch.device) -> mae.MAE:
    """A backbone and its decoder with random weights, frozen, on the device."""
    vit, decoder = mae.init(BACKBONES[cfg.backbone].arch, rng(cfg.seed, "bench"))
    backbone = Backbone(vit, recompute=cfg.recompute).requires_grad_(False).to(device)
    return mae.MAE(backbone, decoder.to(device))


def alternation(text: str, method: str, mode: str) -> dict[str, Any]:
    """Median seconds by phase of one alternation (for peft: of N_U steps), and `Peak`'s memory.

    `text` is the BenchConfig as JSON, since this runs in a process of its own.
    """
    cfg = BenchConfig.model_validate_json(text)
    device = pick_device(cfg.machine.device)
    task, arch = network(cfg, device), BACKBONES[cfg.backbone].arch
    theta = init_theta(arch.depth, cfg.rank, arch.dim, rng(cfg.seed, "lora"))
    leaves = trainable({"P": theta, "D": theta}, device)
    phi_D = trainable(init_head(arch.dim, CLASSES, rng(cfg.seed, "head")), device)
    how = setting(cfg, method)
    s = state(how, leaves, trainable(task.phi, device), phi_D)
    natural, how_ = mode == "natural", World().gradients
    amp = natural and cfg.amp
    kernels: AbstractContextManager[Any] = nullcontext() if natural else sdpa_kernel(SDPBackend.MATH)
    loss_P, loss_D = (autocast(loss, device, amp) for loss in (task.loss, downstream_loss(task.backbone)))
    pretext, downstream = endless(task, cfg, device)
    clock, phases = bisslight.Clock(device, fine=True), []
    gc.collect()
    memory = Peak(device)
    with kernels:
        if method == "peft":
            for _ in range(cfg.repeats + 1):
                phases.append(peft_steps(s, loss_D, downstream, cfg.upper_steps, clock, how_))
        else:
            solve = partial(cg.cg, iterations=5, pieces=part_by_part)
            inverse: Any = {"mfac": mfac.mfac, "identity": mfac.identity, "cg": solve}[method]
            on_host = method == "mfac" and cfg.machine.mfac_device == "cpu"
            s.G = on_host_store(cfg.lower_steps, theta, device) if on_host else None
            bisslight.align(
                s, how.bilevel, loss_P, loss_D, inverse, pretext, downstream, task.after_step,
                lambda s, log: phases.append(log.seconds), of_parts(task.loss), how=how_, clock=clock,
                stored=method == "mfac",
            )  # fmt: skip
    peak = memory.read()
    kept = phases[1:]  # the first alternation warms caches up
    median = {phase: statistics.median(p.get(phase, 0.0) for p in kept) for phase in kept[0]}
    seconds = statistics.median(sum(p.values()) for p in kept)
    amp = amp and device.type == "cuda"
    rate = matrix_rate(device, torch.bfloat16 if amp else torch.float32)
    about = {"amp": amp, "matrix_TFLOP_per_s": rate, "host_peak_GB": host_peak()}
    return {"seconds": seconds, "phases": median, "peak_GB": peak, **about}


def peft_steps(
    s: bisslight.State,
    loss_D: Callable[..., Tensor],
    downstream: Iterator[Any],
    steps: int,
    clock: bisslight.Clock,
    how: Callable[..., list[Tensor]],
) -> dict[str, float]:
    """Plain fine-tuning steps, timed like the upper level's."""
    clock.start()
    for _ in range(steps):
        batch, here = next(downstream)
        clock.lap("data")
        _, g, g_phi = bisslight.gradients(loss_D, s.theta_D, s.phi_D, batch, here, how=how)
        clock.lap("upper passes")
        s.opt_D.update([(s.theta_D, g), *bisslight.pairs(s.phi_D, g_phi)])
        clock.lap("optimiser")
    return clock.take()


def endless(task: mae.MAE, cfg: BenchConfig, device: torch.device) -> tuple[Iterator[Parts], Iterator[Any]]:
    """Random batches that are on the device already, in parts of --micro-batch images."""
    size = BACKBONES[cfg.backbone].arch.image_size
    g = rng(cfg.seed, "images")
    images = torch.randn(max(cfg.p_batch, cfg.d_batch), 3, size, size, generator=g).to(device)
    targets = torch.randint(CLASSES, (cfg.d_batch,), generator=g).to(device)

    def pieces(batch: int) -> list[slice]:
        return [slice(piece.start, piece.stop) for piece in micro(range(batch), cfg.machine.micro_batch)]

    def lower() -> Iterator[Parts]:
        while True:
            seed = rng(cfg.seed, "mask")
            yield [
                ((at.stop - at.start) / cfg.p_batch, task.prepare(images[at], seed, at.start, cfg.p_batch))
                for at in pieces(cfg.p_batch)
            ]

    def upper() -> Iterator[Any]:
        parts = [((at.stop - at.start) / cfg.d_batch, (images[at], targets[at])) for at in pieces(cfg.d_batch)]
        while True:
            yield parts, [Here()] * len(parts)

    return lower(), upper()


def host_peak() -> float | None:
    """GB of host memory that this process has taken at most, None where the system does not tell."""
    try:
        return resident("VmHWM") / 1e9
    except (OSError, StopIteration):
        return None


class Peak:
    """Peak memory in GB since it was made: of the GPU's allocator in all, or of the process beyond what was there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        except OSError:
            self.base: int | None = None
            return
        self.base = resident("VmRSS")

    def read(self) -> float | None:
        """None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return None if self.base is None else (resident("VmHWM") - self.base) / 1e9


def resident(field: str) -> int:
    """Bytes of this process, by the name that Linux gives them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a plain matrix product in this process."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, 5, device) / 1e12


def median_seconds(fn: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median wall seconds of a call, after one that does not count."""
    clock, seconds = bisslight.Clock(device), []
    for _ in range(repeats + 1):
        clock.start()
        fn()
        clock.lap("call")
        seconds.append(clock.take()["call"])
    return statistics.median(seconds[1:])


def curvature(K: int, p: int, m: int, repeats: int) -> dict[str, float]:
    """M-FAC in closed form against the paper's recursion, per block, with matrix-vector products, on the CPU.

    `light`: gradients so small against m λ that float32 sums will do. `as_released`: the recursion on a copy into which
    all gradients are gathered first, while they are kept, too.
    """
    g = rng(0, "curvature")
    G, query = torch.randn(K, m, p, generator=g) * 1e-3, torch.randn(K, p, generator=g)
    light = G * 1e-2  # small enough against m λ for products in float32
    cpu, lam = torch.device("cpu"), 1e-3

    def once(fn: Callable[[], Any]) -> tuple[float, float | None]:
        gc.collect()
        memory = Peak(cpu)
        fn()
        return median_seconds(fn, repeats, cpu), memory.read()

    theirs, their_peak = once(lambda: [as_the_paper(block, lam) for block in G])
    gathered, gathered_peak = once(lambda: [as_the_paper(block, lam) for block in G.clone()])
    ours, our_peak = once(lambda: mfac.MFAC(mfac.cut(G, "layer"), lam))
    light_ours, _ = once(lambda: mfac.MFAC(mfac.cut(light, "layer"), lam))
    vectors = [as_the_paper(block, lam) for block in G]
    their_apply, _ = once(lambda: [apply_as_the_paper(v, d, x, lam) for (v, d), x in zip(vectors, query, strict=True)])
    solve = mfac.mfac(G, lam, query, torch.sum)
    our_apply, _ = once(lambda: solve.apply(query))
    solve = mfac.mfac(light, lam, query, torch.sum)
    light_apply, _ = once(lambda: solve.apply(query))
    result = {
        "update_seconds": ours, "light_update_seconds": light_ours, "recursion_update_seconds": theirs,
        "as_released_update_seconds": gathered, "as_released_update_ratio": gathered / ours,
        "update_ratio": theirs / ours, "light_update_ratio": theirs / light_ours,
        "apply_seconds": our_apply, "recursion_apply_seconds": their_apply, "apply_ratio": their_apply / our_apply,
        "light_apply_seconds": light_apply,
        "alternation_ratio": (theirs + 8 * their_apply) / (ours + 8 * our_apply),
        "light_alternation_ratio": (theirs + 8 * their_apply) / (light_ours + 8 * light_apply),
        "as_released_alternation_ratio": (gathered + 8 * their_apply) / (ours + 8 * our_apply),
    }  # fmt: skip
    if their_peak is not None and our_peak is not None and gathered_peak is not None:
        stored = G.numel() * 4 / 1e9
        result |= {"peak_GB": our_peak + stored, "recursion_peak_GB": their_peak + stored}
        result |= {"as_released_peak_GB": gathered_peak + stored}
        result["peak_ratio"] = result["recursion_peak_GB"] / result["peak_GB"]
        result["as_released_peak_ratio"] = result["as_released_peak_GB"] / result["peak_GB"]
    return result


def as_the_paper(grads: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Eq. 7 for one block (m, p), one matrix-vector product after the other, in the gradients' own precision."""
    m = len(grads)
    v, d = torch.empty_like(grads), grads.new_empty(m)
    for i, grad in enumerate(grads):
        v[i] = grad / lam
        if i:
            v[i] -= v[:i].T @ ((v[:i] @ grad) / (m + d[:i]))
        d[i] = v[i] @ grad
    return v, d


def apply_as_the_paper(v: Tensor, d: Tensor, g: Tensor, lam: float) -> Tensor:
    """Eq. 10 for one block."""
    return g - lam * (v.T @ ((v @ g) / (len(d) + d)))


def decoding(cfg: BenchConfig, size: int) -> float:
    """Images a second that the loader decodes and augments with `--workers`, from JPEG files of 500 x 375 pixels."""
    count = 64
    with tempfile.TemporaryDirectory() as folder:
        g, files = rng(cfg.seed, "jpeg"), []
        for i in range(count):
            coarse = torch.randint(256, (12, 16, 3), generator=g, dtype=torch.uint8).numpy()
            files.append(Path(folder) / f"{i}.jpg")
            Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(files[-1], quality=90)
        view = View(size, (0.5,) * 3, (0.5,) * 3, "crop")
        images = Images(Split(files, torch.zeros(count, dtype=torch.long)), view, True, 0, "bench")
        draws = stream(count, 16, 0, "bench", 0, 12)
        items = batches(images, draws, cfg.machine.workers or 0, torch.device("cpu"))
        next(items)  # starts the workers
        began = time.perf_counter()
        seen = sum(len(batch[1]) for batch in items)
        return seen / (time.perf_counter() - began)


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Earlier benches, with their settings (UsageError where there is none)."""
    for path in paths:
        if not (path / "bench.json").is_file():
            raise UsageError(f"{path}: is not a bench, there is no bench.json")
    found = {path: read_json(path / "bench.json") for path in paths}
    for path, made in found.items():
        if not {"config", "rows", "ratios", "device"} <= made.keys():
            raise UsageError(f"{path}: is a bench that did not end, run it again with --force")
    return [*found.values()]


def names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Backbone, device and batches of each, as far as they differ."""
    said = []
    for made in results:
        c = made["config"]
        said.append((c["backbone"], made["device"], f"{c['p_batch']} + {c['d_batch']} images", f"rank {c['rank']}"))
    differ = [i for i in range(4) if i == 0 or len({one[i] for one in said}) > 1]
    return [", ".join(one[i] for i in differ) for one in said]


def draw(results: Sequence[Mapping[str, Any]]) -> Any:
    """The paper's cost figure: seconds and peak memory of an alternation, CG beside M-FAC, by backbone."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(6 + 2 * len(results), 3.2), layout="constrained")
    for axis, what, label in zip(
        axes, ("seconds", "peak_GB"), ("seconds an alternation", "peak memory (GB)"), strict=True
    ):
        for i, (method, mode) in enumerate((m, mode) for m in ("mfac", "cg") for mode in ("natural", "equal")):
            values = [
                next(row.get(what) or 0.0 for row in result["rows"] if (row["method"], row["mode"]) == (method, mode))
                for result in results
            ]
            at = [x + 0.2 * (i - 1.5) for x in range(len(values))]
            hatch = "//" if mode == "equal" else None
            bars = axis.bar(
                at,
                values,
                0.2,
                color=COLOURS[i // 2],
                alpha=0.6 if hatch else 1,
                hatch=hatch,
                label=f"{method}, {mode}",
            )
            axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_xticks(range(len(results)), ["\n".join(wrap(name, 18)) for name in names(results)])
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    return figure
