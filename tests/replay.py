"""How the recorded runs map onto this program: their tensors in our layout, nothing computed.

Everything in the tests that knows both layouts is here.
"""

from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from conftest import Recorded, close, recorded
from torch import Tensor

from bisslight import Log, Passes, State, algorithm_1
from config import Arch
from lora import Backbone, Examples, downstream_loss
from mae import MAE, Batch
from support import checkpoints
from support.optim import Group, Optimiser, Schedule, decay_groups, trainable


class Recording(NamedTuple):
    """The tiny model that a recorded run used."""

    rec: Recorded
    arch: Arch
    backbone: Backbone
    task: MAE
    theta: Tensor
    phi_P: dict[str, Tensor]
    phi_D: dict[str, Tensor]
    dtype: torch.dtype


def recording(rec: Recorded, source: Recorded | None = None) -> Recording:
    """Backbone, decoder, θ, φ_P and φ_D of a run under fixtures/official."""
    m, source = rec.meta, source or rec
    dtype = torch.float32 if m.get("dtype") == "torch.float32" else torch.float64
    sizes = [m[key] for key in ("dim", "depth", "heads", "img", "patch")]
    arch = Arch(*sizes, 4.0, True, m["ddim"], m["ddepth"], m["dheads"])  # type: ignore[call-arg]
    state = source.group("encoder")
    for i in range(arch.depth):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"blocks.{i}.attn.qkv.{x}.{kind}") for x in "qkv"]
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    vit, decoder = checkpoints.build_vit(arch), checkpoints.build_head(arch, "mae")
    vit.load_state_dict(state)
    if source.group("decoder"):  # recordings of PEFT have none
        decoder.load_state_dict(source.group("decoder"))
    backbone = Backbone(vit.to(dtype).requires_grad_(False))
    task = MAE(backbone, decoder.to(dtype))
    lora = source.group("lora_init")
    blocks = [f"blocks.{i}.attn.qkv" for i in range(arch.depth)]
    names = [f"{block}.{x}.lora_{f}" for block in blocks for x in "qv" for f in "AB"]
    theta = to_theta(torch.cat([lora[name].flatten() for name in names]), arch.depth, arch.dim)
    theta = theta.to(dtype).requires_grad_()
    phi_D = trainable({k: v.to(dtype) for k, v in source.group("head_init").items()})
    return Recording(rec, arch, backbone, task, theta, trainable(task.phi), phi_D, dtype)


def replayed(name: str) -> tuple[Recorded, Recording]:
    """A recorded run and its model; some runs share the weights and batches of another one."""
    rec = source = recorded(f"official/{name}.npz")
    if "inputs_in" in rec.meta:
        source = recorded(f"official/{rec.meta['inputs_in']}")
        rec.arrays = source.arrays | rec.arrays
    rec.meta["decoder_param_order"] = source.meta["decoder_param_order"]
    return rec, recording(rec, source)


def state_of(r: Recording) -> State:
    """Line 2 and the recorded optimisers."""
    m = r.rec.meta
    lower, upper = (
        Schedule(m["sched_T"] * n, m["sched_warm"] * n + 1, 1e-6) for n in (m["NL"], m["NU"])
    )
    theta_D = r.theta.detach().clone().requires_grad_()
    groups = [Group([r.theta], m["p_lr"], m["p_wd"])]
    groups += decay_groups(r.phi_P.values(), m["p_head_lr"], m["p_wd"])
    opt_P = Optimiser(groups, lower, (0.9, 0.95), clip=10)
    tensors = [theta_D, *r.phi_D.values()]
    betas = None if m["d_opt"] == "sgd" else (0.9, 0.999)
    opt_D = Optimiser([Group(tensors, m["d_lr"], m["d_wd"])], upper, betas, clip=10)
    return State(r.theta, theta_D, r.phi_P, r.phi_D, opt_P, opt_D)


Steps = namedtuple("Steps", "alternations lower_steps upper_steps lam")  # what Algorithm 1 reads


def to_theta(flat: Tensor, depth: int, dim: int) -> Tensor:
    """θ (K, 4 r dim) of the recorded order: per layer A_q (r, dim), B_q (dim, r), A_v, B_v."""
    if flat.ndim > 1:
        return torch.stack([to_theta(row, depth, dim) for row in flat])
    A_q, B_q, A_v, B_v = flat.unflatten(-1, (depth, 4, -1)).unbind(-2)
    A_q, A_v = (A.unflatten(-1, (-1, dim)) for A in (A_q, A_v))
    B_q, B_v = (B.unflatten(-1, (dim, -1)).mT for B in (B_q, B_v))
    return torch.stack([A_q, B_q, A_v, B_v], 1).flatten(1)


def lower_batches(r: Recording) -> Iterator[Batch]:
    """The recorded pretext batches with their recorded masking noise."""
    for images, noise in zip(r.rec["lower_images_i8"], r.rec["mask_noise"], strict=False):
        yield Batch(images.to(r.dtype) / 32, noise.to(r.dtype))


def upper_batches(r: Recording) -> Iterator[Examples]:
    """The recorded downstream batches; no drop path."""
    for images, labels in zip(r.rec["upper_images_i8"], r.rec["upper_labels"], strict=True):
        yield Examples(images.to(r.dtype) / 32, labels)


class Spy:
    """A hypergradient that keeps what it is given, and q."""

    def __init__(self, hypergradient: Any) -> None:
        self.hypergradient = hypergradient
        self.G: list[Tensor] = []
        self.g: list[Tensor] = []
        self.q: list[Tensor] = []

    def __call__(self, G: Tensor, lam: float, H: Any) -> Any:
        solve = self.hypergradient(G, lam, H)
        self.G.append(G.clone())

        def kept(g: Tensor) -> Tensor:
            self.g.append(g)
            self.q.append(solve(g))
            return self.q[-1]

        return kept


def follow(
    r: Recording, spy: Spy, pretext: Iterator[Batch], tolerance: float, passes: Passes | None = None
) -> list[Log]:
    """Run Algorithm 1 as recorded; both θ and φ_D of each alternation and every q are the same."""
    rec, K, dim = r.rec, r.arch.depth, r.arch.dim
    m, s, logs = rec.meta, state_of(r), []
    steps: Any = Steps(m["T"], m["NL"], m["NU"], m["lam"])
    loss_D = partial(downstream_loss, r.backbone)
    inputs = s, steps, r.task, loss_D, spy, pretext, upper_batches(r), passes
    for t, log in enumerate(algorithm_1(*inputs)):
        logs.append(log)
        close(s.theta_P, to_theta(rec["lora_lower_after"][t], K, dim), tolerance)
        close(s.theta_D, to_theta(rec["lora_upper_after"][t], K, dim), tolerance)
        head = torch.cat([s.phi_D["weight"].flatten(), s.phi_D["bias"]])
        close(head, rec["head_after"][t], tolerance)
    assert s.done == len(logs) == m["T"]
    close(torch.stack(spy.q), to_theta(rec["hypergrad"], K, dim), tolerance)
    return logs
