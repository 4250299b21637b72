"""What settings open, and a pretext task of one's own: found, tried, left as it was."""

import shutil
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from quilts import quilts
from toy import ALIGN_STEPS, ROOT, align_settings, done, refusal

from align import align
from config import FinetuneConfig
from data import Pool, Split, Task, decode_once
from support import experiment, pretext
from support.errors import UsageError
from support.experiment import open_align_experiment, set_up_device
from support.processes import World

EXAMPLE = ROOT / "examples/rotation.py"


def own_task(folder: Path, body: str) -> str:
    """The name of a task that is the example's but for the members in `body`."""
    file = folder / "mine.py"
    file.write_text(
        f"{EXAMPLE.read_text()}\n\nclass Mine(Rotation):\n{indent(dedent(body), '    ')}"
    )
    return f"{file}:Mine"


# --- a pretext task of one's own --------------------------------------------------------------


def test_a_class_or_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    name = own_task(tmp_path, "pass")
    with pytest.raises(UsageError, match=r"Main.*Mine"):
        pretext.load_task_class(name.replace("Mine", "Main"))
    with pytest.raises(UsageError, match=r"none\.py"):
        pretext.load_task_class(f"{tmp_path}/none.py:Mine")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("def draw(self, B, rng):\n    raise KeyError", KeyError),
        ("def loss(self, theta, phi, batch):\n    return 1 / 0", ZeroDivisionError),
        (
            "def loss(self, theta, phi, batch):\n    return super().loss(theta, phi, batch) / 0",
            ValueError,
        ),
    ],
    ids=["draw", "loss", "not finite"],
)
def test_an_error_in_a_task_shows_before_the_long_work(
    weights: Path, tmp_path: Path, body: str, error: type[Exception]
) -> None:
    """As Python tells it; there is no run directory yet."""
    cfg = align_settings(weights, pretext=own_task(tmp_path, body))
    with pytest.raises(error):
        align(cfg, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_first_step_leaves_task_and_random_numbers_as_they_were(
    weights: Path, tmp_path: Path
) -> None:
    """A task that counts its steps in `state`, and draws from torch's global generator."""
    body = """
    def after_step(self, theta_P):
        self.state["steps"] = torch.rand(()) + 1
    """
    opened = open_align_experiment(align_settings(weights, pretext=own_task(tmp_path, body)))
    theta = opened.new_theta(0)
    before = torch.get_rng_state()
    task = opened.new_pretext_task(theta)
    assert torch.equal(torch.get_rng_state(), before)
    assert "steps" not in task.state
    assert torch.equal(theta, opened.new_theta(0))


def test_a_loss_that_compares_images_gets_whole_batches(weights: Path, tmp_path: Path) -> None:
    """Also in the first step; pieces are refused before any work, with what to do."""
    body = """
    mean_over_images = False

    def loss(self, theta, phi, batch):
        assert len(batch.images) == 8
        return super().loss(theta, phi, batch)
    """
    name = own_task(tmp_path, body)
    trial = open_align_experiment(align_settings(weights, pretext=name))
    trial.new_pretext_task(trial.new_theta(0))
    cut = align_settings(weights, pretext=name, micro_batch=4)
    with pytest.raises(UsageError, match=r"mine\.py:Mine: .* leave micro-batches out"):
        align(cut, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- what is opened ---------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 3])
def test_test_images_that_are_in_the_pool_are_counted(
    caplog: pytest.LogCaptureFixture, shared: int
) -> None:
    files = [Path(f"{number}.png") for number in range(9)]
    split = Split(files, torch.zeros(9))
    caplog.set_level("INFO", "bisslight")
    experiment.tell_test_images(
        Task("own", split, split, split, ["a"]), Pool([Path("x.png"), *files[:shared]])
    )
    assert [str(shared) in told for told in caplog.messages] == [True] * (shared > 0)


def test_a_random_decoder_is_drawn_by_the_seed_and_not_into_the_checkpoints(weights: Path) -> None:
    trial = open_align_experiment(align_settings(weights, decoder="random"))
    theta = trial.new_theta(0)
    loaded = {name: x.clone() for name, x in trial.pretext_head.state_dict().items()}
    first = trial.new_pretext_task(theta).phi["decoder_embed.weight"]
    assert torch.equal(first, trial.new_pretext_task(theta).phi["decoder_embed.weight"])
    other = replace(trial, cfg=trial.cfg.replace(seed=1)).new_pretext_task(theta)
    assert not torch.equal(first, other.phi["decoder_embed.weight"])
    for name, x in trial.pretext_head.state_dict().items():
        assert torch.equal(x, loaded[name])


def test_a_device_that_is_not_for_training_is_refused() -> None:
    with pytest.raises(UsageError, match="--device meta"):
        set_up_device(FinetuneConfig(backbone="vit_mini", dataset="quilts", device="meta"))


def test_one_thread_serves_the_smallest_network_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    small = FinetuneConfig(backbone="vit_mini", dataset="quilts", device="cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_up_device(small)
    assert asked == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_up_device(small)
    assert asked == [1]


def test_batches_that_cannot_be_shared_out_are_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quilts have 80 training images: the last of 79 is alone, and BatchNorm needs two."""
    opened = open_align_experiment(align_settings(weights))
    opened.check_batches("--d-batch", 79)
    with_norm = replace(opened, cfg=align_settings(weights, head="batchnorm"))
    with_norm.check_batches("--d-batch", 80)
    with pytest.raises(UsageError, match=r"--d-batch 79: .* has 1 images, BatchNorm needs 2"):
        with_norm.check_batches("--d-batch", 79)
    cut = replace(opened, cfg=align_settings(weights, head="batchnorm", micro_batch=4))
    with pytest.raises(UsageError, match="--micro-batch: a BatchNorm head"):
        cut.check_batches("--d-batch", 80)
    monkeypatch.setattr(experiment, "world", lambda: World(rank=0, size=9))
    with pytest.raises(UsageError, match="has 8 images, the processes need 9"):
        opened.check_batches("--d-batch", 12)
    with pytest.raises(UsageError, match="--p-batch 8: give each of 9 processes an image"):
        opened.check_pretext_batches()


def test_an_empty_pool_and_a_name_for_handed_in_data_are_refused(
    weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--pool {tmp_path}: no images in {tmp_path}"):
        experiment.open_pool(str(tmp_path), tmp_path, 0)
    for field in ("dataset", "pool"):
        with pytest.raises(UsageError, match=f"--{field} own:1f: was handed in from Python"):
            open_align_experiment(align_settings(weights, **{"pool": "quilts", field: "own:1f"}))
    whole, _ = quilts(0)
    with pytest.raises(UsageError, match=r"pixels in \[0, 1\]"):
        open_align_experiment(align_settings(weights), pool=Pool(2 * torch.as_tensor(whole.images)))


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
    opened = open_align_experiment(align_settings(weights))
    head = opened.new_head("head", 0).with_stats
    everything = opened.logits(opened.task.val, opened.new_theta(0), head)
    for first, end in ((0, 0), (30, 50)):
        monkeypatch.setattr(experiment, "own_part", lambda n, part=slice(first, end): part)
        found = opened.logits(opened.task.val, opened.new_theta(0), head)
        torch.testing.assert_close(found, everything[first:end])
