"""What settings open, and a pretext task of one's own: found, tried, left as it was."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quilts import quilts
from toy import ALIGN_SETTINGS, ALIGN_STEPS, ROOT, align_line, done, refusal

from align import align
from config import AlignConfig, FinetuneConfig
from data import Pool, decode_once
from support import experiment, pretext
from support.errors import UsageError
from support.experiment import AlignExperiment, Experiment

EXAMPLE = ROOT / "examples/rotation.py"


def settings(weights: Path, **more: Any) -> AlignConfig:
    given: dict[str, Any] = {"backbone": "vit_mini", "dataset": "quilts", "weights": weights}
    return AlignConfig(**given | {"device": "cpu"} | ALIGN_SETTINGS | more)


def changed_example(folder: Path, *changes: tuple[str, str]) -> str:
    """The name of the example's task in a copy of its file, with these changes."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / "mine.py"
    file.write_text(text)
    return f"{file}:Rotation"


# --- a pretext task of one's own --------------------------------------------------------------


def test_a_class_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    """The example's NamedTuple, and what it imports, are no tasks."""
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text() + "\n\nclass Brightness:\n    pass\n")
    with pytest.raises(UsageError) as told:
        pretext.load_task_class(f"{tmp_path}/mine.py:Rotate")
    assert str(told.value).endswith("mine.py has Rotation, Brightness; did you mean Rotation?")
    (tmp_path / "none.py").write_text("from lora import Backbone\n")
    with pytest.raises(UsageError, match=r"none\.py has no class"):
        pretext.load_task_class(f"{tmp_path}/none.py:Rotation")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch\nimport nothing_of_that_name", "nothing_of_that_name.* \\(line 2\\)"),
        ("def broken(:\n", "SyntaxError"),
        ("x = 1 / 0\n", "ZeroDivisionError.* \\(line 1\\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_line(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match=f"broken.py:Task: cannot be imported .*{told}"):
        pretext.load_task_class(f"{tmp_path}/broken.py:Task")


def test_all_members_that_are_missing_are_named_at_once(weights: Path, tmp_path: Path) -> None:
    name = changed_example(
        tmp_path,
        ("def draw", "def drew"),
        ("def after_step", "def after"),
        ("self.state:", "self.states:"),
    )
    trial = AlignExperiment(settings(weights, pretext=name))
    with pytest.raises(UsageError, match=r"mine\.py:Rotation: has no state, draw, after_step;"):
        trial.pretext_task(trial.new_theta())


LOSS = 'return F.cross_entropy(F.linear(x, phi["weight"], phi["bias"]), batch.turns)'
WRONG = {  # change -> what is told
    "settings: object, rng: torch.Generator": ("settings: object", "__init__: TypeError"),
    "return (torch.randint(4, (B,), generator=rng),)": (
        "return (torch.randint(4, (B + 1,), generator=rng),)",
        r"draw: needs to return a tuple of tensors \(n, ...\)",
    ),
    "return Batch(torch.stack": ("return (torch.stack", "prepare: needs to return a NamedTuple"),
    "for image, k in pairs]), turns)": (
        "for image, k in pairs]), turns[:1])",
        "prepare: turns has to be None or a tensor",
    ),
    "x = features(self.backbone, theta, batch.images)": (
        "x = features(self.backbone, theta, batch.images)[:, 1:]",
        r"loss: RuntimeError: .* \(line 54\)",
    ),
    LOSS: (LOSS.replace("return", "return 1 * torch.ones(2) *"), "loss: has to be a finite scalar"),
    "torch.zeros(4)}": ("torch.zeros(4), 'more': weight}", 'does not depend on phi\\["more"\\]'),
    "features(self.backbone, theta,": ("features(self.backbone, None,", "not depend on theta"),
    '"bias": torch.zeros(4)': ('"bias": 0.0', "phi: needs to be a dictionary of tensors"),
    "F.linear(x, ": ("F.linear(x.detach() / 0, ", "loss: has to be a finite scalar, is nan"),
    "F.cross_entropy(F.linear(x": (  # √0 has no gradient
        "F.cross_entropy(F.linear((x - x).abs() ** 0.5",
        "loss: its gradient with respect to theta is not finite",
    ),
}


@pytest.mark.parametrize("old", WRONG)
def test_a_task_that_cannot_work_is_told_before_the_linear_probe(
    pretrained: Path, tmp_path: Path, old: str
) -> None:
    """In one line that names file, class and member; there is no run directory yet."""
    new, told = WRONG[old]
    name = changed_example(tmp_path, (old, new))
    line = refusal(align_line(pretrained, f"--pretext {name} --out {tmp_path}/a"))
    assert re.search(f"mine.py:Rotation: .*{told}", line), line
    assert not (tmp_path / "a").exists()


def test_the_trial_leaves_task_and_random_numbers_as_they_were(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that counts its batches in `state`, and shuffles with torch's global generator."""
    name = changed_example(
        tmp_path,
        ("= {}  # no teacher", '= {"seen": torch.zeros(())}  # no teacher'),
        (
            "pairs = zip(images, turns.tolist(), strict=True)",
            'self.state["seen"] += len(images)\n        self.state["late"] = torch.rand(3)\n'
            "        pairs = zip(images, turns.tolist(), strict=True)",
        ),
    )
    trial = AlignExperiment(settings(weights, pretext=name))
    theta = trial.new_theta()
    before = torch.get_rng_state()
    task = trial.pretext_task(theta)
    assert torch.equal(torch.get_rng_state(), before)
    assert {key: float(x) for key, x in task.state.items()} == {"seen": 0.0}
    assert torch.equal(theta, trial.new_theta())
    first = task.phi["weight"].clone()
    monkeypatch.setattr(experiment, "check_pretext_task", lambda *_: None)
    assert torch.equal(first, trial.pretext_task(theta).phi["weight"])


def test_a_run_with_the_trial_is_the_run_without(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    cfg = settings(weights, pretext=f"{tmp_path}/mine.py:Rotation")
    one = align(cfg, tmp_path / "one")
    monkeypatch.setattr(experiment, "check_pretext_task", lambda *_: None)
    other = align(cfg, tmp_path / "other")
    assert one.adapter.read_bytes() == other.adapter.read_bytes()
    lines = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("one", "other")]
    assert lines[0] == lines[1]


def test_a_loss_that_compares_images_gets_whole_batches(weights: Path, tmp_path: Path) -> None:
    """Also in the trial; pieces are refused before any work, with what to do."""
    name = changed_example(
        tmp_path,
        ("class Rotation:", "class Rotation:\n    mean_over_images = False"),
        ("x = features(", "assert len(batch.images) == 8\n        x = features("),
    )
    trial = AlignExperiment(settings(weights, pretext=name))
    trial.pretext_task(trial.new_theta())
    cut = settings(weights, pretext=name, micro_batch=4)
    with pytest.raises(UsageError, match=r"mine\.py:Rotation: .* leave --micro-batch out"):
        align(cut, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- what is opened ---------------------------------------------------------------------------


def test_an_experiment_with_other_settings_leaves_the_first_as_it_was(weights: Path) -> None:
    given: dict[str, Any] = {"backbone": "vit_mini", "dataset": "quilts", "weights": weights}
    cfg = FinetuneConfig(**given)
    first = Experiment(cfg)
    theta = first.new_theta()
    other = first.with_settings(FinetuneConfig(**given, seed=1))
    assert other.backbone is first.backbone and other.task is first.task
    assert not torch.equal(other.new_theta(), theta)
    assert first.cfg is cfg and torch.equal(first.new_theta(), theta)
    assert theta.shape == first.theta_shape == (4, 4 * 8 * 64)


def test_a_random_decoder_is_drawn_by_the_seed_and_not_into_the_checkpoints(weights: Path) -> None:
    trial = AlignExperiment(settings(weights, decoder="random"))
    theta = trial.new_theta()
    loaded = {name: x.clone() for name, x in trial.pretext_head.state_dict().items()}
    first = trial.pretext_task(theta).phi["decoder_embed.weight"]
    assert torch.equal(first, trial.pretext_task(theta).phi["decoder_embed.weight"])
    other = trial.with_settings(trial.cfg.replace(seed=1)).pretext_task(theta)
    assert not torch.equal(first, other.phi["decoder_embed.weight"])
    for name, x in trial.pretext_head.state_dict().items():
        assert torch.equal(x, loaded[name])


def test_one_thread_serves_the_smallest_network_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    cpu = torch.device("cpu")
    experiment.use_one_thread_for_small_networks("vit_mini", cpu)
    monkeypatch.delenv("OMP_NUM_THREADS")
    experiment.use_one_thread_for_small_networks("vit_b16", cpu)
    experiment.use_one_thread_for_small_networks("vit_mini", torch.device("cuda"))
    assert asked == []
    experiment.use_one_thread_for_small_networks("vit_mini", cpu)
    assert asked == [1]


def test_batches_that_cannot_be_shared_out_are_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quilts have 80 training images: the last of 79 is alone, and BatchNorm needs two."""
    opened = AlignExperiment(settings(weights))
    opened.check_batches("--d-batch", 79)
    with_norm = opened.with_settings(settings(weights, head="batchnorm"))
    with_norm.check_batches("--d-batch", 80)
    with pytest.raises(UsageError, match=r"--d-batch 79: .* has 1 images, BatchNorm needs 2"):
        with_norm.check_batches("--d-batch", 79)
    cut = opened.with_settings(settings(weights, head="batchnorm", micro_batch=4))
    with pytest.raises(UsageError, match="--micro-batch: a BatchNorm head"):
        cut.check_batches("--d-batch", 80)
    monkeypatch.setattr(experiment, "world", lambda: (0, 9))
    with pytest.raises(UsageError, match="has 8 images, the processes need 9"):
        opened.check_batches("--d-batch", 12)
    with pytest.raises(UsageError, match="--p-batch 8: give each of 9 processes an image"):
        opened.check_batches("--d-batch", 80)


def test_an_empty_pool_and_a_name_for_handed_in_data_are_refused(
    weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--pool {tmp_path}: no images in {tmp_path}"):
        experiment.open_pool(str(tmp_path), tmp_path, 0)
    for field in ("dataset", "pool"):
        with pytest.raises(UsageError, match=f"--{field} own:1f: was handed in from Python"):
            AlignExperiment(settings(weights, **{"pool": "quilts", field: "own:1f"}))
    whole, _ = quilts(0)
    with pytest.raises(UsageError, match=r"pixels in \[0, 1\]"):
        AlignExperiment(settings(weights), pool=Pool(2 * torch.as_tensor(whole.images)))


def test_align_reads_the_test_images_and_keeps_those_of_validation_alone(
    weights: Path, drawn: Path, tmp_path: Path
) -> None:
    """It never scores the test; a damaged image there is told before it begins nevertheless."""
    shutil.copytree(drawn / "data/shapes", tmp_path / "shapes")
    line = f"align --backbone vit_mini --weights {weights} {ALIGN_STEPS} --quiet"
    line += f" --dataset folder:{tmp_path}/shapes --pool {drawn}/data/pool --out {tmp_path}/run"
    image = tmp_path / "shapes/test/dots/40.png"
    content = image.read_bytes()
    image.write_bytes(content[:200])
    assert str(image) in refusal(line, 1)
    image.write_bytes(content)
    decode_once.cache_clear()
    done(line)
    assert decode_once.cache_info().currsize == 1


def test_a_process_scores_its_own_images_and_may_have_none(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = AlignExperiment(settings(weights))
    head = opened.new_head("head").with_stats
    everything = opened.logits(opened.task.val, opened.new_theta(), head)
    for first, end in ((0, 0), (30, 50)):
        monkeypatch.setattr(experiment, "share", lambda n, part=slice(first, end): part)
        found = opened.logits(opened.task.val, opened.new_theta(), head)
        torch.testing.assert_close(found, everything[first:end])
