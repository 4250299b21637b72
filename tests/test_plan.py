"""What a dry run says of a run: sizes, steps, seconds, and all that the run would refuse."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from toy import (
    MAE_RUN,
    PEFT_STEPS,
    PRETRAIN_STEPS,
    align_line,
    align_settings,
    contents,
    done,
    finetune_line,
    refusal,
    run,
)

from align import Alignment
from config import BACKBONES, AlignConfig, Arch, FinetuneConfig
from extras.plan import (
    count_trials,
    describe_differences,
    describe_length,
    describe_network,
    images_of_share,
    median_seconds,
    reckon,
    seconds_of_align,
    seconds_of_finetune,
    share_of_work,
    tell_duration,
    time_align,
    what_is_left,
)
from support.checkpoints import build_head, check_timm
from support.experiment import open_experiment

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_rates_that_are_there_are_among_those_that_are_unlike_the_paper(
    pretrained: Path,
) -> None:
    """A dry run of one rate into a directory that has another goes on with both."""
    line = finetune_line(pretrained, "--epochs 1 --out f")
    done(line)
    plan = json.loads(done(f"{line} --lr 0.005 --dry-run --json"))
    assert "2 rates" in plan["length"]
    assert plan["unlike the paper"]["lr"] == [0.005, 0.01]


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
    told = describe_length(tuned, 65)
    assert told == "2 trials of 7 epochs of 2 steps: the rate 0.1 with 2 seeds"
    grid = tuned.replace(lr=(1e-3, 3e-3, 1e-2, 3e-2), seeds=8)
    told = describe_length(grid, 64)
    assert told == (
        "11 trials of 7 epochs of 1 step: 4 rates with seed 0, then the best rate with 7 more seeds"
    )


def test_of_one_thing_there_is_no_plural(pretrained: Path) -> None:
    line = align_line(pretrained, "--alternations 1 --upper-steps 1 --probe-epochs 1 --warmup 0")
    told = json.loads(done(f"{line} --dry-run --json"))["length"]
    assert told == "1 epoch of linear probing, 1 alternation of 2 lower steps and 1 upper step"


def test_the_network_is_built_without_its_numbers() -> None:
    """ViT-B of MAE has 85.8 million numbers; a published count."""
    found = describe_network(Arch(), "mae")
    assert found["network"] == "12 layers, width 768, 85.8 million numbers"
    assert found["images"] == "224 x 224 pixels, patches of 16"


def test_times_are_for_people() -> None:
    assert [tell_duration(seconds) for seconds in (1, 600, 36_000)] == [
        "1 second", "10 minutes", "10.0 hours"
    ]  # fmt: skip


def test_a_dry_run_takes_a_step_of_each_level_and_writes_nothing(pretrained: Path) -> None:
    plan = json.loads(done(align_line(pretrained, "--dry-run --json")))
    assert {"lower step", "upper step", "probing step", "validation", "about"} <= plan.keys()
    plan = json.loads(done(finetune_line(pretrained, "--dry-run --json")))
    assert {"training step", "validation", "about"} <= plan.keys()
    said = done(finetune_line(pretrained, "--dry-run"))
    assert "1 trial of 2 epochs of 2 steps: the rate 0.01 with 1 seed" in said and "{" not in said
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    monkeypatch.setitem(BACKBONES, "vit_b16", BACKBONES["vit_mini"])
    plan = json.loads(done("finetune --backbone vit_b16 --dataset quilts --dry-run --json"))
    assert plan["weights"].endswith("mae_pretrain_vit_base_full.pth, to be fetched, 448 MB")
    assert plan["network"].startswith("4 layers")
    assert "timed with random weights, since the real ones are not here" in plan["about"]
    assert "timing steps with random weights, which may take some minutes" in caplog.text
    monkeypatch.setattr("extras.plan.MOST_NUMBERS", 1)
    plan = json.loads(done("finetune --backbone vit_b16 --dataset quilts --dry-run --json"))
    assert plan["about"].startswith("not known") and "training step" not in plan


@pytest.mark.parametrize(
    ("backbone", "told"),
    [
        ("timm:vit_tiny_patch16_224", "augreg_in21k_ft_in1k (the paper's are of MAE or I-JEPA)"),
        ("timm:vit_small_patch16_224.dino", "dino (the paper's are of MAE or I-JEPA)"),
        ("timm:vit_base_patch16_224.mae", None),
        ("timm:vit_huge_patch14_gap_224.in1k_ijepa", None),
        ("timm:local-dir:somewhere", "perhaps not of MAE or I-JEPA, as the paper's are"),
        ("vit_b16", None),
    ],
)
def test_weights_that_are_not_of_the_papers_kind_are_among_what_is_unlike_it(
    backbone: str, told: str | None
) -> None:
    """By what timm calls them, whether it is named or timm's default; of a file nobody knows."""
    cfg = FinetuneConfig(backbone=backbone, dataset="dtd")
    assert describe_differences(cfg).get("weights") == told
    of_file = describe_differences(cfg.replace(weights="w.pth"))
    assert ("weights" in of_file) == (backbone != "vit_b16")
    assert told is None or of_file["weights"].startswith("perhaps not")


def test_a_network_without_any_weights_in_timm_is_refused_unless_a_file_is_given() -> None:
    name = "timm:vit_giant_patch14_224"
    for more in ("", "--dry-run"):
        said = refusal(f"finetune --backbone {name} --dataset quilts {more}")
        assert f"{name}: timm has no weights of it; give --weights FILE, or an" in said
    check_timm(name, has_file=True)


def test_a_benchmark_that_is_not_here_is_told_in_words() -> None:
    said = run("finetune --backbone vit_l16 --dataset cub200 --dry-run").err
    assert "data/CUB_200_2011 is not here; see --data-root, or `bisslight data download" in said
    assert "Errno" not in said


def test_a_run_of_a_single_step_a_level_can_be_planned(pretrained: Path, elsewhere: None) -> None:
    line = align_line(pretrained, "--lower-steps 1 --upper-steps 1 --warmup 0")
    assert "second" in done(f"{line} --alternations 1 --dry-run")


# --- seconds, by arithmetic ---------------------------------------------------------------------


class FakeClock:
    """A clock that stands still until a step says how long it took."""

    def __init__(self) -> None:
        self.now = 100.0
        self.steps = 0

    def __call__(self) -> float:
        return self.now

    def take(self, *seconds: float) -> Iterator[None]:
        """Steps that take so many seconds each."""
        for each in seconds:
            self.now += each
            self.steps += 1
            yield


def test_the_median_of_steps_leaves_the_first_one_out() -> None:
    """Without the first, of 50 seconds, one of 0.9 among those of 0.1 and 0.2 says nothing."""
    clock = FakeClock()
    assert median_seconds(clock.take(50, 0.1, 0.2, 0.9, 0.2, 0.1), clock) == pytest.approx(0.2)


def test_steps_are_taken_for_3_seconds_or_20_times() -> None:
    for each, taken in ((0.01, 21), (1.0, 4), (40.0, 2)):
        clock = FakeClock()
        assert median_seconds(clock.take(*[each] * 99), clock) == pytest.approx(each)
        assert clock.steps == taken


@pytest.mark.parametrize(
    ("network", "batch", "device", "images"),
    [
        ("vit_mini", 256, "cpu", 256),
        ("vit_b16", 64, "cpu", 6),
        ("vit_l16", 64, "cpu", 2),
        ("vit_l16", 64, "meta", 64),
    ],
)
def test_a_large_step_on_a_cpu_is_reckoned_from_as_many_images_as_are_little_work(
    network: str, batch: int, device: str, images: int
) -> None:
    """ViT-B has 85.8 million numbers and 196 patches, ViT-L 303: 1e11 is work for 5.9 and 1.7."""
    shares: list[float] = []

    def time_steps(share: float) -> dict[str, float]:
        shares.append(share)
        return {"training step": 7.0}

    seconds, told = reckon(time_steps, BACKBONES[network], batch, torch.device(device))
    assert seconds == {"training step": 7.0}
    assert [images_of_share(batch, share) for share in shares] == [images]
    whole = images == batch
    assert told == ("" if whole else f", reckoned from steps with {images} of {batch} images")


def test_the_network_of_timm_that_has_five_million_numbers_is_timed_with_whole_steps() -> None:
    """ViT-tiny, whose step of two images takes nearly as long as one of 57 on a busy CPU."""
    tiny = Arch(dim=192, depth=12, heads=3)
    _, told = reckon(lambda share: {"share": share}, tiny, 64, torch.device("cpu"))
    assert told == ""


def test_the_decoder_of_mae_is_work_of_a_lower_step_too() -> None:
    """By hand: 5.5 million numbers and 26 of the decoder, 196 patches, 256 images: 1.58e12."""
    tiny = Arch(dim=192, depth=12, heads=3)
    with torch.device("meta"):
        head = sum(x.numel() for x in build_head(tiny, "mae").parameters())
    assert head == pytest.approx(26e6, rel=0.05)
    share = share_of_work(tiny, 256, torch.device("cpu"), head)
    assert share == pytest.approx(1e11 / 1.58e12, rel=0.05)
    assert share_of_work(tiny, 256, torch.device("meta"), head) == 1.0


def test_lower_steps_are_timed_with_a_share_of_their_own(pretrained: Path) -> None:
    """Steps of 2 of 8 images count four times; the others are as they are."""
    cfg = align_settings(pretrained / "mae")
    experiment = open_experiment(cfg)
    taken: list[AlignConfig] = []

    def note(short: Alignment) -> tuple[float, float, float]:
        """As if all steps took a second."""
        taken.append(short.cfg)
        return 1.0, 1.0, 1.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("extras.plan.time_alternations", note)
        seconds = time_align(experiment, share=1.0, p_share=0.25)
    assert (taken[0].p_batch, taken[0].d_batch) == (2, 8)
    assert (seconds["lower step"], seconds["upper step"]) == (4.0, 1.0)


def test_the_seconds_of_an_align_run_are_those_of_all_that_it_does() -> None:
    """By hand, with 80 images in batches of 32, so 2.5 steps an epoch.

    Probing 4 * 2.5 * 1 = 10; its validation 100; 25 alternations of 2 * 2 + 5 + 3 * 7 = 30; after
    10, 20 and 25 of them two validations, 600; decoding 1000. After 20: 5 alternations and one
    pair of validations.
    """
    cfg = AlignConfig(
        backbone="vit_mini", dataset="dtd", weights=Path("w"), alternations=25, lower_steps=2,
        upper_steps=3, d_batch=32, probe_epochs=4, eval_every=10, warmup=0,
    )  # fmt: skip
    seconds = {"lower step": 2.0, "curvature": 5.0, "upper step": 7.0, "probing step": 1.0}
    seconds |= {"validation": 100.0, "decoding": 1000.0}
    assert seconds_of_align(cfg, seconds, 80, None) == 10 + 100 + 25 * 30 + 600 + 1000
    assert seconds_of_align(cfg, seconds, 80, 20) == 5 * 30 + 200 + 1000


def test_the_seconds_of_fine_tuning_are_those_of_training_validations_and_tests() -> None:
    """By hand: 3 trials of 7 epochs of 2.5 steps of 2 s, 4 validations of 10 s; 2 tests of 30 s.

    Decoding takes 1 s for validation images, and 3 s for three times as many test images. With
    --test-curve each validation scores the test images, too.
    """
    cfg = FinetuneConfig(
        backbone="vit_mini", dataset="dtd", weights=Path("w"), batch=32, epochs=7, eval_epochs=2,
        warmup_epochs=0, lr=0.1,
    )  # fmt: skip
    seconds = {"training step": 2.0, "validation": 10.0, "decoding": 1.0}
    sizes = {"train": 80, "val": 20, "test": 60}
    assert seconds_of_finetune(cfg, seconds, sizes, 3, 2) == 3 * (35 + 40) + 60 + 4
    curve = cfg.replace(test_curve=True)
    assert seconds_of_finetune(curve, seconds, sizes, 3, 2) == 3 * (35 + 160) + 60 + 4
    assert seconds_of_finetune(cfg.replace(batch=256), seconds, sizes, 1, 0) == 14 + 40 + 4


# --- what is there already ----------------------------------------------------------------------


def test_trials_that_are_there_are_not_counted_again(runs: Path, tmp_path: Path) -> None:
    """The run has two rates with seed 0, and the best one with seed 1, too: 3 trials, 2 tests."""
    out = tmp_path / "out"
    shutil.copytree(runs / "without", out)
    result = json.loads((out / "result.json").read_text())
    best, rates = result["lr"], tuple(result["rates"])
    cfg = FinetuneConfig(
        backbone="vit_mini", dataset="dtd", weights=Path("w"), lr=rates, seeds=2, warmup_epochs=0
    )
    assert what_is_left(cfg, tmp_path / "new") == (3, 2, True)
    assert what_is_left(cfg, out) == (0, 0, True)
    assert what_is_left(cfg.replace(seeds=5), out) == (3, 3, True)
    (out / f"lr{best}-s1/result.json").unlink()
    (out / f"lr{best}-s1/test.json").unlink()
    assert what_is_left(cfg, out) == (1, 1, True)
    (out / f"lr{best}-s0/result.json").unlink()  # now either rate may be the best
    assert what_is_left(cfg, out) == (2, 2, True)  # neither has its other trial


def test_a_finished_run_has_nothing_left_to_do(runs: Path, weights: Path) -> None:
    line = align_line(weights.parent, f"--warmup 0 --out {runs}/aligned --dry-run")
    assert "nothing is left to do" in done(line)
    line = finetune_line(weights.parent, f"--lr 1e-3 --out {runs}/without --dry-run")
    said = done(line)
    assert "3 trials" in said and "2 rates with seed 0" in said  # with all that is there
    assert "nothing is left to do" in said
    assert "1 of them is left" in done(f"{line} --seeds 3")
    assert "; 2 of them are left" in done(f"{line} --seeds 4")
    # A third rate is tried with seed 0. If it is the best one, it lacks seeds 1 and 2, else one.
    assert "; at most 3 of them are left" in done(f"{line} --lr 3e-3 --seeds 3")


PRETRAIN = f"pretrain --backbone vit_mini --pool pool {PRETRAIN_STEPS} --quiet"


def make_pool() -> None:
    """Five images in ./pool."""
    Path("pool").mkdir()
    for number in range(5):
        Image.new("RGB", (20, 20), (50 * number, 0, 0)).save(f"pool/{number}.png")


def test_pretraining_is_timed_and_its_directory_looked_at() -> None:
    make_pool()
    plan = json.loads(done(f"{PRETRAIN} --batch 4 --epochs 6 --dry-run --json --out p"))
    assert plan["length"] == "6 epochs of 1 step"
    assert "training step" in plan and "as it is now" in plan["about"]
    assert not Path("p").exists()
    done(f"{PRETRAIN} --batch 4 --out p")
    assert "nothing is left to do" in done(f"{PRETRAIN} --batch 4 --out p --dry-run")
    said = refusal(f"{PRETRAIN} --batch 4 --epochs 6 --out p --dry-run")
    assert "is another run: epochs 1 -> 6" in said
    Path("pool/3.png").write_bytes(b"no image")
    assert "3.png" in refusal(f"{PRETRAIN} --out q --dry-run", code=1)


def test_a_network_of_timm_says_whether_its_weights_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "finetune --backbone timm:test_vit --dataset quilts --epochs 1 --warmup-epochs 0"
    monkeypatch.setattr("extras.plan.find_timm", lambda name: None)
    monkeypatch.setattr("extras.plan.MOST_STEPS", 2)
    plan = json.loads(done(f"{line} --dry-run --json"))
    assert plan["weights"].startswith(
        "timm's own (r160_in1k), not in HF_HOME, to be fetched, about 1 MB; without internet here"
    )
    assert plan["unlike the paper"]["weights"].startswith("r160_in1k (the paper's are of MAE")
    assert "/timm/test_vit.r160_in1k/" in plan["weights"] and "--weights FILE" in plan["weights"]
    assert "timed with random weights" in plan["about"]
