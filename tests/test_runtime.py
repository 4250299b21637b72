"""Schedules against recorded ones, optimisers against formulas, files against interruptions."""

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import close, recorded

from config import AlignConfig, Data, Model, RunError, UsageError
from runtime import (
    Group,
    Optimiser,
    Schedule,
    constant,
    decay_groups,
    open_run,
    pick_device,
    rng,
    seed_of,
    write_atomic,
)


@pytest.mark.parametrize("name", ["small", "paper"])
def test_schedules_equal_the_recorded_ones_to_the_bit(name: str) -> None:
    rec = recorded(f"official/lr_schedules_{name}.npz")
    m, f = rec.meta, rec.meta["finetune"]
    lower = Schedule(m["T"] * m["NL"], m["warmup_alternations"] * m["NL"], 1e-6)
    upper = Schedule(m["T"] * m["NU"], m["warmup_alternations"] * m["NU"], 1e-6)
    tuning = Schedule(f["epochs"] * f["len_loader"], f["warm"] * f["len_loader"], 1e-6)
    for steps, rates, schedule, base in [
        ("lower_step", "lower_lora_lr", lower, m["p_lr"]),
        ("lower_step", "lower_decoder_lr", lower, m["p_head_lr"]),
        ("upper_step", "upper_lr", upper, m["d_lr"]),
        ("finetune_step", "finetune_lr", tuning, f["lr"]),
    ]:
        ours = torch.tensor([schedule(k, base) for k in rec[steps].tolist()], dtype=torch.float64)
        assert torch.equal(ours, rec[rates].double())


def test_a_run_shorter_than_its_warm_up_still_has_rates() -> None:
    assert [Schedule(1, 0, 0.0)(1, 0.3), Schedule(2, 2, 0.0)(2, 0.3)] == [0.3, pytest.approx(0.2)]


def test_clipping_is_joint_and_uses_the_recorded_formula() -> None:
    """min(1, c / (norm + 1e-6)) over all tensors together; plain SGD's first step shows the clipped gradient."""
    a, b = (torch.zeros(n, requires_grad=True, dtype=torch.float64) for n in (2, 1))
    opt = Optimiser([Group([a, b], 1.0, 0.0)], constant, None, clip=1e-4)
    g = torch.tensor([3e-4, 0.0, 4e-4], dtype=torch.float64)
    assert float(opt.update([(a, g[:2].clone()), (b, g[2:].clone())])) == pytest.approx(5e-4)
    close(torch.cat([a, b]), -g * 1e-4 / (5e-4 + 1e-6), 1e-12)  # so small that the 1e-6 shows


def test_decay_groups_follow_name_and_axes() -> None:
    names = {
        "w": torch.zeros(2, 2),
        "mask_token": torch.zeros(1, 1, 2),
        "norm.weight": torch.zeros(2),
        "x.bias": torch.zeros(2, 2),
    }
    decayed, plain = decay_groups(names, 0.1, 0.05)
    assert [len(decayed.tensors), len(plain.tensors)] == [2, 2]
    assert (decayed.weight_decay, plain.weight_decay) == (0.05, 0.0)


def test_seeds_are_stable_across_platforms_and_purposes() -> None:
    assert seed_of(0, "mask", 1) == int.from_bytes(sha256(b"0/mask/1").digest()[:8], "big") // 2
    assert seed_of(0, "mask", 1) != seed_of(0, "mask", 2) != seed_of(1, "mask", 2)
    assert torch.equal(torch.rand(3, generator=rng(0, "a")), torch.rand(3, generator=rng(0, "a")))


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    write_atomic(file, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*unchanged"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def config(**changes: object) -> AlignConfig:
    return AlignConfig(model=Model(backbone="vit_mini"), data=Data(dataset="quilts"), **changes)  # type: ignore[arg-type]


def test_a_run_directory_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="holds files of something else"):
        open_run(tmp_path / "mine", "align", config(), resume=False, force=True)
    run = open_run(tmp_path / "run", "align", config(), resume=False, force=False)
    with pytest.raises(UsageError, match="an unfinished run, --resume continues it"):
        open_run(tmp_path / "run", "align", config(), resume=False, force=False)
    with pytest.raises(UsageError, match=r"settings differ.*seed 0 -> 1"):
        open_run(tmp_path / "run", "align", config(seed=1), resume=True, force=False)
    with pytest.raises(UsageError, match="is not a run of `finetune`"):
        open_run(tmp_path / "run", "finetune", config(), resume=True, force=False)
    with pytest.raises(UsageError, match="weights_sha256 None -> other"):
        open_run(tmp_path / "run", "align", config(), resume=True, force=False, weights_sha256="other")
    other_machine = config(machine={"workers": 3})
    assert open_run(tmp_path / "run", "align", other_machine, resume=True, force=False).resumed
    run.finish({"done": True})
    with pytest.raises(UsageError, match="is finished, there is nothing to resume"):
        open_run(tmp_path / "run", "align", config(), resume=True, force=False)
    with pytest.raises(UsageError, match="a finished run, --force starts it over"):
        open_run(tmp_path / "run", "align", config(), resume=False, force=False)
    (tmp_path / "run" / "picture.png").write_text("the user's own")
    with pytest.raises(UsageError, match="is not a run of `finetune`, choose another --out"):
        open_run(tmp_path / "run", "finetune", config(), resume=False, force=True)
    open_run(tmp_path / "run", "align", config(), resume=False, force=True)
    assert (tmp_path / "run" / "picture.png").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    with pytest.raises(UsageError, match="there is no run in"):
        open_run(tmp_path / "new", "align", config(), resume=True, force=False)
    assert not (tmp_path / "new").exists()


def test_a_machine_without_git_can_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    open_run(tmp_path / "run", "align", config(), resume=False, force=False)
    assert json.loads((tmp_path / "run" / "env.json").read_text())["commit"] is None


def test_the_saved_config_is_the_config(tmp_path: Path) -> None:
    cfg = config(bilevel={"lam": 0.25})
    open_run(tmp_path / "run", "align", cfg, resume=False, force=False)
    assert AlignConfig.model_validate(json.loads((tmp_path / "run" / "config.json").read_text())) == cfg


def test_a_device_that_is_not_there_is_an_error() -> None:
    assert pick_device("auto").type in ("cpu", "cuda")
    for name in ("cuda:77", "abacus"):
        with pytest.raises(UsageError, match=f"--device {name}: not available here"):
            pick_device(name)
