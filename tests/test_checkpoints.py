"""Official files, adapters, and the released layout."""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from toy import run

import cli
from config import BACKBONES, AlignConfig, Arch
from data import rng
from head import init_head, init_norm
from support.adapters import AdapterInfo, load_adapter, save_adapter
from support.checkpoints import Pretrained, build_head, build_vit, find_weights, load_backbone
from support.definitions import FORMAT
from support.errors import UsageError
from support.weights import OFFICIAL_FILES, download


def official_layout(backbone: str) -> dict[str, Any]:
    """Random values under the official names of a full MAE file."""
    return random_tensors(BACKBONES[backbone])


def random_tensors(arch: Arch) -> dict[str, Any]:
    """The same of a network of other sizes."""
    state = {**build_vit(arch).state_dict(), **build_head(arch, "mae").state_dict()}
    return {k: torch.empty(v.shape).normal_(0, 0.02) for k, v in state.items()}


def settings(**given: Any) -> AlignConfig:
    """Settings of a vit_mini unless they name another network."""
    return AlignConfig(**{"backbone": "vit_mini", "dataset": "quilts"} | given)


def load(**given: Any) -> Pretrained:
    """The networks of these settings."""
    cfg = settings(**given)
    return load_backbone(cfg, find_weights(cfg))


@pytest.mark.usefixtures("elsewhere")
def test_weights_are_downloaded_once_on_first_use(
    server: Any, monkeypatch: Any, capsys: Any
) -> None:
    """Offline: a line with URL, place and remedy, and nothing is left that looks like the file."""
    monkeypatch.setitem(BACKBONES, "vit_b16", BACKBONES["vit_mini"])
    torch.save({"model": official_layout("vit_b16")}, "served.pth")
    server.files["x_full.pth"] = content = Path("served.pth").read_bytes()
    monkeypatch.setenv("TORCH_HOME", str(Path("cache").absolute()))
    place = Path("cache/hub/checkpoints/x_full.pth")
    line = "finetune --backbone vit_b16 --dataset quilts --epochs 1 --warmup-epochs 0 --seeds 1"
    line += " --lr 1e-2 --rank 2 --quiet --out f"
    gone = "http://127.0.0.1:1/x_full.pth"
    monkeypatch.setitem(OFFICIAL_FILES, ("vit_b16", "mae"), gone)
    said = run(line).err.splitlines()[-1]
    assert gone in said and str(place.absolute()) in said and "--weights FILE" in said
    assert not list(Path("cache").rglob("*.pth"))
    monkeypatch.setitem(OFFICIAL_FILES, ("vit_b16", "mae"), f"{server.url}/x_full.pth")
    plan = cli.run([*line.split(), "--dry-run"])
    assert plan == 0 and not place.exists()
    assert cli.run(line.split()) == 0, capsys.readouterr().err
    server.files.clear()
    assert place.read_bytes() == content
    load(backbone="vit_b16")
    place.write_bytes(content[:-500])
    said = run(line.replace("--out f", "--out g")).err.splitlines()[-1]
    assert f"{place}: cannot be read" in said and said.endswith("or fetch it again")


def test_adapters_come_back_bit_equal_and_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    theta, head = torch.randn(3, 512), init_head(32, 7, rng(3)) | init_norm(32)[0]
    origin = AdapterInfo(stage="align", definition={"rank": 4}, arch={"dim": 32})
    data = save_adapter(theta, head, origin)
    again = AdapterInfo(arch={"dim": 32}, definition={"rank": 4}, stage="align")
    assert save_adapter(theta, dict(reversed(head.items())), again) == data
    (tmp_path / "a").write_bytes(data)
    found = load_adapter(tmp_path / "a")
    assert found[2] == origin
    torch.testing.assert_close(found[:2], (theta, head), rtol=0, atol=0)
    save_file(head, tmp_path / "a", {"bisslight": f'{{"format": {FORMAT}}}'})
    with pytest.raises(UsageError, match="theta"):
        load_adapter(tmp_path / "a")
    save_file(head, tmp_path / "a", {"bisslight": '{"format": "x", "versions": "bisslight 1"}'})
    with pytest.raises(UsageError, match=r"a: made by bisslight 1;"):
        load_adapter(tmp_path / "a")


AROUND: dict[str, Any] = {  # how programs save the tensors of a network
    "as they are": lambda state: state,
    "compiled": lambda state: {"model": {f"module._orig_mod.{k}": x for k, x in state.items()}},
    "lightning": lambda state: {
        "state_dict": {f"model.net.{k}": x for k, x in state.items()}
        | {"metric.sum": torch.ones(1)},
        "epoch": 3,
        "hyper_parameters": {"lr": 1e-3},
    },
    "timm": lambda state: {"state_dict": state, "args": Namespace(lr=1e-3), "metric": 71.2},
    "a number beside them": lambda state: {"model": state | {"epoch": 3}},
    "DINO": lambda state: {
        "student": {f"module.backbone.{k}": x + 1 for k, x in state.items()},
        "teacher": {f"backbone.{k}": x for k, x in state.items()},
        "optimizer": {"state": {0: torch.ones(1)}, 1: 2},
    },
    "an encoder inside": lambda state: in_parts(state, "model.encoder.", "model."),
    "a moving average": lambda state: {
        "state_dict": state,
        "state_dict_ema": {k: x + 1 for k, x in state.items()},
    },
}


def in_parts(state: dict[str, Any], encoder: str, decoder: str) -> dict[str, Any]:
    """Encoder and decoder as parts of one module, which also has a classifier."""
    found = {"backbone_2.mask_token": torch.ones(1), "classifier.weight": torch.ones(2)}
    for name, tensor in state.items():
        is_of_decoder = name.startswith("decoder_") or name == "mask_token"
        found[(decoder if is_of_decoder else encoder) + name] = tensor
    return {"state_dict": found, "epoch": 3}


@pytest.mark.parametrize("program", AROUND)
def test_a_network_is_found_in_what_programs_save_around_it(tmp_path: Path, program: str) -> None:
    state = official_layout("vit_mini")
    torch.save(AROUND[program](state), tmp_path / "w.pth")
    loaded = load(weights=tmp_path / "w.pth")
    found = loaded.backbone.vit.state_dict() | loaded.head.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert "decoder_pos_embed" not in dict(loaded.head.named_parameters())  # it is not trained


@pytest.mark.parametrize(
    ("saved", "size"),
    [
        ({"model": {"a": torch.ones(9999)}}, 5000),  # cut
        ({"best": np.float64(71.2)}, None),  # torch's own text tells how to run the code in it
        ([torch.ones(1)], None),
    ],
)
def test_a_file_that_cannot_be_read_is_told_before_images_are_looked_at(
    tmp_path: Path, saved: Any, size: int | None
) -> None:
    file = tmp_path / "w.pth"
    torch.save(saved, file)
    file.write_bytes(file.read_bytes()[:size])
    for backbone in ("vit_mini", "timm:test_vit2"):
        with pytest.raises(UsageError, match=f"--weights: {file}: ") as refused:
            find_weights(settings(weights=file, backbone=backbone))
        assert "weights_only" not in str(refused.value)


def test_settings_of_other_sizes_than_the_files_are_refused(weights: Path) -> None:
    """Another network, image or patch."""
    loaded = load(weights=weights)
    assert loaded.arch == BACKBONES["vit_mini"]
    assert not any(tensor.requires_grad for tensor in loaded.backbone.parameters())
    assert all(tensor.requires_grad for tensor in loaded.head.parameters())
    for changed, named in (
        ({"image_size": 64}, "^--image-size 64: the weights in .*pth have 16; leave --image-size"),
        ({"patch_size": 8}, "^--patch-size 8: the weights in .*pth have 4; leave --patch-size out"),
        ({"backbone": "vit_s16"}, "was trained as vit_mini"),
    ):
        with pytest.raises(UsageError, match=named):
            load(**{"weights": weights} | changed)


def test_a_file_that_names_no_size_is_read_with_that_of_the_settings(tmp_path: Path) -> None:
    """As MAE's own code saves a network for larger images, or for smaller patches."""
    for image_size, patch_size in ((28, 4), (16, 2), (16, 4)):
        arch = BACKBONES["vit_mini"]._replace(image_size=image_size, patch_size=patch_size)
        torch.save({"model": random_tensors(arch)}, tmp_path / "w.pth")
        given = {"image_size": image_size, "patch_size": patch_size}
        loaded = load(weights=tmp_path / "w.pth", **given)
        assert loaded.arch == arch
        assert loaded.backbone(torch.zeros(1, 3, image_size, image_size)).shape[-1] == 64
        with pytest.raises(UsageError, match=r"cannot be read .*size mismatch for "):
            load(weights=tmp_path / "w.pth", image_size=32)


def test_files_of_another_layout_are_refused(tmp_path: Path) -> None:
    """Hugging Face's MAE, the authors' encoder alone and their decoder of raw pixels.

    And a file with two networks, of which none is meant.
    """
    state = official_layout("vit_mini")
    ema = {f"model.{k}": x for k, x in state.items()} | {f"ema.{k}": x for k, x in state.items()}
    told = "in the names of another program.*decoder.mask_token"
    hugging_face = {"vit.embeddings.cls_token": torch.ones(1), "decoder.mask_token": torch.ones(1)}
    alone = {"model": {"cls_token": torch.ones(1)}}
    for name, pretext, content, text in (
        ("pytorch_model.bin", "mae", hugging_face, told),
        ("two.pth", "mae", {"state_dict": ema}, r"holds 2 networks.*\['model.', 'ema.'\]; save"),
        ("mae_pretrain_vit_base.pth", "mae", alone, "no MAE decoder.*cls_token"),
        ("mae_visualize_vit_base.pth", "mae", hugging_face, "raw pixels"),
        ("vit.pth.tar", "ijepa", alone, "no target_encoder and predictor"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(UsageError, match=f"{name}.*{text}"):
            load(pretext=pretext, weights=tmp_path / name)


def test_processes_that_ask_for_one_file_fetch_it_once(tmp_path: Path, monkeypatch: Any) -> None:
    fetched = []

    def fetch(url: str, place: str, progress: bool) -> None:
        fetched.append(url)
        Path(place).write_text("all of it")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: download("http://x/y.pth", tmp_path / "hub/y.pth"), range(4)))
    assert fetched == ["http://x/y.pth"]


def test_a_network_stays_as_it_was_read_where_its_file_is_written_anew(tmp_path: Path) -> None:
    """Its bytes become zeros in place, as where another program saves under the same name."""
    path = tmp_path / "w.pth"
    torch.save({"model": official_layout("vit_mini")}, path)
    vit = load(weights=path).backbone.vit
    before = {key: tensor.clone() for key, tensor in vit.state_dict().items()}
    with path.open("r+b") as opened:
        opened.write(bytes(path.stat().st_size))
    assert all(torch.equal(before[key], tensor) for key, tensor in vit.state_dict().items())
