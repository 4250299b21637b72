"""The scripts of experiments/: each runs at toy size, and their own mathematics has witnesses."""

import csv
import json
import re
import shutil
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from pages import assert_cell, tables
from quilts import few_quilts
from scipy.stats import spearmanr
from scipy.stats import t as student
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from toy import ALIGN_SETTINGS, call

from align import align
from bisslight import Diverged
from config import BACKBONES, AlignConfig, Arch, keep_known
from data import rng
from evaluate import compare
from experiments import (
    accuracy,
    attention_rollout,
    cost,
    exact,
    lora_rank,
    recipe,
    similarity,
    time_and_memory,
)
from head import features, logits
from lora import Backbone, init_theta, merge
from support.adapters import find_adapters, load_adapter
from support.checkpoints import build_vit
from support.errors import RunError, UsageError

PAGES = Path(recipe.__file__).parent
TOY = ALIGN_SETTINGS | {"epochs": 1, "warmup_epochs": 0, "batch": 40, "seeds": 2}
TOY["lr"] = "1e-2,3e-2"


def toy(weights: Path, **changes: Any) -> list[str]:
    """Toy settings as they are given on the command line."""
    settings = TOY | {"weights": weights} | changes
    return [f"{name}={value}" for name, value in settings.items()]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# --- accuracy -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_largest_stable_share_of_the_direct_rate_is_taken(
    weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Instability is planted in the first two candidates, 2/3 and 1/2 of the rate."""
    settings = {"backbone": "vit_mini", "dataset": "quilts", "weights": weights} | TOY
    real = accuracy.check_stable
    tried = list[str]()

    def planted(run: Path) -> None:
        tried.append(run.name)
        if run.name in ("dlr0.02", "dlr0.015") and (run / "metrics.jsonl").exists():
            raise Diverged("planted")
        real(run)

    monkeypatch.setattr(accuracy, "check_stable", planted)
    found = accuracy.align_stably(settings, 0.03, tmp_path / "out")
    assert [*dict.fromkeys(tried)] == ["dlr0.02", "dlr0.015", "dlr0.01"]
    assert Path(found.out).name == "dlr0.01"
    assert accuracy.align_stably(settings, 0.03, tmp_path / "out") == found  # reads it
    given = keep_known(AlignConfig, settings)
    align(AlignConfig(**given, d_lr=0.01), tmp_path / "plain")
    one, two = (Path(run, "adapter.safetensors") for run in (found.out, tmp_path / "plain"))
    assert one.read_bytes() == two.read_bytes()  # looking on changes nothing
    monkeypatch.setattr(accuracy, "unstable", lambda records: "planted")
    with pytest.raises(RunError, match="stable"):
        accuracy.align_stably(settings, 0.03, tmp_path / "none")


@pytest.mark.slow
def test_the_table_of_accuracies_has_a_row_for_each_method_and_goes_on(
    weights: Path, tmp_path: Path
) -> None:
    line = f"--backbone vit_mini --dataset quilts --hypergrad mfac,cg --out {tmp_path}/a"
    told = call(accuracy, line, toy(weights))
    rows = read(tmp_path / "a/accuracy.json")
    assert [row["arm"] for row in rows] == ["tuned-mfac", "tuned-cg", "direct"]
    assert (tmp_path / "a/accuracy.md").read_text() == told
    for row in rows:
        assert row["top-1 accuracy"].startswith(mean_accuracy(tmp_path / "a" / row["arm"]))
        assert row["the paper"] is None  # other settings
    rate = read(tmp_path / "a/direct/result.json")["lr"]
    assert (tmp_path / f"a/aligned-mfac/dlr{rate * 2 / 3:.3g}").is_dir()
    shutil.rmtree(tmp_path / "a/tuned-cg")
    call(accuracy, line, toy(weights))
    again = read(tmp_path / "a/accuracy.json")
    for row in [*rows, *again]:
        del row["CPU seconds"]
    assert again == rows


def mean_accuracy(run: Path) -> str:
    tests = read(run / "result.json")["tests"]
    return f"{np.mean([test['accuracy'] for test in tests]):.1f} ±"


@pytest.mark.slow
def test_the_controls_start_where_they_should_and_take_as_long_as_aligning(
    weights: Path, tmp_path: Path
) -> None:
    """By planted times: an epoch of PEFT takes 2 s, aligning 9 s and its PEFT 3.5 s."""
    line = f"--backbone vit_mini --dataset quilts --out {tmp_path}"
    settings = toy(weights, lr="1e-2", device="cpu", d_lr=1e-3)
    call(accuracy, line, settings)
    spent = {"aligned-mfac/dlr0.001": 9.0}
    spent |= {"direct/lr0.01-s0": 1.5, "direct/lr0.01-s1": 2.5}  # 2 on average
    spent |= {"tuned-mfac/lr0.01-s0": 3.5, "tuned-mfac/lr0.01-s1": 3.5}
    for name, seconds in spent.items():
        file = tmp_path / name / "result.json"
        file.write_text(json.dumps(read(file) | {"cpu_seconds": seconds}))
    call(accuracy, f"{line} --controls", settings)
    rows = read(tmp_path / "controls.json")
    arms = [row["arm"] for row in rows]
    assert {arm: read(tmp_path / arm / "config.json")["epochs"] for arm in arms} == {
        "tuned-mfac": 1,
        "direct": 1,
        "equal-time": 6,  # 12.5 s
        "restart": 1,
        "restart-equal-time": 5,  # of which the first PEFT takes 2
        "tuned-lower-only": 1,
        "tuned-identity": 1,
    }
    assert [row["seconds a seed"] for row in rows[:2]] == [12.5, 2.0]
    assert read(tmp_path / "equal-time/config.json")["start"] is None
    for name in ("restart", "restart-equal-time"):
        found = read(tmp_path / name / "config.json")
        assert found["start"] == str(tmp_path / "direct")
        assert found["seed"] == 2  # the first PEFT had 0 and 1
    only = tmp_path / "aligned-lower-only"
    assert read(tmp_path / "tuned-lower-only/config.json")["start"] == str(only)
    aligned = read(tmp_path / "aligned-mfac/dlr0.001/config.json")
    for arm, name in ((only, "upper_steps"), (tmp_path / "aligned-identity/dlr0.001", "hypergrad")):
        assert [key for key, x in read(arm / "config.json").items() if aligned[key] != x] == [name]
    assert rows[-1]["top-1 accuracy"].startswith(mean_accuracy(tmp_path / "tuned-identity"))


@pytest.mark.parametrize("wrong", ["p_lrr=1", "rank"])
def test_a_setting_that_neither_align_nor_finetune_has_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter, match=wrong):
        recipe.read_settings([wrong])


# --- LoRA ranks -----------------------------------------------------------------------------------


def test_lora_has_as_many_parameters_as_the_paper_says() -> None:
    """Counted on the tensor itself, and within a unit of the last digit of tab:lora_param_count."""
    for backbone, paper in lora_rank.PAPER.items():
        arch = BACKBONES[backbone]
        theta = init_theta(arch.depth, 2, arch.dim, rng(0))
        assert lora_rank.lora_parameters(backbone, 2) == theta.numel()
        ours = [lora_rank.lora_parameters(backbone, rank) for rank in lora_rank.RANKS]
        ours.append(lora_rank.backbone_parameters(backbone))
        np.testing.assert_allclose(np.array(ours) / 1e6, paper, rtol=0, atol=0.0101)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "printed"),
    [
        (lora_rank, "--ranks 1,2", ["| 1 |", "| 2 |", "| tuned-mfac |", "| direct |"]),
        (attention_rollout, "--images 2", ["BiSSLight + PEFT: entropy"]),
        (similarity, "", ["| pretrained | mfac |", "| pretrained | cg |", "| mfac | cg |"]),
    ],
)
def test_a_figure_is_drawn_of_runs_that_are_trained_where_they_are_missing(
    script: Any, flags: str, printed: list[str], weights: Path, tmp_path: Path
) -> None:
    line = f"--backbone vit_mini --dataset quilts {flags} --out {tmp_path}"
    told = call(script, line, toy(weights, lr=1e-2, d_lr=1e-2))
    assert all(text in told for text in printed), told
    name = script.__name__.removeprefix("experiments.")
    assert (tmp_path / f"{name}.png").stat().st_size > 0


# --- time and memory ------------------------------------------------------------------------------


@pytest.mark.slow
def test_time_and_memory_has_a_row_for_each_method_and_tells_which_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = time_and_memory.alternations

    def without_identity(cfg: Any, device: torch.device) -> Any:
        if cfg.hypergrad == "identity":
            raise torch.OutOfMemoryError("planted")
        yield from real(cfg, device)

    monkeypatch.setattr(time_and_memory, "alternations", without_identity)
    line = "--backbone vit_mini --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 4 --repeats 1"
    call(time_and_memory, f"{line} --peft 8,4 --out {tmp_path}", ["rank=4"])
    rows = {row["method"]: row["seconds"] for row in read(tmp_path / "vit_mini.json")}
    assert [*rows] == ["mfac", "cg", "identity", "PEFT 8", "PEFT 4"]
    assert "out of memory" in rows.pop("identity")
    assert all(float(seconds) > 0 for seconds in rows.values())


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_forward_pass_counts_each_of_its_products(depth: int) -> None:
    """By hand: tokens times weights, the two products of attention, patches, LoRA, and the head.

    Of ViT-B/16, which has twelve layers.
    """
    dim, tokens, rank = 768, 197, 64
    layer = 12 * dim**2 * tokens + 2 * tokens**2 * dim + 4 * rank * dim * tokens
    products = depth * layer + 196 * 16 * 16 * 3 * dim + dim * cost.CLASSES
    assert cost.count(BACKBONES["vit_b16"]._replace(depth=depth), rank).forward == pytest.approx(
        2 * products, rel=1e-3
    )


@pytest.mark.slow
def test_an_alignment_is_as_much_as_1_to_11_runs_of_peft_as_the_index_says() -> None:
    told = call(cost, "--backbone vit_b16,vit_h14")
    rows = [line.split("|") for line in told.splitlines() if ", vit" in line]
    ends = []
    for column in (3, 2):  # with validation, and without
        values = [float(row[column]) for row in rows]
        ends += [min(values), max(values)]
    assert ends == [1.2, 7.4, 1.3, 11.1]
    index = (Path(cost.__file__).parent / "README.md").read_text()
    told_there = r"as 1\.2\s.*to 7 .*runs of PEFT with validation.*1\.3 to 11, and by seconds"
    assert re.search(told_there, index)


# --- attention rollout ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "prefix"),
    [
        ({}, 1),
        ({"reg_tokens": 4}, 5),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, 0),
    ],
    ids=["class token", "registers", "mean of patches"],
)
def test_maps_are_rows_of_the_product_of_timms_attention(own: Any, prefix: int) -> None:
    """Timm's own unfused path, layer by layer, on weights that LoRA is merged into; any batch."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 4}
    torch.manual_seed(0)
    vit: Any = VisionTransformer(**sizes, **own, num_classes=0)  # timm's types are unions
    vit.double().requires_grad_(False)
    plain = deepcopy(vit)
    for block in vit.blocks:
        block.attn.qkv.weight *= 20  # attention far from uniform
    backbone = Backbone(vit, scale=0.5)
    theta = (torch.randn(3, 4 * 4 * 24, generator=rng(2)) * 0.2).double()
    x = torch.randn(5, 3, 16, 16, generator=rng(1)).double()
    plain.load_state_dict(merge(backbone, theta))
    seen: list[Tensor] = []
    for block in plain.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    plain.eval().forward_features(x)
    assert max(float(attention.max()) for attention in seen) > 0.9  # not near uniform
    product = np.eye(prefix + 16)
    for attention in seen:
        mean = np.asarray(attention[3]).mean(0)
        product = (mean + np.eye(len(product))) / 2 @ product
    maps = attention_rollout.attention_maps(backbone, theta, x)
    assert maps.shape == (5, 4, 4)
    expected = product[0] if prefix else product.mean(0)
    np.testing.assert_allclose(maps[3].flatten(), expected[prefix:], rtol=0, atol=1e-6)
    parts = [attention_rollout.attention_maps(backbone, theta, part) for part in x.split(2)]
    torch.testing.assert_close(torch.cat(parts), maps)


def test_concentration_is_that_of_known_maps() -> None:
    """A uniform map has entropy 1; one that looks at one patch alone has 0."""
    one_patch = torch.eye(16)[:2].view(2, 4, 4)
    assert attention_rollout.concentration(torch.ones(2, 4, 4)) == pytest.approx((1, 1 / 16))
    assert attention_rollout.concentration(one_patch) == pytest.approx((0, 1))


def test_figures_of_runs_are_of_their_files(runs: Path, weights: Path, tmp_path: Path) -> None:
    """Backbone, adapters and validation images are read apart from the program's own way."""
    task = few_quilts(0)
    shift, scale = (torch.tensor(x).view(3, 1, 1) for x in (task.mean, task.std))
    val = (torch.as_tensor(task.val.images) - shift) / scale
    vit = build_vit(Arch(64, 4, 4, 16, 4, 2.0))
    state = torch.load(weights / "backbone.pth", weights_only=True)["model"]
    vit.load_state_dict({name: state[name] for name in vit.state_dict()})
    backbone = Backbone(vit)
    both = {"after": runs / "with", "alone": runs / "without"}
    aligned = {"aligned": runs / "aligned"}
    x = {"pretrained": features(backbone, None, val).detach()}
    heads = {}
    for name, folder in (aligned | both).items():
        theta, heads[name], _ = load_adapter(find_adapters(folder)[0])
        x[name] = features(backbone, theta, val).detach()

    rows = similarity.compare_networks(aligned | both)
    for (a, b), row in zip(combinations(x, 2), rows, strict=True):
        assert (row["network"], row["and"], row["images"]) == (a, b, 24)
        # features are float32, and of other batches: they agree to some 1e-6
        assert row["CKA"] == pytest.approx(similarity.cka(x[a], x[b]), abs=1e-5)
        assert row["RSA"] == pytest.approx(similarity.rsa(x[a], x[b]), abs=1e-4)
    assert rows[2]["CKA"] < 0.9999  # PEFT learned something

    rows = attention_rollout.draw(both, 3, tmp_path / "rollout.png")
    numbers = [row["image"] for row in rows]
    assert len({*numbers}) == 3
    assert [row["label"] for row in rows] == [f"layout {task.val.targets[i]}" for i in numbers]
    for name in both:
        top = logits(x[name][numbers], heads[name]).argmax(1)
        assert [row[name] for row in rows] == [f"layout {k}" for k in top]
    with pytest.raises(UsageError, match="aligned"):
        attention_rollout.draw(aligned, 2, tmp_path / "rollout.png")


# --- similarity -----------------------------------------------------------------------------------


def test_cka_and_rsa_equal_plain_algebra_and_ignore_what_they_should() -> None:
    """Rotations, for CKA also one scale and a shift, for RSA a scale of each image."""
    x, y, other = torch.randn(3, 60, 8, generator=rng(1), dtype=torch.float64) + 0.5
    turn, _ = torch.linalg.qr(other[:8])
    y[:, :4] = x[:, :4]
    cka, rsa = similarity.cka(x, y[:, :5]), similarity.rsa(x, y)
    H = np.eye(60) - 1 / 60  # the Gram form of CKA
    K, L = (H @ np.asarray(z @ z.mT) @ H for z in (x, y[:, :5]))
    gram = np.trace(K @ L) / np.sqrt(np.trace(K @ K) * np.trace(L @ L))
    assert cka == pytest.approx(gram, abs=1e-10)
    unit = [np.asarray(z / z.norm(dim=1, keepdim=True)) for z in (x, y)]
    distances = [(1 - z @ z.T)[np.triu_indices(60, 1)] for z in unit]  # cosines of all pairs
    assert rsa == pytest.approx(spearmanr(*distances).statistic, abs=1e-10)
    for changed in (x @ turn, 37 * x, x + torch.arange(8) * 1e4):
        assert similarity.cka(changed, y[:, :5]) == pytest.approx(cka, abs=1e-10)
    for changed in (x @ turn, x * torch.rand(60, 1, generator=rng(4)) + 1e-3 * x):
        assert similarity.rsa(changed, y) == pytest.approx(rsa, abs=1e-10)
    assert similarity.cka(x, 2 * x @ turn - 5) == pytest.approx(1, abs=1e-12)
    assert similarity.rsa(x, 3 * x @ turn) == pytest.approx(1, abs=1e-10)
    assert abs(similarity.cka(x * torch.linspace(0.1, 9, 8), y[:, :5]) - cka) > 1e-3
    assert abs(similarity.rsa(x + 3, y) - rsa) > 1e-3


# --- studies --------------------------------------------------------------------------------------


def test_exact_compares_with_the_dense_inverse(tmp_path: Path) -> None:
    """On a quadratic: CG without damping is exact within five steps, where four values differ."""
    Q, _ = torch.linalg.qr(torch.randn(24, 24, generator=rng(0), dtype=torch.float64))
    values = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64).repeat(6)
    A = Q @ values.diag() @ Q.T
    theta, g = (torch.randn(3, 8, generator=rng(i), dtype=torch.float64) for i in (1, 2))
    G = torch.randn(3, max(exact.STORED), 8, generator=rng(3), dtype=torch.float64)
    batch: Any = (torch.zeros(1),)

    def loss(theta: Tensor, phi: Any, batch: Any) -> Tensor:
        return theta.flatten() @ A @ theta.flatten() / 2

    task: Any = SimpleNamespace(loss=loss)
    point = exact.Point(task, theta, {}, batch, g, G)
    H = exact.dense_hessian(point)
    torch.testing.assert_close(H, A)
    rows = [row for lam in exact.LAMBDAS for row in exact.compare(point, H, lam)]
    for row in rows:
        if row["method"] == exact.UNDAMPED:
            assert (row["cosine"], row["ratio"]) == pytest.approx((1, 1), abs=1e-9)
    identity = next(row for row in rows if row["method"] == "identity")
    inverse = Q @ (identity["lambda"] / (values + identity["lambda"])).diag() @ Q.T @ g.flatten()
    ratio = g.norm() / inverse.norm()
    assert identity["ratio"] == pytest.approx(float(ratio), rel=1e-9)
    exact.draw(rows, -0.001, tmp_path / "exact.png")
    assert (tmp_path / "exact.png").stat().st_size > 0


def test_the_tables_of_the_photographs_follow_from_what_each_seed_got_right() -> None:
    """Means, deviations, p; pooled the difference and its interval. VOC07 may end in 1 more."""
    images = {"flowers": 612, "cub200": 713, "voc07": 10000}  # hundredths of a point of mAP
    counts: dict[tuple[str, str], list[int]] = {}
    with (PAGES / "photographs.csv").open() as file:
        for row in csv.DictReader(file):
            name, arm, *seeds = row.values()
            counts[name, arm] = [int(count) for count in seeds]
    percent = {key: 100 * np.array(right) / images[key[0]] for key, right in counts.items()}
    page = (PAGES / "photographs.md").read_text()
    (by_set,), (pooled,) = tables(page, "set"), tables(page, "points")
    assert [(row["set"], row["arm"]) for row in by_set] == [*counts]
    for row in by_set:
        key, aligned = (row["set"], row["arm"]), (row["set"], "aligned")
        means = [percent[key].mean(), stdev(percent[key])]
        assert [float(x) for x in row["test"].split(" ± ")] == pytest.approx(means, abs=0.0101)
        if key != aligned:
            assert_cell(row["p"], compare(counts[aligned], counts[key]).p)
            gain = percent[aligned].mean() - percent[key].mean()
            assert float(row["aligned minus this"]) == pytest.approx(gain, abs=0.0101)
    assert len(pooled) == 6
    for row in pooled:
        pairs = [(percent[name, "aligned"], percent[name, row["aligned minus"]]) for name in images]
        mean = fmean(ours.mean() - theirs.mean() for ours, theirs in pairs)
        variance = sum(stdev(values) ** 2 / 8 for pair in pairs for values in pair) / 9
        half = float(student.ppf(0.975, 42)) * variance**0.5
        assert float(row["points"]) == pytest.approx(mean, abs=0.011)
        assert_cell(row["95 % interval"], mean - half, mean + half)
