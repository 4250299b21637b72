"""Scores, the permutation test by brute force, runs that make an arm, the paper's tables."""

import json
import math
import re
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from conftest import shared
from toy import refusal

import evaluate as tables
from config import BACKBONES, FinetuneConfig
from data import rng
from evaluate import (
    Comparison,
    PooledEvaluation,
    Stratum,
    compare,
    compare_strata,
    evaluate,
    read_arm,
)
from extras.dry_run import MEMORY
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
    for odd in (70.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="not percentages"):
            compare([odd, 70], [71])  # type: ignore[list-item]


def strata_by_hand(strata: list[Stratum]) -> float:
    """Share of permutations within strata at least as far from 0, each listed, in fractions."""
    choices = []
    observed = Fraction(0)
    for stratum in strata:
        pooled, n, m = [*stratum.arm, *stratum.against], len(stratum.arm), len(stratum.against)
        differences = []
        for chosen in combinations(pooled, n):
            rest = sum(pooled) - sum(chosen)
            differences.append((Fraction(sum(chosen), n) - Fraction(rest, m)) / stratum.images)
        observed += differences[0]  # `combinations` begins with the first n, those of the arm
        choices.append(differences)
    sums = [abs(sum(differences)) >= abs(observed) for differences in product(*choices)]
    return sum(sums) / len(sums)


def draw_stratum(n: int, m: int, images: int, spread: int) -> Stratum:
    """Counts that differ by less than `spread` images, often equal ones."""
    numbers = torch.randint(spread, (n + m,), generator=rng(n, m, images, spread)).tolist()
    return Stratum(numbers[:n], numbers[n:], images)


def test_the_stratified_p_is_the_share_of_permutations_within_strata() -> None:
    """Seeds and images differ between strata, so do the fractions; ties and 0 are among them."""
    for spread in (2, 6, 40):
        strata = [draw_stratum(2, 3, 7, spread), draw_stratum(4, 2, 10, spread)]
        strata += [draw_stratum(1, 3, 7, spread), draw_stratum(2, 3, 7, spread + 1)]
        for chosen in (strata[:2], strata[1:], strata):
            found = compare_strata(chosen)
            assert found.p == strata_by_hand(chosen)
            assert found.splits == math.prod(
                math.comb(len(s.arm) + len(s.against), len(s.arm)) for s in chosen
            )
    far = Stratum([9, 8], [1, 2, 3], 10)
    assert compare_strata([far, far]).p == strata_by_hand([far, far]) < compare_strata([far]).p  # type: ignore[operator]
    level = Stratum([5, 7], [6, 6], 10)
    assert compare_strata([level, level]) == Comparison(difference=0, p=1, splits=36)


def test_the_stratified_difference_is_the_mean_of_the_strata_in_points() -> None:
    """A data set of many images and seeds weighs no more than another."""
    strata = [Stratum([60, 70, 65, 65], [50], 100), Stratum([400], [500, 500], 1000)]
    assert compare_strata(strata).difference == (15 - 10) / 2


def test_twelve_strata_of_three_sizes_are_counted() -> None:
    """70 splits each, 70¹² in all: no listing does that, but their sum is nearly normal."""
    strata = []
    variance = 0.0
    for images in (168, 119, 182):
        for k in range(4):
            stratum = draw_stratum(4, 4, images, 30 + k)
            strata.append(stratum)
            # Of the difference of means of two random halves of N numbers: their variance · 4 / N
            pooled = torch.tensor([*stratum.arm, *stratum.against]) / images
            variance += 4 * pooled.var().item() / len(pooled)
    found = compare_strata(strata)
    assert found.splits == 70**12
    assert str(found).endswith("splits=1.4e+22")
    sums = abs(found.difference) / 100 * len(strata)
    assert found.p == pytest.approx(math.erfc(sums / math.sqrt(2 * variance)), abs=0.01)
    mirrored = compare_strata([Stratum(s.against, s.arm, s.images) for s in strata])
    assert (mirrored.difference, mirrored.p) == (-found.difference, found.p)


def test_strata_that_cannot_be_counted_are_refused() -> None:
    stratum = Stratum([5, 7], [6, 6], 10)
    for wrong in ([], [stratum, Stratum([], [1], 10)], [Stratum([1.5], [1, 2], 10)]):  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"no strata|every stratum|not percentages"):
            compare_strata(wrong)
    primes = (10007, 10009, 10037, 10039, 10061, 10067, 10069)
    with pytest.raises(ValueError, match="fewer data sets"):
        compare_strata([draw_stratum(6, 6, images, images) for images in primes])


def finished(path: Path, test: list[float], by: str | None = None, **changes: Any) -> Path:
    """A finished run of vit_l16 on CUB-200 with the paper's settings and 1000 test images.

    `changes` are other settings, or other entries of its result.
    """
    path.mkdir(parents=True)
    own = {key: x for key, x in changes.items() if key == "backbone" or x == "ijepa"}
    given: Any = {"backbone": "vit_l16", "dataset": "cub200"} | own
    config = json.loads(FinetuneConfig(**given).model_dump_json())
    config |= {"grid": [1e-3], "start": by, "seed": len(str(path))}
    result: dict[str, Any] = {"unit": "PEFT seed", "test": test, "backbone": "vit_l16"}
    whole = changes.get("test_images", 1000)
    right = None if "metric" in changes else [round(x * whole / 100) for x in test]
    result["test_images"] = whole
    result |= {"metric": "top-1 accuracy", "pretext": "mae", "right": right, "lr": 1e-3}
    result |= {"aligned_by": by, "aligned_on": by and "cub200", "align_unlike_paper": by and {}}
    result |= {name: value for name, value in changes.items() if name in result}
    config |= {name: value for name, value in changes.items() if name not in result}
    images = f"{config['dataset']} {config['data_seed']}"
    about = {"data_sha256": config.pop("data_sha256", images)}
    about["weights_sha256"] = changes.get("weights_sha256", "b")
    for name, content in (("config", config), ("env", {"about": about}), ("result", result)):
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_directory_of_runs_is_one_arm(tmp_path: Path) -> None:
    finished(tmp_path / "arm" / "s10", [72.0])
    finished(tmp_path / "arm" / "s2", [70.0])
    finished(tmp_path / "other", [60.0, 61.0])
    arm, other = evaluate([tmp_path / "arm", tmp_path / "other"]).arms
    assert (arm.arm, arm.seeds, arm.accuracies, arm.counts) == ("arm", 2, [70.0, 72.0], [700, 720])
    assert (arm.mean, arm.std) == (71.0, pytest.approx(2**0.5))
    assert (arm.first_minus_this, arm.differs, other.differs) == (None, {}, {})
    p = by_hand([700, 720], [600, 610])
    assert other.first_minus_this == Comparison(difference=10.5, p=p, splits=6)


def test_runs_that_are_no_arm_are_refused(tmp_path: Path) -> None:
    for arm, changes in (("mixed", {"rank": 4}), ("both", {"by": "mfac"})):
        finished(tmp_path / arm / "a", [70.0])
        finished(tmp_path / arm / "b", [70.0], **changes)
    finished(tmp_path / "empty", [])
    finished(tmp_path / "twice" / "a", [70.0, 71.0], seed=5)  # 5, 6
    finished(tmp_path / "twice" / "c", [71.0], seed=6)
    (finished(tmp_path / "running", [70.0]) / "result.json").unlink()
    (finished(tmp_path / "torn", [70.0]) / "config.json").write_text("{")
    (finished(tmp_path / "old", [70.0]) / "env.json").write_text("{}")
    messages = {"mixed": "its runs are no seeds of one arm, see rank"}
    messages["both"] = "its runs are no seeds of one arm, see align_unlike_paper, aligned_by"
    for images, seed in (("x", 1), ("y", 2)):  # one name, but other images
        finished(tmp_path / "changed" / images, [70.0], seed=seed, data_sha256=images)
    finished(tmp_path / "ranks" / "a", [70.0])
    finished(tmp_path / "ranks" / "b", [70.0], dataset="dtd", rank=4)
    messages["changed"] = "its runs are no seeds of one arm, see data_sha256"
    messages["ranks"] = "its runs are no seeds of one arm, see rank"
    messages["twice"] = "its runs are no seeds of one arm, see seed"
    messages |= {"empty": "has no test accuracy"}
    messages |= dict.fromkeys(("torn", "old"), "cannot be read .*; give a finished")
    messages["running"] = "is not finished"
    for name, message in messages.items():
        with pytest.raises(UsageError, match=f"{name}: {message}"):
            read_arm(tmp_path / name)


@pytest.mark.parametrize("how", ["", "--against "])
def test_a_path_without_a_run_is_named_and_not_its_files(how: str, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", [70.0])
    (tmp_path / "bare").mkdir()
    for path in (tmp_path / "none", tmp_path / "bare"):
        said = refusal(f"evaluate {run} {how}{path}")
        assert str(path) in said and "config.json" not in said and "Errno" not in said


def test_a_pretrain_run_is_told_to_be_no_finetune_run(pretrained: Path) -> None:
    said = refusal(f"evaluate {pretrained}/mae")
    assert f"{pretrained}/mae" in said and "finetune" in said and "align" not in said


def test_arms_with_another_test_are_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", [70.0])
    for name, changes in (("other", {"dataset": "dtd"}), ("split", {"data_seed": 3})):
        with pytest.raises(UsageError, match="not comparable"):
            evaluate([first, finished(tmp_path / name, [70.0], **changes)])
    unlike = finished(tmp_path / "unlike", [70.0], amp=False, device="cuda", weights_sha256="c")
    aligned = finished(tmp_path / "aligned", [70.0], by="mfac", grid=[1e-4])
    found = evaluate([first, unlike, aligned])
    assert found.arms[1].differs == {"amp": "False, there True", "weights_sha256": "c, there b"}
    assert found.arms[2].differs == {}  # it has the grid that goes with its start


def test_other_rates_of_an_aligned_and_a_direct_arm_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    direct = finished(tmp_path / "direct", [70.0])
    aligned = finished(tmp_path / "aligned", [70.0], by="mfac", grid=[1e-4, 2e-4])
    evaluate([aligned, direct])
    (line,) = caplog.messages
    assert line.index("direct") < line.index("[0.001]") < line.index("aligned")
    assert line.endswith("[0.0001, 0.0002]")
    caplog.clear()
    evaluate([finished(tmp_path / "same", [70.0], by="mfac"), direct])
    assert caplog.messages == []


PETS = {"dataset": "pets", "test_images": 500}


def two_data_sets(path: Path, cub: list[float], pets: list[float]) -> Path:
    """An arm on CUB-200, a run for each seed, and on half of Pets, all seeds in one run."""
    for seed, accuracy in enumerate(cub):
        finished(path / "cub" / f"s{seed}", [accuracy], seed=seed)
    finished(path / "pets" / "all", pets, seed=0, data_seed=1, **PETS)
    return path


def test_arms_over_several_data_sets_are_compared_on_each_and_on_all(tmp_path: Path) -> None:
    first = two_data_sets(tmp_path / "first", [70.0, 71.5, 70.1], [90.0, 91.0])
    other = two_data_sets(tmp_path / "other", [69.0, 70.5], [88.0, 90.2])
    found = evaluate([first, other])
    assert isinstance(found, PooledEvaluation)
    on_cub, on_pets = " on cub200", " on pets, data seed 1"
    names = ["first" + on_cub, "other" + on_cub, "first" + on_pets, "other" + on_pets]
    assert [row.arm for row in found.arms] == names
    assert [row.counts for row in found.arms[:2]] == [[700, 715, 701], [690, 705]]
    alone = evaluate([first / "cub", other / "cub"]).arms[1].first_minus_this
    assert found.arms[1].first_minus_this == alone
    strata = [Stratum([700, 715, 701], [690, 705], 1000), Stratum([450, 455], [440, 451], 500)]
    pooled = found.pooled[1]
    assert pooled.first_minus_this == compare_strata(strata)
    assert pooled.first_minus_this.p == strata_by_hand(strata)
    assert (pooled.seeds, pooled.data_sets) == (4, ["cub200", "pets, data seed 1"])
    assert pooled.mean == pytest.approx((69.75 + 89.1) / 2)
    assert (found.pooled[0].first_minus_this, pooled.differs) == (None, {})
    assert json.loads(found.model_dump_json())["pooled"][1]["arm"] == "other"


def test_runs_side_by_side_are_the_arm_that_they_are_in_folders_of_data_sets(
    tmp_path: Path,
) -> None:
    """In any order, and with a rate of its own for each data set."""
    nested = two_data_sets(tmp_path / "a" / "arm", [70.0, 71.5], [90.0, 91.0])
    side_by_side = tmp_path / "b" / "arm"
    finished(side_by_side / "0", [90.0, 91.0], seed=0, data_seed=1, **PETS)
    for seed, accuracy in enumerate([70.0, 71.5]):
        finished(side_by_side / f"{seed + 1}", [accuracy], seed=seed, grid=[1e-2])
    found = evaluate([nested, side_by_side])
    assert isinstance(found, PooledEvaluation)
    first, other = found.pooled
    assert (other.data_sets, other.mean) == (first.data_sets, first.mean)
    assert other.first_minus_this == Comparison(difference=0, p=1, splits=36)
    assert other.differs == {"grid": "[0.01], there [0.001]"}


def test_a_data_set_that_is_in_one_arm_only_is_named(tmp_path: Path) -> None:
    both = two_data_sets(tmp_path / "both", [70.0], [90.0])
    for name, changes, missing in (
        ("cub", {}, "pets, data seed 1"),
        ("pets", PETS | {"data_seed": 1}, "cub200"),
    ):
        one = finished(tmp_path / name, [70.0], **changes)
        for runs in ([one, both], [both, one]):
            with pytest.raises(UsageError, match=f"{name}: .* {missing}, which both has"):
                evaluate(runs)


def test_map_is_pooled_in_percentage_points(tmp_path: Path) -> None:
    """Hundredths of a point are no images: of 10,000, not of as many as the test has."""
    runs = []
    for name, accuracy in (("a", 82.0), ("b", 80.0)):
        runs.append(tmp_path / name)
        finished(tmp_path / name / "cub", [70.0])
        finished(tmp_path / name / "voc", [accuracy], dataset="voc07", metric="11-point mAP")
    found = evaluate(runs)
    assert isinstance(found, PooledEvaluation)
    assert found.pooled[1].first_minus_this == Comparison(difference=1, p=1, splits=4)


def test_counts_are_whole_right_images_and_of_map_hundredths_of_a_point(tmp_path: Path) -> None:
    test = [100 * 347 / 480, 100 * (336 / 480)]
    images = finished(tmp_path / "a", test, test_images=480)
    assert evaluate([images]).arms[0].counts == [347, 336]
    voc = [finished(tmp_path / f"m{i}", [80.004, 80.0 + i], metric="11-point mAP") for i in (1, 2)]
    row = evaluate(voc).arms[1]
    assert row.counts == [8000, 8200]
    assert row.first_minus_this is not None and row.first_minus_this.difference == -0.5


def test_arms_with_equal_means_differ_by_nothing(tmp_path: Path) -> None:
    """300 + 302 images are 301 + 301, though the means of the percentages differ by rounding."""
    runs = []
    for name, counts in (("a", (300, 302)), ("b", (301, 301))):
        test = [100 * (n / 1000) for n in counts]
        runs.append(finished(tmp_path / name, test))
    assert fmean([100 * (300 / 1000), 100 * (302 / 1000)]) != fmean([100 * (301 / 1000)] * 2)
    found = evaluate(runs).arms[1].first_minus_this
    assert found == Comparison(difference=0.0, p=1.0, splits=6)


def test_text_has_two_decimals_and_two_digits_of_p_and_json_all(tmp_path: Path) -> None:
    runs = [finished(tmp_path / "a", [70.1, 71.0, 70.5])]
    runs.append(finished(tmp_path / "b", [69.0, 68.0, 69.5], lam=1.0, align_unlike_paper={"T": 1}))
    arm = evaluate(runs).arms[1]
    assert str(arm.first_minus_this) == "difference=1.70 p=0.10 splits=20"
    assert arm.differs == {"align_unlike_paper": "T 1, there None", "lam": "1.0, there None"}
    compared = json.loads(arm.model_dump_json())["first_minus_this"]
    assert compared == {"difference": 1.7, "p": 0.1, "splits": 20}


def test_two_ways_of_aligning_are_told_apart(tmp_path: Path) -> None:
    runs = [finished(tmp_path / by, [70.0], by=by) for by in ("mfac", "cg")]
    assert evaluate(runs).arms[1].differs == {"aligned_by": "cg, there mfac"}


def test_the_papers_figure_stands_only_beside_what_the_paper_measured(tmp_path: Path) -> None:
    official = "x/mae_pretrain_vit_large_full.pth"
    cases: list[tuple[str | None, dict[str, Any], tuple[float, float] | None]] = [
        (None, {}, (84.4, 0.4)),
        ("mfac", {}, (85.6, 0.3)),
        (None, {"weights": official}, (84.4, 0.4)),
        (None, {"weights": "x/backbone.pth"}, None),
        ("identity", {}, None),
        (None, {"partial": True}, None),
        (None, {"batch": 64}, None),
        ("mfac", {"pretext": "rotation"}, None),
        ("mfac", {"pretext": "ijepa", "backbone": "vit_h14"}, (86.8, 0.2)),
        (None, {"min_crop": 1.0}, None),
        (None, {"amp": False, "grid_seeds": 2}, (84.4, 0.4)),
        ("mfac", {"aligned_on": "dtd"}, None),
        ("mfac", {"align_unlike_paper": {"lam": 1.0}}, None),
        (None, {"dataset": "folder:cub200"}, None),
    ]
    for i, (by, changes, expected) in enumerate(cases):
        found = evaluate([finished(tmp_path / f"{i}", [70.0], by, **changes)]).arms[0].paper
        assert (found and (found.mean, found.std)) == expected, (by, changes)


def test_the_papers_tables_are_copied_right() -> None:
    """Every number of the LaTeX source's tables, in order."""
    text = shared("paper/bisslight.tex").read_text()

    def table_of(label: str) -> str:
        start = text.index(f"\\label{{{label}}}")
        return text[start : text.index("\\end{tabular}", start)]

    def pairs(label: str) -> list[tuple[float, float]]:
        found = re.findall(r"(\d+\.\d)\}?\\scriptstyle\{\\pm (\d+\.\d)\}", table_of(label))
        return [(float(a), float(b)) for a, b in found]

    main, other = "tab:mae_bisslight_main_results", "tab:classificaiton_acc_bisslight_ijepa"
    bissl = "tab:classificaiton_acc_bissl_orig"
    floats = {}
    for label, rows in tables.ACCURACIES.items():
        figures = " ".join(rows.values()).split()
        floats[label] = [(float(x.split("±")[0]), float(x.split("±")[1])) for x in figures]
    assert {k: pairs(k) for k in (main, other)} == {k: floats[k] for k in (main, other)}
    assert pairs(bissl) == floats[main][:12] + floats[bissl]  # the rows of ViT-B and its own
    head = re.findall(r"& (\w+)", table_of(main).split("midrule")[0])
    assert [name.lower() for name in head] == [*tables.COLUMNS]
    body = table_of("tab:lora_param_count").split("midrule")[1]
    millions = [float(x) for x in re.findall(r"\d+\.\d\d", body)]  # the ninth is the backbone's
    for k, name in enumerate(("vit_b16", "vit_l16", "vit_h14")):
        arch = BACKBONES[name]
        ours = [4 * arch.depth * arch.dim * 2**i / 1e6 for i in range(8)]
        assert millions[9 * k : 9 * k + 8] == pytest.approx(ours, abs=0.0051)
    memory = re.findall(r"\\\((\d+)\\\) GB", table_of("tab:memory_single_gpu"))
    for at, row in zip((0, 6, 9, 12), MEMORY.values(), strict=True):  # on the fewest GPUs
        assert [int(x) for x in memory[at : at + 3]] == [gigabytes for gigabytes, _ in row.values()]
