"""Properties that hold for any input: settings, shapes, masks, order, files. Hypothesis draws them.

Derandomised, so that a failure repeats.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import KINDS, WORDS, flipped
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from commands import AlignConfig, FinetuneConfig, settle
from config import Settings, UsageError
from data import epochs, in_order, stream
from extras.settings import PretrainConfig
from ijepa import check_masks, multiblock
from lora import factors, from_factors, load_adapter, save_adapter
from mfac import mfac, recursion


def drawn(examples: int) -> settings:
    """How many examples a property is tried with; no deadlines, which a busy machine would miss."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=checks,
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- settings ---------------------------------------------------------------------------------

TRIED = (AlignConfig, FinetuneConfig, PretrainConfig)
NAMES = sorted({name for kind in TRIED for name in kind.model_fields})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(WORDS)
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS)
TABLES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=6)


@drawn(200)
@given(table=TABLES, kind=st.sampled_from(TRIED), whole=st.booleans())
def test_any_json_is_settings_or_one_line(
    table: dict[str, Any], kind: type[Settings], whole: bool, tmp_path_factory: Any
) -> None:
    """Valid ones are frozen, and what a run would save of them is read back as the same."""
    file = tmp_path_factory.getbasetemp() / "c.json"
    needed = {"backbone": "vit_mini", "dataset": "quilts", "pool": "quilts"}
    base = {name: value for name, value in needed.items() if whole and name in kind.model_fields}
    file.write_text(json.dumps(base | table))
    try:
        config, sources = settle(kind, {}, file)
    except UsageError as error:
        assert str(error)
        return
    assert {*sources} <= kind.model_fields.keys()
    with pytest.raises(ValidationError):
        config.seed = 3
    file.write_text(config.model_dump_json())
    assert settle(kind, {}, file)[0] == config


def test_the_property_above_meets_both_outcomes(tmp_path: Path) -> None:
    for value, right in ((0.5, True), (-1, False)):
        try:
            settle(AlignConfig, {"backbone": "vit_mini", "dataset": "quilts", "lam": value})
        except UsageError:
            assert not right
        else:
            assert right
    assert KINDS["align"] is AlignConfig


# --- shapes -----------------------------------------------------------------------------------

SHAPES = st.tuples(*(st.integers(1, 4) for _ in range(3)))


@drawn(40)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_theta_and_its_factors_are_the_same_numbers(shape: tuple[int, ...], seed: int) -> None:
    depth, rank, dim = shape
    theta = torch.randn(depth, 4 * rank * dim, generator=seeded(seed))
    A_q, B_q, A_v, B_v = factors(theta, dim)
    assert A_q.shape == A_v.shape == (depth, rank, dim)
    assert B_q.shape == B_v.shape == (depth, dim, rank)
    assert torch.equal(from_factors(A_q, B_q, A_v, B_v), theta)
    k, i, j = depth - 1, rank - 1, dim - 1
    assert B_v[k, j, i] == theta[k, 3 * rank * dim + i * dim + j]  # by hand: B is transposed


@drawn(40)
@given(shape=SHAPES, classes=st.integers(0, 3), seed=st.integers(0, 99), word=st.text(max_size=8))
def test_an_adapter_file_holds_what_was_put_in_or_is_refused(
    shape: tuple[int, ...], classes: int, seed: int, word: str, tmp_path_factory: Any
) -> None:
    """Damaged files are read as they were written, or not at all, up to the numbers themselves."""
    assume(not any(0xD800 <= ord(c) < 0xE000 for c in word))
    depth, rank, dim = shape
    g = seeded(seed)
    theta = torch.randn(depth, 4 * rank * dim, generator=g)
    weight = {"weight": torch.randn(classes, dim, generator=g)} if classes else {}
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    data = save_adapter(theta, weight, {"word": word, "backbone": "x"})
    path.write_bytes(data)
    found, head, about = load_adapter(path)
    assert torch.equal(found, theta)
    assert head.keys() == weight.keys()
    assert all(torch.equal(head[name], weight[name]) for name in head)
    assert about == {"word": word, "backbone": "x"}
    assert save_adapter(found, head, about) == data
    rng = random.Random(seed)
    size = 8 + int.from_bytes(data[:8], "little")  # its head: lengths, names, shapes
    for damaged in (data[: rng.randrange(len(data))], flipped(data[:size], rng) + data[size:]):
        path.write_bytes(damaged)
        try:
            found, _, _ = load_adapter(path)
        except (ValueError, OSError):
            continue
        assert found.ndim == 2


@drawn(40)
@given(
    K=st.integers(1, 3), m=st.integers(1, 5), quarter=st.integers(1, 5), seed=st.integers(0, 99),
    partition=st.sampled_from(["layer", "projection", "matrix", "global"]),
    lam=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
)  # fmt: skip
def test_the_closed_form_equals_the_recursion_and_the_dense_inverse(
    K: int, m: int, quarter: int, seed: int, partition: Any, lam: float
) -> None:
    """Any shape, any partition: q = λ (GᵀG/m + λI)⁻¹ g block by block, three ways, in float64."""
    g = seeded(seed)
    G = torch.randn(K, m, 4 * quarter, generator=g, dtype=torch.float64)
    x = torch.randn(K, 4 * quarter, generator=g, dtype=torch.float64)
    count = {"layer": K, "projection": 2 * K, "matrix": 4 * K, "global": 1}[partition]
    rows = G.transpose(1, 2).reshape(count, -1, m)  # (blocks, p, m)
    dense = [
        torch.linalg.solve(R @ R.T / m + lam * torch.eye(len(R), dtype=torch.float64), lam * g_k)
        for R, g_k in zip(rows, x.reshape(count, -1), strict=True)
    ]
    for inverse in (mfac(G, lam, partition=partition), recursion(G, lam, partition=partition)):
        q = inverse(x)
        assert q.shape == x.shape
        torch.testing.assert_close(q.reshape(count, -1), torch.stack(dense), rtol=1e-8, atol=1e-8)


# --- masks and order --------------------------------------------------------------------------


@drawn(40)
@given(
    grid=st.integers(4, 14), n=st.integers(1, 4), targets=st.integers(1, 4),
    contexts=st.integers(1, 2), min_keep=st.integers(0, 10), overlap=st.booleans(),
    scale=st.sampled_from([(0.15, 0.2), (0.1, 0.4), (0.3, 0.3), (0.05, 0.9)]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_masks_are_rectangles_that_leave_a_context(
    grid: int, n: int, seed: int, scale: Any, **given: Any
) -> None:
    """Settings that `check_masks` lets through give blocks within the grid and contexts beside."""
    shapes = {"target_scale": scale, "context_scale": (0.85, 1.0), "aspect": (0.75, 1.5)}
    masks = SimpleNamespace(**given, **shapes)
    try:
        check_masks(masks, grid)
    except ValueError as error:
        assert str(error)
        return
    context, blocks = multiblock(masks, grid, n, seeded(seed))
    assert context.shape[:2] == (n, masks.contexts)
    assert blocks.shape[:2] == (n, masks.targets)
    assert min(context.shape[2], blocks.shape[2]) > masks.min_keep
    for places in (*context.flatten(0, 1), *blocks.flatten(0, 1)):
        assert int(places.min()) >= 0
        assert int(places.max()) < grid * grid
        assert (places.diff() > 0).all()  # raster order, none twice
    for places in blocks.flatten(0, 1):
        rows, columns = (places // grid).unique(), (places % grid).unique()
        assert len(rows) * len(columns) == len(places)  # a rectangle without gaps:
        for line in (rows, columns):
            assert int(line.max() - line.min()) == len(line) - 1
            assert int(line.max()) < grid - 1  # as in the official collator


@drawn(60)
@given(
    n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 10**6),
    passes=st.integers(1, 4), at=st.integers(0, 5),
)  # fmt: skip
def test_every_pass_sees_every_image_once(
    n: int, batch: int, seed: int, passes: int, at: int
) -> None:
    """Whatever the sizes: in epochs, in a stream without seams, and from any step of it on."""
    seen = [draw for part in epochs(n, batch, seed, "x", passes) for draw in part]
    assert [number for number, _ in seen] == list(range(passes * n))
    steps = -(-passes * n // batch)
    whole = list(stream(n, batch, seed, "x", 0, steps))
    flat = [draw for part in whole for draw in part]
    assert {len(part) for part in whole} == {batch}
    for p in range(passes):
        assert sorted(i for _, i in flat[p * n : (p + 1) * n]) == list(range(n))
    assert list(stream(n, batch, seed, "x", min(at, steps), steps)) == whole[min(at, steps) :]
    assert flat[: passes * n] == seen  # one order for both
    assert [i for part in in_order(range(n), batch) for _, i in part] == list(range(n))
