"""The paper's protocol: official weights, the authors' defaults, the choice of the upper rate."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from conftest import close, fixture

import align
import cli
from config import ALIGNED_GRID, GRID, RELEASED, AlignConfig, FinetuneConfig
from data import rng
from lora import Backbone, features, init_head, logits
from support.benchmarks import BENCHMARKS
from support.experiment import Model as Whole
from support.optim import trainable

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_pooling_is_timms_own() -> None:
    """Mean of patches with its own norm after the pooling, as timm's forward computes it."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    vit: Any = timm.models.VisionTransformer(**sizes, num_classes=5, global_pool="avg")
    torch.nn.init.normal_(vit.head.weight)
    x = torch.randn(2, 3, 32, 32)
    phi = {"weight": vit.head.weight.detach(), "bias": vit.head.bias.detach()}
    close(logits(features(Backbone(vit), None, x), phi), vit.eval()(x), 1e-6)


FIXED = {  # recorded lines that are fixed in the code: value in force
    "lora_dropout": 0.0, "lora_alpha": "= rank", "lower_optimizer": "adamw",
    "lower_betas": [0.9, 0.95], "upper_betas": [0.9, 0.999], "lower_encoder_drop_path": 0.0,
    "decoder_drop_path": 0.0, "norm_pix_loss": True, "amp": "bfloat16 autocast",
    "probe_lr": "= upper lr, constant", "optimizer_direct": "adamw",
}  # fmt: skip
SETTING = {  # recorded line -> the setting's name
    "lambda": "lam", "warmup_alternations": "warmup", "lora_rank": "rank", "lower_batch": "p_batch",
    "upper_batch": "d_batch", "lower_lora_lr": "p_lr", "lower_decoder_lr": "phi_p_lr",
    "lower_weight_decay": "p_weight_decay", "upper_weight_decay": "d_weight_decay",
    "upper_optimizer": "d_optimizer", "upper_drop_path": "drop_path", "grad_clip_norm": "clip",
    "eval_every_alternations": "eval_every", "mfac_block": "partition",
    "optimizer_after_bilevel": "optimizer", "iterations": "cg_iterations", "damping": "cg_damping",
}  # fmt: skip
WORDS = {
    "sgd (momentum 0.9)": "sgd", "transformer layer": "layer", "256 (memory table)": 256,
    "inherits the upper optimizer, i.e. sgd": "sgd", "0.1 ViT-B, 0.2 ViT-L/H": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("who", ["program", "paper"])
def test_presets_equal_the_recorded_defaults_line_by_line(who: str) -> None:
    """Each preset once; the paper's G lies on the CPU, here beside θ, which gives the same."""
    recorded = json.loads(fixture("official/official_effective_defaults.json").read_text())
    about = {"backbone": "vit_b16", "dataset": "cub200"}
    for section in ("bilevel", "bilevel_cg", "finetune"):
        kind: Any = FinetuneConfig if section == "finetune" else AlignConfig
        preset = RELEASED.keys() & kind.model_fields if who == "program" else ()
        now = kind(**{key: RELEASED[key] for key in preset} | about).model_dump()
        for key, line in recorded[section].items():
            elsewhere = (key, who) == ("mfac_device", "paper")
            if isinstance(line, list) or line[who] is None or elsewhere:
                continue
            found = FIXED[key] if key in FIXED else now[SETTING.get(key, key)]
            assert found == WORDS.get(str(line[who]), line[who]), key
    tune = recorded["finetune"]
    assert (tune["lr_grid_direct"], tune["lr_grid_after_bilevel"]) == ([*GRID], [*ALIGNED_GRID])
    for dataset, sizes in recorded["dataset_sizes_train_val_test"].items():
        assert list(BENCHMARKS[dataset].sizes) == sizes


def test_what_is_fixed_in_the_code_is_what_the_paper_says(weights: Path) -> None:
    """Optimisers, betas, schedules, scale: from the objects that the commands build."""
    cfg = AlignConfig(backbone="vit_b16", dataset="cub200")
    phi_P = {"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(2)}
    task: Any = SimpleNamespace(phi=phi_P | {"mask_token": torch.zeros(1, 1, 2)})
    s, _ = align.begin(cfg, torch.zeros(2, 8), task, trainable(init_head(4, 3, rng(0))))
    P, D = s.opt_P.torch, s.opt_D.torch
    assert type(P) is type(D) is torch.optim.AdamW
    assert {group["betas"] for group in P.param_groups} == {(0.9, 0.95)}
    assert {group["betas"] for group in D.param_groups} == {(0.9, 0.999)}
    assert {group["eps"] for group in (*P.param_groups, *D.param_groups)} == {1e-8}
    rates = [[(g.lr, g.weight_decay) for g in opt.groups] for opt in (s.opt_P, s.opt_D)]
    # θ; decoder matrices and mask token; its bias
    assert rates == [[(0.01, 0.05), (1e-4, 0.05), (1e-4, 0.0)], [(6.7e-4, 0.05)]]
    assert (s.opt_P.clip, s.opt_D.clip) == (10.0, 10.0)
    assert all(group["fused"] for group in (*P.param_groups, *D.param_groups))
    for opt, steps, warmup in ((s.opt_P, 10_000, 200), (s.opt_D, 4_000, 80)):
        found = [opt.rate(k, 1.0) for k in (1, warmup, steps)]
        assert found == pytest.approx([1 / (warmup + 1), warmup / (warmup + 1), 1e-6])
    m = Whole(AlignConfig(backbone="vit_mini", weights=weights, dataset="quilts"))
    made: Any = m.pretext_task(torch.zeros(4, 4 * 8 * 64))
    assert (m.backbone.scale, made.mask_ratio) == (1.0, 0.75)


SMALL = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --warmup 1"
SMALL += " --probe-epochs 1 --eval-every 1 --quiet"


def test_the_largest_stable_share_of_the_direct_rate_is_taken(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Instability is planted in the first two candidates; none of them is tried a second time."""
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    tune = f"finetune {own} --epochs 1 --warmup-epochs 0 --seeds 2 --batch 40 --quiet"
    assert cli.run(f"{tune} --grid 1e-2,3e-2 --out direct".split()) == 0
    best = json.loads(Path("direct/result.json").read_text())["lr"]
    line = f"align {own} {SMALL} --d-lr-from direct --out whole".split()
    real, alternations = align.unstable, list[int]()

    def planted(records: Any) -> str | None:
        alternations.append(len(records) - 1)
        return "planted" if len(alternations) in (2, 3) else real(records)

    monkeypatch.setattr(align, "unstable", planted)
    assert cli.run(line) == 0
    assert alternations == [1, 2, 1, 1, 2, 3]
    result = json.loads(Path("whole/result.json").read_text())
    assert result["d_lr"] == pytest.approx(best / 3, rel=2e-3)
    given_up = [f"{best * 2 / 3:.3g}", f"{best / 2:.3g}"]
    assert list(result["unstable"]) == given_up
    assert "alternation 2: planted" in result["unstable"][given_up[0]]
    adapter = Path("whole/adapter.safetensors").read_bytes()
    assert cli.run(f"align {own} {SMALL} --d-lr {result['d_lr']} --out plain".split()) == 0
    assert Path("plain/adapter.safetensors").read_bytes() == adapter  # the run of that rate
    monkeypatch.setattr(align, "unstable", lambda records: "planted")
    capsys.readouterr()
    for code, last, message in [
        (1, f"align {own} {SMALL} --d-lr-from direct --out none", "is stable"),
        (2, f"align {own} {SMALL} --d-lr-from whole --out b", "give a finetune grid of quilts"),
        (2, f"{tune} --from direct/adapter-s0.safetensors --out b", "is fine-tuned already"),
    ]:
        assert cli.run(last.split()) == code
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert not Path("b").exists()
