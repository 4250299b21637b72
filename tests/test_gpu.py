"""A CUDA device against the CPU: `make gpu`; skipped where there is no device.

Without TF32 both compute the same sums in float32, in another order. A pass is compared to 1e-5 of
the largest entry, each tensor of a head by itself to 1e-4, since terms of a norm's gradient cancel.
Runs are compared to 1e-3: AdamW takes a full step where a gradient is nothing but rounding, and
line 13 divides by small eigenvalues. In bfloat16, whose steps are 4e-3, passes and runs are
compared to 5e-2.

BISSLIGHT_GPU=cpu rehearses these tests on a machine without a device: CPU against CPU.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toy import PROGRAM, PROGRAM_PATH, words_of

import cli
import lora
from bisslight import Gradients, Passes
from config import AlignConfig
from lora import Backbone, Examples, Phi
from support import runs
from support.checkpoints import arch_of, build_head, build_pretext_task, build_vit, initialise
from support.processes import HEARD

REHEARSAL = os.environ.get("BISSLIGHT_GPU") == "cpu"
DEVICE = "cpu" if REHEARSAL else "cuda"
BACKBONE = "vit_mini" if REHEARSAL else "vit_b16"  # of the passes

STEPS = (
    "--alternations 3 --lower-steps 3 --upper-steps 2 --p-batch 24 --d-batch 16 --probe-epochs 1 "
    "--eval-every 1 --warmup 1 --rank 4 --drop-path 0.1 --quiet"
)
PEFT = "--epochs 2 --batch 40 --seeds 2 --lr 1e-2 --warmup-epochs 0 --quiet"
NUMBERS = (
    "loss_P", "proximal", "norm_P", "loss_D_at_P", "loss_D_at_D", "norm_D", "q_over_g", "cosine",
    "distance",
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not REHEARSAL and not torch.cuda.is_available(),
        reason="no CUDA device is visible; on a machine with one, `make gpu` shows it",
    ),
    pytest.mark.usefixtures("elsewhere"),
]


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    """Neither matrix products nor convolutions (on by default) use TF32, unless a test says so."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def done(line: str) -> None:
    """A command line in this process that must succeed; what it prints is left out."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(words_of(line))
    assert code == 0, line


def error_of(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest entry."""
    difference = (found.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
    return float(difference / expected.detach().abs().max().cpu().double().clamp_min(1e-300))


def error_of_norm(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, as a share of the norm."""
    difference = found.detach().cpu().double() - expected.detach().cpu().double()
    return float(difference.norm() / expected.detach().cpu().double().norm().clamp_min(1e-300))


def worst_tensor(
    error: Callable[[Tensor, Tensor], float], found: Phi, expected: Phi
) -> tuple[str, float]:
    """The tensor of a head with the largest error; joined, large ones would hide small ones."""
    errors = {name: error(found[name], expected[name]) for name in expected}
    name = max(errors, key=lambda name: errors[name])
    return name, errors[name]


# --- one pass of ViT-B ----------------------------------------------------------------------------


class Level:
    """A level of Algorithm 1 on a random ViT-B: its loss, θ, φ and a batch, on one device."""

    def __init__(self, kind: str, device: str) -> None:
        pretext = "ijepa" if kind == "ijepa" else "mae"
        own = {"dataset": "own", "pool": "own"}
        cfg = AlignConfig(backbone=BACKBONE, pretext=pretext, min_keep=0, **own)
        arch = arch_of({}, cfg)
        g = torch.Generator().manual_seed(0)
        vit = build_vit(arch)
        head = build_head(arch, pretext)
        initialise([vit, head], pretext, g)
        backbone = Backbone(vit).requires_grad_(False).to(device)
        # B is 0 at the start of a run, which would hide the gradients of A
        self.theta = 0.02 * torch.randn(arch.depth, 4 * cfg.rank * arch.dim, generator=g)
        images = torch.randn(4, 3, arch.image_size, arch.image_size, generator=g)
        if kind == "downstream":
            self.phi = lora.init_head(arch.dim, 20, g)
            drop = lora.drop_path(0.1, arch.depth, 4, g).to(device)
            self.batch: Any = Examples(images.to(device), torch.arange(4).to(device), drop)
            self.loss: Any = partial(lora.downstream_loss, backbone, regularise=True)
        else:
            task: Any = build_pretext_task(
                cfg, backbone, head.to(device), 10, self.theta.to(device)
            )
            drawn = [x.to(device) for x in task.draw(4, g)]
            self.phi = task.phi
            self.batch = task.prepare(images.to(device), *drawn)
            self.loss = task.loss
        self.device = device

    def gradients(self, passes: Passes) -> Gradients:
        theta = self.theta.to(self.device).requires_grad_()
        phi = {name: x.detach().to(self.device).requires_grad_() for name, x in self.phi.items()}
        return passes.gradients(self.loss, theta, phi, self.batch)


@pytest.mark.parametrize("kind", ["mae", "ijepa", "downstream"])
def test_a_pass_has_the_value_and_gradients_of_the_cpu(kind: str) -> None:
    expected = Level(kind, "cpu").gradients(Passes())
    level = Level(kind, DEVICE)
    found = level.gradients(Passes())
    errors = [error_of(found.value, expected.value), error_of(found.theta, expected.theta)]
    name, of_phi = worst_tensor(error_of, found.phi, expected.phi)
    print(kind, "float32: value, theta", errors, name, of_phi)
    assert max(errors) < 1e-5 and of_phi < 1e-4
    rounded = level.gradients(Passes(amp=True))
    assert rounded.theta.dtype == torch.float32
    value = error_of(rounded.value, expected.value)
    of_theta = error_of_norm(rounded.theta, expected.theta)
    name, of_phi = worst_tensor(error_of_norm, rounded.phi, expected.phi)
    print(kind, "bfloat16: value, theta", value, of_theta, name, of_phi)
    assert value < 1e-2 and of_theta < 5e-2 and of_phi < 5e-2


def test_micro_batches_and_recomputation_give_the_gradients_of_the_whole() -> None:
    level = Level("downstream", DEVICE)
    whole = level.gradients(Passes())
    parts = level.gradients(Passes(micro_batch=3))
    level.loss.args[0].recompute = True  # the backbone
    again = level.gradients(Passes())
    errors = [error_of(x.theta, whole.theta) for x in (parts, again)]
    print("micro-batches, recompute:", errors)
    assert max(errors) < 1e-5


def test_hessian_products_are_those_of_the_cpu() -> None:
    """Of MAE on ViT-B, by the products that CG takes; twice the rounding of a gradient's."""
    products = []
    for device in ("cpu", DEVICE):
        level = Level("mae", device)
        theta = level.theta.to(device)
        phi = {name: x.detach() for name, x in level.phi.items()}
        product = Passes().hessian(level.loss, theta, phi, level.batch)
        products.append(product(theta))
    error = error_of(products[1], products[0])
    print("Hessian product:", error)
    assert error < 1e-4


# --- runs by the command line ---------------------------------------------------------------------


def align_line(pretrained: Path, hypergrad: str, pretext: str = "mae") -> str:
    model = f"--backbone vit_mini --pretext {pretext} --weights {pretrained / pretext}"
    return f"align {model} --dataset quilts --hypergrad {hypergrad} {STEPS}"


def curves(run: str) -> list[dict[str, Any]]:
    """The alternations of a run, without the probe."""
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"] > 0]


def difference(one: str, two: str, names: tuple[str, ...] = NUMBERS) -> float:
    """The largest relative difference of two runs' numbers; each list counts as a whole."""
    worst = 0.0
    for first, second in zip(curves(one), curves(two), strict=True):
        for name in names:
            error = error_of(torch.tensor(second[name]), torch.tensor(first[name]))
            worst = max(worst, error)
    print(f"{one}, {two}: {worst:.2g}")
    return worst


@pytest.mark.parametrize("hypergrad", ["mfac", "recursion", "cg", "identity", "exact", "ijepa"])
def test_align_has_the_numbers_of_the_cpu(pretrained: Path, hypergrad: str) -> None:
    """Each hypergradient with MAE, and M-FAC with I-JEPA."""
    line = align_line(pretrained, hypergrad)
    if hypergrad == "ijepa":
        line = align_line(pretrained, "mfac", "ijepa")
    if hypergrad == "exact":  # a Hessian product for each of 1,024 numbers of θ
        line += " --rank 1 --alternations 1 --p-batch 4"
    done(f"{line} --device cpu --out cpu")
    done(f"{line} --device {DEVICE} amp=false --out gpu")
    assert difference("cpu", "gpu") < 1e-3


def test_align_in_bfloat16_or_with_gradients_on_the_cpu_is_near(pretrained: Path) -> None:
    """In bfloat16 losses and distances; θ and the adapter file stay float32."""
    line = align_line(pretrained, "mfac")
    done(f"{line} --device cpu --out cpu")
    done(f"{line} --device {DEVICE} --out gpu")
    assert difference("cpu", "gpu", ("loss_P", "loss_D_at_P", "loss_D_at_D", "distance")) < 5e-2
    assert load_file("gpu/adapter.safetensors")["theta"].dtype == torch.float32
    done(f"{line} --device {DEVICE} amp=false --mfac-device cpu --out there")
    assert difference("cpu", "there") < 1e-3


def test_peft_has_the_scores_of_the_cpu(pretrained: Path) -> None:
    """From an align run: both scores of each seed, and the test loss; in bfloat16, the loss."""
    done(f"{align_line(pretrained, 'mfac')} --device cpu --out aligned")
    line = f"finetune --from aligned {PEFT}"
    done(f"{line} --device cpu --out cpu")
    done(f"{line} --device {DEVICE} amp=false --out gpu")
    done(f"{line} --device {DEVICE} --out rounded")
    tests = [
        json.loads(Path(run, "result.json").read_text())["tests"]
        for run in ("cpu", "gpu", "rounded")
    ]
    print(tests)
    for expected, found, rounded in zip(*tests, strict=True):  # of each seed
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert rounded["loss"] == pytest.approx(expected["loss"], rel=5e-2)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.3)  # 1 of 480 images


def test_a_run_stopped_and_continued_is_the_run_in_one_piece(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, in bfloat16; whether the bits are equal is printed."""
    line = f"{align_line(pretrained, 'mfac')} --save-minutes 0 --device {DEVICE}"
    done(f"{line} --out whole")
    done(f"{line} --out twice")
    log = runs.Run.log

    def log_and_stop(run: runs.Run, record: dict[str, Any]) -> None:
        log(run, record)
        if record["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs.Run, "log", log_and_stop)
    assert cli.run(words_of(f"{line} --out cut")) == 143
    monkeypatch.setattr(runs.Run, "log", log)
    HEARD.clear()
    assert len(curves("cut")) == 1
    done(f"{line} --out cut")
    assert difference("whole", "cut") < 1e-3
    whole, again, cut = (
        Path(run, "adapter.safetensors").read_bytes() for run in ("whole", "twice", "cut")
    )
    print("bits equal: run again", whole == again, "resumed", whole == cut)


def test_too_little_memory_is_told_in_one_line(
    pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if REHEARSAL:
        pytest.skip("the CPU's memory has no limit to set")
    line = align_line(pretrained, "mfac").replace("--p-batch 24", "--p-batch 4000")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        code = cli.run(words_of(f"{line} --device {DEVICE} --out short"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "warm-up" not in line]
    assert (code, len(lines)) == (1, 1), lines
    assert "out of memory" in lines[0] and "--micro-batch" in lines[0]


def test_two_processes_on_two_devices_have_the_numbers_of_one(pretrained: Path) -> None:
    """By NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two CUDA devices are needed, {torch.cuda.device_count()} visible")
    line = f"{align_line(pretrained, 'mfac')} --device cuda amp=false"
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = Path("program.py")
    program.write_text(PROGRAM[-1])
    call += [str(program), *words_of(line), "--out", "two"]
    env = os.environ | {"PYTHONPATH": PROGRAM_PATH}
    outcome = subprocess.run(call, env=env, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    done(f"{line} --out one")
    assert difference("one", "two") < 1e-3
