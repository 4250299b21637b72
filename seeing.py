"""What alignment did to a network, seen: attention rollout and representation similarity of finished runs (Sec. 4, D).

Each takes run directories, opens their adapters on one backbone, and looks at the validation split: the paper's choice
for rollout, and here for the similarities too. Runs of different data, weights or views are refused.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rollout as ro
import similarity as si
from config import Machine, UsageError
from data import Images, batches
from figures import check_picture
from loading import Downstream, Finished, check_weights, downstream, fetch_weights, read_run, resolved_machine
from lora import Phi, features, logits
from runtime import autocast, read_json, runs_in, short_names
from stages import silent

HERE = Machine()  # where runs are looked at, whatever machine they were made on
BATCH = 64
MOST = 10_000  # images of RSA: 50 million pairs, 0.2 GB a model and some GB on the way


class Opened(NamedTuple):
    """A finished run, ready to look at images."""

    path: Path
    d: Downstream
    theta: Tensor
    phi_D: Phi  # empty for an align run
    what: str  # how it was aligned, whether it was fine-tuned, its seed


def opened(path: Path, seed: int | None = None, machine: Machine = HERE) -> Opened:
    """A finished align or finetune run on its backbone.

    Args:
        path: of a run, or of a directory of runs, of which it is that of the seed.
        seed: whose adapter, of a finetune run or a directory; None: its first. A single align run has but one.
        machine: device and workers; its data root, where it has one, wins over the run's.
    """
    run = read_run(one_run(path, seed), seed)
    cfg = run.cfg
    fetch_weights(cfg.model, silent)
    root = machine.data_root or cfg.machine.data_root
    machine = resolved_machine(machine.model_copy(update={"data_root": root}), cfg.data.dataset)
    d = downstream(cfg.model, cfg.data, machine, cfg.amp)
    check_weights(run, d.loaded)
    phi_D = {name: tensor.to(d.device) for name, tensor in run.phi_D.items()}
    return Opened(run.path, d, run.theta.to(d.device), phi_D, what(run, seed))


def one_run(path: Path, seed: int | None) -> Path:
    """The run of a seed in a directory of runs, None: its first; a run is itself (UsageError where none is)."""
    runs = runs_in(path)
    if len(runs) < 2 or seed is None:
        return next(iter(runs), path)
    configs = {run: read_json(run / "config.json") for run in runs}
    own = [run for run in runs if configs[run]["seed"] == seed or (run / f"adapter-s{seed}.safetensors").exists()]
    if not own:
        raise UsageError(f"--seed {seed}: {path} has runs of {', '.join(str(c['seed']) for c in configs.values())}")
    return own[0]


def what(run: Finished, seed: int | None) -> str:
    """What a run is, in a few words."""
    own = run.cfg.seed if seed is None or run.about["stage"] == "align" else seed
    if run.about["stage"] == "align":
        return f"aligned ({run.about['hypergrad']}), seed {own}"
    how = read_json(run.path / "result.json")["aligned_by"]
    start = "direct PEFT" if how is None else "aligned + PEFT" if how == "mfac" else f"aligned ({how}) + PEFT"
    return f"{start}, seed {own}"


def together(runs: Sequence[Path], seed: int | None, machine: Machine) -> dict[str, Opened]:
    """Runs by name, all about the same images on the same backbone (UsageError otherwise).

    Names are those of the directories, with those above them where two are equal.
    """
    single = [one_run(path, seed).resolve() for path in runs]
    if twice := [path for path in single if single.count(path) > 1]:
        raise UsageError(f"{twice[0]}: one run twice, leave it out once")
    names = short_names([path.resolve() for path in runs])
    all_ = {name: opened(path, seed, machine) for name, path in zip(names, runs, strict=True)}
    first = identity(next(iter(all_.values())))
    for name, run in all_.items():
        if different := [key for key, value in identity(run).items() if value != first[key]]:
            raise UsageError(f"{name}: differs from {names[0]} in {', '.join(different)}; look at them one by one")
    return all_


def titles(models: Mapping[str, Opened]) -> dict[str, str]:
    """By name, what each run is; with its name where that does not tell it apart."""
    said = [run.what for run in models.values()]
    return {name: f"{run.what}, {name}" if said.count(run.what) > 1 else run.what for name, run in models.items()}


def identity(run: Opened) -> dict[str, Any]:
    """What runs must share to be looked at together."""
    size, mean, std, _, _, how, _ = run.d.view
    data = {"dataset": run.d.task.name, "images or labels": run.d.task.fingerprint()}
    return data | {"weights": run.d.loaded.digest, "image size": size, "channels or interpolation": (mean, std, how)}


def looked_at(d: Downstream, index: Sequence[int]) -> Any:
    """(images, targets) of some validation images, in batches on the device, cut as for a test."""
    draws = ([(i, i) for i in index[at : at + BATCH]] for at in range(0, len(index), BATCH))
    return batches(Images(d.task.val, d.view, False, 0, "eval"), draws, d.workers, d.device)


# --- rollout ---------------------------------------------------------------------------------------------------------


def rollout(
    runs: Sequence[Path], count: int, out: Path, seed: int | None = None, machine: Machine = HERE
) -> dict[str, Any]:
    """Draw the rollouts of finetune runs on the same validation images; returns what is in the picture.

    Args:
        count: of images, spread over the classes, drawn by `seed` (None: 0).
        out: the picture. Rows are the input, then the runs in this order.
    """
    check_picture("--picture", out)
    models = together(runs, seed, machine)
    for name, run in models.items():
        if not run.phi_D:
            raise UsageError(f"--rollout: {name} is an align run, it predicts nothing; give finetune runs")
    d = next(iter(models.values())).d
    split, classes = d.task.val, d.task.classes
    if not 1 <= count <= len(split.targets):
        raise UsageError(f"--rollout {count}: {d.task.name} has 1 to {len(split.targets)} validation images to show")
    index = ro.spread(split.targets, count, seed or 0)
    present = [classes_of(split.targets[i]) for i in index]
    shown: dict[str, ro.Model] = {}
    for name, run in models.items():
        maps, z = (torch.cat(parts) for parts in zip(*(at(run, x) for x, _ in looked_at(d, index)), strict=True))
        tops = [row.topk(max(1, len(k))).indices.tolist() for row, k in zip(z, present, strict=True)]
        right = [{*top} == {*k} for top, k in zip(tops, present, strict=True)]
        shown[name] = ro.Model(maps, [said(top, classes) for top in tops], right)
    labels = [said(k, classes) for k in present]
    named = titles(models)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (d.view.mean, d.view.std))
    images = torch.cat([x.cpu() for x, _ in looked_at(d, index)])
    ro.draw(images * std + mean, labels, {named[name]: model for name, model in shown.items()}, out)
    rows = [
        {"index": i, "label": label, "predictions": {name: model.said[k] for name, model in shown.items()}}
        for k, (i, label) in enumerate(zip(index, labels, strict=True))
    ]
    about = {
        name: {"what": named[name], "run": str(models[name].path), "peak": ro.peak(model.maps)}
        for name, model in shown.items()
    }
    return {"picture": str(out), "dataset": d.task.name, "images": rows, "looked_at": about}


@torch.no_grad()
def at(run: Opened, images: Tensor) -> tuple[Tensor, Tensor]:
    """A model's maps of a batch and, from a forward of its own, its logits."""
    device, amp, backbone = run.d.device, run.d.amp, run.d.loaded.backbone
    maps = autocast(ro.rollout, device, amp)(backbone, run.theta, images)
    z = autocast(partial(logits, backbone, run.theta, run.phi_D), device, amp)(images)
    return maps.cpu(), z.float().cpu()


def classes_of(target: Tensor) -> list[int]:
    """The classes of one image: its label, or those that are present."""
    return [int(target)] if target.ndim == 0 else (target == 1).nonzero()[:, 0].tolist()


def said(kinds: Sequence[int], classes: Sequence[str]) -> str:
    """Classes by name."""
    return ", ".join(classes[k] for k in sorted(kinds)) or "none"


# --- similarity ------------------------------------------------------------------------------------------------------


def similarity(
    runs: Sequence[Path], out: Path | None, seed: int | None = None, limit: int | None = None, machine: Machine = HERE
) -> dict[str, Any]:
    """CKA and RSA between the pretrained backbone and every align or finetune run, on validation images.

    Compared is what enters the head, before its BatchNorm.

    Args:
        out: a picture of both as heat maps.
        limit: so many images, spread over the classes. None: the whole split.
    """
    if out:
        check_picture("--picture", out)
    models = together(runs, seed, machine)
    d = next(iter(models.values())).d
    n = len(d.task.val.targets)
    if limit is not None and limit < 3:
        raise UsageError(f"--limit {limit}: three images at least, or there is nothing to rank")
    count = n if limit is None else min(n, limit)
    if count > MOST:
        raise UsageError(f"--similarity: {count} validation images make too many pairs; --limit {MOST} or fewer")
    index = sorted(ro.spread(d.task.val.targets, count, 0))
    thetas: dict[str, tuple[Downstream, Tensor | None]] = {"pretrained": (d, None)}
    named = titles(models)
    thetas |= {named[name]: (run.d, run.theta) for name, run in models.items()}
    seen: dict[str, list[Tensor]] = {name: [] for name in thetas}
    for x, _ in looked_at(d, index):
        for name, (r, theta) in thetas.items():
            with torch.no_grad():
                entering = autocast(partial(features, r.loaded.backbone, theta), r.device, r.amp)(x)
            seen[name].append(entering.float().cpu())
    cka, rsa = si.compare([torch.cat(parts) for parts in seen.values()])
    if out:
        title = f"{d.task.name}, {count} validation images"
        si.draw([*seen], {"linear CKA": cka, "RSA": rsa}, title, out)
    about = {named[name]: str(run.path) for name, run in models.items()}
    table = {"models": [*seen], "looked_at": about, "dataset": d.task.name, "images": count}
    return table | {"cka": cka.tolist(), "rsa": rsa.tolist()}
