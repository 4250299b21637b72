"""A CUDA device against the CPU: `make gpu`; skipped where there is no device.

Without TF32 both compute the same sums in float32, in another order. A pass is compared to 1e-5 of
the largest entry, each tensor of a head by itself to 1e-4, since terms of a norm's gradient cancel.
Runs are compared to 1e-3: AdamW takes a full step where a gradient is nothing but rounding, and
line 13 divides by small eigenvalues. With I-JEPA the pretext gradients of the toy network are
1e-6, those of the queries 1e-10, so rounding moves θ by up to a percent: lengths of θ are compared
to 5e-2 there (`test_rounding_moves_theta_of_ijepa_and_no_loss` has the same on a CPU). In bfloat16,
whose steps are 4e-3, passes and runs are compared to 5e-2.

BISSLIGHT_GPU=cpu rehearses these tests on a machine without a device: CPU against CPU.
"""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toy import PEFT_STEPS, align_line, done, read_records, torchrun, words_of

import cli
import lora
from bisslight import Gradients, Passes
from config import AlignConfig
from lora import Backbone, Examples
from support import runs
from support.checkpoints import build_head, build_pretext_task, build_vit, initialise
from support.optim import trainable
from support.processes import HEARD

REHEARSAL = os.environ.get("BISSLIGHT_GPU") == "cpu"
DEVICE = "cpu" if REHEARSAL else "cuda"
GPU = f"--device {DEVICE}"
BACKBONE = "vit_mini" if REHEARSAL else "vit_b16"  # of the passes

STEPS = "--lower-steps 3 --p-batch 24 --d-batch 16 --rank 4 --drop-path 0.1"
NUMBERS = (
    "loss_P", "spring", "norm_P", "loss_D_at_P", "loss_D_at_D", "norm_D", "q_over_g", "cosine",
    "distance",
)  # fmt: skip
LENGTHS = ("spring", "distance")  # of θ_P − θ_D; the others are losses, gradients and q

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not REHEARSAL and not torch.cuda.is_available(),
        reason="no CUDA device is visible; on a machine with one, `make gpu` shows it",
    ),
    pytest.mark.usefixtures("elsewhere"),
]


@pytest.fixture(autouse=True)
def plain_float32() -> None:
    """Neither matrix products nor convolutions (on by default) use TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def error_of(found: Tensor, expected: Tensor, norm: float = math.inf) -> float:
    """Norm of the difference as a share of the norm; by default of the largest entries."""
    a, b = (x.detach().cpu().double().flatten() for x in (found, expected))
    return float((a - b).norm(norm) / b.norm(norm).clamp_min(1e-300))


# --- one pass of ViT-B ----------------------------------------------------------------------------


def one_pass(kind: str, device: str, amp: bool = False) -> Gradients:
    """A pass of one level of Algorithm 1 through a random ViT-B, the same one on every device."""
    pretext = "ijepa" if kind == "ijepa" else "mae"
    cfg = AlignConfig(backbone=BACKBONE, pretext=pretext, dataset="own", pool="own", min_keep=0)
    arch = cfg.arch()
    g = torch.Generator().manual_seed(0)
    vit = build_vit(arch)
    head = build_head(arch, pretext)
    initialise([vit, head], pretext, g)
    backbone = Backbone(vit).requires_grad_(False).to(device)
    # B is 0 at the start of a run, which would hide the gradients of A
    start = 0.02 * torch.randn(arch.depth, 4 * cfg.rank * arch.dim, generator=g)
    images = torch.randn(4, 3, arch.image_size, arch.image_size, generator=g).to(device)
    if kind == "downstream":
        phi = lora.init_head(arch.dim, 20, g)
        drop = lora.drop_path(0.1, arch.depth, 4, g).to(device)
        batch: Any = Examples(images, torch.arange(4).to(device), drop)
        loss: Any = partial(lora.downstream_loss, backbone, drop_path=True)
    else:
        task: Any = build_pretext_task(cfg, backbone, head.to(device), 10, start.to(device))
        batch = task.prepare(images, *(x.to(device) for x in task.draw(4, g)))
        phi, loss = task.phi, task.loss
    (theta,) = trainable({"theta": start}, device).values()
    return Passes(amp=amp).gradients(loss, theta, trainable(phi, device), batch)


@pytest.mark.parametrize("kind", ["mae", "ijepa", "downstream"])
def test_a_pass_has_the_value_and_gradients_of_the_cpu(kind: str) -> None:
    expected = one_pass(kind, "cpu")
    found = one_pass(kind, DEVICE)
    assert error_of(found.value, expected.value) < 1e-5
    assert error_of(found.theta, expected.theta) < 1e-5
    rounded = one_pass(kind, DEVICE, amp=True)
    assert rounded.theta.dtype == torch.float32
    assert error_of(rounded.value, expected.value) < 1e-2
    assert error_of(rounded.theta, expected.theta, norm=2) < 5e-2
    for name, of_cpu in expected.phi.items():
        assert error_of(found.phi[name], of_cpu) < 1e-4, name
        assert error_of(rounded.phi[name], of_cpu, norm=2) < 5e-2, name


# --- runs by the command line ---------------------------------------------------------------------


def difference(one: str, two: str, names: tuple[str, ...] = NUMBERS) -> float:
    """The largest relative difference of two runs' alternations; each list counts as a whole."""
    errors = []
    (_, *alternations), (_, *others) = read_records(Path(one)), read_records(Path(two))
    for first, second in zip(alternations, others, strict=True):
        errors += [error_of(torch.tensor(second[x]), torch.tensor(first[x])) for x in names]
    print(f"{one}, {two}: {max(errors):.2g}")
    return max(errors)


@pytest.mark.parametrize(
    "method", ["mfac", "mfac --pretext ijepa", "recursion", "cg", "identity", "exact"]
)
def test_align_has_the_numbers_of_the_cpu(pretrained: Path, method: str) -> None:
    pretext = "ijepa" if "ijepa" in method else "mae"
    line = align_line(pretrained, f"{STEPS} --hypergrad {method}", pretext)
    if method == "exact":  # a Hessian product for each of 1,024 numbers of θ
        line += " --rank 1 --alternations 1 --p-batch 4"
    done(f"{line} --device cpu --out cpu")
    done(f"{line} {GPU} amp=false --out gpu")
    others = tuple(name for name in NUMBERS if name not in LENGTHS)
    assert difference("cpu", "gpu", others) < 1e-3
    assert difference("cpu", "gpu", LENGTHS) < (5e-2 if pretext == "ijepa" else 1e-3)
    if method == "mfac":  # in bfloat16 losses stay near; θ and the adapter file stay float32
        done(f"{line} {GPU} --out rounded")
        names = ("loss_P", "loss_D_at_P", "loss_D_at_D", "distance")
        assert difference("cpu", "rounded", names) < 5e-2
        assert load_file("rounded/adapter.safetensors")["theta"].dtype == torch.float32
        done(f"{line} {GPU} amp=false --mfac-device cpu --out stored")
        assert difference("gpu", "stored") < 1e-3


def test_peft_has_the_scores_of_the_cpu(pretrained: Path) -> None:
    """From an align run: loss and accuracy of each seed; in bfloat16, the loss."""
    done(align_line(pretrained, f"{STEPS} --device cpu --out aligned"))
    tests = []
    for out, how in (("cpu", "--device cpu"), ("gpu", f"{GPU} amp=false"), ("rounded", GPU)):
        done(f"finetune --from aligned {PEFT_STEPS} --seeds 2 --quiet {how} --out {out}")
        tests.append(json.loads(Path(out, "result.json").read_text())["tests"])
    for expected, found, rounded in zip(*tests, strict=True):  # of each seed
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert rounded["loss"] == pytest.approx(expected["loss"], rel=5e-2)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.3)  # 1 of 480 images


def test_a_run_stopped_and_continued_is_the_run_in_one_piece(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, in bfloat16."""
    line = align_line(pretrained, f"{STEPS} --save-minutes 0 {GPU}")
    done(f"{line} --out whole")
    log = runs.Run.log

    def log_and_stop(run: runs.Run, record: dict[str, Any]) -> None:
        log(run, record)
        if record["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Run, "log", log_and_stop)
        assert cli.run(words_of(f"{line} --out cut")) == 143
    HEARD.clear()
    assert len(read_records(Path("cut"))) == 2  # the probe, and one alternation
    done(f"{line} --out cut")
    assert difference("whole", "cut") < 1e-3


def test_two_processes_on_two_devices_have_the_numbers_of_one(pretrained: Path) -> None:
    """By NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two CUDA devices are needed, {torch.cuda.device_count()} visible")
    line = align_line(pretrained, f"{STEPS} {GPU} amp=false")
    torchrun(f"{line} --out two")
    done(f"{line} --out one")
    assert difference("one", "two") < 1e-3
