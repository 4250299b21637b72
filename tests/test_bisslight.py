"""Algorithm 1 against recorded whole runs, a quadratic with a known optimum, and its own rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Recorded, close, recorded
from replay import head_flat, lower_batches, model_of, to_theta, upper_batches
from torch import Tensor

from bisslight import Log, State, align
from config import Bilevel
from finetune import downstream_loss
from finetune import optimiser as downstream_optimiser
from mfac import Partition, mfac
from runtime import Group, Optimiser, Schedule, decay_groups

RUNS = [
    ("bisslight_tiny_adamw_f64", 1e-10),
    ("bisslight_tiny_clipactive_blockgroups_f64", 1e-10),
    ("bisslight_tiny_sgdupper_wd0_f64", 1e-10),
    ("bisslight_tiny_adamw_f32", 1e-4),  # A starts with zero gradient, which Adam blows up to its rounding
]


@pytest.mark.parametrize(("name", "tolerance"), RUNS)
def test_align_reproduces_a_recorded_run(name: str, tolerance: float) -> None:
    """Same weights, batches and noise as the recorded program: every loss, gradient, rate and parameter agrees."""
    rec = recorded(f"official/{name}.npz")
    source = recorded(f"official/{rec.meta['inputs_in']}") if "inputs_in" in rec.meta else rec
    inputs = Recorded.__new__(Recorded)
    inputs.arrays, inputs.meta = source.arrays | rec.arrays, rec.meta
    r = model_of(inputs, source)
    m, K, dim = rec.meta, r.arch.depth, r.arch.dim
    lower = Schedule(m["sched_T"] * m["NL"], m["sched_warm"] * m["NL"], 1e-6)
    upper = Schedule(m["sched_T"] * m["NU"], m["sched_warm"] * m["NU"], 1e-6)
    theta_D = r.theta.detach().clone().requires_grad_()
    groups = [Group([r.theta], m["p_lr"], m["p_wd"]), *decay_groups(r.phi_P, m["p_head_lr"], m["p_wd"])]
    opt_P = Optimiser(groups, lower, (0.9, 0.95), clip=10)
    tensors_D = [theta_D, *r.phi_D.values()]
    opt_D = downstream_optimiser(tensors_D, m["d_lr"], m["d_wd"], upper, m["d_opt"] == "sgd", clip=10)
    state = State(r.theta, theta_D, r.phi_P, r.phi_D, opt_P, opt_D)
    cfg = Bilevel(alternations=m["T"], lower_steps=m["NL"], upper_steps=m["NU"], lam=m["lam"])
    partition: Partition = "layer" if m["grouping"] == "layer" else "projection"
    seen: dict[str, list[Any]] = {"G": [], "g": [], "q": [], "log": []}

    def spy(G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor]) -> Any:
        solve = mfac(G, lam, theta_P, loss_P, partition)
        seen["G"].append(G.transpose(0, 1).clone())  # (N_L, K, p)

        def apply(g: Tensor) -> Tensor:
            q = solve.apply(g)
            seen["g"].append(g)
            seen["q"].append(q)
            return q

        return solve._replace(apply=apply)

    def after(s: State, log: Log) -> None:
        seen["log"].append(log)
        t = log.alternation - 1
        close(s.theta_P.detach(), to_theta(rec["lora_lower_after"][t], K, dim), tolerance)
        close(s.theta_D.detach(), to_theta(rec["lora_upper_after"][t], K, dim), tolerance)
        close(head_flat(s.phi_D).detach(), rec["head_after"][t], tolerance)

    result = align(
        state, cfg, r.task.loss, downstream_loss(r.backbone), spy,
        lower_batches(r), upper_batches(r), r.task.after_step, after,
    )  # fmt: skip

    assert result is state.theta_P and len(seen["log"]) == m["T"]
    for t in range(m["T"]):
        close(seen["G"][t], to_theta(rec["pretext_grads_lora"][t], K, dim), tolerance)
    close(torch.stack(seen["g"]), to_theta(rec["q_grad_LD_at_thetaP"], K, dim), tolerance)
    close(torch.stack(seen["q"]), to_theta(rec["hypergrad"], K, dim), tolerance)
    for field, key in [
        ("loss_P", "lower_loss_pretext"), ("pull", "lower_loss_reg"), ("norm_P", "lower_gradnorm_before_clip"),
        ("loss_D_at_P", "upper_loss_at_thetaP"), ("loss_D_at_D", "upper_loss_at_thetaD"),
        ("norm_D", "upper_gradnorm_before_clip"),
    ]:  # fmt: skip
        close(
            torch.tensor([x for log in seen["log"] for x in getattr(log, field)], dtype=torch.float64),
            rec[key],
            tolerance,
        )
    decoder = torch.cat([r.phi_P[k].detach().flatten() for k in source.meta["decoder_param_order"]])
    close(decoder, rec["decoder_after_last"], 1e-4 if r.dtype is torch.float32 else 1e-6)
