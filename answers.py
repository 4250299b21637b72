"""What a command found, for people: a sentence, a small table, and what to type next."""

import json
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from config import Record, read_table
from evaluate import Comparison, Evaluation, Pooled, PooledEvaluation, Row
from support.screen import Answer, draw_table, format_value

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
    ending = "" if number == 1 else "s"
    return f"{number:,} {thing}{ending}"


REPEATED = {  # in plain words, by a result's `unit`
    "PEFT seed": "the fine-tuning",
    "PEFT and PEFT anew": "both fine-tunings",
    "PEFT seed on one LoRA file": "the fine-tuning, not the aligning",
    "PEFT seed on one align run": "the fine-tuning, not the aligning",
    "align run and PEFT": "the aligning and the fine-tuning",
}

# --- align ----------------------------------------------------------------------------------------

CURVATURE = {"mfac": "M-FAC", "recursion": "M-FAC", "cg": "CG", "exact": "the exact inverse"}


def answer_align(result: "AlignResult") -> Answer:
    """Validation before and after, how far θ_P moved, and what the curvature did."""
    run = Path(result.out)
    settings = read_table(run / "config.json")
    about = read_table(run / "env.json")["about"]
    images = count(about["images"]["val"], "validation image")
    after = percent([result.val_P.accuracy])
    sentence = f"{result.metric} on {images}: {after} after aligning"
    kept = "lower level, θ_P: kept, for finetune"
    accuracies = {kept: result.val_P.accuracy, "upper level, θ_D": result.val_D.accuracy}
    first_line, _, _ = (run / "metrics.jsonl").read_text().partition("\n")
    probe = json.loads(first_line).get("probe_val")  # None without --probe-epochs
    if probe:
        sentence += f", {percent([probe['accuracy']])} before"
        accuracies = {"before: linear probe": probe["accuracy"]} | accuracies
    rows = [{"": name, "validation": percent([value])} for name, value in accuracies.items()]
    remarks = [
        measure_way(result, settings),
        f"the distance between θ_P and θ_D is {result.distance:.3g}",
        describe_curvature(result, settings),
        "whether aligning helped, finetune and evaluate will tell",
    ]
    return Answer(
        sentence,
        rows,
        remarks,
        run,
        f"bisslight finetune --from {run} --out {run}-peft",
    )


def measure_way(result: "AlignResult", settings: Record) -> str:
    """How far θ_P moved from where it started."""
    from data import rng
    from lora import init_theta
    from support.checkpoints import load_adapter

    theta_P = load_adapter(result.adapter).theta  # (K, 4 r dim)
    K, p = theta_P.shape
    dim = p // (4 * settings["rank"])
    start = init_theta(K, settings["rank"], dim, rng(settings["seed"], "lora"))
    way = float((theta_P - start).norm())
    share = 100 * way / float(start.norm())
    return f"θ_P moved by {way:.3g}, {share:.0f} % of its length at the start"


def describe_curvature(result: "AlignResult", settings: Record) -> str:
    """Whether the curvature changed the hypergradient of the last step, in words."""
    name = CURVATURE.get(settings["hypergrad"])
    if settings["upper_steps"] == 0 or name is None:
        return "no curvature was used, as the settings say"
    ratio = result.q_over_g
    angle = math.degrees(math.acos(max(-1.0, min(1.0, result.cosine))))
    effect = f"{name} scaled the gradient by {ratio:.4g} and turned it by {angle:.3g}°"
    if abs(1 - ratio) < 0.001 and angle < 1:
        effect = f"{name} changed nothing"
    return f"|q|/|g| = {ratio:.4f}: {effect}"


# --- finetune and pretrain ------------------------------------------------------------------------


def answer_finetune(result: "FinetuneResult") -> Answer:
    """Mean and deviation of the test, and a row for each seed."""
    run = Path(result.out)
    settings = read_table(run / "config.json")
    heading = f"test ({count(result.test_images, 'image')})"
    rows = []
    for i, test in enumerate(result.test):
        row = {"seed": settings["seed"] + i, "best epoch": result.epochs[i]}
        rows.append(row | {"validation": percent([result.val[i]]), heading: percent([test])})
    rate = f"rate {result.lr:g} as given"
    remarks = []
    if len(result.grid) > 1:
        rate = f"rate {result.lr:g} by validation"
        if is_tied(result):
            rate += " loss: another is as accurate"
        remarks.append(describe_grid(result.grid))
    if result.aligned_by:
        repeated = REPEATED.get(result.unit, result.unit)
        remarks.append(f"aligned by {result.aligned_by}; the seeds repeat {repeated}")
    seeds = count(len(result.test), "seed")
    sentence = f"test {result.metric} {percent(result.test)} ({seeds}; {rate})"
    return Answer(sentence, rows, remarks, run, next_after_finetune(result))


def is_tied(result: "FinetuneResult") -> bool:
    """Whether another rate has the same validation accuracy as the chosen one."""
    means = [mean_of_rate(accuracies) for accuracies in result.grid.values()]
    chosen = mean_of_rate(result.grid[str(result.lr)])
    return means.count(chosen) > 1


def mean_of_rate(accuracies: Sequence[float | None]) -> float | None:
    """The mean over seeds; None where one diverged."""
    finite = [accuracy for accuracy in accuracies if accuracy is not None]
    return fmean(finite) if len(finite) == len(accuracies) else None


def describe_grid(grid: dict[str, list[float | None]]) -> str:
    """The validation of each rate.

    >>> describe_grid({"0.01": [50.0, 52.0], "0.1": [None]})
    'validation by rate: 0.01 51.0 ± 1.4 %, 0.1 diverged'
    """
    words = []
    for rate, accuracies in grid.items():
        finite = [accuracy for accuracy in accuracies if accuracy is not None]
        outcome = percent(finite) if len(finite) == len(accuracies) else "diverged"
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
        return f"bisslight evaluate {run} --against DIRECT_RUN"
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


# --- evaluate and predict -------------------------------------------------------------------------


def answer_evaluate(evaluation: Evaluation, pictures: str = "") -> Answer:
    """Say by how much the first arm is better than each other one; on all data sets together.

    `pictures`: the files that were drawn.
    """
    arms: Sequence[Row | Pooled] = evaluation.arms
    over = ""
    if isinstance(evaluation, PooledEvaluation):
        arms = evaluation.pooled
        over = f", over {len(evaluation.pooled[0].data_sets)} data sets"
    first = arms[0]
    sentences = []
    for arm in arms:
        if arm.first_minus_this:
            difference = describe_comparison(arm.first_minus_this)
            sentences.append(f"{first.arm} minus {arm.arm}{over}: {difference}")
    if not sentences:
        seeds = count(first.seeds, "seed")
        sentences = [f"test {evaluation.arms[0].metric} {first.mean:.1f} % ({seeds}{over})"]
    remarks = []
    for row in evaluation.arms:
        if row.unit != "PEFT seed":
            repeated = REPEATED.get(row.unit, row.unit)
            remarks.append(f"the seeds of {row.arm} repeat {repeated}")
        if row.differs:
            # the first arm has none: its run had no such setting, or it was left out
            differs = format_value(row.differs).replace("there None", "there not set")
            remarks.append(f"{row.arm} differs: {differs}")
    rows = [describe_arm(row, first.arm) for row in evaluation.arms]
    return Answer("\n".join(sentences), rows, remarks, pictures)


def describe_arm(row: Row, first: str) -> Record:
    """The line of an arm in a table; `first` is the name of the one that it is compared with."""
    line: Record = {"arm": row.arm, "seeds": row.seeds, "rate": row.rates}
    line["test images"] = row.test_images
    line[f"test {row.metric}"] = percent(row.accuracies)
    versus = row.first_minus_this
    if versus:
        line[f"{first} minus this"] = points(versus)
        line["p"] = "none" if versus.p is None else f"{versus.p:#.2g}"
    if row.paper:
        line["the paper"] = f"{row.paper.mean} ± {row.paper.std} % ({row.paper.source})"
    return line


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


def answer_demo(result: "DemoResult") -> Answer:
    """What the demo says of its arms, and its picture."""
    arms = answer_evaluate(Evaluation(arms=result.arms))
    lines = [textwrap.fill(text, 79, break_on_hyphens=False) for text in result.answer]
    return Answer("\n".join(lines), arms.rows, place=result.picture)


def answer_curves(drawn: Record) -> Answer:
    """The file that curves were drawn to."""
    return Answer("losses and validations are drawn", place=drawn["curves"])


def answer_predict(guesses: Sequence[Record], seed: int) -> Answer:
    """The classes of each image, by a seed's adapter; the folder of all images is told once."""
    paths = [Path(guess["image"]).absolute() for guess in guesses]
    folder = os.path.commonpath([path.parent for path in paths])
    rows = []
    for path, guess in zip(paths, guesses, strict=True):
        row = {"image": path.relative_to(folder), "class": guess["label"]}
        rows.append(row | {"probability": f"{guess['probability']:.2f}"})
    images = count(len(set(paths)), "image")
    return Answer(f"{images} in {folder}, by seed {seed}", rows)


# --- dry runs -------------------------------------------------------------------------------------


def answer_plan(plan: Record) -> Answer:
    """A line for each thing that is known of a run, and a table of its settings."""
    lines = []
    for name, value in plan.items():
        if isinstance(value, list):
            lines += [f"{name}:", draw_table(value)]
        elif value:
            lines.append(f"{name}: {format_value(value)}")
    return Answer("\n".join(lines))


# --- data -----------------------------------------------------------------------------------------


def answer_list(sets: list[Record]) -> Answer:
    """List how much of each data set is there; the folder they all lie in is told once."""
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
    outcome = count(len(problems), "problem") if problems else "nothing is wrong"
    sentence = f"{found['name']}: {count(found['images'], 'image')}, {outcome}"
    counts = dict(found)
    for told in ("name", "images", "problems"):
        del counts[told]
    if counts:
        sentence += f" ({format_value(counts)})"
    return Answer(sentence, problems)


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
