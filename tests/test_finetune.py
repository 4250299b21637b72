"""Probing and PEFT against a recorded run, and the rules of selection."""

import torch
from conftest import close, recorded
from replay import head_flat, model_of, to_theta

from finetune import downstream_loss, optimiser, peft, probe
from runtime import Schedule, Score, constant


def test_probe_then_peft_reproduce_a_recorded_run() -> None:
    """The head after probing, then θ and head after three epochs of PEFT, in float64."""
    rec = recorded("official/probe_and_peft_tiny_f64.npz")
    r = model_of(rec)
    loss_D = downstream_loss(r.backbone)
    batches = [(x.double() / 32, y) for x, y in zip(rec["images_i8"], rec["labels"], strict=True)]

    p = rec.meta["probe"]
    opt = optimiser(r.phi_D.values(), p["lr"], p["wd"], constant)
    assert (
        len(list(probe(loss_D, r.theta, r.phi_D, opt, [(b, None) for b in batches * p["epochs"]])))
        == len(batches) * p["epochs"]
    )
    close(head_flat(r.phi_D).detach(), rec["head_after_probe"], 1e-10)

    p = rec.meta["peft"]
    schedule = Schedule(p["epochs"] * len(batches), p["warm"] * len(batches), 1e-6)
    opt = optimiser([r.theta, *r.phi_D.values()], p["lr"], p["wd"], schedule)
    losses: list[float] = []
    peft(
        loss_D, r.theta, r.phi_D, opt, ((batch, None) for batch in batches * p["epochs"]), p["epochs"], len(batches),
        lambda theta, phi: Score(0.0, 0.0), report=lambda epoch, loss, val: losses.append(loss),
    )  # fmt: skip
    close(torch.tensor(losses, dtype=torch.float64), rec["peft_loss_per_epoch"], 1e-10)
    close(r.theta.detach(), to_theta(rec["lora_after_peft"], r.arch.depth, r.arch.dim), 1e-10)
    close(head_flat(r.phi_D).detach(), rec["head_after_peft"], 1e-10)
