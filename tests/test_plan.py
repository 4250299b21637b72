"""What a dry run says of a run: sizes, steps, seconds, and all that the run would refuse."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from toy import (
    MAE_RUN,
    PEFT_STEPS,
    PRETRAIN_STEPS,
    align_line,
    contents,
    done,
    finetune_line,
    refusal,
)

from config import BACKBONES, Arch, FinetuneConfig
from extras.plan import count_done, describe_sizes
from support.trials import count_trials

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_trials_are_each_rate_with_the_first_seeds_and_the_best_with_all() -> None:
    """Two of three rates are tried with 2 seeds each for nothing: 4 + 5 trials."""
    cfg = FinetuneConfig(
        backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2,1e-1", grid_seeds=2, seeds=5
    )
    assert count_trials(cfg) == 9
    assert count_trials(cfg.replace(lr=(1e-3,))) == 5


def test_the_network_is_built_without_its_numbers() -> None:
    """ViT-B of MAE has 85.8 million numbers; a published count."""
    found = describe_sizes(Arch())
    assert found["network"] == "12 layers, width 768, 85.8 million numbers"
    assert found["images"] == "224 x 224 pixels, patches of 16"


def test_a_dry_run_takes_a_step_of_each_level_and_writes_nothing(pretrained: Path) -> None:
    plan = json.loads(done(align_line(pretrained, "--dry-run --json")))
    assert {"lower step", "upper step", "validation", "about"} <= plan.keys()
    assert (plan["train"], plan["val"], plan["test"]) == (80, 24, 48)
    assert plan["unlike the paper"]["lower_steps"] == [2, 20]
    assert not {"partition", "dataset", "weights"} & plan["unlike the paper"].keys()
    plan = json.loads(done(finetune_line(pretrained, "--dry-run --json")))
    assert {"training step", "validation", "about"} <= plan.keys()
    said = done(finetune_line(pretrained, "--dry-run"))
    assert "1 trial of 2 epochs of 2 steps: 1 rate, 1 seed" in said and "{" not in said
    assert contents(Path()) == {}


def test_a_dry_run_refuses_the_directory_of_another_run(runs: Path, weights: Path) -> None:
    line = align_line(weights.parent, f"--warmup 0 --out {runs}/aligned --rank 4 --dry-run")
    assert "is another run: rank 8 -> 4" in refusal(line)
    model = MAE_RUN.format(weights=weights)
    other = f"finetune {model} {PEFT_STEPS} --seeds 2 --out {runs}/with --dry-run"
    assert "is another run" in refusal(other)


def test_weights_that_are_fetched_are_told_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    monkeypatch.setitem(BACKBONES, "vit_b16", BACKBONES["vit_mini"])
    plan = json.loads(done("finetune --backbone vit_b16 --dataset quilts --dry-run --json"))
    assert plan["weights"].endswith("_base_full.pth, to be fetched, about 448 MB")
    assert plan["network"].startswith("4 layers") and "training step" not in plan


def test_what_is_there_is_told_and_not_counted_again(runs: Path, weights: Path) -> None:
    line = align_line(weights.parent, f"--warmup 0 --out {runs}/aligned --dry-run --json")
    plan = json.loads(done(line))
    assert plan["out"] == f"{runs}/aligned, 3 of 3 done" and "about" not in plan
    line = finetune_line(weights.parent, f"--lr 1e-3 --out {runs}/without --dry-run --json")
    plan = json.loads(done(line))  # with all that is there: two rates and two seeds
    assert "2 rates, 2 seeds" in plan["length"] and "3 of 3 done" in plan["out"]
    assert plan["unlike the paper"]["lr"][0] == [0.001, 0.01]
    assert "3 of 5 done" in json.loads(done(f"{line} --seeds 4"))["out"]


PRETRAIN = f"pretrain --backbone vit_mini --pool pool {PRETRAIN_STEPS} --quiet"


def make_pool() -> None:
    """Five images in ./pool."""
    Path("pool").mkdir()
    for number in range(5):
        Image.new("RGB", (20, 20), (50 * number, 0, 0)).save(f"pool/{number}.png")


@pytest.mark.parametrize(("accuracy", "done"), [(None, 1), (60.0, 2), (40.0, 4)])
def test_trials_are_done_if_their_rate_is_known_to_be_the_best(
    accuracy: float | None, done: int, tmp_path: Path
) -> None:
    """0.01 has three seeds with 50 %. 0.1 is added: it is not tried yet, or better, or worse."""
    told = {"start_sha256": None, "start_cpu_seconds": 0, "cpu_seconds": 1, "seconds": 1}
    trials = [(0.01, 0, 50.0), (0.01, 1, 50.0), (0.01, 2, 50.0)]
    trials += [(0.1, 0, accuracy)] if accuracy else []
    for rate, seed, percent in trials:
        val = {"accuracy": percent, "loss": 1.0}
        place = tmp_path / f"lr{rate}-s{seed}"
        place.mkdir()
        content = json.dumps({"lr": rate, "seed": seed, "val": val} | told)
        (place / "result.json").write_text(content)
    shutil.copytree(tmp_path / "lr0.01-s1", tmp_path / "lr0.01-s1 (copy)")
    cfg = FinetuneConfig(backbone="vit_mini", dataset="dtd", lr=(0.01, 0.1), seeds=3)
    assert count_done(cfg, tmp_path) == done


def test_pretraining_is_timed_and_its_directory_looked_at() -> None:
    make_pool()
    plan = json.loads(done(f"{PRETRAIN} --batch 4 --epochs 6 --dry-run --json --out p"))
    assert plan["length"] == "6 epochs of 1 step"
    assert "training step" in plan and "as busy as now" in plan["about"]
    assert "pool" not in plan["unlike the paper"]  # it has no default to be unlike of
    assert not Path("p").exists()
    done(f"{PRETRAIN} --batch 4 --out p")
    assert "p, 1 of 1 done" in done(f"{PRETRAIN} --batch 4 --out p --dry-run")
    said = refusal(f"{PRETRAIN} --batch 4 --epochs 6 --out p --dry-run")
    assert "is another run: epochs 1 -> 6" in said
    Path("pool/3.png").write_bytes(b"no image")
    assert "3.png" in refusal(f"{PRETRAIN} --out q --dry-run", code=1)


def test_fine_tuning_can_be_planned_before_the_run_that_it_starts_from(pretrained: Path) -> None:
    """With the network and data that are given, and the rates after align; else in one line."""
    line = finetune_line(pretrained, "--from a --dry-run --json").replace("--lr 1e-2", "")
    plan = json.loads(done(line))
    assert plan["start"].startswith(str(Path("a").absolute()))
    assert "6 rates" in plan["length"] and "lr" not in plan["unlike the paper"]
    assert "training step" in plan
    said = refusal("finetune --from a --dry-run")
    assert "--from a" in said and "--backbone" in said and "--dataset" in said
