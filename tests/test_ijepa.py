"""I-JEPA against recorded runs of the official program, from tokens to trajectory and sampler."""

import dataclasses
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import close, fixture, recorded
from torch import Tensor

import ijepa
from bisslight import Passes
from config import BACKBONES, AlignConfig, Arch
from data import rng
from ijepa import IJEPA, Batch, Masks, block_size, multiblock
from lora import Backbone, init_theta
from support.checkpoints import build_head, build_pretext_task, build_vit
from support.optim import Optimiser, Schedule, decay_groups

TINY = Arch(32, 3, 4, 64, 8, class_token=False, predictor_dim=16, predictor_depth=2)
EIGHT = Masks(min_keep=4)  # for a grid of 8 x 8
IO = recorded("ijepa/ijepa_tiny_io.npz")
IMAGES = IO["imgs"].double()
CONFIG = json.loads(fixture("ijepa/ijepa_tiny.json").read_text())["config"]


def official(name: str = "jepa_tiny.pth.tar", teacher: str = "target_encoder") -> list[Any]:
    """Encoder, teacher and predictor of a recorded file, which the official loop wrote."""
    state = torch.load(fixture(f"ijepa/{name}"), weights_only=True)
    networks = [build_vit(TINY), build_vit(TINY), build_head(TINY, "ijepa")]
    for network, key in zip(networks, ("encoder", teacher, "predictor"), strict=True):
        network.load_state_dict(ijepa.split_state(state, key)[0])
    return networks


def task() -> IJEPA:
    """Student `encoder`, teacher `target_encoder`, as in the recorded loss."""
    student, teacher, predictor = (network.double() for network in official())
    return IJEPA(Backbone(student), predictor, EIGHT, (0.9, 10), None, Backbone(teacher))


def case(t: IJEPA, name: str) -> Batch:
    """A recorded batch. The official order of its masks is: block, then image."""
    contexts, targets = IO[f"enc_idx_{name}"], IO[f"pred_idx_{name}"]
    assert (contexts == contexts[0]).all()  # in case B, there are two equal ones
    return t.prepare(IMAGES, contexts[0], targets.transpose(0, 1))


def officially(x: Tensor, contexts: int) -> Tensor:
    """(B, targets, n, dim) in the official order: target block, then context, then image."""
    return x.transpose(0, 1)[:, None].expand(-1, contexts, -1, -1, -1).flatten(0, 2)


def test_tokens_of_both_encoders_equal_the_official_ones() -> None:
    t = task()
    close(t.backbone(IMAGES), IO["encoder_full_f64"], 1e-9)
    close(t.teacher(IMAGES), IO["target_full_f64"], 1e-9)
    pooled = t.backbone.vit.forward_head(t.backbone(IMAGES), pre_logits=True)
    close(pooled, IO["encoder_full_avgpool_f64"], 1e-9)  # what the downstream head sees


@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("name", ["A", "B"])
def test_predictions_loss_and_gradients_equal_the_official_ones(
    name: str, micro: int | None
) -> None:
    """Case B has three targets. It has two contexts, too, but they are equal."""
    t = task()
    batch, contexts = case(t, name), len(IO[f"enc_idx_{name}"])
    tokens = t.backbone(IMAGES, None, batch.context)
    close(tokens.repeat(contexts, 1, 1), IO[f"context_{name}_f64"], 1e-9)
    close(officially(batch.tokens, contexts), IO[f"target_{name}_f64"], 1e-9)
    close(officially(t.predict(None, t.phi, batch), contexts), IO[f"pred_{name}_f64"], 1e-9)
    named = {f"encoder/{k}": v for k, v in t.backbone.vit.named_parameters()}
    named |= {f"predictor/{k}": v for k, v in t.phi.items()}
    expected = IO.group(f"grad_{name}")
    assert len(expected) == 9
    wanted = [named[key] for key in expected]
    loss, found = Passes(micro).value_and_gradients(partial(t.loss, None, t.phi), wanted, batch)
    close(loss, IO[f"loss_{name}_f64"], 1e-9)
    for gradient, tensor in zip(found, expected.values(), strict=True):
        close(gradient, tensor, 1e-9)


def test_every_target_is_predicted_from_the_context_alone() -> None:
    t = task()
    batch = case(t, "B")
    together = t.predict(None, t.phi, batch)
    for m in range(3):
        one = batch._replace(targets=batch.targets[:, [m]])
        close(together[:, m], t.predict(None, t.phi, one)[:, 0], 1e-12)


@pytest.mark.parametrize("micro", [None, 3])
def test_training_follows_the_recorded_trajectory(micro: int | None) -> None:
    """Six float32 steps with our schedules, decay groups and teacher; the final file."""
    vit, teacher, predictor = official("jepa_tiny_init.pth", "encoder")
    c = CONFIG["traj"]
    steps, warmup = c["epochs"] * c["ipe"] * c["ipe_scale"], c["warmup"] * c["ipe"]
    t = IJEPA(Backbone(vit), predictor, EIGHT, (c["ema"][0], steps), None, Backbone(teacher))
    named = {name: p for name, p in vit.named_parameters() if name != "pos_embed"} | t.phi
    rate = Schedule(int(steps), warmup, c["final_lr"], c["start_lr"] / c["lr"])
    decay = Schedule(int(steps), 0, c["final_wd"])
    groups = decay_groups(named.values(), c["lr"], c["wd"])
    opt = Optimiser(groups, rate, (0.9, 0.999), decay=decay)
    losses = []
    for i in range(6):
        context, targets = (IO[f"traj_{kind}_idx_{i}"].long() for kind in ("enc", "pred"))
        batch = t.prepare(IO["imgs"], context[0], targets.transpose(0, 1))
        loss, found = Passes(micro).value_and_gradients(
            partial(t.loss, None, t.phi), [*named.values()], batch
        )
        opt.update([*named.values()], found)
        t.after_step(None)
        losses.append(loss)
    close(torch.stack(losses).double(), IO["traj_loss_f32"], 1e-6)
    for network, final, tolerance in zip(
        (vit, teacher, predictor), official(), (1e-5, 1e-5, 1e-4), strict=True
    ):
        for name, tensor in final.state_dict().items():
            error = float((network.state_dict()[name] - tensor).abs().max())
            assert error <= tolerance, name
    assert int(t.state["step"]) == 6
    assert torch.equal(t.state["vit.norm.weight"], teacher.norm.weight)


@pytest.mark.parametrize("kind", ["traj", "sched"])
def test_the_schedules_are_the_official_ones(kind: str) -> None:
    c = CONFIG[kind]
    total = int(steps := c["epochs"] * c["ipe"] * c["ipe_scale"])
    rate = Schedule(total, c["warmup"] * c["ipe"], c["final_lr"], c["start_lr"] / c["lr"])
    decay = Schedule(total, 0, c["final_wd"])
    count = len(IO[f"{kind}_lr"])
    found = {
        "lr": [rate(k + 1, c["lr"]) for k in range(count)],
        "wd": [decay(k + 1, c["wd"]) for k in range(count)],
        "ema_m": [ijepa.momentum(k, c["ema"][0], steps) for k in range(count)],
    }
    for name, values in found.items():
        close(torch.tensor(values, dtype=torch.float64), IO[f"{kind}_{name}"], 1e-12)


def aligning(theta: Tensor) -> IJEPA:
    """As in align: one network under θ_P and θ_T."""
    _, vit, predictor = official()
    return IJEPA(Backbone(vit.double()), predictor.double(), EIGHT, (0.9, 4), theta)


def test_the_teacher_is_an_average_of_theta_on_the_same_network() -> None:
    """θ_T after three steps by hand; targets are ψ's under θ_T; the loss is pure."""
    theta = init_theta(3, 2, 32, rng(0, "x")).double()
    t, by_hand, now = aligning(theta), theta.clone(), theta.clone()
    theta.zero_()  # as training, which changes θ_P in place, and not θ_T
    for i in range(3):
        now = now + torch.randn(now.shape, generator=rng(i, "x"), dtype=torch.float64)
        m = 0.9 + i * 0.1 / 4
        by_hand = m * by_hand + (1 - m) * now
        t.after_step(now)
    close(t.state["theta_T"], by_hand, 1e-12)
    drawn = t.draw(len(IMAGES), rng(5, "x"))
    batch = t.prepare(IMAGES, *drawn)
    x = t.backbone(IMAGES, by_hand)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt()
    close(batch.tokens, torch.stack([a[i] for a, i in zip(x, drawn[1], strict=True)]), 1e-9)
    first = t.loss(now, t.phi, batch)
    t.after_step(now + 1)
    assert torch.equal(first, t.loss(now, t.phi, batch)) and not batch.tokens.requires_grad
    assert int(t.state["step"]) == 4


def test_the_loss_is_twice_differentiable_in_theta() -> None:
    """Hessian-vector products, in micro-batches, equal differences of gradients."""
    theta = init_theta(3, 2, 32, rng(0, "x")).double() + 0.1
    t = aligning(theta)
    batch = t.prepare(IMAGES, *t.draw(len(IMAGES), rng(1, "x")))
    d = torch.randn(theta.shape, generator=rng(2, "x")).double()
    product = Passes(2).hessian(t.loss, theta, t.phi, batch)(d)
    ends = [(theta + sign * 1e-5 * d).requires_grad_() for sign in (1, -1)]
    g = [torch.autograd.grad(t.loss(end, t.phi, batch), end)[0] for end in ends]
    close(product, (g[0] - g[1]) / 2e-5, 1e-6)


def statistics(name: str) -> dict[str, Any]:
    entries = json.loads(fixture("ijepa/collator_stats.json").read_text())
    return next(entry for entry in entries if entry["name"] == name)


@pytest.mark.parametrize("name", ["g14_b1", "g16_b128"])
def test_the_sampler_agrees_with_the_recorded_statistics(name: str) -> None:
    """Means of the context size before and after the cut, positions, coverage.

    Bounds are 5 standard errors of the difference for the two means (false alarm 6e-7 each under a
    normal law), and 5.5 for each of the at most 256 shares, 4e-8 each.
    """
    stats = statistics(name)
    grid, n = stats["grid"], stats["batch"]
    draws = {1: 2000, 128: 150}[n]
    masks = Masks(min_keep=stats["settings"]["min_keep"])
    before, after = [], []
    shares: dict[str, list[Tensor]] = {"target": [], "context": []}
    inside = torch.zeros(grid, grid, dtype=torch.bool)
    inside[:-1, :-1] = True  # the context block is always this one
    for i in range(draws):
        context, targets = multiblock(masks, grid, n, rng(i, name))
        h, w = (x.amax(-1) - x.amin(-1) + 1 for x in (targets // grid, targets % grid))
        assert h.unique().numel() == w.unique().numel() == 1  # one shape for images and targets
        seen = torch.zeros(n, grid**2, dtype=torch.bool).scatter(1, targets.flatten(1), True)
        assert not seen.gather(1, context).any()  # no overlap
        free = (inside.flatten() & ~seen).sum(1)
        before += free.tolist()
        after.append(context.shape[-1])
        assert int(free.min()) == after[-1]
        for kind, index in (("target", targets), ("context", context)):
            count = torch.bincount(index.flatten(), minlength=grid * grid)
            shares[kind].append(count / math.prod(index.shape[:-1]))
    unit = math.sqrt(1 / draws + 1 / stats["draws"])  # a batch, whose images share a shape
    for values, key in ((before, "before"), (after, "after")):
        mine = torch.tensor(values, dtype=torch.float64)
        theirs = stats[f"context_tokens_{key}_truncation"]
        assert abs(float(mine.mean()) - theirs["mean"]) < 5 * unit * theirs["std"], key
        assert 0.8 < float(mine.std()) / theirs["std"] < 1.25
    maps = recorded("ijepa/collator_stats.npz")
    for kind, found in shares.items():
        share, spread = torch.stack(found).mean(0), torch.stack(found).std(0, unbiased=False)
        difference = share - maps[f"{kind}_freq/{name}"].flatten()
        assert float((difference.abs() / (spread * unit + 1e-9)).max()) < 5.5, kind


@pytest.mark.parametrize("name", ["g14_b1", "g16_b1", "g16_b128"])
def test_block_shapes_have_the_exact_probabilities(name: str) -> None:
    stats, n = statistics(name), 50_000
    sizes = [block_size((i + 0.5) / n, (0.15, 0.2), (0.75, 1.5), stats["grid"]) for i in range(n)]
    found = {f"{h}x{w}": sizes.count((h, w)) / n for h, w in set(sizes)}
    assert found == pytest.approx(stats["target_block_hw_probability"], abs=1e-4)


def test_constraints_are_given_up_one_by_one_when_targets_cover_too_much() -> None:
    """Three of four targets are given up here. Numbers were recorded from the first edition."""
    masks = Masks(target_scale=(0.4, 0.4), aspect=(1, 1), min_keep=22)
    generator = rng(0, "x")
    context, targets = multiblock(masks, 8, 6, generator)
    assert context.shape == (6, 24)
    assert (int(context.sum()), int(targets.sum())) == (3663, 16175)
    assert int(torch.randint(1000, (1,), generator=generator)) == 616  # as many draws as there


def test_a_context_has_more_than_min_keep_patches() -> None:
    """The context block is always 7 x 7, the target 4 x 4 of them, so 33 are left.

    With min_keep 33 they are too few: after 20 attempts the target is given up.
    """
    for min_keep, seen in ((32, 33), (33, 49)):
        masks = Masks(targets=1, target_scale=(0.25, 0.25), aspect=(1, 1), min_keep=min_keep)
        context, targets = multiblock(masks, 8, 3, rng(0))
        assert (context.shape, targets.shape) == ((3, seen), (3, 1, 16))


def test_settings_that_allow_blocks_that_are_too_small_are_refused() -> None:
    fits = Masks(target_scale=(0.25, 0.25), aspect=(1, 1), min_keep=15)  # targets of 4 x 4
    ijepa.check_masks(fits, 8)
    with pytest.raises(ValueError, match=r"a target block .* 16 of them"):
        ijepa.check_masks(dataclasses.replace(fits, min_keep=16), 8)
    with pytest.raises(ValueError, match=r"a context block .* 9 of them"):  # 3 x 3
        ijepa.check_masks(dataclasses.replace(fits, context_scale=(0.2, 1.0)), 8)


def test_settings_of_the_masks_reach_the_sampler() -> None:
    """By hand on 8 x 8: 28 patches, 7 high and 4 wide, which the defaults never give.

    Of the context's 7 x 7, 21 are left: as many as min_keep, so the target is given up.
    """
    cfg = AlignConfig(
        backbone="vit_mini", dataset="own", pretext="ijepa", pool="own",
        targets=1, target_scale=(0.45, 0.45), aspect=(1.75, 1.75), min_keep=21,
    )  # fmt: skip
    head = build_head(TINY, "ijepa")
    theta = init_theta(3, 2, 32, rng(0, "x"))
    t = build_pretext_task(cfg, Backbone(build_vit(TINY)), head, 4, theta)
    context, targets = t.draw(5, rng(0))
    assert (context.shape, targets.shape) == ((5, 49), (5, 1, 28))
    rows, columns = targets // 8, targets % 8
    assert (rows.amax(-1) - rows.amin(-1) == 6).all()
    assert (columns.amax(-1) - columns.amin(-1) == 3).all()


def test_a_network_with_a_class_token_is_refused() -> None:
    _, _, predictor = official()
    with_class_token = Backbone(build_vit(TINY._replace(class_token=True)))
    theta = init_theta(3, 2, 32, rng(0, "x"))
    with pytest.raises(ValueError, match="class token"):
        IJEPA(with_class_token, predictor, EIGHT, (0.9, 4), theta)


@pytest.mark.parametrize(
    ("patch", "size", "found"),
    [
        ((8, 8), (64, 64), None),
        ((8, 8), (72, 72), 81),
        ((8, 8), (128, 32), 64),
        ((4, 16), (64, 64), 64),
        ((4, 16), (32, 128), None),
    ],
)
def test_images_on_another_grid_than_the_predictors_are_refused(
    patch: tuple[int, int], size: tuple[int, int], found: int | None
) -> None:
    """4 x 16 patches are as many as 8 x 8: no shape would tell that the blocks are torn apart."""

    def backbone(images: Tensor, theta: Tensor) -> Tensor:
        return F.avg_pool2d(images, patch).flatten(2).mT + theta  # mean colours

    own: Any = backbone
    own.patch_shape = patch
    predictor = ijepa.Predictor(3, 64, width=8, depth=1, heads=1)
    t = IJEPA(own, predictor, EIGHT, (0.9, 4), torch.zeros(3))
    drawn = t.draw(2, rng(0))
    if found is None:
        assert t.prepare(torch.rand(2, 3, *size), *drawn).tokens.shape[-1] == 3
        return
    with pytest.raises(ValueError, match=f"8 x 8 .*{size[0]} x {size[1]} .*{found}"):
        t.prepare(torch.rand(2, 3, *size), *drawn)


def test_the_official_sizes_have_the_known_numbers_of_tensors_and_parameters() -> None:
    arch = BACKBONES["vit_h14"]._replace(class_token=False)
    with torch.device("meta"):
        networks = build_vit(arch), build_head(arch, "ijepa")
    found = [[t.numel() for t in network.state_dict().values()] for network in networks]
    assert [(len(x), sum(x)) for x in found] == [(389, 630_762_240), (152, 22_377_728)]
    assert networks[1].predictor_blocks[0].attn.num_heads == 16


def test_the_sizes_of_targets_and_context_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a uniform number of its own, so over many batches they are not correlated."""
    uniforms: list[float] = []

    def spy(uniform: float, *others: Any) -> tuple[int, int]:
        uniforms.append(uniform)
        return block_size(uniform, *others)

    monkeypatch.setattr(ijepa, "block_size", spy)
    for seed in range(200):
        multiblock(EIGHT, 8, 1, rng(seed, "sizes"))
    of_targets, of_contexts = torch.tensor(uniforms).view(200, 2).T
    assert abs(float(torch.corrcoef(torch.stack([of_targets, of_contexts]))[0, 1])) < 0.2
