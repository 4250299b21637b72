"""Scores, the permutation test by brute force, runs that make an arm, what arms differ in."""

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from toy import refusal

from config import ALIGNED_RATES, RATES, AlignConfig, FinetuneConfig
from data import rng
from evaluate import Arm, Comparison, compare, evaluate, read_arm
from support.definitions import FORMAT
from support.errors import UsageError


def by_hand(a: list[int], b: list[int]) -> float:
    """Share of splits whose means differ at least as much; every split listed, in fractions."""
    pooled, n, m = [*a, *b], len(a), len(b)

    def apart(chosen: tuple[int, ...] | list[int]) -> Fraction:
        return abs(Fraction(sum(chosen), n) - Fraction(sum(pooled) - sum(chosen), m))

    splits = [apart(chosen) >= apart(a) for chosen in combinations(pooled, n)]
    return sum(splits) / len(splits)


@pytest.mark.parametrize(("n", "m"), [(3, 4), (4, 3), (1, 6), (6, 1), (8, 8)])
def test_p_is_the_share_of_splits_that_differ_at_least_as_much(n: int, m: int) -> None:
    """Ties count; of eight seeds an arm, an image apart, floating point would lose 1,200 splits."""
    cases = [(range(700, 700 + n), range(699, 699 + m))]
    for spread in (2, 6, 40):
        counts = torch.randint(spread, (n + m,), generator=rng(n, m, spread)).tolist()
        cases.append((counts[:n], counts[n:]))
    for a, b in cases if n < 8 else cases[:1]:
        assert compare([*a], [*b]).p == by_hand([*a], [*b])
    assert compare([80], [70]) == Comparison(difference=10, p=None, splits=2)  # one seed each


def test_percentages_and_empty_arms_are_refused() -> None:
    for odd in (70.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="not percentages"):
            compare([odd, 70], [71])  # type: ignore[list-item]
    for arm, against in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="without a seed"):
            compare(arm, against)


RUNS = itertools.count()


def finished(
    path: Path,
    test: list[float],
    by: str | None = None,
    origin: dict[str, Any] | None = None,
    metric: str = "top-1 accuracy",
    images: int = 1000,
    start: str | None = None,
    before: float | None = 0.0,
    start_seeds: Sequence[int] = (),
    aligned: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A finished run of vit_l16 on CUB-200 with the paper's settings and 1000 test images.

    `by` is the hypergradient of the align run before it, which took `before` CPU seconds, `start`
    the digest of its adapter; `origin` changes what that says, and `aligned` the definition in it;
    `changes` are other settings.
    """
    path.mkdir(parents=True)
    own = {key: x for key, x in changes.items() if key == "backbone" or x == "ijepa"}
    given: Any = {"backbone": "vit_l16", "dataset": "cub200"} | own
    seed = changes.pop("seed", len(str(path)))
    config = FinetuneConfig(**given).model_dump(mode="json")
    del config["lr"], config["seeds"], config["grid_seeds"]
    about = {"format": FORMAT, "versions": "bisslight 1"}
    config |= about | {"seed": seed, "weights_sha256": "b"} | changes
    config |= {"command": "finetune", "images": {"train": 1, "val": 1, "test": images}}
    config.setdefault("data_sha256", f"2:{config['dataset']} {config['data_seed']}")
    config["start"] = by and "/aligned"
    said: dict[str, Any] = {}
    if by:
        before_it: Any = {"backbone": config["backbone"], "dataset": "cub200", "hypergrad": by}
        definition = AlignConfig(**before_it, pretext=config["pretext"]).model_dump(mode="json")
        said = {"stage": "align", "definition": about | definition | (aligned or {})}
    tests = []
    trials = []
    for k, accuracy in enumerate(test):
        right = round(accuracy * images / 100) if metric == "top-1 accuracy" else None
        tests.append({"accuracy": accuracy, "loss": 1.0, "right": right})
        trial = {"lr": 1e-3, "seed": seed + k, "val": tests[-1], "cpu_seconds": 8.0}
        trial |= {"seconds": 9.0 + next(RUNS)}  # no two runs take equally long
        trial |= {"start_sha256": start or by, "start_cpu_seconds": before}
        trial |= {"start_seeds": start_seeds}
        trials.append(trial)
    result: dict[str, Any] = {"tests": tests, "trials": trials, "metric": metric}
    result |= {"origin": said | (origin or {})}
    result |= {"start_cpu_seconds": before, "grid_seeds": 1, "tried": []}
    result |= {"rates": ALIGNED_RATES if by else RATES, "lr": 1e-3}
    result |= {"cpu_seconds": 8.0 * len(test), "seconds": 9.0}
    for name, content in (("config", config), ("result", result)):
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def by_setting(arm: Arm, field: str = "differs") -> dict[str, tuple[str, str]]:
    """In what an arm differs, as the JSON of `bisslight evaluate` says it."""
    told = json.loads(arm.model_dump_json())[field]
    return {name: (own, other) for name, (own, other) in told.items()}


def test_a_directory_of_runs_is_one_arm(tmp_path: Path) -> None:
    finished(tmp_path / "arm" / "s10", [72.0])
    finished(tmp_path / "arm" / "s2", [70.0])
    finished(tmp_path / "other", [60.0, 61.0])
    arm, other = evaluate([tmp_path / "arm", tmp_path / "other"]).arms
    assert (arm.arm, arm.unit, arm.mean) == ("arm", "2 x finetune (2 seeds)", 71.0)
    assert (arm.accuracies, arm.counts) == ([70.0, 72.0], [700, 720])
    assert (arm.first_minus_this, arm.differs, other.differs) == (None, [], [])
    compared = json.loads(other.model_dump_json())["first_minus_this"]
    assert compared == {"difference": 10.5, "p": by_hand([700, 720], [600, 610]), "splits": 6}
    row = other.as_row()
    assert (row["difference"], row["p"], row["CPU seconds"]) == ("+10.5", "0.33", "16")


def test_a_run_in_two_arms_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given twice, by another way to write it, by a link, with the folder that it lies in, or as a
    copy that has grown since.
    """
    run = finished(tmp_path / "arm/a", [70.0, 72.0])
    other = finished(tmp_path / "other", [60.0], seed=99)
    (tmp_path / "link").symlink_to(run)
    grown = Path(shutil.copytree(run, tmp_path / "grown"))
    result, more = (json.loads((place / "result.json").read_text()) for place in (run, other))
    both = {name: result[name] + more[name] for name in ("tests", "trials")}
    (grown / "result.json").write_text(json.dumps(result | both))
    monkeypatch.chdir(run)
    for again in (run, Path(), tmp_path / "link", tmp_path / "arm", grown):
        with pytest.raises(UsageError, match=rf"^{again}: \S* is in two arms, also as {run}/lr"):
            evaluate([run, again])


def test_arms_have_names_that_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [finished(tmp_path / folder / "tuned", [70.0]) for folder in ("a", "b")]
    assert [arm.arm for arm in evaluate(runs).arms] == [str(run) for run in runs]
    monkeypatch.chdir(runs[0])
    assert evaluate([Path()]).arms[0].arm == "tuned"


def test_the_time_of_a_run_before_is_counted_once(tmp_path: Path) -> None:
    """Two fine-tunings of one align run cost one alignment; those of two cost two."""
    for run, start in (("one/s0", "a"), ("one/s1", "a"), ("two/s0", "a"), ("two/s1", "b")):
        seed = int(run[-1])
        finished(tmp_path / run, [70.0], by="mfac", start=start, before=5.0, seed=seed)
    one, two = (read_arm(tmp_path / name) for name in ("one", "two"))
    assert (one.cpu_seconds, one.start_cpu_seconds) == (16, 5)
    assert (two.cpu_seconds, two.start_cpu_seconds) == (16, 10)
    assert two.as_row()["CPU seconds"] == "16 + 10"
    unknown = read_arm(finished(tmp_path / "unknown", [70.0], by="mfac", before=None))
    assert unknown.as_row()["CPU seconds"] == "8 + unknown"
    assert read_arm(finished(tmp_path / "direct", [70.0])).as_row()["CPU seconds"] == "8"


@pytest.mark.parametrize(
    ("earlier", "unit"),
    [
        ([[0, 7], [0, 8]], "2 x align (2 seeds), 2 x finetune (1 seed)"),
        ([[0, 7], [1, 7]], "1 x align (1 seed), 2 x finetune (2 seeds)"),
    ],
)
def test_a_restart_says_which_runs_before_it_are_done_anew(
    earlier: list[list[int]], unit: str, tmp_path: Path
) -> None:
    """`earlier` has the seeds of PEFT and of the align run before it, for each trial."""
    said = {"stage": "finetune", "origin": {"stage": "align"}}
    for k in range(2):
        again: Any = {"origin": said, "start": str(k), "start_seeds": earlier[k], "seed": 9 + k}
        finished(tmp_path / "arm" / str(k), [70.0], **again)
    last = "2 x finetune (2 seeds)"
    arm = read_arm(tmp_path / "arm")
    assert (arm.unit, arm.one_align) == (f"{unit}, {last}", unit.startswith("1 x align"))


OF_ALIGN: dict[str, Any] = {"by": "mfac", "start": "0"}
OF_TUNED: dict[str, Any] = {"origin": {"stage": "finetune"}, "start": "0"}


@pytest.mark.parametrize(
    ("both", "second", "reason"),
    [
        ({}, {"rank": 4}, r"--rank \(Rank of LoRA .*\) is 4 and 64"),
        ({}, {"by": "mfac"}, "align, finetune and finetune"),
        ({}, {"data_sha256": "other"}, "content of --dataset is other and"),
        ({}, {"seed": 6}, "a seed is there twice"),
        (OF_ALIGN, {"start": "1"}, "there are 2 starts for 3 seeds"),
        # made twice, such as with and without micro-batches
        (OF_ALIGN | {"start_seeds": (3,)}, {"start": "1"}, "the same seed, 3"),
        (OF_TUNED | {"start_seeds": (0, 3)}, {"start": "1"}, "the same seed, 0, 3"),
        (OF_ALIGN | {"pretext": "a.py:A"}, {"pretext": "a.py:B"}, r"--pretext \(.*\) is B and A"),
    ],
)
def test_runs_that_are_no_arm_are_refused(
    both: dict[str, Any], second: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    finished(tmp_path / "arm/a", [70.0, 71.0], **{"seed": 5} | both)  # 5, 6
    finished(tmp_path / "arm/b", [70.0], **{"seed": 7} | both | second)
    with pytest.raises(UsageError, match=f"arm: .*{reason}.*; give them apart"):
        read_arm(tmp_path / "arm")


def test_arms_with_another_test_are_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", [70.0])
    for name, changes in (("other", {"dataset": "dtd"}), ("split", {"data_seed": 3})):
        with pytest.raises(UsageError, match="not comparable"):
            evaluate([first, finished(tmp_path / name, [70.0], **changes)])  # type: ignore[arg-type]
    changes = {"amp": False, "other_data": True, "weights_sha256": "c"}
    unlike = finished(tmp_path / "unlike", [70.0], device="cuda", **changes)
    aligned = finished(tmp_path / "aligned", [70.0], by="mfac")
    restart = finished(tmp_path / "restart", [70.0], origin={"stage": "finetune"})
    found = evaluate([first, unlike, aligned, restart]).arms
    assert by_setting(found[1]) == {
        "amp": ("False", "True"),
        "other_data": ("True", "False"),
        "weights_sha256": ("c", "b"),
    }
    assert by_setting(found[2])["start"] == ("align, finetune", "finetune")
    assert by_setting(found[3]) == {"start": ("finetune, finetune", "finetune")}


ALIGNED_ON = {"d_lr": "0.001", "hypergrad": "mfac", "data_sha256": "d", "pool_sha256": "p"}
ALIGNED_ON |= {"pretext": "Rotation", "pretext_sha256": "t", "versions": "bisslight 1"}


@pytest.mark.parametrize(
    ("name", "own", "flag"),
    [
        ("d_lr", "0.1", "--d-lr"),
        ("hypergrad", "cg", "--hypergrad"),
        ("data_sha256", "q", "--dataset"),
        ("pool_sha256", "q", "--pool"),
        ("pretext", "mae", "--pretext"),
        ("pretext_sha256", "q", "--pretext"),
        ("versions", "bisslight 2", "versions"),
    ],
)
def test_what_aligned_arms_differ_in_is_told(
    name: str, own: str, flag: str, tmp_path: Path
) -> None:
    one = finished(tmp_path / "one", [70.0], by="mfac", aligned=ALIGNED_ON)
    arm = finished(tmp_path / "arm", [70.0], by="mfac", aligned=ALIGNED_ON | {name: own})
    found = evaluate([one, arm])
    assert by_setting(found.arms[1]) == {f"start.{name}": (own, ALIGNED_ON[name])}
    assert flag in str(found).splitlines()[-1]


def test_where_images_lie_is_not_told_and_the_version_of_fine_tuning_is(tmp_path: Path) -> None:
    moved = ALIGNED_ON | {"pool": "folder:/scratch", "data_seed": "4"}
    one = finished(tmp_path / "one", [70.0], by="mfac", aligned=ALIGNED_ON)
    two = finished(tmp_path / "two", [70.0], by="mfac", aligned=moved, versions="bisslight 2")
    assert by_setting(evaluate([one, two]).arms[1]) == {"versions": ("bisslight 2", "bisslight 1")}


def test_restarts_of_aligned_runs_are_told_apart_after_a_restart_of_a_direct_one(
    tmp_path: Path,
) -> None:
    """Only the restart of another aligned run starts as they do, so the λ of both is told."""
    before: Any = {
        "r_d": {},
        "r_t": {"stage": "align", "definition": {"lam": 1.0}},
        "r_t5": {"stage": "align", "definition": {"lam": 5.0}},
    }
    runs = [finished(tmp_path / "direct", [70.0])]
    for name, start in before.items():
        tuned = {"stage": "finetune", "definition": {}, "origin": start}
        runs.append(finished(tmp_path / name, [70.0], by="mfac", start=name, origin=tuned))
    found = evaluate(runs).arms
    assert [arm.starts_as for arm in found] == [None, None, None, "r_t"]
    assert by_setting(found[3], "start_differs") == {"start.start.lam": ("5.0", "1.0")}


def test_seeds_with_one_pretext_task_in_files_at_two_places_are_an_arm(tmp_path: Path) -> None:
    """As after a move of the file."""
    for k, name in enumerate(("tasks/mine.py:Mine", "/moved/mine.py:Mine")):
        run: Any = {"by": "mfac", "start": str(k), "seed": k, "pretext": name}
        finished(tmp_path / "arm" / str(k), [70.0 + k], **run)
    assert read_arm(tmp_path / "arm").accuracies == [70.0, 71.0]


def test_what_is_no_finished_run_of_finetune_is_named_for_what_it_is(
    tmp_path: Path, runs: Path
) -> None:
    (finished(tmp_path / "running", [70.0]) / "result.json").unlink()
    (finished(tmp_path / "torn", [70.0]) / "config.json").write_text("{")
    foreign = finished(tmp_path / "foreign", [70.0]) / "result.json"
    foreign.write_text(foreign.read_text().replace("top-1 accuracy", "F1"))
    finished(tmp_path / "format", [70.0], format=6)
    told = {
        f"{runs}/aligned": ": is a run of align",
        f"{tmp_path}/nothing": ": is not here",
        f"{tmp_path}/running": ": is no finished run",
        f"{tmp_path}/torn": "/config.json: cannot be read",
        f"{tmp_path}/foreign": "/result.json: cannot be read",
        f"{tmp_path}/format": "/config.json: made by bisslight 1",
    }
    for run, what in told.items():
        assert run + what in refusal(f"evaluate {run}")


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4)])
def test_a_p_that_few_seeds_cannot_fall_below_is_told(n: int, m: int, tmp_path: Path) -> None:
    """It is that of arms that do not overlap; 4 and 4 seeds, or 3 and 4, reach less than 0.05."""
    low = finished(tmp_path / "low", [*range(10, 10 + n)])
    high = finished(tmp_path / "high", [*range(50, 50 + m)])
    result = evaluate([low, high])
    compared = result.arms[1].first_minus_this
    assert compared
    said = f"high: with so few seeds, p cannot be less than {compared.p or 0:#.2g}"
    assert (said in str(result)) == (compared.p is not None and compared.p > 0.05)
    assert ("cannot be less" in str(result)) == (said in str(result))


def test_the_interval_by_images_is_wilsons(tmp_path: Path) -> None:
    """Its ends are where the accuracy is 1.96 deviations of a binomial away from the measured."""
    told = evaluate([finished(tmp_path / "a", [40.0, 60.0], images=35)]).arms[0].interval()
    assert told is not None and told[0] < 50 < told[1]
    for end in told:
        deviation = 100 * math.sqrt(end / 100 * (1 - end / 100) / 35)
        assert abs(end - 50.0) / deviation == pytest.approx(1.96, abs=0.01)


def test_counts_are_whole_right_images_and_of_map_hundredths_of_a_point(tmp_path: Path) -> None:
    test = [100 * 347 / 480, 100 * (336 / 480)]
    images = finished(tmp_path / "a", test, images=480)
    assert evaluate([images]).arms[0].counts == [347, 336]
    # 300 + 302 images are 301 + 301, though the means of the percentages differ by rounding.
    one = [100 * (300 / 1000), 100 * (302 / 1000)]
    two = [100 * (301 / 1000)] * 2
    assert fmean(one) != fmean(two)
    equal = evaluate([finished(tmp_path / "one", one), finished(tmp_path / "two", two)]).arms[1]
    assert equal.first_minus_this == Comparison(difference=0.0, p=1.0, splits=6)
    voc = [finished(tmp_path / f"m{i}", [80.004, 80.0 + i], metric="11-point mAP") for i in (1, 2)]
    row = evaluate(voc).arms[1]
    assert row.counts == [8000, 8200] and row.interval() is None
    assert row.first_minus_this is not None and row.first_minus_this.difference == -0.5
