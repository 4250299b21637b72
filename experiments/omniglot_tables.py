"""The tables of omniglot.md, from the units of omniglot.py that are done.

    python -m experiments.omniglot_tables --out runs/omniglot

prints them, and writes OUT/omniglot.csv with a row for each unit.
"""

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

from config import Record
from evaluate import Stratum, compare_strata
from experiments.omniglot import DRIVES, LONGER, MAIN, Tuned
from experiments.recipe import run_script, write_table
from support.runs import read_json, write_atomic

EARLY = 5  # epochs of PEFT

# Of all units, what the tables are made of: by arm, by (alphabet, repeat), by seed.
Results = dict[str, dict[tuple[str, int], list[Tuned]]]


def read_results(out: Path) -> Results:
    """All units that are there; the arm `direct` is the rate that is best on validation."""
    results: Results = {}
    for file in sorted(out.glob("units/*/*/unit.json")):
        record = read_json(file)
        curve = {int(epoch): percent for epoch, percent in record.pop("curve").items()}
        tuned = Tuned(**record, curve=curve)
        cells = results.setdefault(tuned.arm, {})
        cells.setdefault((tuned.alphabet, tuned.repeat), []).append(tuned)
    if "direct 0.01" in results and "direct 0.03" in results:
        results["direct"] = choose_direct(results)
    return results


def choose_direct(results: Results) -> dict[tuple[str, int], list[Tuned]]:
    """In each cell the rate with the best mean validation."""
    chosen = {}
    for cell, seeds in results["direct 0.01"].items():
        best = seeds
        for rate in ("direct 0.003", "direct 0.03"):
            others = results[rate].get(cell, [])
            if others and fmean(x.val for x in others) > fmean(x.val for x in best):
                best = others
        chosen[cell] = best
    return chosen


def at_the_end(tuned: Tuned) -> int:
    """Test images that are right after the epoch that validation chose."""
    return tuned.right


def early(tuned: Tuned) -> int:
    """Test images that are right after 5 epochs."""
    return round(tuned.curve[EARLY] / 100 * tuned.images)


def probed(tuned: Tuned) -> int:
    """Test images that the linear probe of the start gets right."""
    return tuned.probe_P


Count = Callable[[Tuned], int]


def percent(cells: Iterable[list[Tuned]], count: Count) -> float:
    """The mean over cells of the mean over seeds, in per cent."""
    means = []
    for seeds in cells:
        means.append(fmean(100 * count(tuned) / tuned.images for tuned in seeds))
    return fmean(means)


def subtract(
    results: Results, arm: str, against: str, count: Count, repeat: int | None = None
) -> str:
    """Points by which an arm is ahead of another in the cells that both have, and p."""
    strata = []
    for cell, seeds in results[arm].items():
        others = results[against].get(cell)
        if others and repeat in (None, cell[1]):
            mine = [count(tuned) for tuned in seeds]
            theirs = [count(tuned) for tuned in others]
            strata.append(Stratum(mine, theirs, seeds[0].images))
    found = compare_strata(strata)
    p = "" if found.p is None else f" (p {found.p:.2g})"
    return f"{found.difference:+.1f}{p}"


def describe_arm(results: Results, arm: str, first: str = "aligned") -> Record:
    """A row of the tables: accuracies, and how far `first` is ahead."""
    cells = results[arm].values()
    every = [tuned for seeds in cells for tuned in seeds]
    row: Record = {
        "arm": arm,
        "cells x seeds": f"{len(cells)} x {len(every) / len(cells):g}",
        "test (%)": f"{percent(cells, at_the_end):.1f}",
        "after 5 epochs": f"{percent(cells, early):.1f}",
        "probe": f"{percent(cells, probed):.1f}",
        "CPU-s": f"{fmean(x.cpu_align + x.cpu_peft for x in every):.0f}",
    }
    for name, count in (("end", at_the_end), ("epoch 5", early), ("probe", probed)):
        heading = f"{first} minus this, {name}"
        row[heading] = "" if arm == first else subtract(results, first, arm, count)
    return row


def main(out: Path = Path("runs/omniglot")) -> None:
    """All tables, and every unit as a row of a CSV file."""
    results = read_results(out)
    arms = [arm for arm in ("aligned", "direct", *MAIN) if arm in results]
    write_table([describe_arm(results, arm) for arm in dict.fromkeys(arms)], out / "arms")
    rows: list[Record] = []
    for repeat in sorted({cell[1] for cell in results["aligned"]}):
        row: Record = {"backbone": repeat}
        for arm in ("direct", "restart", "restart, equal time"):
            if arm not in results:
                continue
            row[f"aligned minus {arm}"] = subtract(results, "aligned", arm, at_the_end, repeat)
        rows.append(row)
    write_table(rows, out / "backbones")
    longer = [arm for arm in LONGER if arm in results]
    if longer:
        write_table([describe_longer(results, arm) for arm in longer], out / "longer")
    drives = [arm for arm in DRIVES if arm in results]
    if drives:
        write_table([describe_drive(results, arm) for arm in drives], out / "drives")
    write_csv(results, out / "omniglot.csv")


def write_csv(results: Results, path: Path) -> None:
    """Every unit as a row; its curve is the test accuracies after epochs 5, 10 ... 25."""
    text = io.StringIO(newline="")
    rows = csv.DictWriter(text, Tuned._fields, lineterminator="\n")
    rows.writeheader()
    for arm, cells in results.items():
        for seeds in cells.values():
            for tuned in seeds:
                if tuned.arm != arm:  # `direct` repeats one of the rates
                    continue
                record: Record = tuned._asdict()
                record["curve"] = " ".join(f"{value:.2f}" for value in tuned.curve.values())
                for name in ("val", "cpu_align", "cpu_peft", "q_over_g", "distance"):
                    if record[name] is not None:
                        record[name] = f"{record[name]:.5g}"
                rows.writerow(record)
    write_atomic(path, text.getvalue())


def describe_longer(results: Results, arm: str) -> Record:
    """A row of the table of arms with three times as many alternations."""
    row = describe_arm(results, arm, first="aligned, T 150")
    against = "restart, time of T 150"
    is_compared = arm != against and against in results
    row["this minus restart, end"] = ""
    if is_compared:
        row["this minus restart, end"] = subtract(results, arm, against, at_the_end)
    return row


def describe_drive(results: Results, arm: str) -> Record:
    """One thing changed: its accuracies, beside those of the unchanged arm in the same cells."""
    cells = results[arm]
    every = [tuned for seeds in cells.values() for tuned in seeds]
    same = {cell: [x for x in results["aligned"][cell] if x.seed == 0] for cell in cells}
    lengths = [tuned.q_over_g for tuned in every if tuned.q_over_g is not None]
    return {
        "changed": arm,
        "test (%)": f"{percent(cells.values(), at_the_end):.1f}",
        "unchanged": f"{percent(same.values(), at_the_end):.1f}",
        "after 5 epochs": f"{percent(cells.values(), early):.1f}",
        "unchanged, 5": f"{percent(same.values(), early):.1f}",
        "probe of θ_P": f"{percent(cells.values(), probed):.1f}",
        "unchanged, probe": f"{percent(same.values(), probed):.1f}",
        "|q| / |g|": f"{fmean(lengths):.4f}" if lengths else "",
        "CPU-s": f"{fmean(x.cpu_align + x.cpu_peft for x in every):.0f}",
    }


if __name__ == "__main__":
    run_script(main)
