"""MAE against the official program's recorded numbers: tokens and predictions, not only losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Recorded, close, fixture, recorded
from replay import model_of
from torch import Tensor

import mae
from bisslight import pretrain
from config import BACKBONES, Arch, BackboneDefaults, UsageError
from lora import Backbone, logits, psi_of, sincos
from mae import MAE, Batch, Decoder
from runtime import Optimiser, constant, decay_groups, rng

TINY = Arch(
    image_size=32, patch_size=8, dim=32, depth=3, heads=4, decoder_dim=24, decoder_depth=2, decoder_heads=4
)  # fmt: skip


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded checkpoint in the official layout, and `tiny` as the name of its sizes."""
    monkeypatch.setitem(BACKBONES, "tiny", BackboneDefaults(TINY, 4, 0.0))
    return fixture("mae/mae_tiny_full.pth")


@pytest.fixture
def io() -> Recorded:
    return recorded("mae/mae_tiny_io.npz")


def task(path: Path, ratio: float = 0.75, norm_pix: bool = True, dtype: torch.dtype = torch.float64) -> MAE:
    vit, decoder, _ = mae.load(path, "tiny")
    return MAE(Backbone(vit.to(dtype)), decoder.to(dtype), ratio, norm_pix)


def test_encoder_tokens_equal_the_official_ones(official: Path, io: Recorded) -> None:
    t = task(official)
    close(t.backbone(io["imgs"].double()), io["latent_full_f64"], 1e-9)
    close(t.backbone.vit.patch_embed(io["imgs"].double()), io["patch_embed_f64"], 1e-9)
    close(mae.patchify(io["imgs"].double(), 8), io["patches_f64"], 1e-9)
    t32 = task(official, dtype=torch.float32)
    close(t32.backbone(io["imgs"]), io["latent_full_f32"], 1e-5)


@pytest.mark.parametrize("percent", [75, 60])
@pytest.mark.parametrize(("loss", "norm_pix"), [("norm", True), ("raw", False)])
def test_masking_predictions_losses_and_gradients_equal_the_official_ones(
    official: Path, io: Recorded, percent: int, loss: str, norm_pix: bool
) -> None:
    t = task(official, percent / 100, norm_pix)
    batch = Batch(io["imgs"].double(), io["noise"].double())
    keep, restore = mae.masking(batch.noise, t.mask_ratio)
    assert torch.equal(keep, io[f"ids_keep_{percent}"])
    assert torch.equal(restore, io[f"ids_restore_{percent}"])
    prediction, mask = t.predict(None, t.phi, batch)
    assert torch.equal(mask.byte(), io[f"mask_{percent}"])
    close(t.backbone(batch.images, keep=keep), io[f"latent_masked_{percent}_f64"], 1e-9)
    close(prediction, io[f"pred_{percent}_f64"], 1e-9)
    value = t.loss(None, t.phi, batch)
    close(value.detach(), io[f"loss_{percent}_{loss}_f64"], 1e-9)
    named = {**psi_of(t.backbone.vit), **t.phi}
    gradients = dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))
    expected = io.group(f"grad_{percent}_{loss}")
    assert len(expected) == 10
    for name, gradient in expected.items():
        close(gradients[name], gradient, 1e-9)


@pytest.mark.parametrize("percent", [75, 60])
def test_float32_agrees_to_float32(official: Path, io: Recorded, percent: int) -> None:
    t = task(official, percent / 100, dtype=torch.float32)
    batch = Batch(io["imgs"], io["noise"])
    close(t.predict(None, t.phi, batch)[0], io[f"pred_{percent}_f32"], 1e-5)
    close(t.loss(None, t.phi, batch).detach(), io[f"loss_{percent}_norm_f32"], 1e-6)


def test_positions_are_taken_from_the_file(official: Path, io: Recorded) -> None:
    t = task(official)
    with torch.no_grad():
        t.backbone.vit.pos_embed.copy_(io["alt_pos_embed"])
        t.decoder.decoder_pos_embed.copy_(io["alt_decoder_pos_embed"])
    batch = Batch(io["imgs"].double(), io["noise"].double())
    close(t.backbone(batch.images), io["alt_latent_full_f64"], 1e-9)
    close(t.loss(None, t.phi, batch).detach(), io["alt_loss_75_norm_f64"], 1e-9)


def test_pretraining_follows_the_official_adamw_trajectory(official: Path, io: Recorded) -> None:
    """`bisslight.pretrain` itself, with its decay groups: five steps, every loss and three final tensors."""
    t = task(official)
    named = {**psi_of(t.backbone.vit), **t.phi}
    opt = Optimiser(decay_groups(named, 1e-3, 0.05), constant, (0.9, 0.95))
    losses: list[float] = []
    batches = [Batch(io["imgs"].double(), noise.double()) for noise in io["traj_noise"]]
    psi = psi_of(t.backbone.vit)
    pretrain(psi, t.phi, t.loss, opt, iter(batches), t.after_step, lambda step, loss: losses.append(loss))
    close(torch.tensor(losses, dtype=torch.float64), io["traj_loss_f64"], 1e-9)
    for name, tensor in io.group("traj_final").items():
        close(named[name].detach(), tensor, 1e-9)


def test_the_schedule_is_the_official_one(io: Recorded) -> None:
    rate = mae.schedule(epochs=20, warmup=4, steps_per_epoch=5, min_lr=0.0)
    close(torch.tensor([rate(k + 1, 1.5e-4) for k in range(100)], dtype=torch.float64), io["sched_lr"], 1e-12)


@pytest.mark.parametrize(("dim", "side"), [(768, 14), (1024, 14), (1280, 16), (512, 14), (512, 16)])
def test_position_tables_at_real_sizes_are_the_official_ones(io: Recorded, dim: int, side: int) -> None:
    table = sincos(dim, side)[0]
    close(table[io[f"sincos_{dim}_{side}_rows"]][:, ::8], io[f"sincos_{dim}_{side}"], 1e-6)
    sums = torch.stack([table.double().sum(), table.double().square().sum()])
    close(sums, io[f"sincos_{dim}_{side}_sum_sumsq"], 1e-6)


def test_the_released_programs_mae_forward_is_reproduced() -> None:
    """Another recording, at a θ whose B is not zero: two mask ratios, both losses, the class token, the logits."""
    rec = recorded("official/mae_forward_tiny_f64.npz")
    r = model_of(rec)
    images = rec["images_i8"].double() / 32
    for percent in (75, 50):
        for name, norm_pix in (("normpix", True), ("rawpix", False)):
            t = MAE(r.backbone, r.task.decoder, percent / 100, norm_pix)
            batch = Batch(images, rec["noise"].double())
            close(t.loss(r.theta, t.phi, batch), rec[f"loss_ratio{percent}_{name}"], 1e-10)
            if norm_pix:
                prediction, mask = t.predict(r.theta, t.phi, batch)
                close(prediction, rec[f"pred_ratio{percent}_normpix"], 1e-10)
                assert torch.equal(mask.byte(), rec[f"mask_ratio{percent}_normpix"])
    close(r.backbone(images, r.theta)[:, 0], rec["cls_unmasked_via_mae"], 1e-10)
    close(r.backbone(images, r.theta)[:, 0], rec["cls_via_classifier_backbone"], 1e-10)
    close(logits(r.backbone, r.theta, r.phi_D, images), rec["logits"], 1e-10)


def test_official_and_own_checkpoints_have_one_layout(official: Path, tmp_path: Path, io: Recorded) -> None:
    """Read official, write ours: same keys in the same groups, tensors bit-equal; read back, same loss."""
    t = task(official, dtype=torch.float32)
    torch.save(t.checkpoint(TINY, "tiny"), tmp_path / "ours.pth")
    ours = torch.load(tmp_path / "ours.pth", weights_only=True)["model"]
    theirs = torch.load(official, weights_only=True)["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    again = task(tmp_path / "ours.pth", dtype=torch.float32)
    batch = Batch(io["imgs"], io["noise"])
    assert torch.equal(t.loss(None, t.phi, batch), again.loss(None, again.phi, batch))


@pytest.mark.parametrize(("name", "keys"), [("vit_b16", 254), ("vit_l16", 398), ("vit_h14", 494)])
def test_real_sizes_have_the_official_number_of_keys_and_parameters(name: str, keys: int) -> None:
    arch = BACKBONES[name].arch
    with torch.device("meta"):
        state = {**mae.build_vit(arch).state_dict(), **Decoder(arch).state_dict()}
    assert len(state) == keys
    total = {"vit_b16": 111_907_840, "vit_l16": 329_541_888, "vit_h14": 657_074_508}[name]
    assert sum(tensor.numel() for tensor in state.values()) == total


def hugging_face(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"vit.embeddings.{key}" if key == "cls_token" else key: value for key, value in model.items()}


WRONG: list[tuple[Any, str]] = [
    (lambda m: {"model": {k: v for k, v in m.items() if not mae.is_decoder(k)}}, "holds the encoder only"),
    (lambda m: {"model": hugging_face(m)}, "Hugging Face names"),
    (lambda m: {"encoder": m, "predictor": {}, "target_encoder": m}, "I-JEPA checkpoint"),
    (
        lambda m: {"model": {"base_model.model.blocks.0.attn.qkv.q.lora_A.default.weight": m["cls_token"]}},
        "LoRA adapter",
    ),
    (lambda m: {"model": {}}, "no {'model': ...} state dict"),
    (lambda m: [1, 2], "no {'model': ...} state dict"),
    (lambda m: {"model": {k: v for k, v in m.items() if k != "mask_token"}}, r"1 keys missing \['mask_token'\]"),
    (lambda m: {"model": m | {"head.weight": m["cls_token"]}}, r"unexpected \['head.weight'\]"),
    (lambda m: {"model": m | {"norm.weight": torch.zeros(7)}}, r"norm.weight is \(7,\), not \(32,\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_file_of_another_family_is_explained(official: Path, tmp_path: Path, change: Any, message: str) -> None:
    model = torch.load(official, weights_only=True)["model"]
    torch.save(change(model), tmp_path / "wrong.pth")
    with pytest.raises(UsageError, match=message):
        mae.load(tmp_path / "wrong.pth", "tiny")


def test_a_visualize_file_is_recognised_by_its_name(official: Path, tmp_path: Path) -> None:
    """Its keys are those of the right file; only the target of its decoder differs."""
    path = tmp_path / "mae_visualize_vit_base.pth"
    path.write_bytes(official.read_bytes())
    with pytest.raises(UsageError, match="predicts raw pixels"):
        mae.load(path, "tiny")


def test_the_size_that_a_file_is_for_is_named(official: Path) -> None:
    with pytest.raises(UsageError, match="fit --backbone tiny"):
        mae.load(official, "vit_mini")


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, official: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model": Payload()}, tmp_path / "evil.pth")
    with pytest.raises(UsageError, match="not a checkpoint that loads safely"):
        mae.load(tmp_path / "evil.pth", "tiny")
    assert not (tmp_path / "ran").exists()


def test_a_training_checkpoint_with_argparse_settings_loads(tmp_path: Path, official: Path) -> None:
    """The official repository stores its settings as argparse.Namespace, which plain weights_only loading refuses."""
    from argparse import Namespace

    data = torch.load(official, weights_only=True)
    torch.save(data | {"args": Namespace(lr=1.0), "epoch": 3}, tmp_path / "training.pth")
    assert mae.load(tmp_path / "training.pth", "tiny")[2] == TINY


def test_initialisation_is_seeded_and_leaves_no_zero_matrix() -> None:
    vit, decoder = mae.init(TINY, rng(0))
    again, _ = mae.init(TINY, rng(0))
    assert all(torch.equal(a, b) for a, b in zip(vit.state_dict().values(), again.state_dict().values(), strict=True))
    for name, tensor in {**psi_of(vit), **dict(decoder.named_parameters())}.items():
        assert tensor.ndim < 2 or bool(tensor.any()), name


def test_reconstruction_keeps_what_was_seen(official: Path, io: Recorded) -> None:
    t = task(official)
    batch = Batch(io["imgs"].double(), io["noise"].double())
    masked, filled = mae.reconstruct(t, None, t.phi, batch)
    seen = mae.unpatchify((1 - io["mask_75"].double())[..., None].expand(-1, -1, 192), 8).bool()
    assert torch.equal(filled[seen], batch.images[seen])
    assert not masked[~seen].any()
    assert not torch.isclose(filled[~seen], batch.images[~seen]).all()


def test_unpatchify_inverts_patchify() -> None:
    images = torch.randn(2, 3, 12, 12, generator=rng(0))
    assert torch.equal(mae.unpatchify(mae.patchify(images, 4), 4), images)


def test_a_mask_ratio_that_leaves_nothing_is_refused(official: Path) -> None:
    with pytest.raises(UsageError, match="leaves none or all of the 16 patches visible"):
        task(official, 0.99)


def test_a_decoder_for_raw_pixels_is_recognised_by_what_it_predicts() -> None:
    """Nearly constant images of value 3: a decoder that answers 3 is right on raw pixels only."""
    vit, decoder = mae.init(TINY, rng(0))
    images = 3 + 0.1 * torch.randn(4, 3, 32, 32, generator=rng(1))
    t = MAE(Backbone(vit), decoder)
    batch = t.prepare(images, rng(2))
    t.check(batch)  # a random decoder passes
    t.check(batch._replace(images=0.1 * (images - 3)))  # on images of little contrast, too
    with torch.no_grad():
        decoder.decoder_pred.weight.zero_()
        t.check(batch)  # so does one that predicts zero
        decoder.decoder_pred.bias.fill_(3)
    with pytest.raises(UsageError, match="trained on raw ones"):
        t.check(batch)
