"""What is q? M-FAC's F, and the Gauss-Newton matrix N of L^P where a lower level ends.

python -m experiments.what_q_is              # table and picture from what_q_is.csv
python -m experiments.what_q_is --measure    # first adds the rows that the file lacks
"""

import csv
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
import typer
from matplotlib import pyplot as plt
from torch import Tensor

from align import batches_left, prepare, probe
from bisslight import Map, agreement, algorithm_1
from config import AlignConfig, Record
from experiments.newton import NewtonPasses, compare, newton
from experiments.recipe import markdown
from mfac import mfac
from support.experiment import open_experiment

ROWS = Path(__file__).with_name("what_q_is.csv")
SETTINGS: Record = {  # the rest is the paper's, or vit_mini's default
    "backbone": "vit_mini", "alternations": 12, "warmup": 2, "upper_steps": 3, "d_lr": 1e-2,
    "clip": 1e9, "device": "cpu",
}  # fmt: skip
ALPHABETS = ("Tagalog", "Early_Aramaic")
LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SCALES = [(20.0, 1e-3, c) for c in (1.0, 1e1, 1e2, 1e3, 1e4)]  # N_L, λ, c
CASES = [*product((5.0, 20.0, 80.0), LAMBDAS, (1.0,))]  # N_L, λ, c
LAST = 6  # alternations that are measured
FROM_CASE = "trace_F trace_N along_F along_N share ratio_F ratio_N cosine_N pull acts product"
FROM_SCALE = "ratio_F cosine_F ratio_N loss_P distance"


def measure(lower_steps: float, lam: float, c: float, alphabet: str) -> Record:
    """Do an align run with c L^P and c λ, and return means over its last alternations.

    With c = 1 the run follows M-FAC's q. Otherwise q = g, so that such runs differ in c alone.
    """
    case = {"dataset": f"omniglot:{alphabet}", "lower_steps": int(lower_steps), "lam": c * lam}
    cfg = AlignConfig(**SETTINGS | case)
    experiment = open_experiment(cfg)
    rows: list[Record] = []  # one for each alternation; only the last ones are filled

    def watched(G: Tensor, c_lam: float, H: Callable[[], Map]) -> Map:
        """Line 10: M-FAC's, or q = g; the first line 13 after it also measures."""
        by_mfac = mfac(G, c_lam)
        row: Record = {}
        rows.append(row)

        def solve(g: Tensor) -> Tensor:
            """Line 13."""
            is_measured = state.done >= cfg.alternations - LAST
            if is_measured and not row:  # the first g of the alternation
                N = H()  # that of L^P, without c
                row.update(compare(G / c, g, N, lam))
                for name, q in (("F", by_mfac(g)), ("N", newton(G, lam, lambda: N)(g))):
                    ratio, cosine = agreement(g, q)
                    row.update({f"ratio_{name}": float(ratio), f"cosine_{name}": float(cosine)})
            return by_mfac(g) if c == 1 else g.clone()

        return solve

    prepared = prepare(experiment, watched)
    list(probe(experiment, prepared))
    state, pretext_task, head, hypergrad, _ = prepared
    batches = batches_left(experiment, prepared)
    passes = NewtonPasses(task=pretext_task)  # type: ignore[arg-type]
    loss_P = pretext_task.loss
    pretext_task.loss = lambda *args: c * loss_P(*args)  # type: ignore[method-assign]
    inputs = (pretext_task, head.loss, hypergrad, *batches, passes)
    logs = [*algorithm_1(state, cfg, *inputs)][-LAST:]
    means: Record = {"lower_steps": lower_steps, "lam": lam, "c": c, "alphabet": alphabet}
    for name in rows[-1]:
        means[name] = fmean(row[name] for row in rows[-LAST:])
    means["distance"] = fmean(fmean(log.distance) for log in logs)
    means["loss_P"] = fmean(fmean(log.loss_P) for log in logs) / c
    return means


def read_rows(path: Path) -> list[Record]:
    """The rows of the file, with what follows from their numbers; none if it is not there."""
    rows: list[Record] = []
    lines = path.read_text().splitlines() if path.exists() else []
    for line in csv.DictReader(lines):
        row: Record = {k: v if k == "alphabet" else float(v) for k, v in line.items()}
        row["pull"] = row["lam"] * row["distance"] / row["norm_P"]  # λ|δ| / |∇L^P|
        row["acts"] = row["norm_P"] ** 2 / row["lam"]  # |∇L^P|² / λ
        rows.append(row | {"product": row["pull"] * row["acts"]})  # |∇L^P| |δ|
    return rows


def add_rows(path: Path) -> None:
    """Measure the cases that the file lacks."""
    done = {tuple(row.values())[:4] for row in read_rows(path)}
    for case, alphabet in product(CASES + SCALES[1:], ALPHABETS):
        if (*case, alphabet) not in done:
            row = measure(*case, alphabet)
            lines = [] if path.exists() else [",".join(row)]  # a new file begins with the names
            lines.append(",".join(f"{x:.6g}" if x != alphabet else x for x in row.values()))
            with path.open("a") as file:
                file.write("\n".join(lines) + "\n")


def of_alphabets(rows: list[Record], case: tuple[float, ...], name: str) -> list[float]:
    """The number of this name that each alphabet has in a case: N_L, λ, c, a row's first three."""
    return [row[name] for row in rows if tuple(row.values())[:3] == case]


def table(rows: list[Record], cases: list[tuple[float, float, float]], names: str) -> str:
    """A line for each case; the two numbers of a cell are those of the two alphabets."""
    lines: list[Record] = []
    for case in cases:
        line: Record = dict(zip(("N_L", "λ", "c"), (f"{x:g}" for x in case), strict=True))
        for name in names.split():
            style = ".4f" if name.startswith(("ratio", "cosine", "loss", "dist")) else ".2g"
            line[name] = ", ".join(f"{x:{style}}" for x in of_alphabets(rows, case, name))
        lines.append(line)
    return markdown(lines)


def draw(rows: list[Record], path: Path) -> None:
    """Draw left what M-FAC and N make of g, right whether the pull and M-FAC act, against λ.

    Points are means of the two alphabets, with c = 1. In `curves`, each curve has its axes, a name
    in `rows`, its label and N_L.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    curves = [(left, "ratio_F", f"|q|/|g|, M-FAC, N_L {n:g}", n) for n in (5.0, 20.0, 80.0)]
    curves.append((left, "ratio_N", "|q|/|g|, Gauss-Newton", 20.0))
    curves.append((right, "pull", "the pull acts: λ|δ| / |∇L$^P$|", 20.0))
    curves.append((right, "acts", "M-FAC acts: |∇L$^P$|² / λ", 20.0))
    curves.append((right, "product", "their product: |∇L$^P$| |δ|", 20.0))
    for axes, name, label, n in curves:
        y = [fmean(of_alphabets(rows, (n, lam, 1.0), name)) for lam in LAMBDAS]
        axes.plot(LAMBDAS, y, "o-", label=label, linewidth=1.5, markersize=4)
        axes.set(xscale="log", xlabel="λ")
        axes.legend(fontsize=8)
    right.set_yscale("log")
    figure.savefig(path, dpi=110)


def main(add: bool = typer.Option(False, "--measure"), path: Path = ROWS) -> None:
    """Print both tables, and draw the picture; with --measure measure first what is missing."""
    torch.set_num_threads(1)
    if add:
        add_rows(path)
    rows = read_rows(path)
    print(f"{table(rows, CASES, FROM_CASE)}\n\n{table(rows, SCALES, FROM_SCALE)}")
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
