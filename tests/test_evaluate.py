"""Scores, the permutation test by brute force, runs that make an arm, what arms differ in."""

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from toy import photos_in, refusal

from config import ALIGNED_RATES, RATES, FinetuneConfig
from data import Split, Task, folder, rng
from evaluate import (
    NOT_COMPARED,
    SWITCHES,
    WORDS,
    Comparison,
    compare,
    evaluate,
    in_words,
    read_arm,
)
from finetune import finetune
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


def test_percentages_and_empty_arms_are_refused() -> None:
    for odd in (70.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="not percentages"):
            compare([odd, 70], [71])  # type: ignore[list-item]
    for arm, against in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="without a seed"):
            compare(arm, against)


RUNS = itertools.count()


def finished(
    path: Path,
    test: list[float],
    by: str | None = None,
    origin: dict[str, Any] | None = None,
    metric: str = "top-1 accuracy",
    images: int = 1000,
    start: str | None = None,
    before: float | None = 0.0,
    start_seeds: Sequence[int] = (),
    versions: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """A finished run of vit_l16 on CUB-200 with the paper's settings and 1000 test images.

    `by` is the hypergradient of the align run before it, which took `before` CPU seconds, `start`
    the digest of its adapter; `origin` changes what that says, `changes` are other settings.
    """
    path.mkdir(parents=True)
    own = {key: x for key, x in changes.items() if key == "backbone" or x == "ijepa"}
    given: Any = {"backbone": "vit_l16", "dataset": "cub200"} | own
    seed = changes.pop("seed", len(str(path)))
    config = FinetuneConfig(**given).model_dump(mode="json")
    del config["lr"], config["seeds"], config["grid_seeds"]
    config |= {"seed": seed, "weights_sha256": "b"} | changes
    config |= {"command": "finetune", "images": {"train": 1, "val": 1, "test": images}}
    config.setdefault("data_sha256", f"2:{config['dataset']} {config['data_seed']}")
    config["start"] = by and "/aligned"
    said: dict[str, Any] = {}
    if by:
        said = {"stage": "align", "hypergrad": by, "dataset": "cub200", "unlike_paper": {}}
        said |= {"pretext": config["pretext"]}
    tests = []
    trials = []
    for k, accuracy in enumerate(test):
        right = round(accuracy * images / 100) if metric == "top-1 accuracy" else None
        tests.append({"accuracy": accuracy, "loss": 1.0, "right": right})
        trial = {"lr": 1e-3, "seed": seed + k, "val": tests[-1], "cpu_seconds": 8.0}
        trial |= {"seconds": 9.0 + next(RUNS)}  # no two runs take equally long
        trial |= {"start_sha256": start or by, "start_cpu_seconds": before}
        trial |= {"start_seeds": start_seeds}
        trials.append(trial)
    result: dict[str, Any] = {"tests": tests, "trials": trials, "metric": metric}
    result |= {"origin": said | (origin or {}), "versions": versions}
    result |= {"start_cpu_seconds": before, "grid_seeds": 1, "tried": []}
    result |= {"rates": ALIGNED_RATES if by else RATES, "lr": 1e-3}
    result |= {"cpu_seconds": 8.0 * len(test), "seconds": 9.0}
    for name, content in (("config", config), ("result", result)):
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_directory_of_runs_is_one_arm(tmp_path: Path) -> None:
    finished(tmp_path / "arm" / "s10", [72.0])
    finished(tmp_path / "arm" / "s2", [70.0])
    finished(tmp_path / "other", [60.0, 61.0])
    arm, other = evaluate([tmp_path / "arm", tmp_path / "other"]).arms
    assert (arm.arm, arm.unit, arm.mean) == ("arm", "PEFT", 71.0)
    assert (arm.accuracies, arm.counts) == ([70.0, 72.0], [700, 720])
    assert (arm.first_minus_this, arm.differs, other.differs) == (None, {}, {})
    compared = json.loads(other.model_dump_json())["first_minus_this"]
    assert compared == {"difference": 10.5, "p": by_hand([700, 720], [600, 610]), "splits": 6}


def test_a_run_in_two_arms_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given twice, by another way to write it, by a link, or with the folder that it lies in."""
    run = finished(tmp_path / "arm/a", [70.0, 72.0])
    other = finished(tmp_path / "other", [60.0])
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    for again in (run, Path(), tmp_path / "link", tmp_path / "arm"):
        with pytest.raises(UsageError, match=rf"^{again}: \S* is in two arms; give each run once$"):
            evaluate([run, other, again])


def test_a_copy_of_a_run_in_another_arm_is_refused(tmp_path: Path) -> None:
    """Also one that has grown since: a trial of it is still that of the first run."""
    run = finished(tmp_path / "a", [70.0, 72.0])
    grown = Path(shutil.copytree(run, tmp_path / "b"))
    result = json.loads((grown / "result.json").read_text())
    new = json.loads((finished(tmp_path / "new", [60.0], seed=99) / "result.json").read_text())
    for name in ("tests", "trials"):
        result[name] += new[name]
    said = rf"^{grown}: {grown}/lr\S+ is a copy of {run}/lr\S+, of another arm; give each run once$"
    with pytest.raises(UsageError, match=said):
        evaluate([run, grown])
    (grown / "result.json").write_text(json.dumps(result))
    with pytest.raises(UsageError, match=said):
        evaluate([run, grown])


def test_arms_have_names_that_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [finished(tmp_path / folder / "tuned", [70.0]) for folder in ("a", "b")]
    assert [arm.arm for arm in evaluate(runs).arms] == [str(run) for run in runs]
    monkeypatch.chdir(runs[0])
    assert evaluate([Path()]).arms[0].arm == "tuned"


def test_the_time_of_a_run_before_is_counted_once(tmp_path: Path) -> None:
    """Two fine-tunings of one align run cost one alignment; those of two cost two."""
    for run, start in (("one/s0", "a"), ("one/s1", "a"), ("two/s0", "a"), ("two/s1", "b")):
        seed = int(run[-1])
        finished(tmp_path / run, [70.0], by="mfac", start=start, before=5.0, seed=seed)
    one, two = (read_arm(tmp_path / name) for name in ("one", "two"))
    assert (one.cpu_seconds, one.start_cpu_seconds, one.unit) == (16, 5, "PEFT from one adapter")
    assert (two.cpu_seconds, two.start_cpu_seconds, two.unit) == (16, 10, "align run and PEFT")
    assert two.as_row()["CPU seconds"] == "16 + 10"
    unknown = read_arm(finished(tmp_path / "unknown", [70.0], by="mfac", before=None))
    assert unknown.as_row()["CPU seconds"] == "8 + unknown"
    assert read_arm(finished(tmp_path / "direct", [70.0])).as_row()["CPU seconds"] == "8"


def test_one_seed_of_peft_after_all_align_runs_is_said(tmp_path: Path) -> None:
    """All have one head and one order of batches: p is about align runs alone."""
    for k in "01":
        finished(tmp_path / "arm" / k, [70.0], by="mfac", start=k, seed=0)
        again: Any = {"origin": {"stage": "finetune"}, "start": k, "seed": 9}
        finished(tmp_path / "restart" / k, [70.0], **again)
    assert read_arm(tmp_path / "arm").unit == "align run, with one seed of PEFT after it"
    assert read_arm(tmp_path / "restart").unit == "PEFT, with one seed of PEFT after it"


@pytest.mark.parametrize(
    ("earlier", "seeds", "unit"),
    [
        ([[0, 7], [0, 8]], (9, 10), "align run and last PEFT, with one seed of PEFT between them"),
        ([[0, 7], [0, 8]], (9, 9), "align run, with one seed of each PEFT after it"),
        ([[0, 7], [1, 8]], (9, 10), "align run, PEFT and PEFT anew"),
        ([[0, 7], [1, 8]], (9, 9), "align run and PEFT, with one seed of PEFT after it"),
        ([[0, 7], [1, 7]], (9, 10), "PEFT and PEFT anew, on one align run"),
        ([[0, 7], [1, 7]], (9, 9), "PEFT, with one seed of PEFT after it, on one align run"),
        ([[0, 7], [1, 7], [2, 8]], (9, 10, 11), "PEFT and PEFT anew, on 2 align runs"),
        ([[], []], (9, 10), "PEFT and PEFT anew"),  # of an older version, which did not say them
    ],
)
def test_a_restart_says_which_runs_before_it_are_done_anew(
    earlier: list[list[int]], seeds: tuple[int, ...], unit: str, tmp_path: Path
) -> None:
    """`earlier` has the seeds of PEFT and of the align run before it, for each trial."""
    said = {"stage": "finetune", "origin": {"stage": "align"}}
    for k in range(len(seeds)):
        again: Any = {"origin": said, "start": str(k), "start_seeds": earlier[k], "seed": seeds[k]}
        finished(tmp_path / "arm" / str(k), [70.0], **again)
    assert read_arm(tmp_path / "arm").unit == unit


def test_runs_that_are_no_arm_are_refused(tmp_path: Path, pretrained: Path, runs: Path) -> None:
    second: dict[str, Any] = {"mixed": {"rank": 4}, "both": {"by": "mfac"}, "twice": {"seed": 6}}
    second["changed"] = {"data_sha256": "other"}  # one name, but other images
    for arm, changes in second.items():
        finished(tmp_path / arm / "a", [70.0, 71.0], seed=5)  # 5, 6
        finished(tmp_path / arm / "b", [70.0], **{"seed": 7} | changes)
    for align_run in ("0", "1"):  # two of them are not four
        again: Any = {"by": "mfac", "start": align_run, "seed": 5}
        finished(tmp_path / "again" / align_run, [70.0, 71.0], **again)
    for k in "01":  # made twice, such as with and without micro-batches
        again = {"by": "mfac", "start": k, "start_seeds": (3,), "seed": 5}
        finished(tmp_path / "remade" / k, [70.0], **again)
        again = {"origin": {"stage": "finetune"}, "start": k, "start_seeds": (0, 3), "seed": 5}
        finished(tmp_path / "retuned" / k, [70.0], **again)
    (finished(tmp_path / "running", [70.0]) / "result.json").unlink()
    (finished(tmp_path / "torn", [70.0]) / "config.json").write_text("{")
    (finished(tmp_path / "foreign", [70.0]) / "result.json").write_text('{"accuracy": 3}')
    named = {"mixed": "LoRA of rank 4 and LoRA of rank 64", "both": "aligned with M-FAC and not"}
    named |= {"twice": "a seed is there twice", "changed": "labelled images other and labelled"}
    named |= {
        "again": "there are 2 starts for 4 seeds, neither",
        "remade": "two align runs have the same seed",
    }
    named |= {"retuned": "two finetune runs have the same seed"}
    messages = {name: f"its runs are no seeds of one arm: .*{x}" for name, x in named.items()}
    messages |= dict.fromkeys(("torn", "foreign"), ".*give a finished finetune run")
    messages["running"] = "is no finished run; its own command goes on with it; give a finished"
    for name, message in messages.items():
        with pytest.raises(UsageError, match=rf"{name}(/\w+\.json)?: {message}"):
            read_arm(tmp_path / name)
    for run in (pretrained / "mae", runs / "aligned"):  # of other commands
        assert str(run) in refusal(f"evaluate {run}")


def test_arms_with_another_test_are_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", [70.0])
    for name, changes in (("other", {"dataset": "dtd"}), ("split", {"data_seed": 3})):
        with pytest.raises(UsageError, match="not comparable"):
            evaluate([first, finished(tmp_path / name, [70.0], **changes)])  # type: ignore[arg-type]
    unlike = finished(tmp_path / "unlike", [70.0], amp=False, device="cuda", weights_sha256="c")
    aligned = finished(tmp_path / "aligned", [70.0], by="mfac")
    restart = finished(tmp_path / "restart", [70.0], origin={"stage": "finetune"})
    found = evaluate([first, unlike, aligned, restart]).arms
    assert found[1].differs == {
        "amp": ("float32 throughout", "bfloat16 on a GPU"),
        "weights_sha256": ("weights of the backbone c", "weights of the backbone b"),
    }
    assert found[2].differs["origin"] == ("aligned with M-FAC", "not aligned")
    restarted = ("restarted from an earlier fine-tuning", "not aligned")
    assert found[3].differs == {"origin": restarted}
    for name, before in (("aligned with M-FAC", aligned), ("not aligned", first)):
        origin = json.loads((before / "result.json").read_text())["origin"]
        said: Any = {"stage": "finetune", "origin": origin}
        again = finished(tmp_path / "again" / name, [70.0], origin=said)
        which = f"restarted from an earlier fine-tuning, which was {name}"
        assert evaluate([aligned, again]).arms[1].differs["origin"][0] == which
    config = json.loads((unlike / "config.json").read_text())
    del config["scale"]  # a setting that came after a run had its default there
    (unlike / "config.json").write_text(json.dumps(config))
    assert evaluate([first, unlike]).arms[1].differs == found[1].differs


def test_what_is_done_with_vocs_difficult_objects_is_told_of_runs_on_voc07_alone(
    tmp_path: Path,
) -> None:
    for dataset, told in (("voc07", {"voc_difficult"}), ("own", set())):
        of_arms: Any = [{"dataset": dataset, "voc_difficult": x} for x in ("ignore", "positive")]
        one, two = (
            finished(tmp_path / dataset / arm["voc_difficult"], [70.0], **arm) for arm in of_arms
        )
        assert evaluate([one, two]).arms[1].differs.keys() == told


def test_a_size_that_was_typed_is_no_difference_where_the_weights_are_the_same(
    tmp_path: Path,
) -> None:
    """A checkpoint refuses other sizes than its own, but timm's networks take any image size."""
    sizes: Any = {"image_size": 64, "patch_size": 8}
    for case, changes, told in (
        ("same", {}, set()),
        ("other", {"weights_sha256": "c"}, {"image_size", "patch_size", "weights_sha256"}),
        ("timm", {"backbone": "timm:vit_base_patch16_224"}, {"image_size"}),  # of an older version
        ("known", {"backbone": "timm:vit_base_patch16_224", "input_size": 64}, set()),
    ):
        common: Any = {} if case == "other" else changes
        plain = finished(tmp_path / case / "plain", [70.0], **common)
        typed = finished(tmp_path / case / "typed", [70.0], **sizes, **changes)
        assert evaluate([plain, typed]).arms[1].differs.keys() == told, case


def test_what_aligned_arms_differ_in_is_told_in_a_line(tmp_path: Path) -> None:
    """The images aligned on, the upper rate, versions, settings; not where images lie."""
    on: Any = {"d_lr": 1e-3, "data_sha256": "a", "pool_sha256": "p", "dataset": "omniglot:Greek"}
    on |= {"contents_sha256": "c", "pool_contents_sha256": "x"}
    one = finished(tmp_path / "one", [70.0], by="mfac", origin=on, versions=("bisslight 1",))

    def told(name: str, versions: tuple[str, ...] = ("bisslight 1",), **origin: Any) -> str:
        arm = finished(tmp_path / name, [70.0], by="mfac", origin=on | origin, versions=versions)
        return str(evaluate([one, arm])).splitlines()[-1]

    seeds = "1 seed; done for each: PEFT from one adapter; 2 splits"
    rate = told("rate", d_lr=0.1)
    assert (
        rate
        == "rate: align with upper learning rate 0.1 (one: align with upper learning rate 0.001)"
    )
    data = told("data", data_sha256="b", contents_sha256="d", dataset="omniglot:Latin")
    greek = "its start trained on omniglot:Greek"
    assert data == f"data: its start trained on omniglot:Latin (b) (one: {greek} (a))"
    replaced = told("replaced", contents_sha256="d")  # by files of as many bytes
    assert replaced == f"replaced: {greek} (d) (one: {greek} (c))"
    older = told("older", contents_sha256=None, pool_contents_sha256=None)
    assert older == f"older: {seeds}"  # and nothing after it
    script = told("script", data_sha256="named", files_sha256="a", dataset="own")
    assert script == f"script: {seeds}"  # and nothing after it
    pull = told("pull", unlike_paper={"lam": 1.0, "pool": "/scratch"})
    assert pull == "pull: align with λ 1.0 (one: align with λ as in the paper)"
    hypergradient = told("hypergradient", hypergrad="identity", unlike_paper={"lam": 1.0})
    assert hypergradient == (
        "hypergradient: align with λ 1.0 (one: align with λ as in the paper);"
        " aligned with no curvature (one: aligned with M-FAC)"
    )
    precision = told("precision", unlike_paper={"amp": False})
    there = "(one: align with bfloat16 on a GPU)"
    assert precision == f"precision: align with float32 throughout {there}"
    pool = told("pool", pool_sha256="q", pool_contents_sha256="y")
    assert pool == "pool: align with pool q (one: align with pool p)"
    content = told("content", pool_contents_sha256="y")
    assert content == "content: align with content of pool y (one: align with content of pool x)"
    moved = told("moved", dataset="folder:/scratch0/greek", unlike_paper={"pool": "/scratch0"})
    assert moved == f"moved: {seeds}"  # and nothing after it
    version = told("version", versions=("bisslight 2",))
    assert version == "version: made by bisslight 2 (one: made by bisslight 1)"
    both = told("both", versions=("bisslight 1", "bisslight 2"))
    assert both == "both: by several versions: bisslight 1; bisslight 2"


@pytest.mark.parametrize(
    ("dataset", "told"),
    [("own", "own (1111aaaa, of mean and std, too)"), ("folder:/a", "folder:/a (1111aaaa)")],
)
def test_a_start_on_data_of_a_script_is_not_said_to_be_on_other_images_alone(
    dataset: str, told: str
) -> None:
    """Its digest is another one where a script gives the same images another mean."""
    start = {"origin": "tuned", "origin_dataset": dataset, "origin_data_sha256": "2:1111aaaa"}
    run = {"dataset": dataset, "data_sha256": "2:2222bbbb"}
    assert in_words("origin", start | run) == f"tuned, on {told}"


def test_arms_that_start_alike_are_told_apart_where_the_first_one_starts_otherwise(
    tmp_path: Path,
) -> None:
    """After align on the arm's own images and on others, with direct fine-tuning first."""
    own: Any = {"data_sha256": "2:cub200 0"}
    other: Any = {"data_sha256": "2:latin", "dataset": "omniglot:Latin"}
    runs = [finished(tmp_path / "direct", [70.0])]
    runs.append(finished(tmp_path / "own", [70.0], by="mfac", origin=own))
    stiff = other | {"unlike_paper": {"lam": 1.0}}
    runs.append(finished(tmp_path / "other", [70.0], by="mfac", origin=stiff))
    of_own, of_other = str(evaluate(runs)).splitlines()[-2:]
    assert of_own.endswith("; aligned with M-FAC (direct: not aligned)")
    assert of_other.endswith(
        "; aligned with M-FAC, on omniglot:Latin (2:latin) (direct: not aligned);"
        " align with λ 1.0 (own: align with λ as in the paper);"
        " its start trained on omniglot:Latin (2:latin)"
        " (own: its start trained on cub200 (cub200 0))"
    )


def test_restarts_of_aligned_runs_are_told_apart_after_a_restart_of_a_direct_one(
    tmp_path: Path,
) -> None:
    """Only the restart of another aligned run starts as they do, so the λ of both is told."""
    aligned: Any = {"stage": "align", "hypergrad": "mfac", "dataset": "cub200"}
    before: Any = {
        "r_d": {},
        "r_t": aligned | {"unlike_paper": {"lam": 1.0}},
        "r_t5": aligned | {"unlike_paper": {"lam": 5.0}},
    }
    runs = [finished(tmp_path / "direct", [70.0])]
    for name, start in before.items():
        tuned = {"stage": "finetune", "backbone": "vit_l16", "lr": 1e-3, "origin": start}
        runs.append(finished(tmp_path / name, [70.0], by="mfac", start=name, origin=tuned))
    found = evaluate(runs).arms
    assert [arm.starts_as for arm in found] == [None, None, None, "r_t"]
    told = ("its start: align with λ 5.0", "its start: align with λ 1.0")
    assert [*found[3].start_differs.values()] == [told]


def test_counts_of_a_small_type_are_compared_as_whole_numbers() -> None:
    """A sum of several is more than a byte holds."""
    counts = [20, 22, 25, 28], [30, 31, 33, 35]
    small = [[*torch.tensor(numbers, dtype=torch.uint8)] for numbers in counts]
    assert compare(*small, 40) == compare(*counts, 40)  # type: ignore[arg-type]


def test_the_image_size_of_the_run_before_is_compared(tmp_path: Path) -> None:
    """That of align, and that of an earlier fine-tuning; an older adapter says none."""
    sizes = {
        name: {"arch": {"image_size": size, "patch_size": 16}}
        for name, size in (("one", 32), ("same", 32), ("other", 64))
    }
    sizes["older"] = {}
    for stage, start in (("align", "align with"), ("finetune", "its start:")):
        for name, arch in sizes.items():
            said: Any = arch | ({} if stage == "align" else {"stage": stage, "origin": {}})
            finished(tmp_path / stage / name, [70.0], by="mfac", start=name, origin=said)
        arms = evaluate([tmp_path / stage / name for name in sizes]).arms
        told = {arm.arm: [*arm.differs.values()] for arm in arms}
        assert told["same"] == told["older"] == []
        assert told["other"] == [(f"{start} image size 64", f"{start} image size 32")]
        for name in ("same", "older"):
            shutil.rmtree(tmp_path / stage / name)
        with pytest.raises(UsageError, match=f"no seeds of one arm: {start} image size 64 and"):
            read_arm(tmp_path / stage)


def test_arms_whose_pretext_tasks_differ_in_name_or_content_are_told_apart(tmp_path: Path) -> None:
    """A file of a task that was edited between two align runs has another digest."""
    on: Any = {"pretext": "rotation", "pretext_sha256": "1" * 64}
    one = finished(tmp_path / "one", [70.0], by="mfac", origin=on)
    again = finished(tmp_path / "again", [70.0], by="mfac", origin=on)
    edited = finished(
        tmp_path / "edited", [70.0], by="mfac", origin=on | {"pretext_sha256": "2" * 64}
    )
    mae = finished(tmp_path / "mae", [70.0], by="mfac")
    found = evaluate([one, again, edited, mae]).arms
    there = "align with pretext task rotation (11111111)"
    assert found[1].differs == {}
    assert found[2].differs["align_pretext"] == (
        "align with pretext task rotation (22222222)",
        there,
    )
    assert found[3].differs["align_pretext"] == ("align with pretext task mae", there)


def test_a_class_of_ones_own_that_is_called_ijepa_has_none_of_its_recipe(tmp_path: Path) -> None:
    """Fine-tuning after it had a linear head, as after MAE; after I-JEPA it has a batchnorm.

    An adapter names the class in small letters. That of I-JEPA says which encoder it is of.
    """
    said: dict[str, Any] = {"mae": {"pretext": "mae"}, "own": {"pretext": "ijepa"}}
    said["ijepa"] = {"pretext": "ijepa", "base": "target_encoder"}
    for name, pretext in said.items():
        origin = {"stage": "finetune", "backbone": "vit_l16", "origin": {}} | pretext
        finished(tmp_path / name, [70.0], by="mfac", origin=origin)
    _, own, ijepa = evaluate([tmp_path / name for name in said]).arms
    assert own.differs.keys() == {"align_pretext"}
    head = ("its start: downstream head batchnorm", "its start: downstream head linear")
    assert ijepa.differs["start_head"] == head


def test_seeds_with_one_pretext_task_in_files_at_two_places_are_an_arm(tmp_path: Path) -> None:
    """As after a move of the file; another class is another arm."""
    on: Any = {"pretext": "mine", "pretext_sha256": "1" * 64}
    for k, name in enumerate(("tasks/mine.py:Mine", "/moved/mine.py:Mine", "tasks/mine.py:Other")):
        run: Any = {"by": "mfac", "start": str(k), "seed": k, "origin": on, "pretext": name}
        finished(tmp_path / "arm" / str(k), [70.0 + k], **run)
    with pytest.raises(UsageError, match="pretext task Other and pretext task Mine; give them"):
        read_arm(tmp_path / "arm")
    shutil.rmtree(tmp_path / "arm/2")
    assert read_arm(tmp_path / "arm").accuracies == [70.0, 71.0]


def test_seeds_whose_pretext_task_has_another_content_are_no_arm(tmp_path: Path) -> None:
    for k in "12":
        on: Any = {"pretext": "rotation", "pretext_sha256": k * 64}
        finished(tmp_path / "arm" / k, [70.0], by="mfac", start=k, seed=int(k), origin=on)
    with pytest.raises(UsageError, match=r"no seeds of one arm: .*rotation \(22222222\) and"):
        read_arm(tmp_path / "arm")


def test_runs_that_knew_images_by_their_names_alone_are_not_compared(tmp_path: Path) -> None:
    """Neither with each other, since equal names may be of other pictures, nor with newer runs."""
    old = [finished(tmp_path / name, [70.0], data_sha256="1" * 64) for name in ("a", "b")]
    new = finished(tmp_path / "new", [70.0])
    for arms, named in ((old, "a"), ([new, old[0]], "a"), ([old[1], new], "b")):
        with pytest.raises(UsageError, match=f"^{named}: .*by their names alone; give a new run"):
            evaluate(arms)
    assert evaluate(old[:1]).arms[0].mean == 70.0


def test_what_is_no_finetune_run_is_named_for_what_it_is(tmp_path: Path, runs: Path) -> None:
    assert f"{runs}/aligned: is a run of align; give a" in refusal(f"evaluate {runs}/aligned")
    assert f"{tmp_path}/nothing: is not here; give a finished" in refusal(
        f"evaluate {tmp_path}/nothing"
    )


def test_every_setting_that_is_compared_has_words() -> None:
    names = FinetuneConfig.model_fields.keys() - NOT_COMPARED - {"seeds"}
    assert names <= WORDS.keys() | SWITCHES.keys()


def test_results_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    """Each is told in one line, with the run's name and no address on the web."""
    changes: dict[str, Any] = {
        "none": {"tests": []},
        "above": {"tests": [{"accuracy": 101, "loss": 1.0, "right": 1010}]},
        "nan": {"tests": [{"accuracy": math.nan, "loss": 1.0, "right": 700}]},
        "unsaid": {"tests": [{"accuracy": 70.0, "loss": 1.0, "right": None}]},
        "other": {"tests": [{"accuracy": 70.0, "loss": 1.0, "right": 300}]},
        "trials": {"trials": []},
        "twice": {"tests": [{"accuracy": 70.0, "loss": 1.0, "right": 700}] * 2},
        "metric": {"metric": "bla"},
        "mAP": {"metric": "11-point mAP"},  # then the images that are right would not count
        "seconds": {"cpu_seconds": -5},
        "rate": {"lr": 3e-3},  # the trials are of 1e-3
        "rates": {"rates": [0.1]},
    }
    for name, change in changes.items():
        run = finished(tmp_path / name, [70.0])
        content = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(content | change))
        said = refusal(f"evaluate {run}")
        assert str(run) in said and "http" not in said
    run = finished(tmp_path / "digest", [70.0], data_sha256=None)
    said = refusal(f"evaluate {run}")
    assert f"{run}/config.json: cannot be read (it does not say its data_sha256); give" in said


def test_the_table_of_three_arms_fits_a_terminal(tmp_path: Path) -> None:
    """With the names of README it fits 80 columns, also where aligning took a day."""
    tests = [77.1, 70.4, 81.3, 80.0, 73.2, 71.9, 79.5, 75.8]
    before: Any = {"aligned": {"by": "mfac", "before": 86400.0}, "direct": {}}
    before["restart"] = {"origin": {"stage": "finetune"}, "before": 157.0}
    for name, changes in before.items():
        finished(tmp_path / name, tests, **changes)
    lines = str(evaluate([tmp_path / name for name in before])).splitlines()
    assert [line.split()[0] for line in lines[3:6]] == [*before]
    table_and_seeds = [line for line in lines if "(" not in line]  # what arms differ in is longer
    assert max(map(len, table_and_seeds)) <= 80, lines
    assert lines[3].endswith("  64 + 86400") and lines[4].endswith("  +0.0        1.0  64")
    assert "direct: 8 seeds; done for each: PEFT; 12,870 splits" in lines
    assert any(line.startswith("±: the standard deviation over the seeds") for line in lines)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4)])
def test_a_p_that_few_seeds_cannot_fall_below_is_told(n: int, m: int, tmp_path: Path) -> None:
    """It is that of arms that do not overlap; 4 and 4 seeds, or 3 and 4, reach less than 0.05."""
    low = finished(tmp_path / "low", [*range(10, 10 + n)])
    high = finished(tmp_path / "high", [*range(50, 50 + m)])
    result = evaluate([low, high])
    compared = result.arms[1].first_minus_this
    assert compared
    said = f"high: with so few seeds, p cannot be less than {compared.p or 0:#.2g}"
    assert (said in str(result)) == (compared.p is not None and compared.p > 0.05)
    assert ("cannot be less" in str(result)) == (said in str(result))


def test_the_interval_by_images_is_wilsons(tmp_path: Path) -> None:
    """Its ends are where the accuracy is 1.96 deviations of a binomial away from the measured."""
    told = evaluate([finished(tmp_path / "a", [40.0, 60.0], images=35)]).arms[0].interval()
    assert told is not None and told[0] < 50 < told[1]
    for end in told:
        deviation = 100 * math.sqrt(end / 100 * (1 - end / 100) / 35)
        assert abs(end - 50.0) / deviation == pytest.approx(1.96, abs=0.01)


def test_half_of_100_images_right_is_40_to_60_percent(tmp_path: Path) -> None:
    """Wilson's interval by hand: z² / 100 = 0.0384, so its ends are 50 ± 98 / √103.84."""
    told = evaluate([finished(tmp_path / "a", [50.0], images=100)]).arms[0].interval()
    assert told == pytest.approx((40.383, 59.617), abs=0.005)


def test_a_mean_average_precision_has_no_interval_by_images(tmp_path: Path) -> None:
    mean = finished(tmp_path / "map", [80.0], metric="11-point mAP")
    assert evaluate([mean]).arms[0].interval() is None


def test_counts_are_whole_right_images_and_of_map_hundredths_of_a_point(tmp_path: Path) -> None:
    test = [100 * 347 / 480, 100 * (336 / 480)]
    images = finished(tmp_path / "a", test, images=480)
    assert evaluate([images]).arms[0].counts == [347, 336]
    # 300 + 302 images are 301 + 301, though the means of the percentages differ by rounding.
    one = [100 * (300 / 1000), 100 * (302 / 1000)]
    two = [100 * (301 / 1000)] * 2
    assert fmean(one) != fmean(two)
    equal = evaluate([finished(tmp_path / "one", one), finished(tmp_path / "two", two)]).arms[1]
    assert equal.first_minus_this == Comparison(difference=0.0, p=1.0, splits=6)
    voc = [finished(tmp_path / f"m{i}", [80.004, 80.0 + i], metric="11-point mAP") for i in (1, 2)]
    row = evaluate(voc).arms[1]
    assert row.counts == [8000, 8200]
    assert row.first_minus_this is not None and row.first_minus_this.difference == -0.5


def test_the_same_files_by_name_and_from_a_script_are_comparable(
    weights: Path, tmp_path: Path
) -> None:
    """With class numbers that the script has exchanged they are not. No seed of a split is told."""
    photos_in(tmp_path, [f"photos/{kind}/{k}.png" for kind in ("cat", "dog") for k in range(10)])
    given: Any = {"backbone": "vit_mini", "weights": weights, "rank": 2, "lr": (1e-3,), "seeds": 1}
    given |= {"epochs": 1, "warmup_epochs": 0, "batch": 4}
    named = f"folder:{tmp_path}/photos"
    finetune(FinetuneConfig(**given, dataset=named), tmp_path / "named")
    task = folder(tmp_path / "photos", 0)
    own = FinetuneConfig(**given, dataset="own", data_seed=3)
    finetune(own, tmp_path / "own", task=task)
    finetune(own, tmp_path / "called", task=task._replace(classes=["Katze", "Hund"]))
    named_arm, own_arm, called_arm = evaluate(
        [tmp_path / name for name in ("named", "own", "called")]
    ).arms
    assert named_arm.counts == own_arm.counts == called_arm.counts
    assert own_arm.differs == called_arm.differs == {}
    finetune(own.replace(seed=1), tmp_path / "mixed/own", task=task)
    shutil.copytree(tmp_path / "named", tmp_path / "mixed/named")
    start: Any = {"start": tmp_path / "mixed", "seeds": 2, "seed": 7}
    finetune(FinetuneConfig(**given | start, dataset=named), tmp_path / "again")
    for name in ("named", "own"):
        of_one = {"start": tmp_path / "mixed" / name, "seed": 9}
        finetune(FinetuneConfig(**given | of_one, dataset=named), tmp_path / "after" / name)
    assert evaluate([tmp_path / "after" / name for name in ("named", "own")]).arms[1].differs == {}
    exchanged = [Split(part.images, 1 - part.targets) for part in (task.train, task.val, task.test)]
    train, val, test = exchanged
    finetune(own, tmp_path / "exchanged", task=Task("own", train, val, test, ["dog", "cat"]))
    with pytest.raises(UsageError, match=r"exchanged: not comparable, .*/photos; give"):
        evaluate([tmp_path / "named", tmp_path / "exchanged"])
    shifted = task._replace(mean=(0.1,) * 3)
    finetune(own, tmp_path / "shifted", task=shifted)
    with pytest.raises(UsageError, match="its images, splits, mean, std or `uncut` of own are not"):
        evaluate([tmp_path / "own", tmp_path / "shifted"])
    with pytest.raises(UsageError, match=r"the task has other images, .*, mean, std or `uncut`;"):
        finetune(own, tmp_path / "own", task=shifted)
    pixels = torch.rand(6, 3, 8, 8, generator=rng(0))
    part = Split(pixels, torch.tensor([0, 1] * 3))
    finetune(own, tmp_path / "memory", task=Task("own", part, part, part, ["cat", "dog"]))
    with pytest.raises(UsageError, match=r"\(in memory, images are known otherwise than those"):
        evaluate([tmp_path / "named", tmp_path / "memory"])


def test_names_of_classes_are_told_where_images_in_memory_may_differ_in_them(
    weights: Path, tmp_path: Path
) -> None:
    """Pixels, labels and splits are the same; of files, names of classes make no difference."""
    given: Any = {"backbone": "vit_mini", "weights": weights, "rank": 2, "lr": (1e-3,), "seeds": 1}
    cfg = FinetuneConfig(**given, epochs=1, warmup_epochs=0, batch=4, dataset="own")
    part = Split(torch.rand(6, 3, 8, 8, generator=rng(0)), torch.tensor([0, 1] * 3))
    for name, classes in (("english", ["cat", "dog"]), ("german", ["Katze", "Hund"])):
        finetune(cfg, tmp_path / name, task=Task("own", part, part, part, classes))
    with pytest.raises(UsageError, match="its images, splits, names of classes, mean, std or"):
        evaluate([tmp_path / "english", tmp_path / "german"])
