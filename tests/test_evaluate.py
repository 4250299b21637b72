"""Scores, and which runs may be pooled. The permutation test is in test_wrong_numbers."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fixture, recorded, shared

import paper
from config import BACKBONES, RunError, UsageError
from evaluate import average_precision, mean_average_precision, read_arm, score, table
from finetune import cross_entropy
from runtime import rng


def test_score_does_not_depend_on_batch_size() -> None:
    z, y = torch.randn(23, 5, generator=rng(1)), torch.randint(5, (23,), generator=rng(2))
    whole = score(lambda x: x, [(z, y)])
    parts = score(lambda x: x, zip(z.split(4), y.split(4), strict=True))
    assert whole.accuracy == parts.accuracy == pytest.approx(100 * float((z.argmax(1) == y).float().mean()))
    assert whole.loss == pytest.approx(parts.loss)
    assert whole.loss == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)))


def finished(path: Path, test: list[float], **changes: object) -> None:
    """A finished run; `changes` are settings that differ from the others'."""
    path.mkdir(parents=True)
    data = {"dataset": "quilts", "data_seed": 0, "partial": False, "voc_difficult": "ignore", "augment": "crop"}
    model = {"rank": 64, "weights": "x/mae_pretrain_vit_large_full.pth"}
    peft = {"epochs": 200, "optimizer": "adamw"}
    groups = {"data": data | changes, "model": model | changes, "peft": peft | changes}
    config = groups | {"start": None, "seed": len(str(path))}
    (path / "config.json").write_text(json.dumps(config))
    (path / "env.json").write_text(
        json.dumps({"data_sha256": f"{config['data']['data_seed']:064d}", "images": {"test": 100}})
    )
    result = {"unit": "PEFT seed", "test": test, "backbone": "vit_mini", "aligned_by": None, "pretext": "mae"}
    (path / "result.json").write_text(json.dumps(result | {"metric": "top-1 accuracy"}))


def test_a_directory_of_runs_is_one_arm(tmp_path: Path) -> None:
    finished(tmp_path / "arm" / "s0", [70.0])
    finished(tmp_path / "arm" / "s1", [72.0])
    arm = read_arm(tmp_path / "arm")
    assert arm[:4] == ("arm", [70.0, 72.0], "PEFT seed", {"dataset": "quilts", "data": 12 * "0"})
    assert arm.counts == [70, 72]
    assert (arm.mean, arm.std) == (71.0, pytest.approx(2**0.5))
    rows = table([arm, arm._replace(accuracies=[60.0, 61.0])])
    assert rows[1]["first_minus_this"]["difference"] == pytest.approx(10.5)


def test_runs_that_are_no_arm_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "mixed" / "a", [70.0])
    finished(tmp_path / "mixed" / "b", [70.0], rank=4)
    finished(tmp_path / "other", [70.0], dataset="dtd")
    with pytest.raises(UsageError, match="not comparable"):
        table([read_arm(tmp_path / "mixed" / "a"), read_arm(tmp_path / "other")])
    finished(tmp_path / "running", [70.0])
    (tmp_path / "running" / "result.json").unlink()
    finished(tmp_path / "align", [])
    (tmp_path / "align" / "result.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for name, message in [
        ("mixed", "differs from .* in model"),
        ("running", "is not finished"),
        ("align", "has no test accuracy"),
        ("nothing", "is neither a run nor a directory of runs"),
        ("missing", "there is no such run directory"),
    ]:
        with pytest.raises(UsageError, match=message):
            read_arm(tmp_path / name)


def test_metrics_equal_the_recorded_ones() -> None:
    """Per-class AP by the exact recall test, mAP, top-1 and both losses, of 160 images."""
    rec = recorded("official/eval_metrics.npz")
    z, y = rec["ml_logits"], rec["ml_targets"].long()
    labels = 2 * y - 1
    for k, expected in enumerate(rec["ml_ap11_exact_percent_per_class"].tolist()):
        if (labels[:, k] == 1).any():
            assert 100 * average_precision(z[:, k], labels[:, k]) == pytest.approx(expected, abs=1e-10)
    found = score(lambda x: x, zip(z.split(16), labels.split(16), strict=True), cross_entropy)
    assert found.accuracy == pytest.approx(float(rec["ml_map11_exact_percent"]), abs=1e-10)
    assert found.loss == pytest.approx(float(rec["ml_softmax_ce_batchmean"]), rel=1e-6)
    z, y = rec["sl_logits"], rec["sl_labels"].long()
    found = score(lambda x: x, [(z, y)])
    assert found.accuracy == pytest.approx(float(rec["sl_top1_percent"]), abs=1e-4)


def devkit(scores: list[float], labels: list[int]) -> float:
    """VOCevalcls of the devkit, step by step: difficult images move neither count; recall in exact fractions."""
    ranked = [label for _, label in sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0])]
    positives, tp, fp, points = sum(label == 1 for label in labels), 0, 0, []
    for label in ranked:
        tp, fp = tp + (label == 1), fp + (label == -1)
        if tp + fp:
            points.append((Fraction(tp, positives), Fraction(tp, tp + fp)))
    steps = [Fraction(t, 10) for t in range(11)]
    return float(sum(max((p for r, p in points if r >= t), default=Fraction(0)) for t in steps) / 11)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([1, -1, 1], (6 + 5 * 2 / 3) / 11),
        ([0, 1, 0, -1, 1, 0], (6 + 5 * 2 / 3) / 11),  # difficult ones change nothing
        ([0, -1, 1], 1 / 2),
        ([-1, -1, 1, 0], 1 / 3),
        ([1] * 7 + [-1] * 7 + [1] * 3, (8 + 3 * 10 / 17) / 11),  # recall is exactly 0.7 after the seventh
        ([1] * 9 + [-1] + [1], (10 + 10 / 11) / 11),
    ],
)
def test_average_precision_by_hand(labels: list[int], expected: float) -> None:
    scores = [1 - i / 100 for i in range(len(labels))]
    assert devkit(scores, labels) == pytest.approx(expected)
    assert average_precision(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(expected)


def test_average_precision_equals_the_devkit_on_random_scores_with_ties() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        scores = torch.randint(12, (40,), generator=g) / 12.0
        labels = torch.randint(-1, 2, (40,), generator=g)
        assert average_precision(scores, labels) == pytest.approx(devkit(scores.tolist(), labels.tolist()), abs=1e-12)
    with pytest.raises(RunError, match="no class has a positive"):
        mean_average_precision(torch.zeros(3, 2), -torch.ones(3, 2))


def test_per_class_accuracy_counts_classes_alike() -> None:
    z, y = torch.eye(3)[[0, 0, 0, 1, 2]], torch.tensor([0, 0, 0, 0, 2])
    assert score(lambda x: x, [(z, y)])[::2] == (pytest.approx(80.0), pytest.approx(100 * (3 / 4 + 1) / 2))


def test_losses_of_several_labels_an_image() -> None:
    z = torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)
    labels = torch.tensor([[1, -1, 0, 1]])
    p = z.softmax(1)[0]
    assert cross_entropy(z, labels, "softmax").item() == pytest.approx(-float(p[0].log() + p[3].log()))
    s = z.sigmoid()[0]
    expected = -float(s[0].log() + (1 - s[1]).log() + s[3].log()) / 3
    assert cross_entropy(z, labels, "bce").item() == pytest.approx(expected)
    assert cross_entropy(z, torch.zeros(1, 4).long(), "bce").item() == 0  # only difficult objects: nothing to learn


def tables_of(text: str) -> dict[str, Any]:
    """Every number of the paper's tables that the program shows, in the order of the LaTeX source."""

    def table_of(label: str) -> str:
        start = text.index(f"\\label{{{label}}}")
        return text[start : text.index("\\end{tabular}", start)]

    def pairs(label: str) -> list[list[float]]:
        found = re.findall(r"(\d+\.\d)\}?\\scriptstyle\{\\pm (\d+\.\d)\}", table_of(label))
        return [[float(a), float(b)] for a, b in found]

    body = table_of("tab:lora_param_count").split("midrule")[1]
    return {
        "mae": pairs("tab:mae_bisslight_main_results"),
        "ijepa": pairs("tab:classificaiton_acc_bisslight_ijepa"),
        "bissl": pairs("tab:classificaiton_acc_bissl_orig"),
        "datasets": re.findall(r"& (\w+)", table_of("tab:mae_bisslight_main_results").split("midrule")[0]),
        "lora_millions": [float(x) for x in re.findall(r"\d+\.\d\d", body)],
        "memory_GB": [int(x) for x in re.findall(r"\\\((\d+)\\\) GB", table_of("tab:memory_single_gpu"))],
    }


def test_the_papers_tables_are_copied_right() -> None:
    """Every number of paper.py against those that a script took out of the LaTeX source, in order."""
    tables = json.loads(fixture("paper_tables.json").read_text())
    assert tables["mae"] == [[*pair] for row in paper.MAE.values() for pair in row]
    assert tables["ijepa"] == [[*pair] for row in paper.IJEPA.values() for pair in row]
    bissl = [*paper.MAE["vit_b16", "PEFT"], *paper.MAE["vit_b16", "BiSSLight"], *paper.BISSL["vit_b16", "BiSSL"]]
    assert tables["bissl"] == [[*pair] for pair in bissl]
    assert tables["datasets"] == ["Pets", "DTD", "VOC07", "Flowers", "CUB200", "Aircrafts"]
    assert [name.lower() for name in tables["datasets"]] == [*paper.DATASETS]
    ours = [x for name, row in paper.LORA_MILLIONS.items() for x in (*row, paper.BACKBONE_MILLIONS[name])]
    assert tables["lora_millions"] == ours
    assert tables["memory_GB"] == [x for row in paper.MEMORY_GB.values() for x in row.values()]


def test_the_recorded_tables_are_those_of_the_paper() -> None:
    assert tables_of(shared("paper/bisslight.tex").read_text()) == json.loads(fixture("paper_tables.json").read_text())


def test_the_parameter_table_follows_from_the_formula() -> None:
    for name, row in paper.LORA_MILLIONS.items():
        arch = BACKBONES[name].arch
        for rank, millions in zip(paper.LORA_RANKS, row, strict=True):
            printed = 0.006 if (name, rank) == ("vit_b16", 8) else 0.00501  # 0.295 is printed 0.30
            assert 4 * rank * arch.dim * arch.depth / 1e6 == pytest.approx(millions, abs=printed)


def test_the_papers_figure_stands_beside_a_whole_benchmark_only(tmp_path: Path) -> None:
    finished(tmp_path / "own", [70.0])
    assert read_arm(tmp_path / "own").published is None
    for name, changed, by, expected in [
        ("direct", {}, None, (84.4, 0.4)), ("aligned", {}, "mfac", (85.6, 0.3)), ("identity", {}, "identity", None),
        ("subset", {"partial": True}, None, None), ("rank", {"rank": 8}, "mfac", None),
        ("own", {"weights": "backbone.pth"}, None, None), ("short", {"epochs": 5}, None, None),
        ("file", {}, "unknown", None), ("released", {"optimizer": "sgd"}, "mfac", None),
    ]:  # fmt: skip
        finished(tmp_path / "x" / name, [70.0], **({"dataset": "cub200"} | changed))
        result = json.loads((tmp_path / "x" / name / "result.json").read_text())
        (tmp_path / "x" / name / "result.json").write_text(
            json.dumps(result | {"backbone": "vit_l16", "aligned_by": by, "align_unlike_paper": {}})
        )
        found = read_arm(tmp_path / "x" / name).published
        assert (found and found[:2]) == expected, name
    (tmp_path / "own" / "result.json").write_text(json.dumps({"unit": "PEFT seed", "test": [1.0]}))
    with pytest.raises(UsageError, match="was made by an older version"):
        read_arm(tmp_path / "own")


def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    from figures import check_picture

    check_picture("--picture", tmp_path / "arms.svg")
    for wrong in ("arms.gif2", "arms", "nowhere/arms.png"):
        with pytest.raises(UsageError, match="--picture"):
            check_picture("--picture", tmp_path / wrong)
