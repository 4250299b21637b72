"""What the runs of the study of derivatives say.

python -m experiments.which_derivative_analysis    # rules: which_derivative.md
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance

from scipy.stats import t as student

from config import Record
from experiments import which_derivative as plan
from experiments.fair_race_analysis import Difference, difference, holm, verdict
from experiments.recipe import markdown, run_script

CONTROL = ("oracle-G", "0v")  # without it there is no verdict: see HEARD
PRIMARY = (("U", "G"), ("G", "0v"), ("N", "G"))
SECONDARY = (("A", "G"), ("P", "G"), ("U", "C"))
HEARD = 2.0  # points that the lower end of the control's interval has to be above
Task = tuple[str, int]  # alphabet and backbone
Means = dict[tuple[str, Task], float]  # by arm and task: mean accuracy over seeds and rates


def main(results: Path = plan.RESULTS) -> None:
    """Print the first-order gains; of whole cells the means and the comparisons."""
    gains = plan.read_gains(results / plan.GAINS)
    planned = len(plan.GAIN_CELLS) * len(plan.AT)
    print(f"{len(gains)} of {planned} first-order gains are there\n")
    if gains:
        print(markdown(gain_rows(gains)))
    runs = whole_cells(plan.read_runs(results / plan.RUNS))
    cells = len(runs) // len(plan.NAMES)
    print(f"\n{cells} of {len(plan.CELLS)} cells are whole\n")
    means = means_of(runs)
    if runs:
        print(markdown(arm_rows(runs)))
    if have_intervals(means):
        print(f"\n{markdown(compare(means, final=cells == len(plan.CELLS)))}")
        print(f"\n{markdown(alphabet_rows(means))}")


def gain_rows(gains: Sequence[plan.Gains]) -> list[Record]:
    """A row for each arm: responses divided by G's, the means of the cells and their range."""
    rows: list[Record] = []
    for arm in gains[0].own:
        row: Record = {"arm": arm}
        for steps in ("own", "next"):
            ratios = []
            for cell in dict.fromkeys((one.alphabet, one.backbone, one.seed) for one in gains):
                there = [one for one in gains if (one.alphabet, one.backbone, one.seed) == cell]
                of_arm = sum(getattr(one, steps)[arm] for one in there)
                ratios.append(of_arm / sum(getattr(one, steps)["G"] for one in there))
            row[f"{steps} steps"] = f"{fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        for name in ("with_g", "with_U", "q_over_g"):
            row[name] = f"{fmean(getattr(one, name)[arm] for one in gains):.2f}"
        rows.append(row)
    return rows


def whole_cells(runs: Sequence[plan.Run]) -> list[plan.Run]:
    """The runs of those cells that have every arm once, and one backbone."""
    whole: list[plan.Run] = []
    for cell in plan.CELLS:
        of_cell = [run for run in runs if run.cell == cell]
        if {run.arm for run in of_cell} == {*plan.NAMES}:
            assert len(of_cell) == len(plan.NAMES), cell
            assert len({run.weights for run in of_cell}) == 1, cell
            whole += of_cell
    return whole


def end(run: plan.Run) -> float:
    """The endpoint of a run: its mean accuracy over the three rates."""
    assert len(run.ends) == len(plan.RATES)
    return fmean(run.ends.values())


def means_of(runs: Sequence[plan.Run]) -> Means:
    """The endpoint of each arm, as the mean over both seeds; without tasks that lack a seed."""
    by_seed: dict[tuple[str, Task], list[float]] = {}
    for run in runs:
        by_seed.setdefault((run.arm, (run.alphabet, run.backbone)), []).append(end(run))
    return {key: fmean(ends) for key, ends in by_seed.items() if len(ends) == len(plan.SEEDS)}


def tasks_of(means: Means) -> list[Task]:
    """Alphabets and backbones of which there are means."""
    return [task for arm, task in means if arm == "G"]


def have_intervals(means: Means) -> bool:
    """Whether there are two alphabets, and one of them has two backbones."""
    tasks = tasks_of(means)
    alphabets = alphabets_of(tasks)
    return 1 < len(alphabets) < len(tasks)


def alphabets_of(tasks: Sequence[Task]) -> list[str]:
    """The alphabets, sorted."""
    return sorted({alphabet for alphabet, _ in tasks})


def arm_rows(runs: Sequence[plan.Run]) -> list[Record]:
    """A row for each arm: means over its runs, by rate and of what aligning noted."""
    rows: list[Record] = []
    for arm in plan.NAMES:
        of_arm = [run for run in runs if run.arm == arm]
        row: Record = {"arm": arm, "mean": f"{fmean(map(end, of_arm)):.2f}"}
        for rate in plan.RATES:
            row[f"{rate:g}"] = f"{fmean(run.ends[f'{rate:g}'] for run in of_arm):.2f}"
        row["diverged"] = sum(run.diverged for run in of_arm)
        for split in ("train", "val", "test"):
            losses = [run.losses[split] for run in of_arm if run.losses]
            row[f"L^D, {split}"] = f"{fmean(losses):.3f}" if losses else None
        ratios = [run.q_over_g for run in of_arm if run.q_over_g is not None]
        row["|q|/|g|"] = f"{fmean(ratios):.2f}" if ratios else None
        cosines = [fmean(run.cosine) for run in of_arm if run.cosine]
        row["cosine"] = f"{fmean(cosines):.2f}" if cosines else None
        row["CPU-s of align"] = f"{fmean(run.cpu_align for run in of_arm):.0f}"
        row["of PEFT"] = f"{fmean(run.cpu_peft for run in of_arm):.1f}"
        rows.append(row)
    return rows


def by_alphabet(means: Means, pair: tuple[str, str]) -> dict[str, list[float]]:
    """The first arm minus the second, for each backbone of each alphabet."""
    tasks = tasks_of(means)
    gains: dict[str, list[float]] = {alphabet: [] for alphabet in alphabets_of(tasks)}
    for task in tasks:
        gains[task[0]].append(means[pair[0], task] - means[pair[1], task])
    return gains


def alphabet_rows(means: Means) -> list[Record]:
    """A row for each alphabet: its mean difference in each of the comparisons, in points."""
    rows: list[Record] = []
    for alphabet in alphabets_of(tasks_of(means)):
        row: Record = {"alphabet": alphabet}
        for pair in (CONTROL, *PRIMARY, *SECONDARY):
            row[" − ".join(pair)] = f"{fmean(by_alphabet(means, pair)[alphabet]):+.1f}"
        rows.append(row)
    return rows


def within(gains: dict[str, list[float]]) -> Difference:
    """The mean over alphabets, with an interval for these alphabets: they are fixed.

    The variance is that of backbones about the mean of their alphabet, pooled over alphabets.
    """
    mean = fmean(fmean(values) for values in gains.values())
    freedom = sum(len(values) - 1 for values in gains.values())
    squares = sum(variance(v) * (len(v) - 1) for v in gains.values() if len(v) > 1)
    shares = sum(1 / len(values) for values in gains.values())
    error = (squares / freedom * shares) ** 0.5 / len(gains)
    half = float(student.ppf(0.975, freedom)) * error
    p = 2 * float(student.sf(abs(mean) / error, freedom)) if mean else 1.0  # 0 may have no error
    return Difference(mean, mean - half, mean + half, p)


def compare(means: Means, final: bool) -> list[Record]:
    """The control, then both families of comparisons, each with Holm's correction.

    `final`: all cells are there, so there are verdicts.
    """
    heard = within(by_alphabet(means, CONTROL)).low > HEARD
    word = "heard" if heard else "deaf"
    rows = [row_of(means, CONTROL, "control", None, None, word if final else "not yet")]
    for name, pairs in (("primary", PRIMARY), ("secondary", SECONDARY)):
        gains = [by_alphabet(means, pair) for pair in pairs]
        fixed = [within(of_pair) for of_pair in gains]
        units = [of_units(of_pair) for of_pair in gains]
        p_fixed = holm([one.p for one in fixed])
        p_units = holm([one.p for one in units])
        for k, pair in enumerate(pairs):
            words = "none, the endpoint is deaf"
            if heard:
                words = verdict(fixed[k], p_fixed[k])
                if p_fixed[k] < 0.05 and p_units[k] < 0.05:
                    words += "; beyond these alphabets, too"
            if not final:
                words = "not yet"
            rows.append(row_of(means, pair, name, p_fixed[k], p_units[k], words))
    return rows


def of_units(gains: dict[str, list[float]]) -> Difference:
    """The mean over alphabets, with these as the units: Student's t, and all flips of signs."""
    return difference([fmean(values) for values in gains.values()])


def row_of(
    means: Means,
    pair: tuple[str, str],
    family: str,
    p_fixed: float | None,
    p_units: float | None,
    words: str,
) -> Record:
    gains = by_alphabet(means, pair)
    fixed, units = within(gains), of_units(gains)
    above = sum(fmean(values) > 0 for values in gains.values())
    return {
        "points": " − ".join(pair),
        "family": family,
        "mean": f"{fixed.mean:+.2f}",
        "these alphabets": f"{fixed.low:+.2f} to {fixed.high:+.2f}",
        "p (Holm)": with_holm(fixed.p, p_fixed),
        "alphabets as units": f"{units.low:+.2f} to {units.high:+.2f}",
        "their p (Holm)": with_holm(units.p, p_units),
        "alphabets above 0": f"{above} of {len(gains)}",
        "verdict": words,
    }


def with_holm(p: float, adjusted: float | None) -> str:
    """A p, and in brackets the corrected one, if there is any."""
    return f"{p:.2g}" if adjusted is None else f"{p:.2g} ({adjusted:.2g})"


if __name__ == "__main__":
    run_script(main)
