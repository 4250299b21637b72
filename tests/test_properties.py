"""Properties that hold for any input: settings, flags, shapes, lists, files, masks, order. Hypothesis draws them.

Derandomised, so that a failure repeats; `benchmarks/reliability.py` draws anew by its seed.
"""

import io
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import MODELS, WORDS, Made, base_line, command, dry, flags_of, flipped, listing, make_runs, resumed, same
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_tasks import MAKE

import cli
from config import AlignConfig, FinetuneConfig, Masks, PretrainConfig, UsageError, get, leaves, read_file
from data import epochs, in_order, stream
from ijepa import check_masks, multiblock
from lora import adapter_bytes, factors, from_factors, load_adapter
from mfac import MFAC, apply_recursion, cut, cut_flat, recursion
from runtime import load_tensors
from tasks import BENCHMARKS


def drawn(examples: int) -> settings:
    """How many examples a property is tried with; without deadlines, which a busy machine would miss."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=checks)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_runs(tmp_path_factory.mktemp("made"))


# --- settings and flags ----------------------------------------------------------------------------------------------

NAMES = sorted({name for model in (AlignConfig, PretrainConfig, FinetuneConfig) for leaf in leaves(model) for name in leaf.path})  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(WORDS)
JSON = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(NAMES), x, max_size=4), max_leaves=6)  # fmt: skip
TABLES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON, max_size=6)
NEEDED = {"model": {"backbone": "vit_mini"}, "data": {"dataset": "quilts"}, "pool": "quilts"}


@drawn(150)
@given(table=TABLES, model=st.sampled_from([AlignConfig, PretrainConfig, FinetuneConfig]), start=st.booleans())
def test_any_json_is_valid_settings_or_a_usage_error(
    table: dict[str, Any], model: Any, start: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Valid ones are frozen, and what a run would save of them is read back as the same settings."""
    file = tmp_path_factory.getbasetemp() / "c.json"
    base = {k: v for k, v in NEEDED.items() if start and k in model.model_fields}
    file.write_text(json.dumps(base | table))
    try:
        config, sources = cli.build(model, {}, file, "paper")
    except UsageError as error:
        assert str(error)
        return
    assert {leaf.path[-1] for leaf in leaves(model)} >= {*sources}
    with pytest.raises(ValidationError):
        config.seed = 3
    file.write_text(json.dumps(config.model_dump(mode="json")))
    assert model.model_validate(read_file(file, model)) == config


@drawn(60)
@given(data=st.data(), model=st.sampled_from([AlignConfig, PretrainConfig, FinetuneConfig]))
def test_a_setting_taken_from_its_own_dump_is_itself(data: Any, model: Any, tmp_path_factory: Any) -> None:
    """Valid numbers for a few settings: flat in a file, or nested, they give the same settings."""
    numbers = [leaf for leaf in leaves(model) if str(leaf.field.annotation) in ("<class 'float'>", "<class 'int'>")]
    some = data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=4, unique_by=lambda leaf: leaf.path))
    flat = {leaf.path[-1]: data.draw(st.sampled_from([1, 2, 0.5, 0.25, 0.125, 64])) for leaf in some}
    base = {k: v for k, v in NEEDED.items() if k in model.model_fields}
    nested = json.loads(json.dumps(base))
    for leaf in some:
        at = nested
        for name in leaf.path[:-1]:
            at = at.setdefault(name, {})
        at[leaf.path[-1]] = flat[leaf.path[-1]]
    file = tmp_path_factory.getbasetemp() / "d.json"
    built = []
    for table in (base | flat, nested):
        file.write_text(json.dumps(table))
        try:
            built.append(cli.build(model, {}, file, "paper")[0])
        except UsageError:
            built.append(None)
    assert built[0] == built[1]
    if built[0] is not None:
        assert all(get(built[0], leaf.path) == flat[leaf.path[-1]] for leaf in some)


@drawn(60)
@given(data=st.data(), name=st.sampled_from([*MODELS]))
def test_any_word_after_a_flag_is_a_setting_or_one_line(data: Any, name: str, made: Made, monkeypatch: Any) -> None:
    """Exit code 0 or 2 with --dry-run, one line on stderr, nothing written."""
    monkeypatch.chdir(made.weights.parent)
    line = base_line(name, made)
    words = st.sampled_from(WORDS) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=8)
    for flag, switch in data.draw(st.lists(st.sampled_from(flags_of(MODELS[name])), min_size=1, max_size=2)):
        line.append(flag if switch else f"{flag}={data.draw(words)}")
    if any(word.startswith("--workers=") and word[10:].strip().isdecimal() for word in line):
        return  # as many processes would be started
    try:
        dry(line)()
    except UsageError as error:
        assert str(error)


# --- shapes ----------------------------------------------------------------------------------------------------------

SHAPES = st.tuples(*(st.integers(1, 4) for _ in range(4)))


@drawn(40)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_theta_and_its_factors_are_the_same_numbers(shape: tuple[int, ...], seed: int) -> None:
    depth, rank, dim, _ = shape
    theta = torch.randn(depth, 4 * rank * dim, generator=torch.Generator().manual_seed(seed))
    A_q, B_q, A_v, B_v = factors(theta, dim)
    assert A_q.shape == A_v.shape == (depth, rank, dim)
    assert B_q.shape == B_v.shape == (depth, dim, rank)
    assert torch.equal(from_factors(A_q, B_q, A_v, B_v), theta)
    k, i, j = depth - 1, rank - 1, dim - 1
    assert B_v[k, j, i] == theta[k, 3 * rank * dim + i * dim + j]  # by hand: B is stored transposed


@drawn(30)
@given(shape=SHAPES, classes=st.integers(0, 3), seed=st.integers(0, 99), word=st.text(max_size=8))
def test_an_adapter_file_holds_what_was_put_in(
    shape: tuple[int, ...], classes: int, seed: int, word: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    depth, rank, dim, _ = shape
    assume(not any(0xD800 <= ord(c) < 0xE000 for c in word))
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(depth, 4 * rank * dim, generator=g)
    phi = (
        {"weight": torch.randn(classes, dim, generator=g), "bias": torch.randn(classes, generator=g)} if classes else {}
    )
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    data = adapter_bytes(theta, phi, {"word": word, "backbone": "x"})
    path.write_bytes(data)
    found, head, about = load_adapter(path)
    assert torch.equal(found, theta) and same(head, phi)
    assert (about["word"], about["backbone"]) == (word, "x")
    assert adapter_bytes(found, head, {k: v for k, v in about.items() if k != "format"}) == data


@drawn(40)
@given(
    K=st.integers(1, 3), m=st.integers(1, 5), quarter=st.integers(1, 5), seed=st.integers(0, 99),
    partition=st.sampled_from(["layer", "projection", "matrix", "global"]), lam=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
)  # fmt: skip
def test_the_closed_form_equals_the_recursion_and_the_dense_inverse(
    K: int, m: int, quarter: int, seed: int, partition: Any, lam: float
) -> None:
    """Any shape, any partition: q = λ (GᵀG/m + λI)⁻¹ g block by block, three ways, in float64."""
    g = torch.Generator().manual_seed(seed)
    G = torch.randn(K, m, 4 * quarter, generator=g, dtype=torch.float64)
    x = torch.randn(K, 4 * quarter, generator=g, dtype=torch.float64)
    q = torch.empty_like(x)
    MFAC(cut(G, partition), lam).apply(cut(x, partition), cut(q, partition))
    size = {"layer": K, "projection": 2 * K, "matrix": 4 * K, "global": 1}[partition]
    blocks = list(zip(cut(G, partition), cut(x, partition), cut(q, partition), strict=True))
    assert len(blocks) == size
    assert sum(piece.shape[-1] for _, query, _ in blocks for piece in query) == x.numel()
    for rows, query, answer in blocks:
        G_k, g_k, q_k = (torch.cat(pieces, -1) for pieces in (rows, query, answer))
        dense = torch.linalg.solve(G_k.T @ G_k / m + lam * torch.eye(len(g_k), dtype=torch.float64), lam * g_k)
        torch.testing.assert_close(q_k, dense, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(apply_recursion(recursion(G_k, lam), g_k, lam), dense, rtol=1e-8, atol=1e-8)


@drawn(30)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), lead=st.integers(1, 3))
def test_flat_blocks_lie_side_by_side(sizes: list[int], lead: int) -> None:
    x = torch.arange(lead * sum(sizes)).view(lead, -1)
    parts = cut_flat(x, sizes)
    assert [part.shape[-1] for (part,) in parts] == sizes
    assert torch.equal(torch.cat([part for (part,) in parts], -1), x)
    with pytest.raises(ValueError, match="block sizes add up to"):
        cut_flat(x, [*sizes, 1])


# --- masks and order -------------------------------------------------------------------------------------------------


@drawn(40)
@given(
    grid=st.integers(4, 14), batch=st.integers(1, 4), targets=st.integers(1, 4), contexts=st.integers(1, 2),
    min_keep=st.integers(0, 10), scale=st.sampled_from([(0.15, 0.2), (0.1, 0.4), (0.3, 0.3), (0.05, 0.9)]),
    overlap=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_masks_are_rectangles_that_leave_a_context(
    grid: int, batch: int, targets: int, contexts: int, min_keep: int, scale: Any, overlap: bool, seed: int
) -> None:
    """Settings that `check_masks` lets through give blocks within the grid, and contexts of equal size beside them."""
    masks = Masks(targets=targets, contexts=contexts, min_keep=min_keep, target_scale=scale, overlap=overlap)
    try:
        check_masks(masks, grid)
    except UsageError as error:
        assert "--min-keep" in str(error)
        return
    context, blocks = multiblock(masks, grid, batch, torch.Generator().manual_seed(seed))
    assert context.shape[:2] == (contexts, batch) and blocks.shape[:2] == (targets, batch)
    assert context.shape[2] > min_keep and blocks.shape[2] > min_keep
    for places in (*context.flatten(0, 1), *blocks.flatten(0, 1)):
        assert int(places.min()) >= 0 and int(places.max()) < grid * grid
        assert (places.diff() > 0).all()  # raster order, none twice
    for places in blocks.flatten(0, 1):
        rows, columns = (places // grid).unique(), (places % grid).unique()
        assert len(rows) * len(columns) == len(places)  # a rectangle
        assert int(rows.max()) < grid - 1 and int(columns.max()) < grid - 1  # as in the official collator
        assert int(rows.max() - rows.min()) == len(rows) - 1 and int(columns.max() - columns.min()) == len(columns) - 1


@drawn(60)
@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 10**6), passes=st.integers(1, 4), at=st.integers(0, 5))  # fmt: skip
def test_every_pass_sees_every_image_once(n: int, batch: int, seed: int, passes: int, at: int) -> None:
    """Whatever the sizes: in epochs, in a stream without seams, and from any step of it on."""
    seen = [draw for part in epochs(n, batch, seed, "x", passes) for draw in part]
    assert [number for number, _ in seen] == list(range(passes * n))
    for p in range(passes):
        assert sorted(i for _, i in seen[p * n : (p + 1) * n]) == list(range(n))
    assert all(len(part) == batch for part in list(epochs(n, batch, seed, "x", 1))[:-1])
    steps = -(-passes * n // batch)
    whole = list(stream(n, batch, seed, "x", 0, steps))
    flat = [draw for part in whole for draw in part]
    assert {len(part) for part in whole} == {batch}
    for p in range(passes):
        assert sorted(i for _, i in flat[p * n : (p + 1) * n]) == list(range(n))
    assert list(stream(n, batch, seed, "x", min(at, steps), steps)) == whole[min(at, steps) :]
    assert flat[: passes * n] == seen  # one order for both
    assert [i for part in in_order(range(n), batch) for _, i in part] == list(range(n))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copies")
    for name, make in MAKE.items():
        make(root / name)
    return root


@drawn(150)
@given(data=st.data(), name=st.sampled_from([*MAKE]))
def test_any_list_file_gives_a_task_or_a_usage_error(data: Any, name: str, copies: Path) -> None:
    """Random bytes, or a line of random words in a true list: labels in range, files that are there, or one line."""
    root = copies / name
    files = sorted(p for p in (root / BENCHMARKS[name].folder).rglob("*") if p.suffix in (".txt", ".mat"))
    file = data.draw(st.sampled_from(files))
    before = file.read_bytes()
    lines = before.split(b"\n")
    words = st.sampled_from([*lines[0].decode("latin1").split()[:4], "0", "-1", "1", "7", "²", "#", "../x"]) | st.text(
        max_size=4
    )
    at = data.draw(st.integers(0, len(lines) - 1))
    near = b"\n".join(
        [*lines[:at], " ".join(data.draw(st.lists(words, max_size=4))).encode("utf8", "replace"), *lines[at + 1 :]]
    )
    content = data.draw(st.sampled_from([near, near, near, data.draw(st.binary(max_size=60))]))
    try:
        listing(name, root, file, content)()
    except UsageError as error:
        assert str(root) in str(error) or f"--dataset {name}" in str(error)
    assert file.read_bytes() == before


@drawn(120)
@given(data=st.data(), which=st.sampled_from(["adapter.safetensors", "backbone.pth", "checkpoint.pt"]))
def test_a_damaged_file_loads_equal_or_is_refused(data: Any, which: str, made: Made) -> None:
    """A flipped bit anywhere, a cut anywhere, bytes appended or overwritten: never other numbers, never a traceback."""
    folder = made.weights if which == "backbone.pth" else made.aligned
    reader: Any = {"adapter.safetensors": load_adapter, "backbone.pth": load_tensors, "checkpoint.pt": resumed}[which]
    whole = (folder / which).read_bytes()
    how = data.draw(st.sampled_from(["flip", "cut", "overwrite", "nothing"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = {
        "flip": flipped(whole, random.Random(at)),
        "cut": whole[:at],
        "overwrite": whole[:at] + data.draw(st.binary(min_size=1, max_size=40)) + whole[at + 40 :],
        "nothing": whole,
    }[how]
    scratch = made.weights.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    (scratch / which).write_bytes(damaged)
    expected = reader(folder / which)
    try:
        assert same(reader(scratch / which), expected)
    except UsageError as error:
        assert how != "nothing"
        assert which in str(error)
    finally:
        shutil.rmtree(scratch)


def test_bits_that_are_flipped_in_the_numbers_themselves_are_noticed(made: Made) -> None:
    """The control of the property above: most of a file is numbers, and torch and safetensors load other ones."""
    from safetensors.torch import load

    whole = (made.aligned / "adapter.safetensors").read_bytes()
    other = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    assert not torch.equal(load(whole)["theta"], load(other)["theta"])
    buffer = io.BytesIO()
    torch.save(torch.zeros(1000), buffer)
    data = bytearray(buffer.getvalue())
    data[data.index(bytes(3000)) + 1502] ^= 0x40
    assert torch.load(io.BytesIO(bytes(data)), weights_only=True).any()


def test_the_properties_meet_both_outcomes(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are accepted and refused, so that the properties above are not about one of the two alone."""
    monkeypatch.chdir(made.weights.parent)
    ends: Counter[str] = Counter()
    for word in ("--lam=0.5", "--lam=-1", "--rank=4", "--rank=x"):
        try:
            command(*base_line("align", made), word)
            ends["read"] += 1
        except UsageError:
            ends["refused"] += 1
    assert ends == {"read": 2, "refused": 2}
