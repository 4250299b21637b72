"""I-JEPA against recorded runs of the official program: tokens, predictions, losses, gradients, trajectory, sampler."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Recorded, close, fixture, recorded
from torch import Tensor

import ijepa
from bisslight import pretrain
from config import BACKBONES, Arch, BackboneDefaults, Masks, UsageError
from ijepa import IJEPA, Predictor, block_size, decay_schedule, load, momentum, multiblock, schedule
from lora import Backbone, build_vit, init_theta, psi_of
from runtime import Optimiser, decay_groups, rng

TINY = Arch(
    image_size=64, patch_size=8, dim=32, depth=3, heads=4, class_token=False, predictor_dim=16, predictor_depth=2
)
OFFICIAL = Masks()
EIGHT = Masks(min_keep=4)  # for a grid of 8 x 8


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded checkpoint, which the official training loop wrote; its sizes get a name."""
    monkeypatch.setitem(BACKBONES, "tiny", BackboneDefaults(TINY, 4, 0.0))
    return fixture("ijepa/jepa_tiny.pth.tar")


@pytest.fixture
def io() -> Recorded:
    return recorded("ijepa/ijepa_tiny_io.npz")


def task_of(path: Path, dtype: torch.dtype = torch.float64, masks: Masks = EIGHT) -> IJEPA:
    """Student `encoder`, teacher `target_encoder`, as in the recorded loss."""
    vit, predictor, _ = load(path, "tiny", "encoder")
    teacher, _, _ = load(path, "tiny", "target_encoder")
    made = (Backbone(network.to(dtype)) for network in (vit, teacher))
    student, follower = made
    return IJEPA(student, predictor.to(dtype), masks, (0.9, 10), None, follower)


# --- the recorded forward passes -------------------------------------------------------------------------------------


def test_tokens_of_both_encoders_equal_the_official_ones(tiny: Path, io: Recorded) -> None:
    t, images = task_of(tiny), io["imgs"].double()
    close(t.backbone.vit.patch_embed(images), io["patch_embed_f64"], 1e-9)
    close(t.backbone(images), io["encoder_full_f64"], 1e-9)
    close(t.teacher(images), io["target_full_f64"], 1e-9)
    pooled = t.backbone.vit.forward_head(t.backbone(images), pre_logits=True)
    close(pooled, io["encoder_full_avgpool_f64"], 1e-9)  # what the downstream head sees


@pytest.mark.parametrize("case", ["A", "B"])
def test_predictions_loss_and_gradients_equal_the_official_ones(tiny: Path, io: Recorded, case: str) -> None:
    """Case B has two contexts and three targets, which pins the order of the first axis."""
    t = task_of(tiny)
    batch = t.batch(io["imgs"].double(), io[f"enc_idx_{case}"], io[f"pred_idx_{case}"])
    close(t.encode(None, batch), io[f"context_{case}_f64"], 1e-9)
    close(batch.wanted, io[f"target_{case}_f64"], 1e-9)
    close(t.predict(None, t.phi, batch), io[f"pred_{case}_f64"], 1e-9)
    loss = t.loss(None, t.phi, batch)
    close(loss, io[f"loss_{case}_f64"], 1e-9)
    named = {f"encoder/{k}": v for k, v in t.backbone.vit.named_parameters()} | {
        f"predictor/{k}": v for k, v in t.phi.items()
    }
    expected = io.group(f"grad_{case}")
    assert len(expected) == 9
    found = torch.autograd.grad(loss, [named[name] for name in expected])
    for gradient, tensor in zip(found, expected.values(), strict=True):
        close(gradient, tensor, 1e-9)


@pytest.mark.parametrize("case", ["A", "B"])
def test_float32_agrees_to_float32(tiny: Path, io: Recorded, case: str) -> None:
    t = task_of(tiny, torch.float32)
    batch = t.batch(io["imgs"], io[f"enc_idx_{case}"], io[f"pred_idx_{case}"])
    close(t.encode(None, batch), io[f"context_{case}_f32"], 1e-5)
    close(t.predict(None, t.phi, batch), io[f"pred_{case}_f32"], 1e-5)
    close(t.loss(None, t.phi, batch), io[f"loss_{case}_f32"], 1e-5)


def test_training_follows_the_recorded_trajectory(tiny: Path, io: Recorded) -> None:
    """Six float32 steps by `bisslight.pretrain` with its schedules, decay groups and teacher; the final file."""
    start = torch.load(fixture("ijepa/jepa_tiny_init.pth"), weights_only=True)
    final = torch.load(tiny, weights_only=True)

    def strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.removeprefix("module."): v.clone() for k, v in state.items()}

    vit, predictor = build_vit(TINY), Predictor(TINY)
    vit.load_state_dict(strip(start["encoder"]))
    predictor.load_state_dict(strip(start["predictor"]))
    cfg = json.loads(fixture("ijepa/ijepa_tiny.json").read_text())["config"]["traj"]
    steps = cfg["epochs"] * cfg["ipe"] * cfg["ipe_scale"]
    teacher = Backbone(copy.deepcopy(vit)).requires_grad_(False)
    t = IJEPA(Backbone(vit), predictor, Masks(min_keep=4), (cfg["ema"][0], steps), None, teacher)
    psi = psi_of(vit)
    total, warmup = int(steps), cfg["warmup"] * cfg["ipe"]
    rate = schedule(total, warmup, cfg["start_lr"] / cfg["lr"], cfg["final_lr"])
    decay = decay_schedule(total, cfg["wd"], cfg["final_wd"])
    opt = Optimiser(decay_groups(psi | t.phi, cfg["lr"], cfg["wd"]), rate, (0.9, 0.999), decay=decay)
    seen: dict[str, list[float]] = {"loss": [], "lr": [], "wd": [], "m": []}

    def report(step: int, loss: float) -> None:
        group = opt.torch.param_groups[0]
        for name, value in (("loss", loss), ("lr", group["lr"]), ("wd", group["weight_decay"])):
            seen[name].append(value)
        seen["m"].append(momentum(step - 1, *t.ema))

    batches = (t.batch(io["imgs"], io[f"traj_enc_idx_{i}"].long(), io[f"traj_pred_idx_{i}"].long()) for i in range(6))
    pretrain(psi, t.phi, t.loss, opt, batches, t.after_step, report)
    for name, recorded_name, tolerance in (
        ("loss", "traj_loss_f32", 1e-6), ("lr", "traj_lr", 1e-12), ("wd", "traj_wd", 1e-12), ("m", "traj_ema_m", 1e-12)
    ):  # fmt: skip
        close(torch.tensor(seen[name], dtype=torch.float64), io[recorded_name], tolerance)
    for network, key, tolerance in (
        (vit, "encoder", 1e-5),
        (teacher.vit, "target_encoder", 1e-5),
        (predictor, "predictor", 1e-4),
    ):
        for name, tensor in strip(final[key]).items():
            assert float((network.state_dict()[name] - tensor).abs().max()) <= tolerance, name


def test_the_schedules_are_the_official_ones(io: Recorded) -> None:
    cfg = json.loads(fixture("ijepa/ijepa_tiny.json").read_text())["config"]["sched"]
    total = int(cfg["epochs"] * cfg["ipe"] * cfg["ipe_scale"])
    rate = schedule(total, cfg["warmup"] * cfg["ipe"], cfg["start_lr"] / cfg["lr"], cfg["final_lr"])
    decay = decay_schedule(total, cfg["wd"], cfg["final_wd"])
    steps = range(1, total + 1)
    close(torch.tensor([rate(k, cfg["lr"]) for k in steps], dtype=torch.float64), io["sched_lr"], 1e-12)
    close(torch.tensor([decay(k, cfg["wd"]) for k in steps], dtype=torch.float64), io["sched_wd"], 1e-12)
    close(
        torch.tensor([momentum(i, cfg["ema"][0], total) for i in range(total)], dtype=torch.float64),
        io["sched_ema_m"],
        1e-12,
    )
    assert decay(3, 0.0) == 0


# --- in align: one network, three thetas -----------------------------------------------------------------------------


def test_the_teacher_is_an_average_of_theta_on_the_same_network(tiny: Path, io: Recorded) -> None:
    """θ_T after three steps equals the sum by hand; the targets are ψ's under θ_T; loss is pure in its arguments."""
    vit, predictor, _ = load(tiny, "tiny", "target_encoder")
    backbone = Backbone(vit.double())
    theta = init_theta(3, 2, 32, rng(0, "x")).double()
    t = IJEPA(backbone, predictor.double(), Masks(min_keep=4), (0.9, 4), theta)
    by_hand, now = theta.clone(), theta.clone()
    for i in range(3):
        now = now + torch.randn(now.shape, generator=rng(i, "y"), dtype=torch.float64)
        m = 0.9 + i * 0.1 / 4
        by_hand = m * by_hand + (1 - m) * now
        t.after_step(now)
    assert t.theta_T is not None
    close(t.theta_T, by_hand, 1e-12)
    images = io["imgs"].double()
    batch = t.prepare(images, rng(0, "mask"))
    tokens = backbone(images, by_hand)
    tokens = (tokens - tokens.mean(-1, keepdim=True)) / (tokens.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    close(batch.wanted[: len(images)], torch.stack([x[i] for x, i in zip(tokens, batch.targets[0], strict=True)]), 1e-9)
    first = t.loss(now, t.phi, batch)
    t.after_step(now + 1)
    assert torch.equal(first, t.loss(now, t.phi, batch))
    assert not batch.wanted.requires_grad
    other = IJEPA(backbone, predictor, Masks(min_keep=4), (0.9, 4), theta)
    other.load_state_dict(t.state_dict())
    assert torch.equal(other.prepare(images, rng(1, "mask")).wanted, t.prepare(images, rng(1, "mask")).wanted)
    assert other.steps == 4


# --- the mask sampler ------------------------------------------------------------------------------------------------


def statistics() -> list[dict[str, Any]]:
    return json.loads(fixture("ijepa/collator_stats.json").read_text())


@pytest.mark.parametrize("name", ["g14_b1", "g14_b32", "g16_b1", "g16_b32", "g16_b128"])
def test_the_sampler_agrees_with_the_recorded_statistics(name: str) -> None:
    """Means of the context size before and after the cut, shapes, positions, coverage.

    Bounds are 5 standard errors of the difference for the two means (false alarm 6e-7 each under a normal law), and 5.5
    for each of the at most 9 + 256 shares of a setting, 4e-8 each: over all settings below 2e-4.
    """
    stats = {entry["name"]: entry for entry in statistics()}[name]
    grid, batch = stats["grid"], stats["batch"]
    draws = {1: 2000, 32: 600, 128: 150}[batch]
    masks = Masks.model_validate({"min_keep": stats["settings"]["min_keep"]})
    sizes, cut, shapes = [], [], dict.fromkeys(stats["target_block_hw_probability"], 0)
    freq = {"target": torch.zeros(grid * grid), "context": torch.zeros(grid * grid)}
    spread = {"target": torch.zeros(grid * grid), "context": torch.zeros(grid * grid)}
    for i in range(draws):
        g = rng(i, name)
        context, targets = multiblock(masks, grid, batch, g)
        assert (context.diff(dim=-1) > 0).all()
        assert (targets.diff(dim=-1) > 0).all()
        rows, columns = targets // grid, targets % grid
        h, w = (x.amax(-1) - x.amin(-1) + 1 for x in (rows, columns))
        assert h.unique().numel() == w.unique().numel() == 1  # one shape for all images and targets
        shapes[f"{int(h[0, 0])}x{int(w[0, 0])}"] += 1
        assert int(rows.max()) < grid - 1 and int(columns.max()) < grid - 1
        seen = torch.zeros(batch, grid * grid, dtype=torch.bool).scatter(1, targets.transpose(0, 1).flatten(1), True)
        assert not seen.gather(1, context[0]).any()  # no overlap
        inside = torch.zeros(grid, grid, dtype=torch.bool)
        side = {14: 13, 16: 15}[grid]
        inside[:side, :side] = True  # the context block is always this one
        before = (inside.flatten() & ~seen).sum(1)
        sizes += before.tolist()
        cut.append(context.shape[-1])
        assert int(before.min()) == context.shape[-1]
        for kind, index in (("target", targets), ("context", context)):
            share = torch.bincount(index.flatten(), minlength=grid * grid) / (index.shape[0] * index.shape[1])
            freq[kind] += share
            spread[kind] += share**2
    for values, key in ((sizes, "context_tokens_before_truncation"), (cut, "context_tokens_after_truncation")):
        mine, theirs = torch.tensor(values, dtype=torch.float64), stats[key]
        clusters = (draws, stats["draws"])  # images of a batch share a shape: the batch is the unit
        error = math.sqrt(sum(theirs["std"] ** 2 / n for n in clusters))
        assert abs(float(mine.mean()) - theirs["mean"]) < 5 * error, key
        assert 0.8 < float(mine.std()) / theirs["std"] < 1.25
    for shape, p in stats["target_block_hw_probability"].items():
        assert abs(shapes[shape] / draws - p) < 5.5 * math.sqrt(p * (1 - p) / draws), shape
    maps = recorded("ijepa/collator_stats.npz")
    for kind in ("target", "context"):
        mine, variance = freq[kind] / draws, spread[kind] / draws - (freq[kind] / draws) ** 2
        error = (variance * (1 / draws + 1 / stats["draws"])).sqrt() + 1e-9
        assert float(((mine - maps[f"{kind}_freq/{name}"].flatten()).abs() / error).max()) < 5.5, kind


def test_block_shapes_have_the_exact_probabilities() -> None:
    stats = {entry["name"]: entry for entry in statistics()}["g16_b1"]
    n = 200_000
    found: dict[str, int] = {}
    for i in range(n):
        h, w = block_size((i + 0.5) / n, OFFICIAL.target_scale, OFFICIAL.aspect, 16)
        found[f"{h}x{w}"] = found.get(f"{h}x{w}", 0) + 1
    assert found.keys() == stats["target_block_hw_probability"].keys()
    for shape, p in stats["target_block_hw_probability"].items():
        assert found[shape] / n == pytest.approx(p, abs=1e-4)


def test_masks_are_a_function_of_the_generator_and_overlap_can_be_allowed() -> None:
    a, b = (multiblock(OFFICIAL, 16, 8, rng(3, "x")) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    free = Masks(overlap=True, contexts=2, targets=3, context_scale=(0.5, 0.8), target_scale=(0.2, 0.35), min_keep=3)
    context, targets = multiblock(free, 8, 4, rng(0, "x"))
    assert context.shape[:2] == (2, 4)
    assert targets.shape[:2] == (3, 4)
    seen = torch.zeros(4, 64, dtype=torch.bool).scatter(1, targets.transpose(0, 1).flatten(1), True)
    assert seen.gather(1, context.transpose(0, 1).flatten(1)).any()


def test_constraints_are_given_up_one_by_one_when_targets_cover_everything() -> None:
    """Targets as large as the context block, sixteen of them: hardly anything is left; the sampler still ends."""
    masks = Masks(targets=16, target_scale=(0.7, 0.7), aspect=(1, 1), min_keep=30)
    context, _ = multiblock(masks, 8, 16, rng(0, "x"))
    assert context.shape[-1] > 30


@pytest.mark.parametrize(
    ("masks", "grid", "message"),
    [
        (Masks(), 4, "a target block on a grid of 4 x 4 patches can have 1 of them, more than --min-keep 10"),
        (Masks(), 8, "a target block on a grid of 8 x 8 patches can have 9"),
        (Masks(min_keep=50, target_scale=(0.9, 1), context_scale=(0.5, 0.5), aspect=(1, 1)), 8, "a target block"),
        (Masks(min_keep=40, target_scale=(0.75, 0.8), context_scale=(0.3, 0.3), aspect=(1, 1)), 8, "a context block"),
        (Masks(), 1, "a target block"),
    ],
)
def test_settings_that_could_never_be_met_are_refused(masks: Masks, grid: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ijepa.check_masks(masks, grid)


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_base_can_be_chosen(tiny: Path, io: Recorded) -> None:
    images = io["imgs"].double()
    for base, name in (("encoder", "encoder_full_f64"), ("target_encoder", "target_full_f64")):
        close(Backbone(load(tiny, "tiny", base)[0].double())(images), io[name], 1e-9)


WRONG: list[tuple[Any, str]] = [
    (lambda d: {"model": d["encoder"]}, "looks like an MAE checkpoint, leave --pretext ijepa out"),
    (lambda d: {k: v for k, v in d.items() if k != "predictor"}, "holds an encoder only"),
    (lambda d: d["encoder"], "holds no target_encoder and predictor"),
    (lambda d: {k.removeprefix("module."): v for k, v in d["encoder"].items()}, "holds an encoder only"),
    (lambda d: {"embeddings.patch_embeddings.projection.weight": torch.zeros(1)}, "Hugging Face names"),
    (lambda d: {k: v for k, v in d.items() if k != "target_encoder"}, "holds no target_encoder"),
    (lambda d: d | {"predictor": {}}, r"its predictor is not that of I-JEPA's tiny: \d+ keys missing"),
    (lambda d: d | {"predictor": [1]}, "its predictor is no state dict"),
    (lambda d: d | {"target_encoder": d["predictor"]}, "its encoder is not that of I-JEPA's tiny"),
    (lambda d: [1], "holds no target_encoder and predictor"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_file_of_another_kind_is_explained(tiny: Path, tmp_path: Path, change: Any, message: str) -> None:
    torch.save(change(torch.load(tiny, weights_only=True)), tmp_path / "x.pth")
    with pytest.raises(UsageError, match=message):
        load(tmp_path / "x.pth", "tiny", "target_encoder")


def test_an_mae_file_and_an_ijepa_file_point_to_each_other(tiny: Path) -> None:
    from mae import load as load_mae

    with pytest.raises(UsageError, match="is an I-JEPA checkpoint, give --pretext ijepa"):
        load_mae(tiny, "tiny")


def huge(device: str) -> dict[str, dict[str, Tensor]]:
    """The official ViT-H/14 layout, names with their prefix."""
    arch = BACKBONES["vit_h14"].arch.model_copy(update={"class_token": False})
    with torch.device(device):
        networks = {"encoder": build_vit(arch), "predictor": Predictor(arch), "target_encoder": build_vit(arch)}
    return {name: {f"module.{k}": v.detach() for k, v in net.state_dict().items()} for name, net in networks.items()}


def test_the_official_sizes_have_the_known_numbers_of_tensors_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    data = huge("meta")
    assert [len(data[name]) for name in ("encoder", "predictor")] == [389, 152]
    assert sum(t.numel() for t in data["encoder"].values()) == 630_762_240
    assert sum(t.numel() for t in data["predictor"].values()) == 22_377_728
    monkeypatch.setattr(ijepa, "load_tensors", lambda path: data)
    vit, predictor, arch = load(Path("x"), "vit_h14", "target_encoder")
    assert (arch.patches, vit.blocks[0].attn.num_heads, predictor.predictor_blocks[0].attn.num_heads) == (256, 16, 16)
    data["predictor"]["module.mask_token"] = torch.zeros(1, 1, 5)
    with pytest.raises(UsageError, match=r"mask_token is \(1, 1, 5\), not \(1, 1, 384\)"):
        load(Path("x"), "vit_h14", "target_encoder")


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    return sum(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Anonymous")
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell anonymous memory")
def test_a_full_size_file_is_read_without_copying_it(tmp_path: Path) -> None:
    """5 GB of encoder, target encoder and predictor; what loading adds is far below one encoder (2.5 GB)."""
    data = {name: {k: torch.randn(v.shape) for k, v in state.items()} for name, state in huge("meta").items()}
    torch.save(data | {"opt": {}, "scaler": None, "epoch": 300}, tmp_path / "x.pth.tar")
    encoder = sum(t.numel() * 4 for t in data["encoder"].values())
    expected = data["target_encoder"]["module.blocks.31.mlp.fc2.weight"][:2, :2].clone()
    del data
    before = anonymous()
    vit, _, _ = load(tmp_path / "x.pth.tar", "vit_h14", "target_encoder")
    with torch.no_grad():
        tokens = Backbone(vit)(torch.zeros(1, 3, 224, 224))
    assert torch.equal(vit.blocks[31].mlp.fc2.weight[:2, :2], expected)
    assert tokens.shape == (1, 256, 1280)
    rise = anonymous() - before
    print(f"anonymous memory rose by {rise / 1e6:.0f} MB, the encoder has {encoder / 1e6:.0f} MB")
    assert rise < 1.2 * encoder


def test_own_checkpoints_have_the_official_layout(tmp_path: Path) -> None:
    arch = BACKBONES["vit_mini"].arch.model_copy(update={"class_token": False, "patch_size": 2})
    vit, predictor = ijepa.init(arch, rng(0, "x"))
    teacher = Backbone(copy.deepcopy(vit))
    t = IJEPA(Backbone(vit), predictor, Masks(min_keep=4), (0.996, 10), None, teacher)
    torch.save(t.checkpoint(arch, "vit_mini"), tmp_path / "x.pth")
    with torch.no_grad():
        for p in teacher.vit.parameters():
            p.add_(1)
    back, head, found = load(tmp_path / "x.pth", "vit_mini", "encoder")
    assert found == arch
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), vit.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), predictor.parameters(), strict=True))
    with pytest.raises(UsageError, match="has patches of 2, leave the option out"):
        load(tmp_path / "x.pth", "vit_mini", "encoder", patch_size=4)


def test_initialisation_is_seeded_and_scales_with_depth() -> None:
    a, b = (ijepa.init(TINY, rng(0, "x")) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True))
    first, last = (a[0].blocks[i].mlp.fc2.weight.detach().std() for i in (0, 2))
    assert float(first / last) == pytest.approx(math.sqrt(3), rel=0.1)


def test_the_batch_size_belongs_to_the_task() -> None:
    """A larger batch is cut to a shorter context, which is why masks are drawn for the whole of it."""
    lengths = [sum(multiblock(OFFICIAL, 16, n, rng(i, "x"))[0].shape[-1] for i in range(50)) / 50 for n in (1, 16, 256)]
    assert lengths[0] > lengths[1] + 15 > lengths[2] + 20
