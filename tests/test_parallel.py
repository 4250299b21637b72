"""Micro-batches and several processes against one process and one piece; a peer that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import close
from safetensors.torch import load_file

import cli
from bisslight import gradients
from config import BACKBONES, Masks
from finetune import downstream_loss
from ijepa import IJEPA
from ijepa import init as init_ijepa
from lora import Backbone, init_head, init_theta
from mae import MAE
from mae import init as init_mae
from parallel import World, micro
from runtime import rng, trainable

ROOT = Path(cli.__file__).parent
SMALL = "--lower-steps 2 --upper-steps 2 --p-batch 9 --d-batch 9 --warmup 1 --probe-epochs 1 --eval-every 1"
FREE = """import socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1])"""


def task_of(pretext: str) -> Any:
    arch = BACKBONES["vit_mini"].arch
    if pretext == "mae":
        vit, decoder = init_mae(arch, rng(0, "init"))
        return MAE(Backbone(vit.requires_grad_(False)), decoder)
    arch = arch.model_copy(update={"patch_size": 2, "class_token": False})
    vit, predictor = init_ijepa(arch, rng(0, "init"))
    theta = init_theta(arch.depth, 4, arch.dim, rng(0, "lora"))
    return IJEPA(Backbone(vit.requires_grad_(False)), predictor, Masks(min_keep=4), (0.99, 10), theta)


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_batch_in_pieces_has_the_gradients_of_the_whole(pretext: str, size: int) -> None:
    """Five images in pieces of 1 to 5, masks drawn for all five: the same batch, and the same gradients to rounding."""
    task = task_of(pretext)
    theta = (init_theta(4, 4, 64, rng(1, "lora")) + 0.01).requires_grad_()
    phi = trainable(task.phi)
    images = torch.randn(5, 3, 16, 16, generator=rng(2, "x"))
    whole = task.prepare(images, rng(3, "mask"))
    parts = [
        (len(piece) / 5, task.prepare(images[piece.start : piece.stop], rng(3, "mask"), piece.start, 5))
        for piece in micro(range(5), size)
    ]
    value, g_theta, g_phi = gradients(task.loss, theta, phi, whole)
    again = gradients(task.loss, theta, phi, parts, how=World().gradients)
    close(again[0], value, 1e-6)
    close(again[1], g_theta, 2e-6)
    for name in phi:
        close(again[2][name], g_phi[name], 5e-6)


@pytest.mark.parametrize("several", [False, True])
def test_downstream_losses_add_up_too(several: bool) -> None:
    vit = task_of("mae").backbone
    theta = (init_theta(4, 4, 64, rng(1, "lora")) + 0.01).requires_grad_()
    phi = trainable(init_head(64, 6, rng(0, "h")))
    images = torch.randn(5, 3, 16, 16, generator=rng(2, "x"))
    targets = torch.randint(-1, 2, (5, 6), generator=rng(2, "y")) if several else torch.arange(5)
    for loss in [downstream_loss(vit), *([downstream_loss(vit, "bce")] if several else [])]:
        value, g_theta, g_phi = gradients(loss, theta, phi, (images, targets))
        parts = [(0.4, (images[:2], targets[:2])), (0.6, (images[2:], targets[2:]))]
        again = gradients(loss, theta, phi, parts, [None, None], how=World().gradients)
        close(again[0], value, 1e-6)
        close(again[1], g_theta, 2e-6)
        close(again[2]["weight"], g_phi["weight"], 2e-6)


def test_micro_batches_from_the_command_line(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The same run to rounding, and not to the bit, so they were really used; M-FAC gets whole gradients."""
    monkeypatch.chdir(tmp_path)
    line = f"align --backbone vit_mini --weights {pretrained / 'mae'} --dataset quilts {SMALL} --alternations 2 --quiet"
    for out, more in (("whole", ""), ("pieces", "--micro-batch 4")):
        assert cli.run(f"{line} --out {out} {more}".split()) == 0
    a, b = (load_file(f"{out}/adapter.safetensors")["theta"] for out in ("whole", "pieces"))
    assert not torch.equal(a, b)
    close(a, b, 1e-3)  # AdamW turns the rounding of a gradient near zero into a step
    capsys.readouterr()
    jepa = f"--backbone vit_mini --pretext ijepa --weights {pretrained / 'ijepa'} --dataset quilts"
    wrong = f"align {jepa} {SMALL} --micro-batch 4"
    assert cli.run(wrong.split()) == 2
    assert "--micro-batch: a BatchNorm head needs the moments of whole batches" in capsys.readouterr().err
    wrong = f"finetune {jepa} --batch 79"
    assert cli.run(wrong.split()) == 2
    assert "the last batch of a pass has 1 image, BatchNorm needs 2" in capsys.readouterr().err


# --- several processes -----------------------------------------------------------------------------------------------


def start(line: str, size: int, cwd: Path, code: str = "import cli; cli.main()") -> list["subprocess.Popen[str]"]:
    """The same command line in `size` processes, as torchrun starts them."""
    port = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=True).stdout.strip()
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    call = [sys.executable, "-c", code, *line.split()]
    return [
        subprocess.Popen(
            call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip


def together(line: str, size: int, cwd: Path, code: str = "import cli; cli.main()") -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    processes = start(line, size, cwd, code)
    said = [p.communicate(timeout=300) for p in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


SHARED = """
import json, sys
from pathlib import Path
import torch
from test_parallel import first_gradients
import os
pretext, batch = sys.argv[1:]
torch.save(first_gradients(pretext, int(batch)), f"g-{pretext}-{batch}-{os.environ['RANK']}.pt")
"""


def first_gradients(pretext: str, batch: int) -> dict[str, Any]:
    """Lower and upper gradients of a batch that does not divide evenly, then θ after ten steps, in whatever world."""
    from data import Split, Task, View, quilts, stream
    from loading import Downstream, Loaded, Pool
    from lora import init_stats
    from parallel import leave, world
    from runtime import Group, Optimiser, constant

    peers, (pool_images, labelled) = world(), quilts(0)
    task = task_of(pretext)
    view = View(16, labelled.mean, labelled.std)
    device = torch.device("cpu")
    pool = Pool(pool_images, view, device, 0, False, 0, None, peers)
    theta = (init_theta(4, 4, 64, rng(1, "lora")) + 0.01).requires_grad_()
    phi = trainable(task.phi)
    (parts,) = pool.batches(task, batch, 0, 1)
    out: dict[str, Any] = {"lower": gradients(task.loss, theta, phi, parts, how=peers.gradients)}
    arch = BACKBONES["vit_mini"].arch
    loaded = Loaded(task.backbone, None, arch, "", None)
    d = Downstream(loaded, labelled, view, device, 0, False, "softmax", None, peers, {})
    head = trainable(init_head(64, 8, rng(0, "h"), batchnorm=pretext == "ijepa"))
    stats = init_stats({k: v.detach() for k, v in head.items()})
    n = len(labelled.train.targets)
    opt = Optimiser([Group([theta, *head.values()], 0.01, 0.0)], constant, (0.9, 0.999))
    for i, (batches, here) in enumerate(d.train(stream(n, batch, 0, "x", 0, 10), 0, "x", 0.2, stats)):
        value, g, g_head = gradients(d.loss(), theta, head, batches, here, how=peers.gradients)
        if i == 0:
            out["upper"] = (value, g, g_head)
        opt.update([(theta, g), *((head[k], g_head[k]) for k in head)])
    uneven = Split(labelled.val.images[:7], labelled.val.targets[:7])
    out["score"] = [tuple(d.score(split, theta.detach(), head | stats)) for split in (labelled.val, uneven)]
    several = torch.randint(-1, 2, (160, 8), generator=rng(0, "several"))
    out["map"] = tuple(d.score(Split(labelled.val.images, several), theta.detach(), head | stats))
    out["theta"], out["stats"] = theta.detach(), stats
    assert isinstance(labelled, Task)
    leave()
    return out


@pytest.mark.parametrize(
    ("pretext", "size"),
    [
        ("mae", 2),
        ("ijepa", 3),
        pytest.param("mae", 3, marks=pytest.mark.slow),
        pytest.param("ijepa", 2, marks=pytest.mark.slow),
    ],
)
def test_several_processes_do_the_work_of_one(tmp_path: Path, pretext: str, size: int) -> None:
    """A batch of 7: gradients of both levels to 1e-6, moments of all images, ranks equal to the bit after 10 steps."""
    alone = first_gradients(pretext, 7)
    results = together(f"{pretext} 7", size, tmp_path, SHARED)
    assert [code for code, _, _ in results] == [0] * size, results
    ranks = [torch.load(tmp_path / f"g-{pretext}-7-{rank}.pt", weights_only=True) for rank in range(size)]
    for level in ("lower", "upper"):
        value, g_theta, g_phi = alone[level]
        for rank in ranks:
            # BatchNorm magnifies the rounding of features that are nearly equal, as an untrained network's are
            tolerance = 5e-6 if (pretext, level) == ("ijepa", "upper") else 1e-6
            close(rank[level][0], value, 1e-6)
            close(rank[level][1], g_theta, tolerance)
            whole, others = (torch.cat([g.flatten() for g in phi.values()]) for phi in (g_phi, rank[level][2]))
            close(others, whole, tolerance)
    for rank in ranks[1:]:
        assert torch.equal(rank["theta"], ranks[0]["theta"])
        assert all(torch.equal(rank["stats"][k], ranks[0]["stats"][k]) for k in rank["stats"])
        assert rank["score"] == ranks[0]["score"]
    close(ranks[0]["theta"], alone["theta"], 1e-3)
    for ours, single in ((ranks[0]["score"], alone["score"]), ([ranks[0]["map"]], [alone["map"]])):
        for one, other in zip(ours, single, strict=True):
            assert one[0] == pytest.approx(other[0], abs=1.3)  # θ differs by rounding: two of 160 images at most
            assert one[1] == pytest.approx(other[1], rel=1e-3)


@pytest.mark.parametrize(
    ("pretext", "hypergrad"), [("mae", "mfac"), pytest.param("ijepa", "cg", marks=pytest.mark.slow)]
)
def test_align_and_finetune_in_two_processes(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretext: str, hypergrad: str
) -> None:
    """From the command line: rank 0 alone writes and prints, and the numbers are those of one process to rounding."""
    monkeypatch.chdir(tmp_path)
    model = f"--backbone vit_mini --pretext {pretext} --weights {pretrained / pretext} --dataset quilts"
    line = f"align {model} {SMALL} --alternations 2 --hypergrad {hypergrad} --quiet --json"
    results = together(f"{line} --out two", 2, tmp_path)
    assert [code for code, _, _ in results] == [0, 0], results
    assert json.loads(results[0][1])["out"] == "two"
    assert results[1][1:] == ("", "")
    assert cli.run(f"{line} --out one".split()) == 0
    one, two = (
        [json.loads(text) for text in Path(f"{x}/metrics.jsonl").read_text().splitlines()] for x in ("one", "two")
    )
    for a, b in zip(one[1:], two[1:], strict=True):
        for key in ("loss_P", "loss_D_at_P", "loss_D_at_D", "q_over_g", "norm_P", "norm_D"):
            close(torch.tensor(b[key]), torch.tensor(a[key]), 1e-3)
    peft = "finetune --from two --epochs 2 --batch 39 --seeds 2 --lr 1e-3 --quiet --json"
    results = together(f"{peft} --out f2", 2, tmp_path)
    assert [code for code, _, _ in results] == [0, 0], results
    assert cli.run(f"{peft} --out f1".split()) == 0
    a, b = (json.loads(Path(f"{x}/result.json").read_text()) for x in ("f1", "f2"))
    close(torch.tensor(b["test_loss"]), torch.tensor(a["test_loss"]), 1e-3)


def test_a_stop_in_one_process_stops_all_and_any_number_goes_on(weights: Path, tmp_path: Path) -> None:
    """SIGTERM to rank 1 alone: the ranks agree in their all-reduce, save once, and one process can go on."""
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SMALL} --alternations 400 --out a"
    processes = start(line.replace("--eval-every 1", "--eval-every 400"), 2, tmp_path)
    assert processes[0].stderr is not None
    for text in processes[0].stderr:
        if "align 2/400" in text:
            break
    processes[1].send_signal(signal.SIGTERM)
    said = [p.communicate(timeout=60)[1] for p in processes]
    assert [p.returncode for p in processes] == [143, 143], said
    assert all("stopped in alternation" in text for text in said)
    saved = torch.load(tmp_path / "a/checkpoint.pt", weights_only=True)
    if saved["lower"]:
        assert saved["G"].shape[:2] == (4, len(saved["lower"]))  # the rows of both
        assert saved["G"].flatten(2).norm(dim=-1).gt(0).all()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_death_of_one_process_ends_the_others(weights: Path, tmp_path: Path, victim: int) -> None:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SMALL} --alternations 400 --out a"
    processes = start(line, 2, tmp_path)
    assert processes[0].stderr is not None
    for text in processes[0].stderr:
        if "align 2/400" in text:
            break
    os.kill(processes[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    said = processes[1 - victim].communicate(timeout=30)[1]
    assert time.monotonic() - began < 30
    processes[victim].communicate()
    assert processes[1 - victim].returncode == 1, said
    assert "another process of this run is gone" in said
    assert "Traceback" not in said


def test_the_reason_of_a_failure_is_heard_by_all(weights: Path, tmp_path: Path) -> None:
    """A broken image in the share of one rank: both name it."""
    from PIL import Image

    for part in ("a", "b"):
        (tmp_path / "photos" / part).mkdir(parents=True)
        for i in range(15):
            Image.new("RGB", (20, 20), (i, 0, 0)).save(tmp_path / "photos" / part / f"{i}.png")
    line = f"align --backbone vit_mini --weights {weights} --dataset folder:photos --pool photos {SMALL} --out a"
    broken = tmp_path / "photos" / "b" / "14.png"
    broken.write_bytes(broken.read_bytes()[:50])
    results = together(line.replace("--probe-epochs 1", "--probe-epochs 0 --out a"), 2, tmp_path)
    assert [code for code, _, _ in results] == [1, 1], results
    assert all("14.png: cannot be read as an image" in err for _, _, err in results), results
