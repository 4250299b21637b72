"""Properties that hold for any input: settings, shapes, masks, order, files. Hypothesis draws them.

Derandomised, so that a failure repeats.
"""

import json
import random
from types import SimpleNamespace
from typing import Any

import torch
from faults import WORDS, flipped
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commands import AlignConfig, FinetuneConfig, settle
from config import Settings, UsageError
from data import epochs, in_order, stream
from extras.settings import PretrainConfig
from ijepa import check_masks, multiblock
from lora import load_adapter, save_adapter


def drawn(examples: int) -> settings:
    """How many examples a property is tried with; no deadlines, which a busy machine would miss."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=checks,
    )  # fmt: skip


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- settings ---------------------------------------------------------------------------------

TRIED = (AlignConfig, FinetuneConfig, PretrainConfig)
NAMES = sorted({name for kind in TRIED for name in kind.model_fields})
NUMBERS = st.integers() | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(WORDS)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS)
TABLES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=6)


@drawn(100)
@given(table=TABLES, kind=st.sampled_from(TRIED), whole=st.booleans())
def test_any_json_is_settings_or_one_line(
    table: dict[str, Any], kind: type[Settings], whole: bool, tmp_path_factory: Any
) -> None:
    """What a run would save of valid ones is read back as the same."""
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
    file.write_text(config.model_dump_json())
    assert settle(kind, {}, file)[0] == config


# --- adapter files ----------------------------------------------------------------------------

SHAPES = st.tuples(*(st.integers(1, 4) for _ in range(3)))


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
