"""A second analysis of experiments/which_derivative, of the protocol and the files alone.

It imports nothing of the study. All runs are one array of accuracies; means are products with
matrices, Student's t is integrated here, and the flips of signs are counted with bits.

    python tests/second_analysis_of_derivatives.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FILES = Path(__file__).resolve().parents[1] / "experiments" / "which_derivative"
ARMS = ("0v", "G", "N", "U", "A", "C", "oracle-G", "P")
ALPHABETS = (
    "Balinese", "Early_Aramaic", "Greek", "Japanese_(katakana)", "Korean", "Latin", "Sanskrit",
    "Tagalog",
)  # fmt: skip
BACKBONES = (46, 47, 48, 49)
SEEDS = (0, 1)
RATES = ("0.01", "0.02", "0.03")
FAMILIES = {
    "control": [("oracle-G", "0v")],
    "primary": [("U", "G"), ("G", "0v"), ("N", "G")],
    "secondary": [("A", "G"), ("P", "G"), ("U", "C")],
}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def table(runs: list[dict[str, Any]]) -> Array:
    """Accuracies: arm, alphabet, backbone, seeds and rates; NaN where one of two seeds lacks."""
    filled = np.full((len(ARMS), len(ALPHABETS), len(BACKBONES), len(SEEDS), len(RATES)), np.nan)
    for run in runs:
        place = (
            ARMS.index(run["arm"]),
            ALPHABETS.index(run["alphabet"]),
            BACKBONES.index(run["backbone"]),
            SEEDS.index(run["seed"]),
        )
        if not np.isnan(filled[place]).all():
            raise ValueError(f"two lines of {place}")
        filled[place] = [run["ends"][rate] for rate in RATES]
    flat = filled.reshape(len(ARMS), len(ALPHABETS), len(BACKBONES), -1)  # seeds and rates
    flat[:, np.isnan(flat).any((0, 3))] = np.nan
    return flat


def analyse(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each comparison all that the protocol asks for."""
    accuracy = table(runs).mean(3)  # arm, alphabet, backbone
    there = ~np.isnan(accuracy[0])
    is_final = bool(there.all())
    found: dict[str, dict[str, Any]] = {}
    for pairs in FAMILIES.values():
        rows = []
        for first, second in pairs:
            gains = accuracy[ARMS.index(first)] - accuracy[ARMS.index(second)]
            rows.append(fixed(gains, there) | units(gains, there))
            found[f"{first} − {second}"] = rows[-1]
        for name in ("p", "p_units"):
            for row, adjusted in zip(rows, holm([row[name] for row in rows]), strict=True):
                row[f"{name}_holm"] = adjusted
    hears = found["oracle-G − 0v"]["low"] > 2
    for pair, row in found.items():
        row["verdict"] = "not yet"
        if is_final:
            row["verdict"] = verdict(row, hears, pair == "oracle-G − 0v")
    return found


def verdict(row: dict[str, Any], hears: bool, is_control: bool) -> str:
    """What may be said when all cells are there."""
    if is_control:
        return "heard" if hears else "deaf"
    if not hears:
        return "none, the endpoint is deaf"
    said = []
    if row["p_holm"] < 0.05:
        said.append("ahead" if row["mean"] > 0 else "behind")
    if row["high"] < 2:
        said.append("no gain of 2 points")
    text = ", ".join(said) if said else "open"
    if max(row["p_holm"], row["p_units_holm"]) < 0.05:
        text += "; beyond these alphabets, too"
    return text


def fixed(gains: Array, there: Array) -> dict[str, Any]:
    """These alphabets: a linear model with one mean for each, and the mean of these means."""
    alphabet, _ = np.nonzero(there)
    names, column = np.unique(alphabet, return_inverse=True)
    X = np.eye(len(names))[column]
    y = gains[there]
    inverse = np.linalg.inv(X.T @ X)
    coefficients = inverse @ X.T @ y
    residual = y - X @ coefficients
    freedom = len(y) - len(names)
    contrast = np.full(len(names), 1 / len(names))
    error = np.sqrt(residual @ residual / freedom * (contrast @ inverse @ contrast))
    mean = contrast @ coefficients
    half = quantile(freedom) * error
    p = 2 * upper_tail(abs(mean) / error, freedom)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p}


def units(gains: Array, there: Array) -> dict[str, Any]:
    """Alphabets as units: Student's t, and the share of all flips that are as far from 0."""
    whole = there.any(1)
    means = np.nanmean(np.where(there, gains, np.nan)[whole], axis=1)
    n = len(means)
    half = quantile(n - 1) * means.std(ddof=1) / np.sqrt(n)
    bits = np.arange(2**n)[:, None] >> np.arange(n) & 1
    sums = (1 - 2 * bits) @ means
    p = (abs(sums) > abs(means.sum()) - 1e-8).mean()
    mean = means.mean()
    return {
        "low_units": mean - half,
        "high_units": mean + half,
        "p_units": p,
        "above": int((means > 0).sum()),
    }


def upper_tail(x: float, freedom: int) -> float:
    """P(t > x) of Student's t: with t = √ν tan a, the density is proportional to cos(a)^(ν − 1)."""
    a = np.arctan(x / np.sqrt(freedom))
    return simpson(a, np.pi / 2, freedom) / simpson(-np.pi / 2, np.pi / 2, freedom)


def simpson(low: float, high: float, freedom: int) -> float:
    """The integral of cos(a)^(ν − 1)."""
    a = np.linspace(low, high, 20001)
    weights = np.full(20001, 2.0)
    weights[1::2] = 4
    weights[[0, -1]] = 1
    heights = np.clip(np.cos(a), 0, None) ** (freedom - 1)
    return float(weights @ heights * (high - low) / 60000)


def quantile(freedom: int) -> float:
    """The 97.5 % point, by halving."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        if upper_tail(middle, freedom) > 0.025:
            low = middle
        else:
            high = middle
    return low


def holm(ps: list[float]) -> list[float]:
    """The largest, over all p that are not above this one, of p times how many are not below it."""
    return [
        max(min(1.0, p * (len(ps) - sum(other < p for other in ps))) for p in ps if p <= this)
        for this in ps
    ]


def gains_of(lines: list[dict[str, Any]]) -> dict[str, dict[str, Array]]:
    """For own and next steps and each arm: the summed response over that of G, cell by cell."""
    cells = sorted({(line["alphabet"], line["backbone"], line["seed"]) for line in lines})
    ratios: dict[str, dict[str, Array]] = {}
    for steps in ("own", "next"):
        ratios[steps] = {}
        for arm in lines[0][steps]:
            sums = np.zeros((len(cells), 2))
            for line in lines:
                row = cells.index((line["alphabet"], line["backbone"], line["seed"]))
                sums[row] += line[steps][arm], line[steps]["G"]
            ratios[steps][arm] = sums[:, 0] / sums[:, 1]
    return ratios


if __name__ == "__main__":
    if not (FILES / "runs.jsonl").exists():
        sys.exit("no run yet")
    for name, numbers in analyse(read(FILES / "runs.jsonl")).items():
        print(name, numbers)
