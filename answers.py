"""What a command found, for people: a sentence, a small table, and what to type next."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from config import Record, read_table
from evaluate import Comparison, Evaluation, PooledEvaluation, Row
from support.screen import Answer

if TYPE_CHECKING:  # these load torch
    from align import AlignResult
    from extras.demo import DemoResult
    from extras.pretrain import PretrainResult
    from finetune import FinetuneResult


def percent(accuracies: Sequence[float]) -> str:
    """The seeds' accuracies as mean and sample deviation.

    >>> percent([51.0, 53.0]), percent([51.0])
    ('52.0 ± 1.4 %', '51.0 %')
    """
    if len(accuracies) == 1:
        return f"{accuracies[0]:.1f} %"
    return f"{fmean(accuracies):.1f} ± {stdev(accuracies):.1f} %"


def count(number: int, thing: str) -> str:
    """Such as "3 seeds".

    >>> count(1, "seed")
    '1 seed'
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# --- align ----------------------------------------------------------------------------------------

CURVATURE = {"mfac": "M-FAC", "recursion": "M-FAC", "cg": "CG", "exact": "the exact inverse"}


def answer_align(result: "AlignResult") -> Answer:
    """Validation before and after, how far θ_P moved, and what the curvature did."""
    run = Path(result.out)
    settings = read_table(run / "config.json")
    first_line, _, _ = (run / "metrics.jsonl").read_text().partition("\n")
    probe = json.loads(first_line).get("probe_val")  # None without --probe-epochs
    sentence = f"validation {result.metric} {result.val_P.accuracy:.1f} % after aligning"
    heading = "validation %"
    rows = []
    if probe:
        sentence += f", {probe['accuracy']:.1f} % before it (linear probe)"
        rows.append({"": "before: linear probe", heading: f"{probe['accuracy']:.2f}"})
    kept = "lower level, θ_P: kept, for finetune"
    rows.append({"": kept, heading: f"{result.val_P.accuracy:.2f}"})
    rows.append({"": "upper level, θ_D", heading: f"{result.val_D.accuracy:.2f}"})
    return Answer(
        sentence,
        rows,
        [measure_way(result, settings), describe_curvature(result, settings)],
        run,
        f"bisslight finetune --from {run} --out {run}-peft",
    )


def measure_way(result: "AlignResult", settings: Record) -> str:
    """How far θ_P moved from where it started, and how far it lies from θ_D."""
    from data import rng
    from lora import init_theta
    from support.checkpoints import load_adapter

    theta_P = load_adapter(result.adapter).theta  # (K, 4 r dim)
    K, p = theta_P.shape
    dim = p // (4 * settings["rank"])
    start = init_theta(K, settings["rank"], dim, rng(settings["seed"], "lora"))
    way = float((theta_P - start).norm())
    share = 100 * way / float(start.norm())
    return (
        f"θ_P moved by {way:.3g}, {share:.0f} % of its length at the start; "
        f"its distance from θ_D is {result.distance:.3g}"
    )


def describe_curvature(result: "AlignResult", settings: Record) -> str:
    """Whether the curvature changed the hypergradient of the last step, in words."""
    name = CURVATURE.get(settings["hypergrad"])
    if settings["upper_steps"] == 0 or name is None:
        return "no curvature was used, as the settings say"
    ratio = result.q_over_g
    angle = math.degrees(math.acos(max(-1.0, min(1.0, result.cosine))))
    if abs(1 - ratio) < 0.001 and angle < 1:
        effect = (
            f"{name} changed nothing (as often with small networks; aligning acts all the same)"
        )
    elif abs(1 - ratio) < 0.01 and angle < 5:
        effect = f"{name} changed next to nothing"
    else:
        effect = f"{name} scaled the gradient by {ratio:.2g} and turned it by {angle:.0f}°"
    return f"|q|/|g| = {ratio:.4f}: {effect}"


# --- finetune and pretrain ------------------------------------------------------------------------


def answer_finetune(result: "FinetuneResult") -> Answer:
    """Mean and deviation of the test, and a row for each seed."""
    run = Path(result.out)
    settings = read_table(run / "config.json")
    seeds = count(len(result.test), "seed")
    reason = "by validation" if len(result.grid) > 1 else "as given"
    rows = []
    for i, test in enumerate(result.test):
        row = {"seed": settings["seed"] + i, "best epoch": result.epochs[i]}
        row |= {"validation %": f"{result.val[i]:.2f}", "test %": f"{test:.2f}"}
        rows.append(row)
    remarks = []
    if len(result.grid) > 1:
        remarks.append(describe_grid(result.grid))
    if result.aligned_by:
        remarks.append(f"aligned by {result.aligned_by}; what a seed repeats: {result.unit}")
    sentence = f"test {result.metric} {percent(result.test)} ({seeds}; rate {result.lr:g} {reason})"
    return Answer(sentence, rows, remarks, run, next_after_finetune(result))


def describe_grid(grid: dict[str, list[float | None]]) -> str:
    """The validation of each rate.

    >>> describe_grid({"0.01": [50.0, 52.0], "0.1": [None]})
    'validation by rate: 0.01 51.0 %, 0.1 diverged'
    """
    words = []
    for rate, accuracies in grid.items():
        finite = [accuracy for accuracy in accuracies if accuracy is not None]
        diverged = len(finite) < len(accuracies)
        outcome = "diverged" if diverged else f"{fmean(finite):.1f} %"
        words.append(f"{float(rate):g} {outcome}")
    return "validation by rate: " + ", ".join(words)


def next_after_finetune(result: "FinetuneResult") -> str:
    """To compare it with a finished run beside it that started otherwise, if there is one."""
    run = Path(result.out)
    for file in sorted(run.parent.glob("*/result.json")):
        other = json.loads(file.read_text())
        same_data = [other.get("dataset"), other.get("backbone")]
        starts_otherwise = bool(other.get("aligned_by")) != bool(result.aligned_by)
        if same_data == [result.dataset, result.backbone] and starts_otherwise:
            if result.aligned_by:
                return f"bisslight evaluate {run} --against {file.parent}"
            return f"bisslight evaluate {file.parent} --against {run}"
    if result.aligned_by:
        return f"bisslight evaluate {run} --against RUN (a finetune run without --from)"
    return f"bisslight align --backbone {result.backbone} --dataset {result.dataset}"


def answer_pretrain(result: "PretrainResult") -> Answer:
    """The loss at the end."""
    settings = read_table(Path(result.out) / "config.json")
    network = f"--backbone {settings['backbone']} --pretext {settings['pretext']}"
    return Answer(
        f"pretrained: the mean loss at the end is {result.loss:.4g}",
        place=result.weights,
        next=f"bisslight align {network} --weights {result.out} --dataset ... --pool ...",
    )


# --- evaluate -------------------------------------------------------------------------------------


def answer_evaluate(evaluation: Evaluation) -> Answer:
    """The first arm minus each of the others, on all data sets together where there are several."""
    if not isinstance(evaluation, PooledEvaluation):
        return compare(evaluation.arms)
    first = evaluation.pooled[0]
    sentences = []
    for arm in evaluation.pooled:
        versus = arm.first_minus_this
        if versus:
            of = f"{first.arm} minus {arm.arm}, over {len(arm.data_sets)} data sets"
            sentences.append(f"{of}: {describe_comparison(versus)}")
    answer = compare(evaluation.arms, first.arm)
    if not sentences:
        sentences = [
            f"test accuracy {first.mean:.1f} %, the mean of {len(first.data_sets)} data sets"
        ]
    return answer._replace(sentence="\n".join(sentences))


def answer_demo(result: "DemoResult") -> Answer:
    """What the demo says of its arms, and its picture."""
    sentence = "\n".join(result.answer)
    return compare(result.arms)._replace(sentence=sentence, place=result.picture)


def compare(arms: Sequence[Row], first_name: str = "") -> Answer:
    """The first arm minus each of the others, and what else differs between them."""
    first = arms[0]
    first_name = first_name or first.arm
    sentences = []
    rows = []
    remarks = []
    for row in arms:
        line: Record = {"arm": row.arm, "seeds": row.seeds}
        line[f"test {row.metric}"] = percent(row.accuracies)
        versus = row.first_minus_this
        if versus:
            line[f"{first_name} minus this"] = points(versus)
            line["p"] = "none" if versus.p is None else f"{versus.p:#.2g}"
            sentences.append(f"{first_name} minus {row.arm}: {describe_comparison(versus)}")
        if row.paper:
            line["the paper"] = f"{row.paper.mean} ± {row.paper.std} % ({row.paper.source})"
        rows.append(line)
        if row.unit != "PEFT seed":
            remarks.append(f"the seeds of {row.arm}: {row.unit}")
        if row.differs:
            differs = ", ".join(f"{name} {values}" for name, values in row.differs.items())
            differs = differs.replace("there None", "there not set")
            remarks.append(f"{row.arm} differs: {differs}")
    if not sentences:
        seeds = count(first.seeds, "seed")
        sentences = [f"test {first.metric} {percent(first.accuracies)} ({seeds})"]
    return Answer("\n".join(sentences), rows, remarks)


def describe_comparison(versus: Comparison) -> str:
    """A difference in words, with what its p-value means."""
    difference = f"{points(versus)} points"
    if versus.p is None:
        return f"{difference}; one seed each allows no test"
    if versus.p < 0.05:
        meaning = "chance hardly explains it"
    elif versus.p * versus.splits <= 2:  # the observed split and its mirror
        meaning = "the smallest p that so few seeds can have"
    else:
        meaning = "chance may explain it"
    return f"{difference}, p = {versus.p:#.2g}: {meaning}"


def points(versus: Comparison) -> str:
    """A difference in percentage points; adding 0 makes -0 a plain 0."""
    return f"{round(versus.difference, 1) + 0.0:+.1f}"


# --- data -----------------------------------------------------------------------------------------


def answer_list(sets: list[Record]) -> Answer:
    """How much of each data set is there; the folder they all lie in is told once."""
    rows = []
    for row in sets:
        shown = {"data set": row["name"], "images": row["found"] or "missing"}
        rows.append(shown | {"folder": row["place"].name, "terms of use": row["terms"]})
    root = sets[0]["place"].parent
    there = [row["name"] for row in sets if row["found"]]
    return Answer(
        f"{len(there)} of {len(sets)} data sets are in {root}",
        rows,
        next="bisslight data check NAME, or bisslight data download NAME",
    )


def answer_check(found: Record) -> Answer:
    """How many images there are, and all that is wrong."""
    problems = found["problems"]
    parts = [f"{found[part]:,} {part}" for part in ("train", "val", "test") if part in found]
    sizes = f" ({', '.join(parts)})" if parts else ""
    outcome = f"{count(len(problems), 'problem')}" if problems else "nothing is wrong"
    remarks = []
    for row in problems:
        first = f", such as {row['first']}" if "first" in row else ""
        remarks.append(f"{row['problem']}{first}")
    return Answer(f"{found['name']}: {found['images']:,} images{sizes}, {outcome}", (), remarks)


def answer_download(done: Record) -> Answer:
    """Where it is, and what it may be used for."""
    return Answer(
        f"{done['name']} is here; terms of use: {done['terms']}",
        place=done["path"],
        next=f"bisslight data check {done['name']}",
    )


def answer_export(done: Record) -> Answer:
    """What was written."""
    remarks = [str(file) for file in done["files"]]
    return Answer(
        "exported for HF peft, for timm and for the released program", (), remarks, done["out"]
    )
