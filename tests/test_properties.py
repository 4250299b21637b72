"""Properties that hold for any input: settings and the order of images. Hypothesis draws them.

Derandomised, so that a failure repeats.
"""

import json
from typing import Any

from faults import WORDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import AlignConfig, FinetuneConfig, settle
from config import Settings, UsageError
from data import epochs, in_order, stream
from extras.pretrain import PretrainConfig


def drawn(examples: int) -> settings:
    """How many examples a property is tried with; no deadlines, which a busy machine would miss."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=checks,
    )  # fmt: skip


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
        config, layers = settle(kind, {}, file)
    except UsageError as error:
        assert str(error)
        return
    assert {name for layer in layers.values() for name in layer} <= kind.model_fields.keys()
    file.write_text(config.model_dump_json())
    assert settle(kind, {}, file)[0] == config


# --- order ------------------------------------------------------------------------------------


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
