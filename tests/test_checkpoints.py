"""Official files, adapters of this edition and of the one before, and the released layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fixture, recorded
from replay import recording, to_theta
from safetensors.torch import save_file
from toy import refusal

import cli
from config import BACKBONES, AlignConfig
from data import rng
from lora import init_head, init_norm, init_theta
from support.checkpoints import (
    OFFICIAL_FILES,
    AdapterInfo,
    Official,
    build_head,
    build_vit,
    channels_of,
    load_adapter,
    load_backbone,
    load_theta,
    save_adapter,
    theta_from_released,
)
from support.errors import UsageError

THETA = init_theta(3, 4, 32, rng(0, "x")) + 0.1 * torch.randn(3, 512, generator=rng(1, "x"))


def official_layout(backbone: str) -> dict[str, Any]:
    """Random values under the official names of a full MAE file."""
    arch = BACKBONES[backbone]
    state = {**build_vit(arch).state_dict(), **build_head(arch, "mae").state_dict()}
    return {k: torch.empty(v.shape).normal_(0, 0.02) for k, v in state.items()}


def test_an_align_run_given_as_weights_is_sent_to_from(runs: Path, tmp_path: Path) -> None:
    said = refusal(
        f"finetune --backbone vit_mini --dataset quilts --weights {runs}/aligned --out {tmp_path}/f"
    )
    assert f"--weights {runs}/aligned" in said and "--from" in said


@pytest.mark.usefixtures("elsewhere")
def test_weights_are_downloaded_on_first_use(server: Any, monkeypatch: Any, capsys: Any) -> None:
    """Offline: a line with URL, place and remedy. Of another size: not taken. Then taken, once."""
    monkeypatch.setitem(BACKBONES, "vit_b16", BACKBONES["vit_mini"])
    torch.save({"model": official_layout("vit_b16")}, "served.pth")
    server.files["x_full.pth"] = content = Path("served.pth").read_bytes()
    monkeypatch.setenv("TORCH_HOME", str(Path("cache").absolute()))
    place = Path("cache/hub/checkpoints/x_full.pth")
    size = len(content) / 1e6
    line = "finetune --backbone vit_b16 --dataset quilts --epochs 1 --warmup-epochs 0 --seeds 1"
    line += " --lr 1e-2 --rank 2 --quiet --out f"
    for url, megabytes in (
        ("http://127.0.0.1:1/x_full.pth", size),
        (f"{server.url}/x_full.pth", 2 * size),
    ):
        monkeypatch.setitem(OFFICIAL_FILES, ("vit_b16", "mae"), Official(url, megabytes))
        assert cli.run(line.split()) == 2
        assert f"curl -C - -o {place.absolute()} {url}" in capsys.readouterr().err
        assert not list(Path("cache").rglob("*.p*"))
    served = Official(f"{server.url}/x_full.pth", size)
    monkeypatch.setitem(OFFICIAL_FILES, ("vit_b16", "mae"), served)
    assert cli.run([*line.split(), "--dry-run"]) == 0
    assert f"from {server.url}/x_full.pth" in capsys.readouterr().out
    for more in ([], ["--force"]):
        assert cli.run([*line.split(), *more]) == 0, capsys.readouterr().err
        server.files.clear()
    assert place.read_bytes() == content
    place.write_bytes(content[:-500])  # so little is not seen as it arrives
    assert cli.run([*line.split(), "--force"]) == 2
    said = capsys.readouterr().err
    assert str(place) in said and "delete" in said


def test_the_backbone_is_frozen_and_the_pretext_head_is_not(weights: Path) -> None:
    loaded = load_backbone(AlignConfig(backbone="vit_mini", dataset="quilts", weights=weights))
    assert not any(tensor.requires_grad for tensor in loaded.backbone.parameters())
    assert all(tensor.requires_grad for tensor in loaded.head.parameters())
    assert loaded.arch == BACKBONES["vit_mini"]


def test_adapters_come_back_bit_equal_and_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    head = init_head(32, 7, rng(3)) | init_norm(32)[0]
    origin = AdapterInfo(rank=4, alpha=4.0, pretext="mae", arch={"dim": 32})
    data = save_adapter(THETA, head, origin)
    again = AdapterInfo(arch={"dim": 32}, pretext="mae", alpha=4.0, rank=4)
    assert save_adapter(THETA, dict(reversed(head.items())), again) == data
    (tmp_path / "a").write_bytes(data)
    found = load_adapter(tmp_path / "a")
    assert found[2] == origin
    torch.testing.assert_close(found[:2], (THETA, head), rtol=0, atol=0)


def test_a_file_without_theta_or_normalisation_is_refused(tmp_path: Path) -> None:
    info = {"bisslight": '{"format": "bisslight-adapter-1"}'}
    save_file({"head.bias": torch.ones(2)}, tmp_path / "a", info)
    with pytest.raises(ValueError, match="θ"):
        load_adapter(tmp_path / "a")
    with pytest.raises(ValueError, match="normalised"):
        channels_of(AdapterInfo())


@pytest.mark.parametrize("size", ["heads", "patch_size"])
def test_a_checkpoint_whose_sizes_are_0_is_refused(
    weights: Path, tmp_path: Path, size: str
) -> None:
    saved = torch.load(weights / "backbone.pth", weights_only=True)
    written = json.loads(saved["bisslight"])
    written["arch"][size] = 0
    torch.save(saved | {"bisslight": json.dumps(written)}, tmp_path / "w.pth")
    cfg = AlignConfig(backbone="vit_mini", dataset="own", weights=tmp_path / "w.pth")
    with pytest.raises(UsageError, match=r"w\.pth"):
        load_backbone(cfg)


def test_an_adapter_of_the_second_edition_loads() -> None:
    """A recorded file: its θ counts up in sevenths."""
    adapter = load_adapter(fixture("adapter_second_edition.safetensors"))
    assert torch.equal(adapter.theta, (torch.arange(48.0) / 7).view(2, 24))
    sizes = {name: len(tensor) for name, tensor in adapter.phi_D.items()}
    norm = {f"norm.{name}": 6 for name in ("weight", "bias", "mean", "var")}
    assert sizes == {"weight": 3, "bias": 3, **norm}
    origin = adapter.info
    assert (origin.rank, origin.alpha, origin.backbone) == (1, 2.0, "vit_mini")


def test_a_recorded_lora_in_the_released_layout_is_read_and_others_are_refused(
    tmp_path: Path,
) -> None:
    """Named by block, part and matrix; the order in θ is checked against the recorded vector."""
    rec = recorded("official/bisslight_tiny_adamw_f64.npz")
    r = recording(rec)
    found = rec.group("lora_init")
    state = {f"base_model.model.{name}.default.weight": x for name, x in found.items()}
    for number, matrix in enumerate(state.values()):  # as recorded, B is zero
        matrix += torch.randn(matrix.shape, generator=rng(number, "x"))
    torch.save(state, tmp_path / "lora.pth.tar")
    theta, about = load_theta(tmp_path / "lora.pth.tar", r.arch.dim)
    flat = torch.cat([tensor.flatten() for tensor in state.values()]).double()
    assert torch.equal(theta.double(), to_theta(flat, r.arch.depth, r.arch.dim))
    assert about == AdapterInfo()
    first = next(iter(state))
    for other in (
        [1],
        {name: x for name, x in state.items() if name != first},
        {name.replace("qkv.q", "qkv"): x for name, x in state.items()},
        state | {first: state[first][:, :16]},
    ):
        with pytest.raises(ValueError, match="is not a LoRA file"):
            theta_from_released(other, r.arch.dim)


def test_settings_of_other_sizes_than_the_files_are_refused(weights: Path) -> None:
    """Another network, image or patch, and no file at all."""
    settings: Any = {"backbone": "vit_mini", "dataset": "own", "weights": weights}
    for changed, named in (
        ({"image_size": 64}, "image_size 16"),
        ({"patch_size": 8}, "patch_size 4"),
        ({"backbone": "vit_s16"}, "--backbone vit_mini"),
        ({"weights": None}, "--weights FILE"),
    ):
        with pytest.raises(UsageError, match=named):
            load_backbone(AlignConfig(**settings | changed))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_hugging_faces_mae_is_refused_since_it_has_another_decoder(
    name: str, tmp_path: Path
) -> None:
    state = {"vit.embeddings.cls_token": torch.ones(1, 1, 8), "decoder.mask_token": torch.ones(1)}
    if name.endswith("bin"):
        torch.save(state, tmp_path / name)
    else:
        save_file(state, tmp_path / name)
    cfg = AlignConfig(backbone="vit_b16", dataset="own", weights=tmp_path / name)
    with pytest.raises(UsageError, match=f"{name}.*decoder.*vit.embeddings.cls_token"):
        load_backbone(cfg)


def test_the_authors_file_for_pictures_is_refused_since_it_predicts_raw_pixels(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mae_visualize_vit_base.pth"
    torch.save({"model": {"decoder_pred.bias": torch.ones(3)}}, path)
    with pytest.raises(UsageError, match="raw pixels"):
        load_backbone(AlignConfig(backbone="vit_b16", dataset="own", weights=path))
