"""What a dry run says of a run: sizes, steps, seconds, and all that the run would refuse."""

import json
from pathlib import Path

import pytest
from toy import MAE_RUN, PEFT_STEPS, align_line, contents, done, finetune_line, refusal, run

from config import AlignConfig, Arch, FinetuneConfig
from extras.plan import count_trials, describe_length, describe_network, in_hours

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_trials_are_each_rate_with_the_first_seeds_and_the_best_with_all() -> None:
    """Two of three rates are tried with 2 seeds each for nothing: 4 + 5 trials."""
    cfg = FinetuneConfig(
        backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2,1e-1", grid_seeds=2, seeds=5
    )
    assert count_trials(cfg) == 9
    assert count_trials(cfg.replace(lr=(1e-3,))) == 5


def test_the_length_is_told_in_steps() -> None:
    """65 images in batches of 64 are two steps."""
    given = {"backbone": "vit_b16", "dataset": "dtd"}
    tuned = FinetuneConfig(**given, batch=64, epochs=7, lr=0.1, seeds=2, warmup_epochs=0)
    assert describe_length(tuned, 65) == "2 trials of 7 epochs of 2 steps"
    assert "500 alternations of 20 lower and 8 upper" in describe_length(AlignConfig(**given), 65)


def test_the_network_is_built_without_its_numbers() -> None:
    """ViT-B of MAE has 85.8 million numbers; a published count."""
    found = describe_network(Arch(), "mae")
    assert found["network"] == "12 layers, width 768, 85.8 million numbers"
    assert found["images"] == "224 x 224 pixels, patches of 16"


def test_times_are_for_people() -> None:
    assert [in_hours(seconds) for seconds in (1, 600, 36_000)] == [
        "1 seconds", "10 minutes", "10.0 hours"
    ]  # fmt: skip


def test_a_dry_run_takes_a_step_of_each_level_and_writes_nothing(pretrained: Path) -> None:
    plan = json.loads(done(align_line(pretrained, "--dry-run --json")))
    assert {"lower step", "upper step", "validation batch", "about"} <= plan.keys()
    plan = json.loads(done(finetune_line(pretrained, "--dry-run --json")))
    assert {"training step", "validation batch", "about"} <= plan.keys()
    said = done(finetune_line(pretrained, "--dry-run"))
    assert "1 trials of 2 epochs of 2 steps" in said and "{" not in said
    assert contents(Path()) == {}


def test_a_dry_run_refuses_the_directory_of_another_run(runs: Path, weights: Path) -> None:
    line = align_line(weights.parent, f"--warmup 0 --out {runs}/aligned --rank 4 --dry-run")
    assert "is another run: rank 8 -> 4" in refusal(line)
    done(align_line(weights.parent, f"--warmup 0 --out {runs}/aligned --dry-run"))
    model = MAE_RUN.format(weights=weights)
    other = f"finetune {model} {PEFT_STEPS} --seeds 2 --out {runs}/with --dry-run"
    assert "is another run" in refusal(other)


@pytest.mark.parametrize(
    ("name", "said"), [("resnet50", "ResNet"), ("vit_smal_patch16_224", "vit_small")]
)
def test_a_dry_run_looks_networks_of_timm_up(name: str, said: str) -> None:
    assert said in refusal(f"finetune --backbone timm:{name} --dataset quilts --dry-run")


def test_weights_that_are_fetched_are_told_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    plan = json.loads(done("finetune --backbone vit_b16 --dataset quilts --dry-run --json"))
    assert plan["weights"].endswith("mae_pretrain_vit_base_full.pth, to be fetched, 448 MB")
    assert plan["network"].startswith("12 layers")


def test_a_benchmark_that_is_not_here_is_told_in_words() -> None:
    said = run("finetune --backbone vit_l16 --dataset cub200 --dry-run").err
    assert "data/CUB_200_2011 is not here; see --data-root, or `bisslight data download" in said
    assert "Errno" not in said


def test_a_run_of_a_single_step_a_level_can_be_planned(pretrained: Path, elsewhere: None) -> None:
    line = align_line(pretrained, "--lower-steps 1 --upper-steps 1 --warmup 0")
    assert "second" in done(f"{line} --alternations 1 --dry-run")
