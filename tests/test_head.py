"""The head's three modes by hand, and its moments where processes share a batch."""

import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from child_process import finish, start
from test_lora import IMAGES, THETA, VIT, tiny_vit
from torch import Tensor

import head
from bisslight import Passes
from data import rng
from head import Examples, init_head
from lora import Backbone


def test_the_loss_at_theta_P_at_theta_D_and_scoring_differ_as_documented() -> None:
    """By hand, with a BatchNorm head on mean-pooled patches: moments, drop path, statistics."""
    backbone = Backbone(tiny_vit(class_token=False, global_pool="avg", fc_norm=False))
    fresh = init_head(24, 3, rng(0)), *head.init_norm(24)
    linear, norm, stats = ({name: x.double() for name, x in part.items()} for part in fresh)
    norm["norm.weight"] += 0.3 * torch.randn(24, generator=rng(6)).double()
    targets, drop, phi = torch.tensor([0, 2, 1, 1, 0]), torch.ones(5, 3, 2), linear | norm
    drop[1, 1], drop[4, 2, 0] = 0, 2
    batch = Examples(IMAGES, targets, drop)
    loss_D = partial(head.downstream_loss, backbone, stats=stats)
    x = backbone(IMAGES, THETA).mean(1)
    x_dropped = backbone(IMAGES, THETA, drop=drop).mean(1)

    def logits(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        x = (x - mean) / (var + 1e-6).sqrt() * phi["norm.weight"] + phi["norm.bias"]
        return x @ phi["weight"].T + phi["bias"]

    def of_batch(x: Tensor) -> Tensor:
        z = logits(x, x.mean(0), x.var(0, unbiased=False))
        return -z.log_softmax(1)[range(5), targets].mean()

    torch.testing.assert_close(loss_D(THETA, phi, batch), of_batch(x))
    assert (float(stats["norm.mean"].abs().max()), float(stats["norm.var"].mean())) == (0, 1)
    at_D = loss_D(THETA, phi, batch, drop_path=True)
    torch.testing.assert_close(at_D, of_batch(x_dropped))
    assert abs(float(at_D - of_batch(x))) > 1e-3
    torch.testing.assert_close(stats["norm.mean"], 0.1 * x_dropped.mean(0))
    torch.testing.assert_close(stats["norm.var"], 0.9 + 0.1 * x_dropped.var(0))
    scored = head.logits(head.features(backbone, THETA, IMAGES), phi | stats)
    torch.testing.assert_close(scored, logits(x, stats["norm.mean"], stats["norm.var"]))


def test_processes_that_share_a_batch_have_moments_and_gradients_of_the_whole(
    tmp_path: Path,
) -> None:
    """Two processes with two and three images, a BatchNorm head, and its statistics."""
    fresh = init_head(24, 3, rng(0)) | head.init_norm(24)[0]
    phi = {name: x.double().requires_grad_() for name, x in fresh.items()}
    targets, theta = torch.tensor([0, 2, 1, 1, 0]), THETA.clone().requires_grad_()

    def found(mine: slice) -> list[Tensor]:
        stats = {name: x.double() for name, x in head.init_norm(24)[1].items()}
        loss = partial(head.downstream_loss, Backbone(VIT), stats=stats, drop_path=True)
        examples = Examples(IMAGES[mine], targets[mine])
        value, g, g_phi = Passes().gradients(loss, theta, phi, examples)
        return [value, g, *g_phi.values(), *stats.values()]

    def child(rank: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=2
        )
        torch.save(found((slice(0, 2), slice(2, 5))[rank]), tmp_path / f"{rank}.pt")
        torch.distributed.destroy_process_group()

    both = [start(partial(child, rank), tmp_path / "said") for rank in (0, 1)]
    assert [finish(process) for process in both] == [0, 0], (tmp_path / "said").read_text()
    whole = found(slice(0, 5))
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), whole)


def test_difficult_entries_do_not_count_in_the_binary_cross_entropy() -> None:
    """By hand: at z = 0 each entry that counts has log 2, and so has their mean."""
    targets = torch.tensor([[1, 0, 0, -1], [1, -1, -1, -1]])
    loss = head.cross_entropy(torch.zeros(2, 4), targets, "bce")
    torch.testing.assert_close(loss, torch.full((2,), math.log(2)))


def test_gradients_pass_through_the_moments_of_a_batch_as_in_torchs_batch_norm() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=g, dtype=torch.float64).requires_grad_()
    shapes = {"norm.weight": (3,), "norm.bias": (3,), "weight": (2, 3), "bias": (2,)}
    phi = {k: torch.randn(*x, generator=g, dtype=torch.float64) for k, x in shapes.items()}
    direction = torch.randn(5, 2, generator=g, dtype=torch.float64)
    ours = head.logits(x, phi | head.moments(x, None))
    normal = F.batch_norm(
        x, None, None, phi["norm.weight"], phi["norm.bias"], training=True, eps=head.NORM_EPS
    )
    theirs = F.linear(normal, phi["weight"], phi["bias"])
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad((z * direction).sum(), x)[0] for z in (ours, theirs)]
    torch.testing.assert_close(*gradients)
