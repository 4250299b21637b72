"""Scores against the definition, the recorded program and the devkit's steps in fractions."""

from fractions import Fraction

import pytest
import torch
from conftest import recorded

from data import rng
from head import cross_entropy
from support.metrics import average_precision, score


def test_score_counts_images_and_classes() -> None:
    z, y = torch.randn(23, 5, generator=rng(1)), torch.randint(4, (23,), generator=rng(2))
    whole = score(z, y, cross_entropy(z, y))
    assert whole.right == int((z.argmax(1) == y).sum())
    assert whole.accuracy == pytest.approx(100 * whole.right / 23)
    each = [(z.argmax(1) == y)[y == k].double().mean() for k in range(4)]
    assert whole.per_class == pytest.approx(100 * float(sum(each)) / 4)
    assert whole.loss == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)))


def test_metrics_equal_the_recorded_ones() -> None:
    """Per-class AP by the exact recall test, mAP, top-1 and both losses, of 160 images."""
    rec = recorded("official/eval_metrics.npz")
    z, labels = rec["ml_logits"], 2 * rec["ml_targets"].long() - 1
    for k, expected in enumerate(rec["ml_ap11_exact_percent_per_class"].tolist()):
        if (labels[:, k] == 1).any():
            ap = 100 * average_precision(z[:, k], labels[:, k])
            assert ap == pytest.approx(expected, abs=1e-10)
    found = score(z, labels, cross_entropy(z, labels, "softmax"))
    assert found.accuracy == pytest.approx(float(rec["ml_map11_exact_percent"]), abs=1e-10)
    assert found.loss == pytest.approx(float(rec["ml_softmax_ce_batchmean"]), rel=1e-6)
    z, y = rec["sl_logits"], rec["sl_labels"].long()
    found = score(z, y, cross_entropy(z, y))
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


def test_average_precision_equals_the_devkit_on_random_scores_with_ties() -> None:
    g = rng(0)
    for _ in range(50):
        scores = torch.randint(12, (40,), generator=g) / 12.0
        labels = torch.randint(-1, 2, (40,), generator=g)
        expected = devkit(scores.tolist(), labels.tolist())
        assert average_precision(scores, labels) == pytest.approx(expected, abs=1e-12)
    exact = torch.tensor([1] * 7 + [-1] * 7 + [1] * 3)  # recall 0.7 after the seventh image
    found = average_precision(torch.arange(17, 0, -1.0), exact)
    assert found == pytest.approx((8 + 3 * 10 / 17) / 11)
