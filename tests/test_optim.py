"""Rates against recorded ones, optimisers against formulas, the loop over epochs by hand."""

from typing import Any

import pytest
import torch
from conftest import close, recorded

from bisslight import Diverged, Passes
from support.optim import (
    Group,
    Optimiser,
    Schedule,
    TrainRecord,
    decay_groups,
    train_epochs,
    trainable,
)


@pytest.mark.parametrize("name", ["small", "paper"])
def test_schedules_equal_the_recorded_ones_to_the_bit(name: str) -> None:
    rec = recorded(f"official/lr_schedules_{name}.npz")
    m, f = rec.meta, rec.meta["finetune"]
    lower = Schedule(m["T"] * m["NL"], m["warmup_alternations"] * m["NL"] + 1, 1e-6)
    upper = Schedule(m["T"] * m["NU"], m["warmup_alternations"] * m["NU"] + 1, 1e-6)
    tuning = Schedule(f["epochs"] * f["len_loader"], f["warm"] * f["len_loader"] + 1, 1e-6)
    for steps, rates, rate, base in [
        ("lower_step", "lower_lora_lr", lower, m["p_lr"]),
        ("lower_step", "lower_decoder_lr", lower, m["p_head_lr"]),
        ("upper_step", "upper_lr", upper, m["d_lr"]),
        ("finetune_step", "finetune_lr", tuning, f["lr"]),
    ]:
        ours = torch.tensor([rate(k, base) for k in rec[steps].tolist()], dtype=torch.float64)
        assert torch.equal(ours, rec[rates].double())
    rates = [Schedule(1, 1, 0.0)(1, 0.3), Schedule(2, 3, 0.0)(2, 0.3)]  # shorter than the warm-up
    assert rates == [0.3, pytest.approx(0.2)]
    mae = Schedule(20 * 5, 4 * 5, 0.0)  # every step of 20 epochs of 5; MAE counts from 0
    ours = torch.tensor([mae(k, 1.5e-4) for k in range(100)], dtype=torch.float64)
    close(ours, recorded("mae/mae_tiny_io.npz")["sched_lr"], 1e-12)


def test_clipping_is_joint_and_uses_the_recorded_formula() -> None:
    """min(1, c / (norm + 1e-6)) over all tensors; plain SGD's first step shows the gradient."""
    a, b = (torch.zeros(n, requires_grad=True, dtype=torch.float64) for n in (2, 1))
    opt = Optimiser([Group([a, b], 1.0, 0.0)], None, None, clip=1e-4)
    g = torch.tensor([3e-4, 0.0, 4e-4], dtype=torch.float64)
    assert float(opt.update([a, b], [g[:2].clone(), g[2:].clone()])) == pytest.approx(5e-4)
    close(torch.cat([a, b]), -g * 1e-4 / (5e-4 + 1e-6), 1e-12)  # so small that the 1e-6 shows


def test_gradients_may_lie_in_memory_in_any_order() -> None:
    """Three steps of the program's AdamW and of torch's plain one (not fused) agree."""
    g = torch.Generator().manual_seed(0)
    ours = torch.randn(4, 3, generator=g).double().T.requires_grad_()  # transposed in memory
    theirs = ours.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    opt = Optimiser([Group([ours], 0.1, 0.05)], None, (0.9, 0.95), clip=10.0)
    plain = {"weight_decay": 0.05, "foreach": False, "fused": False}
    reference = torch.optim.AdamW([theirs], 0.1, (0.9, 0.95), **plain)
    for _ in range(3):
        theirs.grad = torch.randn(3, 4, generator=g).double()
        opt.update([ours], [torch.cat([theirs.grad, theirs.grad], 1)[:, :4]])  # a view
        reference.step()
        close(ours, theirs, 1e-12)


def test_groups_without_tensors_and_vectors_without_decay() -> None:
    matrix, bias, token = torch.ones(2, 2), torch.ones(2), torch.ones(1, 1, 2)
    decayed, plain = decay_groups([matrix, bias, token], 0.1, 0.05)
    assert [tensor.shape for tensor in decayed.tensors] == [(2, 2), (1, 1, 2)]
    assert [tensor.shape for tensor in plain.tensors] == [(2,)]
    assert (decayed.weight_decay, plain.weight_decay) == (0.05, 0.0)


def test_trainable_copies_are_leaves_that_share_no_memory() -> None:
    x = torch.arange(6.0).view(2, 3).T
    copy = trainable({"x": x})["x"]
    assert copy.is_leaf and copy.requires_grad and copy.is_contiguous() and torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()


def mean_of(x: torch.Tensor) -> Any:
    """The loss (x - mean of the batch)²: its gradient is 2 (x - mean)."""
    return lambda batch: (x - batch[0].mean()).square().sum()


def batches(*values: float) -> list[tuple[torch.Tensor]]:
    return [(torch.full((2,), value, dtype=torch.float64),) for value in values]


def test_epochs_are_counted_from_the_optimisers_step_and_the_last_may_be_shorter() -> None:
    """Steps without momentum, of rate 0.25, on (x - b)²: x goes half of the way to b, by hand."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = Optimiser([Group([x], 0.25, 0.0)], None, None)
    opt.wrapped.param_groups[0]["momentum"] = 0.0
    seen: list[float] = []
    steps = batches(4.0, 4.0, 4.0, 4.0, 4.0)

    def see() -> None:
        seen.append(float(x.detach()))

    epochs = train_epochs(mean_of(x), opt, steps, 2, "toy", Passes(), see)
    first = next(epochs)
    assert first == TrainRecord(number=1, loss=(16 + 4) / 2) and seen == [2.0, 3.0]
    assert [*epochs] == [TrainRecord(2, (1 + 0.25) / 2), TrainRecord(3, 0.0625)]
    assert (opt.step, len(seen)) == (5, 5)
    (more,) = train_epochs(mean_of(x), opt, batches(4.0), 2, "toy", Passes())
    assert more.number == 3  # it went on within the third epoch


def test_a_loss_that_is_not_finite_is_named_with_its_step() -> None:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = Optimiser([Group([x], 0.1, 0.0)], None, None)
    with pytest.raises(Diverged, match="toy, the 2 steps up to 2, step 2"):
        next(train_epochs(mean_of(x), opt, batches(1.0, float("nan")), 2, "toy", Passes()))
