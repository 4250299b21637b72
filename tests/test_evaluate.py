"""Scores, the permutation test by brute force, runs that make an arm, the paper's tables."""

import json
import math
import re
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import recorded, shared

import paper
from config import BACKBONES, RunError, UsageError
from data import rng
from evaluate import (
    average_precision,
    compare,
    evaluate,
    mean_average_precision,
    permutation_p,
    read_arm,
    score,
)
from lora import cross_entropy

# --- the p-value ------------------------------------------------------------------------------


def by_hand(a: list[int], b: list[int]) -> float:
    """Share of splits whose means differ at least as much; every split listed, in fractions."""
    pooled, n, m = [*a, *b], len(a), len(b)

    def apart(chosen: tuple[int, ...] | list[int]) -> Fraction:
        return abs(Fraction(sum(chosen), n) - Fraction(sum(pooled) - sum(chosen), m))

    splits = [apart(chosen) >= apart(a) for chosen in combinations(pooled, n)]
    return sum(splits) / len(splits)


def test_p_counts_splits_that_tie_with_the_observed_one() -> None:
    """A tenth of a point apart; floating-point means would lose 1,200 of the 12,870 splits."""
    a, b = [x / 10 for x in range(700, 708)], [x / 10 for x in range(699, 707)]
    exact = by_hand([*range(700, 708)], [*range(699, 707)])
    assert exact == pytest.approx(0.481, abs=5e-4)
    found = compare(a, b, images=1000)
    assert (found.p, found.splits) == (exact, 12_870)
    assert found.difference == pytest.approx(0.1)


@pytest.mark.parametrize(("n", "m"), [(3, 4), (4, 3), (5, 5), (1, 6), (6, 1), (2, 7)])
def test_p_is_the_share_of_splits_that_differ_at_least_as_much(n: int, m: int) -> None:
    for spread in (2, 6, 40):
        for i in range(6):
            counts = torch.randint(spread, (n + m,), generator=rng(i, n, m, spread)).tolist()
            assert permutation_p(counts[:n], counts[n:]) == by_hand(counts[:n], counts[n:])


def test_p_of_16_against_32_seeds_is_exact() -> None:
    """One arm above the other: this split and its mirror. Seeds right or wrong: hypergeometric."""
    assert compare([*range(32, 48)], [*range(32)]).p == 2 / math.comb(48, 16)
    ways = {k: math.comb(17, k) * math.comb(31, 16 - k) for k in range(17)}
    observed = abs(Fraction(9, 16) - Fraction(8, 32))
    far = [k for k in ways if abs(Fraction(k, 16) - Fraction(17 - k, 32)) >= observed]
    p = compare([1] * 9 + [0] * 7, [1] * 8 + [0] * 24).p
    assert p == sum(ways[k] for k in far) / math.comb(48, 16)


def test_some_comparisons_have_no_p_and_say_why() -> None:
    assert compare([80], [70, 71, 72, 73]).p == 1 / 5
    assert compare([71], [70, 72, 73, 74]).p == 4 / 5  # 72 alone is nearer to the others
    assert compare([80], [70])[1:] == (None, 2, "one seed each")
    for value in (math.nan, math.inf, -math.inf):
        found = compare([70.0, value], [60.0, 61.0], images=100)
        assert (found.p, found.no_p) == (None, "not finite")


def test_percentages_are_taken_as_they_are_printed_and_only_if_they_are_whole_counts() -> None:
    """347 and 350 of 480 are 72.29 and 72.92 %; no count is 72.4 %; 70.3 % of 3,669 is several."""
    exact = by_hand([347, 350], [336, 342])
    assert compare([72.29, 72.92], [70.0, 71.2], images=480).p == exact
    assert compare([100 * 347 / 480, 100 * (350 / 480)], [70.0, 71.25], images=480).p == exact
    for value, images, message in [
        (72.4, 480, "no whole number of 480"),
        (70.3, 3669, "give it with more decimals"),
        (100.5, 200, "no whole number of 200"),
        (-1.0, 100, "no whole number of 100"),
    ]:
        with pytest.raises(UsageError, match=message):
            compare([value, 50.0], [50.0, 50.0], images=images)
    with pytest.raises(UsageError, match="percentages need the number of test images"):
        compare([72.29, 72.92], [70.0, 71.2])


# --- scores -----------------------------------------------------------------------------------


def test_score_does_not_depend_on_batch_size() -> None:
    z, y = torch.randn(23, 5, generator=rng(1)), torch.randint(5, (23,), generator=rng(2))
    whole = score(lambda x: x, [(z, y)])
    parts = score(lambda x: x, zip(z.split(4), y.split(4), strict=True))
    assert whole._replace(loss=0) == parts._replace(loss=0)
    assert whole.right == int((z.argmax(1) == y).sum())
    assert whole.accuracy == pytest.approx(100 * whole.right / 23)
    assert whole.loss == pytest.approx(parts.loss)
    assert whole.loss == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)))


def test_per_class_accuracy_counts_classes_alike() -> None:
    z, y = torch.eye(3)[[0, 0, 0, 1, 2]], torch.tensor([0, 0, 0, 0, 2])
    found = score(lambda x: x, [(z, y)])
    assert found.accuracy == pytest.approx(80.0)
    assert found.per_class == pytest.approx(100 * (3 / 4 + 1) / 2)


def test_metrics_equal_the_recorded_ones() -> None:
    """Per-class AP by the exact recall test, mAP, top-1 and both losses, of 160 images."""
    rec = recorded("official/eval_metrics.npz")
    z, labels = rec["ml_logits"], 2 * rec["ml_targets"].long() - 1
    for k, expected in enumerate(rec["ml_ap11_exact_percent_per_class"].tolist()):
        if (labels[:, k] == 1).any():
            ap = 100 * average_precision(z[:, k], labels[:, k])
            assert ap == pytest.approx(expected, abs=1e-10)
    batches = zip(z.split(16), labels.split(16), strict=True)
    found = score(lambda x: x, batches, lambda z, y: cross_entropy(z, y, "softmax"))
    assert found.accuracy == pytest.approx(float(rec["ml_map11_exact_percent"]), abs=1e-10)
    assert found.loss == pytest.approx(float(rec["ml_softmax_ce_batchmean"]), rel=1e-6)
    found = score(lambda x: x, [(rec["sl_logits"], rec["sl_labels"].long())])
    assert found.accuracy == pytest.approx(float(rec["sl_top1_percent"]), abs=1e-4)


def devkit(scores: list[float], labels: list[int]) -> float:
    """VOCevalcls of the devkit, step by step: difficult images count nowhere; exact fractions."""
    order = sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0])
    positives, tp, fp, points = sum(label == 1 for label in labels), 0, 0, []
    for _, label in order:
        tp, fp = tp + (label == 1), fp + (label == -1)
        if tp + fp:
            points.append((Fraction(tp, positives), Fraction(tp, tp + fp)))
    steps = [Fraction(t, 10) for t in range(11)]
    return float(
        sum(max((p for r, p in points if r >= t), default=Fraction(0)) for t in steps) / 11
    )


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([1, -1, 1], (6 + 5 * 2 / 3) / 11),
        ([0, 1, 0, -1, 1, 0], (6 + 5 * 2 / 3) / 11),  # difficult ones change nothing
        ([0, -1, 1], 1 / 2),
        ([-1, -1, 1, 0], 1 / 3),
        ([1] * 7 + [-1] * 7 + [1] * 3, (8 + 3 * 10 / 17) / 11),  # recall 0.7 after the seventh
        ([1] * 9 + [-1] + [1], (10 + 10 / 11) / 11),
    ],
)
def test_average_precision_by_hand(labels: list[int], expected: float) -> None:
    scores = [1 - i / 100 for i in range(len(labels))]
    assert devkit(scores, labels) == pytest.approx(expected)
    found = average_precision(torch.tensor(scores), torch.tensor(labels))
    assert found == pytest.approx(expected)


def test_average_precision_equals_the_devkit_on_random_scores_with_ties() -> None:
    g = rng(0)
    for _ in range(50):
        scores = torch.randint(12, (40,), generator=g) / 12.0
        labels = torch.randint(-1, 2, (40,), generator=g)
        expected = devkit(scores.tolist(), labels.tolist())
        assert average_precision(scores, labels) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(RunError, match="no class has a positive"):
        mean_average_precision(torch.zeros(3, 2), -torch.ones(3, 2))


def test_losses_of_several_labels_an_image() -> None:
    z = torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)
    labels = torch.tensor([[1, -1, 0, 1]])
    p, s = z.softmax(1)[0], z.sigmoid()[0]
    expected = -float(p[0].log() + p[3].log())
    assert cross_entropy(z, labels, "softmax").item() == pytest.approx(expected)
    expected = -float(s[0].log() + (1 - s[1]).log() + s[3].log()) / 3
    assert cross_entropy(z, labels, "bce").item() == pytest.approx(expected)
    nothing = torch.zeros(1, 4).long()  # only difficult objects: nothing to learn
    assert cross_entropy(z, nothing, "bce").item() == 0


# --- runs -------------------------------------------------------------------------------------


def finished(path: Path, test: list[float], by: str | None = None, **changes: Any) -> Path:
    """A finished run of vit_l16 on CUB-200 with the paper's settings, but for `changes`."""
    path.mkdir(parents=True)
    config = {"dataset": "cub200", "data_seed": 0, "partial": False, "voc_difficult": "ignore"}
    config |= {"augment": "crop", "rank": 64, "weights": None, "epochs": 200, "optimizer": "adamw"}
    config |= {"grid": [1e-3], "start": by, "seed": len(str(path)), "amp": True} | changes
    about = {"data_sha256": 64 * str(config["data_seed"]), "weights_sha256": "b" * 64}
    result: dict[str, Any] = {
        "unit": "PEFT seed",
        "test": test,
        "backbone": "vit_l16",
        "aligned_by": by,
    }
    result |= {"metric": "top-1 accuracy", "pretext": "mae", "right": [round(10 * x) for x in test]}
    if by:
        result |= {"aligned_on": "cub200", "align_unlike_paper": {}}
    for name, content in (("config", config), ("env", {"about": about}), ("result", result)):
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def change(path: Path, **changes: Any) -> Path:
    """A run whose result says something else."""
    result = json.loads((path / "result.json").read_text()) | changes
    (path / "result.json").write_text(json.dumps(result))
    return path


def test_a_directory_of_runs_is_one_arm(tmp_path: Path) -> None:
    finished(tmp_path / "arm" / "s10", [72.0])
    finished(tmp_path / "arm" / "s2", [70.0])
    finished(tmp_path / "other", [60.0, 61.0])
    arm, other = evaluate([tmp_path / "arm", tmp_path / "other"]).arms
    assert (arm.arm, arm.seeds, arm.accuracies, arm.counts) == ("arm", 2, [70.0, 72.0], [700, 720])
    assert (arm.mean, arm.std) == (71.0, pytest.approx(2**0.5))
    assert (arm.first_minus_this, arm.differs, other.differs) == (None, {}, {})
    assert other.first_minus_this is not None
    assert other.first_minus_this.difference == pytest.approx(10.5)
    assert other.first_minus_this.p == by_hand([700, 720], [600, 610])


def test_runs_that_are_no_arm_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "mixed" / "a", [70.0])
    finished(tmp_path / "mixed" / "b", [70.0], rank=4)
    (finished(tmp_path / "running", [70.0]) / "result.json").unlink()
    (finished(tmp_path / "align", []) / "result.json").write_text("{}")
    finished(tmp_path / "empty", [])
    finished(tmp_path / "sweep", [70.0], swept={"rank": [1, 2]})
    (finished(tmp_path / "torn", [70.0]) / "config.json").write_text("{")
    (finished(tmp_path / "old", [70.0]) / "result.json").write_text('{"test": [1.0]}')
    (finished(tmp_path / "list", [70.0]) / "env.json").write_text("[" * 10**5)
    (finished(tmp_path / "bare", [70.0]) / "env.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for name, message in [
        ("mixed", r"mixed/b: differs from a in rank, they are no seeds of one arm"),
        ("running", "is not finished, give its own command again"),
        ("align", "has no test accuracy"),
        ("empty", "has no test accuracy"),
        ("sweep", "is a sweep, give one of its runs"),
        ("torn", r"config.json: cannot be read"),
        ("old", "is damaged or of an older version"),
        ("list", r"env.json: cannot be read"),
        ("bare", "is damaged or of an older version"),
        ("nothing", "is neither a run nor a directory of runs"),
        ("missing", "there is no such run directory"),
    ]:
        with pytest.raises(UsageError, match=message):
            read_arm(tmp_path / name)


def test_arms_with_another_test_are_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", [70.0])
    for name, changes in (("other", {"dataset": "dtd"}), ("split", {"data_seed": 3})):
        with pytest.raises(UsageError, match="not comparable"):
            evaluate([first, finished(tmp_path / name, [70.0], **changes)])
    unlike = finished(tmp_path / "unlike", [70.0], rank=1, epochs=20, seed=7, device="cuda")
    aligned = finished(tmp_path / "aligned", [70.0], by="mfac", grid=[1e-4])
    found = evaluate([first, unlike, aligned])
    assert found.arms[1].differs == {"epochs": [200, 20], "rank": [64, 1]}
    said = "unlike differs from first in epochs 20 (200 there), rank 1 (64 there)"
    assert found.differences == [said]  # the other one has the grid that goes with its start


def test_numbers_that_have_no_counts_are_found_or_have_no_p(tmp_path: Path) -> None:
    """Runs that kept percentages only; mAP, in hundredths; a value that is not finite."""
    first = change(finished(tmp_path / "first", [72.29, 70.0]), right=None)
    env = {"data_sha256": 64 * "0", "images": {"test": 480}}  # as the first edition wrote it
    (first / "env.json").write_text(json.dumps(env))
    assert read_arm(first).counts == [347, 336]
    metric = {"metric": "11-point mAP", "right": None}
    voc = [change(finished(tmp_path / f"m{i}", [80.004, 80.0 + i]), **metric) for i in (1, 2)]
    assert read_arm(voc[0]).counts == [8000, 8100]
    lost = finished(tmp_path / "lost", [70.0, 71.0])
    text = (lost / "result.json").read_text().replace("71.0", "NaN").replace("[700, 710]", "null")
    (lost / "result.json").write_text(text)
    found = evaluate([lost, lost]).arms[1].first_minus_this
    assert found is not None
    assert (found.p, found.no_p) == (None, "not finite")


def test_a_run_of_the_first_edition_is_read(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", [70.0])
    flat = json.loads((run / "config.json").read_text())
    groups = {"model": {"rank": flat.pop("rank"), "weights": flat.pop("weights")}, "data": flat}
    groups |= {"machine": {"workers": 3}, "start": None, "seed": 1}
    (run / "config.json").write_text(json.dumps(groups))
    (run / "env.json").write_text(json.dumps({"data_sha256": 64 * "0", "weights_sha256": "b" * 64}))
    row = evaluate([run, finished(tmp_path / "new", [70.0])]).arms[1]
    assert row.differs == {}


def test_the_papers_figure_stands_only_beside_what_the_paper_measured(tmp_path: Path) -> None:
    for name, by, changed, told, expected in [
        ("direct", None, {}, {}, (84.4, 0.4)),
        ("aligned", "mfac", {}, {}, (85.6, 0.3)),
        ("identity", "identity", {}, {}, None),
        ("subset", None, {"partial": True}, {}, None),
        ("rank", "mfac", {"rank": 8}, {}, None),
        ("own", None, {"weights": "backbone.pth"}, {}, None),
        ("official", None, {"weights": "x/mae_pretrain_vit_large_full.pth"}, {}, (84.4, 0.4)),
        ("short", None, {"epochs": 5}, {}, None),
        ("file", "unknown", {}, {}, None),
        ("released", "mfac", {"optimizer": "sgd"}, {}, None),
        ("task", "mfac", {}, {"pretext": "rotation"}, None),
        ("elsewhere", "mfac", {}, {"aligned_on": "dtd"}, None),
        ("unlike", "mfac", {}, {"align_unlike_paper": {"lam": 1.0}}, None),
        ("folder", None, {"dataset": "folder:cub200"}, {}, None),
    ]:
        run = change(finished(tmp_path / name, [70.0], by, **changed), **told)
        found = evaluate([run]).arms[0].paper
        assert (found and found[:2]) == expected, name


# --- the paper's tables -----------------------------------------------------------------------


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
    assert pairs(main) == [pair for row in paper.MAE.values() for pair in row]
    assert pairs(other) == [pair for row in paper.IJEPA.values() for pair in row]
    bissl = [*paper.MAE["vit_b16", "PEFT"], *paper.MAE["vit_b16", "BiSSLight"]]
    bissl += paper.BISSL["vit_b16", "BiSSL"]
    assert pairs("tab:classificaiton_acc_bissl_orig") == bissl
    head = re.findall(r"& (\w+)", table_of(main).split("midrule")[0])
    assert [name.lower() for name in head] == [*paper.DATASETS]
    body = table_of("tab:lora_param_count").split("midrule")[1]
    rows = [(*row, paper.BACKBONE_MILLIONS[name]) for name, row in paper.LORA_MILLIONS.items()]
    assert [float(x) for x in re.findall(r"\d+\.\d\d", body)] == [x for row in rows for x in row]
    memory = re.findall(r"\\\((\d+)\\\) GB", table_of("tab:memory_single_gpu"))
    gigabytes = [x for row in paper.MEMORY_GB.values() for x in row.values()]
    assert [int(x) for x in memory] == gigabytes


def test_the_parameter_table_follows_from_the_formula() -> None:
    for name, row in paper.LORA_MILLIONS.items():
        arch = BACKBONES[name].arch
        for rank, millions in zip(paper.LORA_RANKS, row, strict=True):
            printed = 0.006 if (name, rank) == ("vit_b16", 8) else 0.00501  # 0.295 is printed 0.30
            found = 4 * rank * arch.dim * arch.depth / 1e6
            assert found == pytest.approx(millions, abs=printed)
