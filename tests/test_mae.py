"""MAE against the official program's recorded numbers: tokens and predictions, not only losses."""

from functools import partial

import pytest
import torch
from conftest import close, fixture, recorded
from torch import Tensor

import ijepa
import mae
from bisslight import Passes
from config import BACKBONES, Arch
from lora import Backbone
from mae import MAE, Batch
from support.checkpoints import build_head, build_vit
from support.optim import Optimiser, decay_groups

TINY = Arch(32, 3, 4, 32, 8, decoder_dim=24, decoder_depth=2, decoder_heads=4)
IO = recorded("mae/mae_tiny_io.npz")
IMAGES, NOISE = IO["imgs"].double(), IO["noise"].double()
BATCH = Batch(IMAGES, NOISE)


def official(ratio: float = 0.75, norm_pix: bool = True) -> MAE:
    """The recorded checkpoint, which has the official layout."""
    state = torch.load(fixture("mae/mae_tiny_full.pth"), weights_only=True)
    networks = build_vit(TINY), build_head(TINY, "mae")
    for network, part in zip(networks, mae.split_state(state["model"]), strict=True):
        network.load_state_dict(part)
    vit, decoder = (network.double() for network in networks)
    return MAE(Backbone(vit), decoder, ratio, norm_pix)


def trained(t: MAE) -> dict[str, Tensor]:
    """ψ and φ_P by name; positions are fixed."""
    vit = dict(t.backbone.vit.named_parameters())
    return {name: p for name, p in vit.items() if name != "pos_embed"} | t.phi


def test_encoder_tokens_and_patches_equal_the_official_ones() -> None:
    close(official().backbone(IMAGES), IO["latent_full_f64"], 1e-9)
    close(mae.patchify(IMAGES, 8), IO["patches_f64"], 1e-9)


@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("percent", [75, 60])
@pytest.mark.parametrize(("loss", "norm_pix"), [("norm", True), ("raw", False)])
def test_masks_predictions_losses_and_gradients_equal_the_official_ones(
    percent: int, loss: str, norm_pix: bool, micro: int | None
) -> None:
    t = official(percent / 100, norm_pix)
    keep, restore = mae.masking(NOISE, t.mask_ratio)
    assert torch.equal(keep, IO[f"ids_keep_{percent}"])
    assert torch.equal(restore, IO[f"ids_restore_{percent}"])
    prediction, mask = t.predict(None, t.phi, BATCH)
    assert torch.equal(mask.byte(), IO[f"mask_{percent}"])
    close(t.backbone(IMAGES, keep=keep), IO[f"latent_masked_{percent}_f64"], 1e-9)
    close(prediction, IO[f"pred_{percent}_f64"], 1e-9)
    named = trained(t)
    value, found = Passes(micro).value_and_gradients(
        partial(t.loss, None, t.phi), [*named.values()], BATCH
    )
    close(value, IO[f"loss_{percent}_{loss}_f64"], 1e-9)
    gradients, expected = dict(zip(named, found, strict=True)), IO.group(f"grad_{percent}_{loss}")
    assert len(expected) == 10
    for name, gradient in expected.items():
        close(gradients[name], gradient, 1e-9)


def test_positions_are_taken_from_the_file() -> None:
    t = official()
    with torch.no_grad():
        t.backbone.vit.pos_embed.copy_(IO["alt_pos_embed"])
        t.decoder.decoder_pos_embed.copy_(IO["alt_decoder_pos_embed"])
    close(t.backbone(IMAGES), IO["alt_latent_full_f64"], 1e-9)
    close(t.loss(None, t.phi, BATCH), IO["alt_loss_75_norm_f64"], 1e-9)


@pytest.mark.parametrize("micro", [None, 1])
def test_pretraining_follows_the_official_adamw_trajectory(micro: int | None) -> None:
    """Five steps with our optimiser and decay groups: every loss and three final tensors."""
    t = official()
    named = trained(t)
    opt = Optimiser(decay_groups(named.values(), 1e-3, 0.05), None, (0.9, 0.95))
    losses = []
    for noise in IO["traj_noise"].double():
        batch = Batch(IMAGES, noise)
        loss, found = Passes(micro).value_and_gradients(
            partial(t.loss, None, t.phi), [*named.values()], batch
        )
        opt.update([*named.values()], found)
        losses.append(loss)
    close(torch.stack(losses), IO["traj_loss_f64"], 1e-9)
    for name, tensor in IO.group("traj_final").items():
        close(named[name], tensor, 1e-9)


@pytest.mark.parametrize("size", [(768, 14), (1024, 14), (1280, 16), (512, 14), (512, 16)])
def test_position_tables_at_real_sizes_are_the_official_ones(size: tuple[int, int]) -> None:
    width, side = size
    name, table = f"sincos_{width}_{side}", mae.positions(width, side**2)[0]
    close(table[IO[f"{name}_rows"]][:, ::8], IO[name], 1e-6)
    sums = torch.stack([table.double().sum(), table.double().square().sum()])
    close(sums, IO[f"{name}_sum_sumsq"], 1e-6)
    assert torch.equal(ijepa.positions(width, side**2)[0], table[1:])


@pytest.mark.parametrize("sizes", [{"width": 10, "patches": 16}, {"width": 8, "patches": 15}])
def test_a_head_that_can_have_no_table_of_positions_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positions"):
        mae.Decoder(dim=8, patch_size=2, depth=1, heads=1, **sizes)
    with pytest.raises(ValueError, match="positions"):
        ijepa.Predictor(dim=8, depth=1, heads=1, **sizes)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"prefix": 0, "patch_size": 8}, "1 tokens before .* 0"),
        ({"prefix": 1, "patch_size": 4}, r"patches of \(8, 8\) pixels, .* \(4, 4\)"),
    ],
)
def test_a_decoder_for_other_tokens_than_the_backbones_is_refused(
    sizes: dict[str, int], named: str
) -> None:
    """A class token would be taken for a patch, a patch for a part of it: no shape would tell."""
    decoder = mae.Decoder(32, 16, width=8, depth=1, heads=1, **sizes)
    with pytest.raises(ValueError, match=named):
        MAE(official().backbone, decoder)


@pytest.mark.parametrize("size", [(16, 64), (64, 16), (40, 40), (24, 24), (33, 32), (32, 39)])
def test_images_on_another_grid_than_the_decoders_are_refused(size: tuple[int, int]) -> None:
    """2 x 8 patches are as many as 4 x 4, but lie elsewhere."""
    t = official()
    with pytest.raises(ValueError, match=f"32 x 32 pixels, .* have {size[0]} x {size[1]}"):
        t.loss(None, t.phi, Batch(torch.rand(2, 3, *size), NOISE[:2]))


SIZES = [  # keys and parameters of the official files
    ("vit_b16", 254, 111_907_840), ("vit_l16", 398, 329_541_888), ("vit_h14", 494, 657_074_508)
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "parameters"), SIZES)
def test_real_sizes_have_the_official_keys(name: str, keys: int, parameters: int) -> None:
    arch = BACKBONES[name]
    with torch.device("meta"):
        state = {**build_vit(arch).state_dict(), **build_head(arch, "mae").state_dict()}
    assert (len(state), sum(tensor.numel() for tensor in state.values())) == (keys, parameters)
    assert [len(part) for part in mae.split_state(state)] == [keys - 104, 104]


@pytest.mark.parametrize("ratio", [0.0, 0.99])
def test_a_mask_ratio_that_leaves_none_or_all_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="leaves none or all of the patches"):
        official(ratio)


@pytest.mark.parametrize(
    ("patches", "ratio", "kept"), [(16, 0.7, 4), (196, 0.9, 19), (64, 0.6, 25)]
)
def test_the_number_of_visible_patches_is_rounded_down(
    patches: int, ratio: float, kept: int
) -> None:
    """As in the official program: int(patches · (1 − ratio))."""
    keep, _ = mae.masking(torch.rand(1, patches), ratio)
    assert keep.shape == (1, kept)
