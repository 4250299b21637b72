"""The paper's protocol: official weights, presets, the two choices of a rate, and an experiment that is interrupted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import close, fixture
from loopback import Server
from torch import Tensor

import cli
import loading
import mae
from config import AlignConfig, Data, FinetuneConfig, Model, Peft, PretrainConfig, UsageError, leaves, preset
from lora import Backbone, build_vit
from tasks import BENCHMARKS


def official_layout(backbone: str, device: str = "cpu") -> dict[str, Tensor]:
    """Random values under the official names of a full MAE file."""
    arch = mae.BACKBONES[backbone].arch
    with torch.device(device):
        state = {**build_vit(arch).state_dict(), **mae.Decoder(arch).state_dict()}
        g = torch.Generator(device).manual_seed(0) if device == "cpu" else None
        return {k: torch.empty(v.shape).normal_(0, 0.02, generator=g) for k, v in state.items()}


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full-size ViT-B/16 file, 448 MB, under the official name."""
    path = tmp_path_factory.mktemp("weights") / "mae_pretrain_vit_base_full.pth"
    torch.save({"model": official_layout("vit_b16")}, path)
    return path


def test_a_full_size_file_gives_timms_tokens(base: Path) -> None:
    """Encoder tokens of B/16 at 224 px, beside a plain timm model that loads the encoder's keys itself."""
    _, size = loading.OFFICIAL["vit_b16", "mae"]
    assert abs(base.stat().st_size - size) < size / 100
    vit, decoder, arch = mae.load(base, "vit_b16")
    plain = timm.create_model("vit_base_patch16_224", num_classes=0).eval()
    state = torch.load(base, weights_only=True, mmap=True)["model"]
    plain.load_state_dict({k: v for k, v in state.items() if not mae.is_decoder(k)})
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(Backbone(vit)(x), plain.forward_features(x), 1e-5)
    assert sum(p.numel() for p in decoder.parameters()) == 26_008_320
    assert arch.patches == 196


@pytest.mark.parametrize("name", ["vit_l16", "vit_h14"])
def test_the_larger_files_are_checked_key_by_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device: every key and shape; a missing, an extra and a wrong one are told."""
    state = official_layout(name, "meta")
    monkeypatch.setattr(mae, "load_tensors", lambda path: {"model": state})
    vit, decoder, _ = mae.load(Path("x.pth"), name)
    assert {**vit.state_dict(), **decoder.state_dict()}.keys() == state.keys()
    with pytest.raises(UsageError, match=f"fit --backbone {name}"):
        mae.load(Path("x.pth"), "vit_b16")
    pred = state.pop("decoder_pred.weight")
    with pytest.raises(UsageError, match=r"1 keys missing \['decoder_pred.weight'\]"):
        mae.load(Path("x.pth"), name)
    state["decoder_pred.weight"] = pred[:-1]
    with pytest.raises(UsageError, match="decoder_pred"):
        mae.load(Path("x.pth"), name)


def test_a_truncated_file_is_refused(base: Path, tmp_path: Path) -> None:
    with base.open("rb") as file:
        (tmp_path / "cut.pth").write_bytes(file.read(1_000_000))
    with pytest.raises(UsageError, match="not a checkpoint that loads safely"):
        mae.load(tmp_path / "cut.pth", "vit_b16")


def small_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Stand in for the official B/16 file with one of a tiny ViT, so that it can be served in a test."""
    tiny = mae.BACKBONES["vit_mini"]
    monkeypatch.setitem(mae.BACKBONES, "vit_b16", tiny)
    torch.save({"model": official_layout("vit_b16")}, tmp_path / "served.pth")
    content = (tmp_path / "served.pth").read_bytes()
    monkeypatch.setitem(loading.OFFICIAL, ("vit_b16", "mae"), (loading.OFFICIAL["vit_b16", "mae"][0], len(content)))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return content


def test_weights_are_downloaded_on_first_use(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Offline: one line with URL and path. Then from a server that cuts once; then verified; then tampered with."""
    server.content = small_official(tmp_path, monkeypatch)
    line = [
        "finetune",
        "--backbone",
        "vit_b16",
        "--dataset",
        "quilts",
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--lr",
        "1e-2",
        "--rank",
        "2",
        "--quiet",
    ]
    expected = tmp_path / "cache/hub/checkpoints/mae_pretrain_vit_base_full.pth"
    monkeypatch.setenv("BISSLIGHT_MIRROR", "http://127.0.0.1:1")
    assert cli.run([*line, "--dry-run"]) == 0  # says what it would fetch, and does not
    assert "to_download: http://127.0.0.1:1/mae/pretrain/mae_pretrain_vit_base_full.pth" in capsys.readouterr().out
    assert cli.run(line) == 1
    error = capsys.readouterr().err
    assert "cannot download http://127.0.0.1:1/mae/pretrain/mae_pretrain_vit_base_full.pth" in error
    assert f"put the file at {expected}" in error
    assert not expected.exists()

    monkeypatch.setenv("BISSLIGHT_MIRROR", server.url)
    server.cuts = [100_000]
    assert cli.run(line) == 0, capsys.readouterr().err
    assert server.asked == [None, "bytes=100000-"]
    assert expected.read_bytes() == server.content
    assert cli.run([*line, "--force"]) == 0  # no second download
    assert len(server.asked) == 2
    raw = bytearray(expected.read_bytes())
    raw[-1000] ^= 1
    expected.write_bytes(raw)
    loading.load_backbone.cache_clear()
    assert cli.run([*line, "--force"]) == 2
    assert "has changed since it was downloaded; delete it" in capsys.readouterr().err


def test_a_file_of_another_size_is_not_taken(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    server.content = small_official(tmp_path, monkeypatch)[:-20_000]
    monkeypatch.setenv("BISSLIGHT_MIRROR", server.url)
    assert cli.run(["finetune", "--backbone", "vit_b16", "--dataset", "quilts", "--lr", "1e-2", "--quiet"]) == 1
    assert "were expected; not taken" in capsys.readouterr().err
    assert [path.suffix for path in (tmp_path / "cache").rglob("*.pth*")] == [".lock"]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224"])
def test_any_plain_timm_vit_can_be_finetuned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A class-token ViT; what is no plain VisionTransformer, or pools by attention, is refused by name."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    for kind, shade in (("a", 40), ("b", 200)):
        for i in range(10):
            path = tmp_path / f"pics/{kind}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (shade, i, 9)).save(path)
    vit = timm.create_model(name, num_classes=3)
    torch.save(vit.state_dict(), tmp_path / "vit.pth")
    line = f"finetune --backbone timm:{name} --weights vit.pth --dataset folder:pics --rank 4 --epochs 1 --seeds 1"
    code = cli.run(f"{line} --lr 1e-3 --out f --quiet".split())
    error = capsys.readouterr().err
    if name == "vit_tiny_patch16_224":
        assert code == 0, error
        assert json.loads(Path("f/result.json").read_text())["backbone"] == f"timm:{name}"
        assert cli.run(["export", "f"]) == 0
        opened = timm.create_model("local-dir:f/export/timm", pretrained=True)
        assert opened.num_classes == 2
        capsys.readouterr()
        assert cli.run(f"align --backbone timm:{name} --weights vit.pth --dataset folder:pics --pool pics".split()) == 2
        assert "align needs a checkpoint with its pretext head" in capsys.readouterr().err
        assert cli.run(line.replace("tiny", "small").split()) == 2
        assert "does not fit timm:vit_small_patch16_224" in capsys.readouterr().err
        assert cli.run(line.replace("vit_tiny_patch16_224", "vit_tinny_patch16_224").split()) == 2
        assert "did you mean vit_tiny_patch16_224?" in capsys.readouterr().err
    else:
        assert code == 2
        assert "Use a timm VisionTransformer with a fused qkv Linear" in error


def test_pooling_is_timms_own() -> None:
    """Mean of patches with its own norm after the pooling, as timm's forward computes it."""
    from lora import logits

    torch.manual_seed(0)
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5, global_pool="avg"
    )
    torch.nn.init.normal_(vit.head.weight)
    x = torch.randn(2, 3, 32, 32)
    phi = {"weight": vit.head.weight.detach(), "bias": vit.head.bias.detach()}
    close(logits(Backbone(vit), None, phi, x), vit.eval()(x).detach(), 1e-6)


# --- presets ---------------------------------------------------------------------------------------------------------

NOT_A_SETTING = {  # recorded lines that are fixed in the code: value in force
    "lora_dropout": 0.0, "lora_alpha": "= rank", "lower_optimizer": "adamw", "lower_betas": [0.9, 0.95],
    "upper_betas": [0.9, 0.999], "lower_encoder_drop_path": 0.0, "decoder_drop_path": 0.0, "norm_pix_loss": True,
    "amp": "bfloat16 autocast", "probe_lr": "= upper lr, constant", "optimizer_direct": "adamw",
}  # fmt: skip
SETTING = {  # recorded line -> the setting's name
    "lambda": "lam", "warmup_alternations": "warmup", "lora_rank": "rank", "lower_batch": "p_batch",
    "upper_batch": "d_batch", "lower_lora_lr": "p_lr", "lower_decoder_lr": "decoder_lr",
    "lower_weight_decay": "p_weight_decay", "upper_weight_decay": "d_weight_decay", "upper_optimizer": "d_optimizer",
    "upper_drop_path": "drop_path", "grad_clip_norm": "clip", "eval_every_alternations": "eval_every",
    "mfac_block": "partition", "optimizer_after_bilevel": "optimizer",
}  # fmt: skip
WORDS = {
    "sgd (momentum 0.9)": "sgd", "transformer layer": "layer", "inherits the upper optimizer, i.e. sgd": "sgd",
    "256 (memory table)": 256,
}  # fmt: skip
DEFERRED = {"mfac_device": "the paper: the CPU; here beside θ, the same numbers"}


def in_force(model: type[Any], name: str, aligned: bool) -> dict[str, Any]:
    """A preset's values over the defaults, by leaf."""
    values = {leaf.path[-1]: leaf.field.get_default(call_default_factory=True) for leaf in leaves(model)}
    return values | preset(name, model, aligned)


@pytest.mark.parametrize("who", ["program", "paper"])
def test_presets_equal_the_recorded_defaults_line_by_line(who: str) -> None:
    recorded = json.loads(fixture("official/official_effective_defaults.json").read_text())
    name = {"program": "as-released", "paper": "paper"}[who]
    for section, model, aligned in (("bilevel", AlignConfig, False), ("finetune", FinetuneConfig, True)):
        now = in_force(model, name, aligned)
        for key, line in recorded[section].items():
            if not isinstance(line, dict):
                continue
            wanted = WORDS.get(str(line[who]), line[who])
            if key in NOT_A_SETTING:
                assert wanted in (NOT_A_SETTING[key], None)
            elif key == "lora_rank":
                assert now["rank"] is None  # the program has no LoRA then and dies; here: by backbone, 64
                assert mae.BACKBONES["vit_b16"].rank == (line["paper"])
            elif key in ("upper_drop_path", "drop_path") and who == "paper":
                assert now["drop_path"] is None  # by backbone
                assert [mae.BACKBONES[b].drop_path for b in ("vit_b16", "vit_l16", "vit_h14")] == [0.1, 0.2, 0.2]
            elif key in DEFERRED and who == "paper":
                continue
            elif wanted is not None:
                assert now[SETTING.get(key, key)] == wanted, key
    direct = in_force(FinetuneConfig, name, False)
    assert direct["optimizer"] == "adamw"
    from finetune import ALIGNED_GRID, DIRECT_GRID

    assert recorded["finetune"]["lr_grid_direct"] == [*DIRECT_GRID]
    assert recorded["finetune"]["lr_grid_after_bilevel"] == [*ALIGNED_GRID]
    for dataset, sizes in recorded["dataset_sizes_train_val_test"].items():
        assert list(BENCHMARKS[dataset].sizes) == sizes
    for backbone, count in recorded["lora_parameters_rank64"].items():
        arch = mae.BACKBONES[backbone].arch
        assert 4 * 64 * arch.dim * arch.depth == count
    assert preset(name, PretrainConfig, False) == {}
    with pytest.raises(UsageError, match="did you mean as-released"):
        preset("released", AlignConfig, False)


def test_a_preset_shows_in_the_dry_run_and_a_flag_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.run(
            [
                "pretrain",
                "--pool",
                "quilts",
                "--backbone",
                "vit_mini",
                "--epochs",
                "1",
                "--warmup-epochs",
                "0",
                "--quiet",
                "--out",
                "pre",
            ]
        )
        == 0
    )
    line = "align --backbone vit_mini --weights pre --dataset quilts --preset as-released --d-weight-decay 0.01"
    capsys.readouterr()
    assert cli.run([*line.split(), "--dry-run", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["d_optimizer"] == {"value": "sgd", "source": "preset as-released"}
    assert settings["drop_path"] == {"value": 0.2, "source": "preset as-released"}
    assert settings["d_weight_decay"] == {"value": 0.01, "source": "flag"}
    assert settings["lam"]["source"] == "default, App. C.3"
    small = "--alternations 2 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --quiet"
    assert cli.run([*line.split(), *small.split(), "--out", "a"]) == 0
    config = json.loads(Path("a/config.json").read_text())
    assert config["lower"]["decoder"] == "random"
    assert config["machine"]["mfac_device"] == "cpu"
    assert cli.run(["align", "--config", "a/config.json", "--out", "b", "--quiet"]) == 0
    assert Path("a/adapter.safetensors").read_bytes() == Path("b/adapter.safetensors").read_bytes()
    same = [*line.split(), *small.split(), "--mfac-device", "same", "--out", "c"]
    assert cli.run(same) == 0
    assert Path("a/adapter.safetensors").read_bytes() == Path("c/adapter.safetensors").read_bytes()
    other = [*line.split(), *small.split(), "--decoder", "checkpoint", "--out", "d"]
    assert cli.run(other) == 0
    assert Path("a/adapter.safetensors").read_bytes() != Path("d/adapter.safetensors").read_bytes()


# --- rates -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pre(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(weights, "pre")
    return "--backbone vit_mini --weights pre --dataset quilts"


def finished(pre: str, grid: str = "1e-2,3e-2") -> None:
    line = f"finetune {pre} --epochs 1 --seeds 2 --batch 40 --grid {grid} --quiet --out direct"
    assert cli.run(line.split()) == 0


SMALL = (
    "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --eval-every 1 --quiet"
)


def test_d_lr_auto_takes_the_largest_stable_share_and_resumes(
    pre: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Instability is planted in the first two candidates; the run is killed after each of them was given up."""
    import finetune as ft
    import runtime

    finished(pre)
    best = json.loads(Path("direct/result.json").read_text())["lr"]
    line = f"align {pre} {SMALL} --d-lr auto --d-lr-from direct".split()
    real, calls, alternations = ft.unstable, 0, []

    def planted(losses: Any, vals: Any) -> str | None:
        nonlocal calls
        calls += 1
        alternations.append(len(losses["L^P"]))
        return "planted" if calls in (2, 3) else real(losses, vals)

    monkeypatch.setattr(ft, "unstable", planted)
    assert cli.run([*line, "--out", "whole"]) == 0
    assert alternations == [1, 2, 1, 1, 2, 3]
    result = json.loads(Path("whole/result.json").read_text())
    assert result["d_lr"] == pytest.approx(best / 3, rel=2e-3)
    assert list(result["unstable"]) == [f"{best * 2 / 3:.3g}", f"{best / 2:.3g}"]
    assert "alternation 2: planted" in result["unstable"][f"{best * 2 / 3:.3g}"]
    assert "upper rate" in Path("whole/train.log").read_text()
    steps = [json.loads(text)["step"] for text in Path("whole/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]

    calls = 0
    save = runtime.Run.save

    def killing(self: Any, state: Any) -> None:
        save(self, state)
        if calls == 5:  # the third candidate's second alternation
            raise KeyboardInterrupt

    monkeypatch.setattr(runtime.Run, "save", killing)
    assert cli.run([*line, "--out", "cut"]) == 130
    monkeypatch.setattr(runtime.Run, "save", save)
    assert cli.run([*line, "--out", "cut", "--resume"]) == 0
    assert calls == 6  # one more alternation, no candidate again
    source = Path("direct/result.json").read_text()
    Path("direct/result.json").write_text(source.replace(f'"lr": {best}', '"lr": 0.5'))
    assert cli.run([*line, "--out", "cut", "--resume"]) == 2  # finished; and of an unfinished one it tells what changed
    Path("cut/result.json").unlink()
    capsys.readouterr()
    assert cli.run([*line, "--out", "cut", "--resume"]) == 2
    assert "upper_rates [" in capsys.readouterr().err
    assert Path("whole/adapter.safetensors").read_bytes() == Path("cut/adapter.safetensors").read_bytes()
    plain = f"align {pre} {SMALL} --d-lr {result['d_lr']} --out plain".split()
    assert cli.run(plain) == 0
    left, right = (theta_of(f"{name}/adapter.safetensors") for name in ("whole", "plain"))
    assert torch.equal(left, right)  # a chosen rate gives the run of that rate


def theta_of(path: str) -> Tensor:
    from safetensors.torch import load_file

    return load_file(path)["theta"]


def test_d_lr_auto_gives_up_in_a_line_and_checks_its_source(
    pre: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import finetune as ft

    finished(pre)
    assert cli.run(f"finetune {pre} --epochs 1 --seeds 1 --batch 80 --lr 1e-2 --quiet --out single".split()) == 0
    monkeypatch.setattr(ft, "unstable", lambda losses, vals: "planted")
    assert cli.run(f"align {pre} {SMALL} --d-lr auto --d-lr-from direct --out a".split()) == 1
    assert "--d-lr auto: none of" in capsys.readouterr().err
    for more, message in [
        ("--d-lr auto", "--d-lr auto and --d-lr-from RUN belong together"),
        ("--d-lr auto --d-lr-from nowhere", "is not a finished grid of `finetune` from the backbone"),
        ("--d-lr auto --d-lr-from pre", "is not a finished grid of `finetune` from the backbone"),
        ("--d-lr auto --d-lr-from single", "is not a finished grid of `finetune` from the backbone"),
        ("--d-lr fast", "--d-lr fast"),
    ]:
        assert cli.run(f"align {pre} {SMALL} --out b {more}".split()) == 2
        assert message in capsys.readouterr().err
    assert not Path("b").exists()


def test_an_interrupted_experiment_repeats_no_finished_run(
    pre: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Grid and eight seeds, stopped after every single PEFT run: as many runs in all, and the same result."""
    import tuning

    line = f"finetune {pre} --epochs 1 --batch 80 --seeds 8 --grid 1e-3,1e-2,3e-2 --quiet".split()
    assert cli.run([*line, "--out", "whole"]) == 0
    real = tuning.run_unit
    done: list[Any] = []

    def once(unit: Any, report: Any = None) -> Any:
        if len(done) and done[-1] == "stop":
            done.pop()
            raise KeyboardInterrupt
        result = real(unit)
        done.append((unit.lr, unit.seed))
        done.append("stop")
        return result

    monkeypatch.setattr(tuning, "run_unit", once)
    code, attempts = cli.run([*line, "--out", "cut"]), 1
    while code == 130:
        assert cli.run([*line, "--out", "cut"]) == 2  # a finished or unfinished run is not overwritten
        code, attempts = cli.run([*line, "--out", "cut", "--resume"]), attempts + 1
    assert code == 0, capsys.readouterr().err
    runs = [unit for unit in done if unit != "stop"]
    assert len(runs) == len(set(runs)) == 3 + 7
    whole, cut = (json.loads(Path(name, "result.json").read_text()) for name in ("whole", "cut"))
    for key in ("lr", "test", "val", "grid", "test_per_class"):
        assert whole[key] == cut[key]
    for seed in range(8):
        left, right = (Path(name, f"adapter-s{seed}.safetensors").read_bytes() for name in ("whole", "cut"))
        assert left == right


def test_a_rate_at_which_a_later_seed_diverges_is_given_up(pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is chosen with one seed; if another one diverges there, the next best takes its place."""
    import tuning

    real, first = tuning.run_unit, {}

    def planted(unit: Any, report: Any = None) -> Any:
        result = real(unit)
        if unit.seed == 0:
            first[unit.lr] = result["val"]
        elif unit.lr == max(first, key=lambda lr: (first[lr]["accuracy"], -first[lr]["loss"])) and unit.seed == 2:
            return {"lr": unit.lr, "seed": 2, "val": None, "diverged": "planted", "curve": []}
        return result

    monkeypatch.setattr(tuning, "run_unit", planted)
    assert cli.run(f"finetune {pre} --epochs 1 --batch 80 --seeds 3 --grid 1e-3,3e-2 --quiet --out f".split()) == 0
    result = json.loads(Path("f/result.json").read_text())
    ranked = sorted(first, key=lambda lr: (first[lr]["accuracy"], -first[lr]["loss"]))
    assert result["lr"] == ranked[0]
    assert len(result["test"]) == 3


def test_what_is_fixed_in_the_code_is_what_the_paper_says(pre: str) -> None:
    """Optimisers, betas, schedules, scale: from the objects that the commands build."""
    from config import Bilevel, Lower, Upper
    from lora import init_head
    from runtime import trainable
    from stages import state

    cfg = AlignConfig(
        model=Model(backbone="vit_b16"), data=Data(dataset="x"), lower=Lower(), upper=Upper(), bilevel=Bilevel()
    )
    theta = {"P": torch.zeros(2, 8), "D": torch.zeros(2, 8)}
    phi_P = {"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(2), "mask_token": torch.zeros(1, 1, 2)}
    s = state(cfg, trainable(theta), trainable(phi_P), trainable(init_head(4, 3, torch.Generator())))
    P, D = s.opt_P.torch, s.opt_D.torch
    assert type(P) is type(D) is torch.optim.AdamW
    assert {group["betas"] for group in P.param_groups} == {(0.9, 0.95)}
    assert {group["betas"] for group in D.param_groups} == {(0.9, 0.999)}
    assert {group["eps"] for group in (*P.param_groups, *D.param_groups)} == {1e-8}
    assert s.opt_P.base == [(0.01, 0.05), (1e-4, 0.05), (1e-4, 0.0)]  # θ; decoder matrices and mask token; its bias
    assert s.opt_D.base == [(6.7e-4, 0.05)]
    assert (s.opt_P.clip, s.opt_D.clip) == (10.0, 10.0)
    assert [s.opt_P.schedule(k, 1.0) for k in (1, 200, 10_000)] == pytest.approx([1 / 201, 200 / 201, 1e-6])
    assert [s.opt_D.schedule(k, 1.0) for k in (1, 80, 4_000)] == pytest.approx([1 / 81, 80 / 81, 1e-6])
    model = loading.resolved_model(Model(backbone="vit_mini", weights=Path("pre")))
    assert model.alpha == model.rank == 8
    loaded = loading.load_backbone(model, torch.device("cpu"))
    task = loading.pretext_task(cfg, loaded, torch.zeros(4, 4 * 8 * 64))
    assert isinstance(task, mae.MAE)
    assert (loaded.backbone.scale, task.mask_ratio, task.norm_pix) == (1.0, 0.75, True)


def test_runs_are_traced_to_what_they_were_made_from(pre: str, capsys: Any) -> None:
    """A LoRA file of unknown origin, a fine-tuned adapter, weights that changed or went, a directory in use."""
    assert cli.run(f"align {pre} {SMALL} --out a".split()) == 0
    assert cli.run(["export", "a", "--out", "e", "--no-merged"]) == 0
    small = "--epochs 1 --batch 80 --seeds 1 --lr 1e-2 --quiet"
    assert cli.run(f"finetune {pre} --from e/released/lora.pth {small} --out f".split()) == 0
    assert json.loads(Path("f/result.json").read_text())["aligned_by"] == "unknown"
    capsys.readouterr()
    for line, message in [
        (f"finetune {pre} --from f/adapter-s0.safetensors {small} --out g", "is fine-tuned already"),
        (f"align {pre} {SMALL} --out f --dry-run", "f: a finished run, --force starts it over"),
        (f"align {pre} {SMALL} --out new --resume --dry-run", "--resume: there is no run in new"),
    ]:
        assert cli.run(line.split()) == 2
        assert message in capsys.readouterr().err
    loading.load_backbone.cache_clear()
    line = (
        "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 500 --quiet --out pre --force"
    )
    assert cli.run([*line.split(), "--seed", "5"]) == 0
    capsys.readouterr()
    assert cli.run(["export", "a", "--out", "z"]) == 2
    assert "backbone.pth differs" in capsys.readouterr().err
    Path("pre/backbone.pth").unlink()
    loading.load_backbone.cache_clear()
    assert cli.run(["export", "a", "--out", "z"]) == 2
    assert "there is no such file any more" in capsys.readouterr().err
    assert not Path("z").exists()


def test_a_preset_wins_over_the_align_run(pre: str, capsys: Any) -> None:
    assert cli.run(f"align {pre} {SMALL} --out a".split()) == 0
    capsys.readouterr()
    assert cli.run(["finetune", "--from", "a", "--preset", "as-released", "--dry-run", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    for name, value in (
        ("drop_path", 0.2),
        ("optimizer", "sgd"),
        ("d_interpolation", "bilinear"),
        ("voc_difficult", "positive"),
    ):
        assert settings[name] == {"value": value, "source": "preset as-released"}
    assert settings["rank"]["source"] == "align run"


def test_a_grid_is_the_default_and_its_settings_are_checked() -> None:
    assert Peft().lr is None
    for wrong in ({"lr": 1.0, "grid": (1.0,)}, {"grid_seeds": 9}, {"lr_grid": False}):
        with pytest.raises(ValueError, match=r"lr|grid"):
            Peft.model_validate(wrong)
    assert loading.resolved_data(Data(dataset="cub200"), True).pool == "imagenet"
    assert loading.resolved_data(Data(dataset="cub200"), False).pool is None
    with pytest.raises(UsageError, match="save its timm state dict"):
        loading.resolved_model(Model(backbone="timm:vit_tiny_patch16_224"))
