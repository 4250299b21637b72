"""The align command: its loop, what it builds from the settings, and pretext tasks of one's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fixture
from torch import Tensor
from toy import (
    PEFT_STEPS,
    ROOT,
    align_line,
    align_settings,
    contents,
    done,
    read_records,
    refusal,
)

from align import AlignResult, align, new_pretext_task, prepare, start_state
from bisslight import Passes
from config import (
    ALIGNED_RATES,
    OMNIGLOT,
    RATES,
    AlignConfig,
    FinetuneConfig,
)
from data import rng
from head import init_head
from support.benchmarks import BENCHMARKS
from support.experiment import open_experiment
from support.files import sha256
from support.optim import trainable
from support.recipes import RELEASED, defaults_of

EXAMPLE = ROOT / "examples/rotation.py"


# --- the run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> AlignResult:
    """A finished run of three alternations, the second and the last of which are validated."""
    out = tmp_path_factory.mktemp("align") / "short"
    return align(align_settings(weights, eval_every=2), out)


def test_a_result_says_what_the_last_record_says(short: AlignResult) -> None:
    last = read_records(Path(short.out))[-1]
    assert (short.distance, short.cosine) == (last["distance"][-1], last["cosine"][-1])
    assert short.probe_val is not None
    assert short.probe_val.model_dump() == read_records(Path(short.out))[0]["probe_val"]
    assert (short.val_P.model_dump(), short.val_D.model_dump()) == (last["val_P"], last["val_D"])


def test_every_eval_every_th_alternation_and_the_last_are_validated(short: AlignResult) -> None:
    """The first record is of the probe."""
    records = read_records(Path(short.out))
    assert ["val_P" in record for record in records] == [False, False, True, True]


def test_a_finished_run_is_read_again(short: AlignResult, weights: Path) -> None:
    before = contents(Path(short.out))
    assert align(align_settings(weights, eval_every=2), Path(short.out)) == short
    assert contents(Path(short.out)) == before


def test_preparing_leaves_the_networks_of_the_experiment_and_the_tasks_as_they_were(
    weights: Path,
) -> None:
    """Another run may share the experiment; Algorithm 1 changes φ_P in its own copy."""
    experiment = open_experiment(align_settings(weights, decoder="random"))
    before = {name: x.clone() for name, x in experiment.networks.head.state_dict().items()}
    prepared = prepare(experiment)
    for name, tensor in experiment.networks.head.state_dict().items():
        assert torch.equal(tensor, before[name])
    for name, tensor in prepared.pretext_task.phi.items():
        assert tensor.data_ptr() != prepared.state.phi_P[name].data_ptr()


def test_a_run_without_an_upper_level_tells_nothing_of_q(weights: Path, tmp_path: Path) -> None:
    alone = align(align_settings(weights, upper_steps=0, alternations=1), tmp_path / "alone")
    assert (alone.distance, alone.q_over_g, alone.cosine) == (None, None, None)


def test_recomputing_changes_no_bit(short: AlignResult, weights: Path, tmp_path: Path) -> None:
    """So a run that is short of memory may go on with it."""
    align(align_settings(weights, eval_every=2, recompute=True), tmp_path / "again")
    one, two = (place / "adapter.safetensors" for place in (Path(short.out), tmp_path / "again"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("q_over_g", "cosine", "change"),
    [(0.995, 1.0, 0.005), (1.0, 0.5, 1.0), (0.0, 0.0, 1.0), (None, None, None)],
)
def test_a_result_says_how_far_q_is_from_g_and_when_it_is_hardly(
    q_over_g: float | None, cosine: float | None, change: float | None
) -> None:
    """|q - g| / |g|: by hand; an equilateral triangle is the second."""
    score = {"accuracy": 50.0, "loss": 1.0}
    result = AlignResult.model_validate(
        {"out": "a", "metric": "top-1 accuracy", "cpu_seconds": 1, "seconds": 1, "distance": 1.0}
        | {"q_over_g": q_over_g, "cosine": cosine, "val_P": score, "val_D": score}
        | {"probe_val": score, "backbone": "vit_b16"}
    )
    assert result.change_of_g == (None if change is None else pytest.approx(change, abs=1e-12))
    assert ("--hypergrad identity" in str(result)) == (change == 0.005)


# --- the paper's settings ---------------------------------------------------------------------


FIXED = {  # recorded lines without a setting; the next test looks at most of them
    "lora_dropout", "lora_alpha", "lower_optimizer", "lower_betas", "upper_betas", "norm_pix_loss",
    "lower_encoder_drop_path", "decoder_drop_path", "probe_lr", "optimizer_direct",
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
    "bfloat16 autocast": True,
}  # fmt: skip


@pytest.mark.parametrize("who", ["program", "paper"])
def test_presets_equal_the_recorded_defaults_line_by_line(who: str) -> None:
    """Each preset once; the paper's G lies on the CPU, here beside θ, which gives the same."""
    recorded = json.loads(fixture("official/official_effective_defaults.json").read_text())
    about = {"backbone": "vit_b16", "dataset": "cub200"}
    for section in ("bilevel", "bilevel_cg", "finetune"):
        kind: Any = FinetuneConfig if section == "finetune" else AlignConfig
        preset = defaults_of(kind, RELEASED, about | {"start": "a"}) if who == "program" else {}
        now = kind(**preset | about).model_dump()
        for key, line in recorded[section].items():
            is_elsewhere = (key, who) == ("mfac_device", "paper")
            if key in FIXED or isinstance(line, list) or line[who] is None or is_elsewhere:
                continue
            assert now[SETTING.get(key, key)] == WORDS.get(str(line[who]), line[who]), key
    tune = recorded["finetune"]
    assert (tune["lr_grid_direct"], tune["lr_grid_after_bilevel"]) == ([*RATES], [*ALIGNED_RATES])
    for dataset, sizes in recorded["dataset_sizes_train_val_test"].items():
        assert [*BENCHMARKS[dataset][2]] == sizes


def test_what_is_fixed_in_the_code_is_what_the_paper_says(weights: Path) -> None:
    """Optimisers, betas, schedules, scale: from the objects that the commands build."""
    cfg = AlignConfig(backbone="vit_b16", dataset="cub200")
    phi_P = {"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(2)}
    phi_P["mask_token"] = torch.zeros(1, 1, 2)
    phi_D = trainable(init_head(4, 3, rng(0)))
    _, optimisers = start_state(cfg, torch.zeros(2, 8), phi_P, phi_D)
    opt_P, opt_D, _ = optimisers
    P, D = opt_P.wrapped, opt_D.wrapped
    assert type(P) is type(D) is torch.optim.AdamW
    assert {group["betas"] for group in P.param_groups} == {(0.9, 0.95)}
    assert {group["betas"] for group in D.param_groups} == {(0.9, 0.999)}
    assert {group["eps"] for group in (*P.param_groups, *D.param_groups)} == {1e-8}
    rates = [[(g.lr, g.weight_decay) for g in opt.groups] for opt in (opt_P, opt_D)]
    # θ; decoder matrices and mask token; its bias
    assert rates == [[(0.01, 0.05), (1e-4, 0.05), (1e-4, 0.0)], [(6.7e-4, 0.05)]]
    assert (opt_P.clip, opt_D.clip) == (10.0, 10.0)
    assert all(group["fused"] for group in (*P.param_groups, *D.param_groups))
    for opt, steps, warmup in ((opt_P, 10_000, 200), (opt_D, 4_000, 80)):
        assert opt.rate is not None
        found = [opt.rate(k, 1.0) for k in (1, warmup, steps)]
        assert found == pytest.approx([1 / (warmup + 1), warmup / (warmup + 1), 1e-6])
    opened = open_experiment(AlignConfig(backbone="vit_mini", weights=weights, dataset="quilts"))
    made: Any = new_pretext_task(opened, opened.new_theta(0))
    assert (opened.backbone.scale, made.mask_ratio) == (1.0, 0.75)


# --- a pretext task of one's own --------------------------------------------------------------


def commands() -> list[str]:
    """Those in the example's docstring, typed at the root of the checkout."""
    text = EXAMPLE.read_text().replace("support/omniglot.pth", str(OMNIGLOT))
    lines = text.split('"""')[1].replace("\\\n", " ").splitlines()
    typed = [line.strip() for line in lines]
    return [line.removeprefix("bisslight ") for line in typed if line.startswith("bisslight ")]


@pytest.mark.usefixtures("elsewhere")
def test_the_examples_task_runs_under_its_own_name() -> None:
    """Its loss falls, its digest is kept, PEFT starts from it, the paper's figure stays away.

    A student's own data.py, in the same folder, does not take the place of the program's.
    """
    shutil.copy(EXAMPLE, "rotation.py")
    Path("data.py").write_text("raise RuntimeError('not the program')\n")
    line = commands()[0].replace("examples/", "")
    line += " --alternations 4 --lower-steps 6 --upper-steps 1 --p-batch 16 --d-batch 16"
    line += " --probe-epochs 1 --quiet --out a"
    done(line)
    losses = [record["loss_P"] for record in read_records(Path("a"))[1:]]
    assert sum(losses[-1]) < sum(losses[0])
    config = json.loads(Path("a/config.json").read_text())
    assert config["pretext_sha256"] == sha256(EXAMPLE)
    done(f"finetune --from a {PEFT_STEPS} --quiet --out f")
    origin = json.loads(Path("f/result.json").read_text())["origin"]
    assert origin["definition"]["pretext"] == "Rotation"
    with Path("rotation.py").open("a") as file:  # another task: the run does not go on with it
        file.write("# changed\n")
    assert "--pretext" in refusal(line)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_the_examples_commands_learn_as_they_are_written() -> None:
    """Chance is 4 % of 24 classes."""
    shutil.copytree(EXAMPLE.parent, "examples")
    for line in commands():
        done(f"{line} --quiet")
    assert read_records(Path("runs/rotation"))[0]["probe_val"]["accuracy"] >= 12


def test_rounding_moves_theta_of_ijepa_and_no_loss(
    pretrained: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients get noise of 1e-7 of their largest entry, about what another device rounds.

    AdamW divides each gradient by its own size, so tiny ones move θ as far as others do.
    """
    line = align_line(pretrained, "--rank 4 --lower-steps 3 --p-batch 12 --eval-every 3", "ijepa")
    done(f"{line} --out plain")
    exact = Passes.value_and_gradients
    g = torch.Generator().manual_seed(0)

    def rounded(*given: Any) -> tuple[Tensor, list[Tensor]]:
        value, gradients = exact(*given)
        noise = [torch.randn(x.shape, generator=g) * x.abs().max() for x in gradients]
        return value, [x + 1e-7 * n for x, n in zip(gradients, noise, strict=True)]

    monkeypatch.setattr(Passes, "value_and_gradients", rounded)
    done(f"{line} --out rounded")
    (_, *plain), (_, *moved) = read_records(Path("plain")), read_records(Path("rounded"))
    for first, second in zip(plain, moved, strict=True):
        assert second["loss_P"] == pytest.approx(first["loss_P"], rel=1e-5)
        assert second["loss_D_at_P"] == pytest.approx(first["loss_D_at_P"], rel=1e-5)
    last = pytest.approx(plain[-1]["distance"], rel=5e-2)
    assert moved[-1]["distance"] == last
    assert moved[-1]["distance"] != pytest.approx(plain[-1]["distance"], rel=1e-4)
