"""Linear CKA and RSA against other formulas and scipy, their invariances, and what they take of memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr
from torch import Tensor

import similarity
from config import RunError
from runtime import rng

ROOT = Path(similarity.__file__).parent


def drawn(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=rng(seed), dtype=torch.float64) + 0.5


def pair_cka(x: Tensor, y: Tensor) -> float:
    return float(similarity.cka([(x, y)])[0, 1])


def pair_rsa(x: Tensor, y: Tensor) -> float:
    return float(similarity.rsa([x, y])[0, 1])


def hsic_cka(x: Tensor, y: Tensor) -> float:
    """The Gram form: tr(K H L H) / sqrt(tr(K H K H) tr(L H L H)), H = I − 1/N."""
    H = np.eye(len(x)) - 1 / len(x)
    K, L = (H @ np.asarray(z @ z.mT) @ H for z in (x, y))
    return float(np.trace(K @ L) / np.sqrt(np.trace(K @ K) * np.trace(L @ L)))


def test_cka_equals_the_gram_form_for_models_of_several_widths() -> None:
    models = [drawn(40, d, d) for d in (5, 60, 12)]
    models.append(models[0] @ drawn(5, 9, 1))  # one that is near another
    found = similarity.cka([models])
    for i, x in enumerate(models):
        for j, y in enumerate(models):
            assert float(found[i, j]) == pytest.approx(hsic_cka(x, y), abs=1e-10)
    assert 0.05 < found[0, 1] < found[0, 3] < 0.999


def test_cka_does_not_depend_on_batches() -> None:
    models = [drawn(41, 6, 1), drawn(41, 7, 2)]
    parts = list(zip(*(x.split(8) for x in models), strict=True))
    torch.testing.assert_close(similarity.cka(parts), similarity.cka([models]), rtol=0, atol=1e-12)
    torch.testing.assert_close(similarity.compare(models, 8)[0], similarity.cka([models]), rtol=0, atol=1e-12)


def test_cka_ignores_rotation_one_scale_and_shift_but_not_a_scale_a_channel() -> None:
    x, y = drawn(50, 8, 1), drawn(50, 8, 2)
    turn = torch.linalg.qr(drawn(8, 8, 3))[0]
    before = pair_cka(x, y)
    for changed in (x @ turn, 37 * x, x + torch.arange(8) * 1e4):
        assert pair_cka(changed, y) == pytest.approx(before, abs=1e-10)
    assert pair_cka(x, 2 * x @ turn - 5) == pytest.approx(1, abs=1e-12)
    assert abs(pair_cka(x * torch.linspace(0.1, 9, 8), y) - before) > 1e-3


def test_rsa_equals_scipy_on_explicit_matrices() -> None:
    """Several chunks of rows and of pairs; scipy's own cosine distances and its own correlation."""
    x, y = drawn(1500, 8, 1), drawn(1500, 5, 2)
    y = torch.cat([y, x[:, :4]], 1)
    above = np.triu_indices(1500, 1)
    expected = spearmanr(*(cdist(z, z, "cosine")[above] for z in (x, y))).statistic
    assert expected > 0.2
    assert pair_rsa(x, y) == pytest.approx(expected, abs=1e-10)


def test_rsa_gives_ties_their_mean_rank() -> None:
    """One-hot features: every dissimilarity is exactly 0 or 1."""
    x, y = torch.eye(4)[torch.arange(30) % 4], drawn(30, 4, 1)
    y[:, 0] += 2 * (torch.arange(30) % 4 == 1)
    above = np.triu_indices(30, 1)
    same = np.asarray(x @ x.mT, dtype=float)
    expected = spearmanr(1 - same[above], cdist(y, y, "cosine")[above]).statistic
    assert abs(expected) > 0.01
    assert pair_rsa(x, y) == pytest.approx(expected, abs=1e-10)


def test_dissimilarities_stand_as_in_the_upper_triangle() -> None:
    x = drawn(23, 4, 1)
    expected = torch.from_numpy(cdist(x, x, "cosine")[np.triu_indices(23, 1)])
    for rows in (1, 7, 23, 100):
        torch.testing.assert_close(similarity.dissimilarities(x, rows), expected, rtol=0, atol=1e-14)


def test_rsa_ignores_rotation_and_a_scale_of_each_image_but_not_a_shift() -> None:
    x, y = drawn(60, 8, 1), drawn(60, 8, 2)
    y[:, :4] = x[:, :4]
    turn = torch.linalg.qr(drawn(8, 8, 3))[0]
    before = pair_rsa(x, y)
    for changed in (x @ turn, x * torch.rand(60, 1, generator=rng(4)) + 1e-3 * x):
        assert pair_rsa(changed, y) == pytest.approx(before, abs=1e-10)
    assert pair_rsa(x, 3 * x @ turn) == pytest.approx(1, abs=1e-10)
    assert abs(pair_rsa(x + 3, y) - before) > 1e-3


def test_rsa_sees_order_only() -> None:
    """In the plane, halving all angles changes every dissimilarity and no order."""
    angle = torch.rand(40, generator=rng(1), dtype=torch.float64) * 3
    x, y = (torch.stack([a.cos(), a.sin()], 1) for a in (angle, angle / 2))
    assert pair_rsa(x, y) == pytest.approx(1, abs=1e-10)
    assert pair_cka(x, y) < 0.99


def test_what_has_no_similarity_is_refused() -> None:
    x = drawn(10, 3, 1)
    with pytest.raises(RunError, match="the same features"):
        similarity.cka([(x, torch.ones(10, 3))])
    with pytest.raises(RunError, match="no direction"):
        similarity.rsa([x, x * (torch.arange(10)[:, None] > 0)])
    with pytest.raises(RunError, match="equally far apart"):
        similarity.rsa([x, torch.eye(10)])


def test_5000_images_at_width_1280_stay_under_2_gb() -> None:
    """The whole process, torch included; two models are three matrices (d, d).

    VmHWM is the peak since the program started; ru_maxrss would begin at that of the process that runs the tests.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    code = (
        "import torch, similarity\n"
        "models = [torch.randn(5000, 1280) for _ in range(2)]\n"
        "similarity.cka(zip(*(x.split(512) for x in models)))\n"
        "print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    peak = 1024 * int(done.stdout.partition("VmHWM:")[2].split()[0])
    assert 3e8 < peak < 2e9


def test_the_picture_has_every_value_in_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(similarity, "save", lambda figure, path: kept.append(figure))
    cka, rsa = torch.tensor([[1.0, 0.25], [0.25, 1.0]]), torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    similarity.draw(["a", "b"], {"linear CKA": cka, "RSA": rsa}, "t", tmp_path / "s.png")
    left, right, _ = kept[0].axes
    assert [text.get_text() for text in left.texts] == ["1.00", "0.25", "0.25", "1.00"]
    assert [text.get_text() for text in right.texts] == ["1.00", "-0.50", "-0.50", "1.00"]
    assert [axes.get_title() for axes in (left, right)] == ["linear CKA", "RSA"]
