"""What the runs of the right curvature say: the rates that were chosen, the comparisons.

python -m experiments.right_curvature_analysis    # rules: right_curvature.md
"""

from itertools import product
from pathlib import Path
from statistics import fmean

from config import Record
from experiments import right_curvature as plan
from experiments.fair_race_analysis import Difference, difference, holm, verdict
from experiments.recipe import markdown, run_script

COMPARED = (("N", "0"), ("V", "0v"), ("F", "0"), ("0", "direct"))
CONTROL = ("oracle", "0")  # without it there is no verdict: see HEARD
EQUAL_RATES = ("N", "F")  # not in the protocol: at 30 epochs both have the rate 0.02
HEARD = 2.0  # points that the lower end of the control's interval has to be above
Runs = dict[plan.Unit, plan.Run]


def main(results: Path = plan.RESULTS) -> None:
    """Print the accuracies of each rate; of whole rounds the means and the comparisons."""
    choice = plan.read_runs(results / "choice.jsonl")
    print(f"choice: {len(choice)} of {len(plan.CHOICE)} runs")
    if len(choice) < len(plan.CHOICE):
        return
    print(markdown(rate_rows([*choice.values()])))
    runs = whole_rounds(plan.read_runs(results / "runs.jsonl"))
    rounds = len(runs) // (len(plan.STUDY) // len(plan.BACKBONES))
    print(f"\n{rounds} of {len(plan.BACKBONES)} rounds are whole\n")
    if rounds > 1:  # one has no interval
        print(markdown(arm_rows(runs)))
        for length in plan.LENGTHS:
            rows = compare(runs, length, final=rounds == len(plan.BACKBONES))
            print(f"\nPEFT of {length}\n\n{markdown(rows)}")
        print(f"\nNot in the protocol: by alphabet, in points\n\n{markdown(alphabet_rows(runs))}")


def rate_rows(runs: list[plan.Run]) -> list[Record]:
    """A row for each arm and length: the mean accuracy at each rate, and the rate that is taken."""
    rows: list[Record] = []
    chosen = plan.choose(runs)
    rates = sorted({rate for of_length in plan.CANDIDATES.values() for rate in of_length})
    for length, arm in product(plan.LENGTHS, plan.ARMS):
        row: Record = {"PEFT of": length, "arm": arm}
        for rate in rates:
            ends = [run.ends[length].get(f"{rate:g}") for run in runs if run.arm == arm]
            accuracies = [accuracy for accuracy in ends if accuracy is not None]
            is_whole = len(accuracies) == len(ends)
            row[f"{rate:g}"] = f"{fmean(accuracies):.1f}" if is_whole else None
        rows.append(row | {"taken": chosen[arm][length][0]})
    return rows


def whole_rounds(runs: Runs) -> Runs:
    """The runs of those backbones that have all theirs, of one file and one device each."""
    whole: Runs = {}
    for backbone in plan.BACKBONES:
        units = [unit for unit in plan.STUDY if unit.backbone == backbone]
        if runs.keys() >= {*units}:
            of_round = {unit: runs[unit] for unit in units}
            assert len({(run.weights, run.device) for run in of_round.values()}) == 1, backbone
            whole |= of_round
    return whole


def end(run: plan.Run, length: str) -> float:
    """Test accuracy at the rate that was chosen."""
    (accuracy,) = run.ends[length].values()
    return accuracy


def arm_rows(runs: Runs) -> list[Record]:
    """A row for each arm: means over its runs, without p. `worst` is the largest of all.

    |q|/|g|, cosine and residual have three numbers, one for each upper step of an alternation.
    """
    rows: list[Record] = []
    for arm in plan.ARMS:
        of_arm = [run for run in runs.values() if run.arm == arm]
        row: Record = {"arm": arm}
        for length in plan.LENGTHS:
            row[length] = f"{fmean(end(run, length) for run in of_arm):.2f}"
        for name in ("objective", "of_test"):
            numbers = [getattr(run, name) for run in of_arm]
            row[name] = None if None in numbers else f"{fmean(numbers):.3f}"
        for name in ("q_over_g", "cosine", "residual"):
            by_query = zip(*(getattr(run, name) for run in of_arm), strict=True)
            row[name] = ", ".join(f"{fmean(numbers):.2f}" for numbers in by_query)
        worst = [run.worst for run in of_arm if run.worst is not None]
        row["worst"] = f"{max(worst):.2f}" if worst else None
        on_cpu = [run for run in of_arm if run.device == "cpu"]
        if on_cpu:  # beside a GPU, seconds of a CPU say nothing
            row["CPU-s of align"] = f"{fmean(run.cpu_align for run in on_cpu):.0f}"
            row["of PEFT"] = f"{fmean(run.cpu_peft for run in on_cpu):.0f}"
        rows.append(row)
    return rows


def by_backbone(runs: Runs, pair: tuple[str, str], length: str) -> list[float]:
    """For each backbone the mean over its cells of the first arm minus the second."""
    means = []
    for backbone in dict.fromkeys(run.backbone for run in runs.values()):
        gains = []
        for unit, run in runs.items():
            if (unit.arm, unit.backbone) == (pair[0], backbone):
                gains.append(end(run, length) - end(runs[unit._replace(arm=pair[1])], length))
        means.append(fmean(gains))
    return means


def compare(runs: Runs, length: str, final: bool) -> list[Record]:
    """The control, then the four comparisons with Holm's correction over them."""
    control, *found = (difference(by_backbone(runs, x, length)) for x in (CONTROL, *COMPARED))
    words = "heard" if control.low > HEARD else "deaf"
    rows = [row_of(CONTROL, control, f"{control.p:.2g}", words if final else "not yet")]
    adjusted = holm([one.p for one in found])
    for pair, one, p in zip(COMPARED, found, adjusted, strict=True):
        words = verdict(one, p) if control.low > HEARD else "none, the endpoint is deaf"
        rows.append(row_of(pair, one, f"{one.p:.2g} ({p:.2g})", words if final else "not yet"))
    return rows


def alphabet_rows(runs: Runs) -> list[Record]:
    """A row for each pair and length: the rates of both arms, and the mean of each alphabet.

    Then 95 % intervals with the alphabets as units, and with the backbones, without Latin.
    """
    rows: list[Record] = []
    for length, pair in product(plan.LENGTHS, (CONTROL, *COMPARED, EQUAL_RATES)):
        row: Record = {"PEFT of": length, "points": " − ".join(pair)}
        row["rates"] = " and ".join(rate_of(runs, arm, length) for arm in pair)
        means = []
        for alphabet in sorted({unit.alphabet for unit in runs}):
            there = {unit: run for unit, run in runs.items() if unit.alphabet == alphabet}
            means.append(fmean(by_backbone(there, pair, length)))
            row[alphabet] = f"{means[-1]:+.1f}"
        others = {unit: run for unit, run in runs.items() if unit.alphabet != "Latin"}
        row["alphabets as units"] = interval(means)
        row["backbones, without Latin"] = interval(by_backbone(others, pair, length))
        rows.append(row)
    return rows


def interval(values: list[float]) -> str:
    """The mean, with its 95 % interval by Student's t."""
    found = difference(values)
    return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def rate_of(runs: Runs, arm: str, length: str) -> str:
    """The rate at which all runs of an arm were fine-tuned."""
    (rate,) = {rate for run in runs.values() if run.arm == arm for rate in run.ends[length]}
    return rate


def row_of(pair: tuple[str, str], one: Difference, p: str, words: str) -> Record:
    difference_of = f"{pair[0]} − {pair[1]}"
    mean = f"{one.mean:+.2f}"
    return {
        "points": difference_of,
        "mean": mean,
        "95 % interval": f"{one.low:+.2f} to {one.high:+.2f}",
        "p (Holm)": p,
        "verdict": words,
    }


if __name__ == "__main__":
    run_script(main)
