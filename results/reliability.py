"""Count how bad input ends: in a correct reading, in one clear line, or otherwise. The table is in reliability.md.

    python results/reliability.py            # some thousand cases, minutes
    python results/reliability.py --scale 1  # what the suite runs

The cases are those of `tests/faults.py`; pytest and hypothesis need to be installed (pip install -e '.[dev]').
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

from faults import kinds, make_runs, outcome


def main(scale: Annotated[int, typer.Option(min=1, max=20)] = 5, seed: int = 0, only: str = "") -> None:
    """Print the table, and each case that ended in neither way."""
    began, total = time.monotonic(), [0, 0, 0]
    print("| kind | cases | read correctly | one clear line | otherwise | slowest, s |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        defects = []
        for kind, cases in kinds(Path(name), random.Random(seed), scale, make_runs(Path(name))).items():
            if only not in kind:
                continue
            ends = [outcome(case) for case in cases]
            counts = [sum(end.how == how for end in ends) for how in ("read", "refused", "defect")]
            total = [a + b for a, b in zip(total, counts, strict=True)]
            slowest = max(end.seconds for end in ends)
            print(f"| {kind} | {len(ends)} | {counts[0]} | {counts[1]} | {counts[2]} | {slowest:.1f} |", flush=True)
            defects += [f"{kind}: {end.name}: {end.line}" for end in ends if end.how == "defect"]
        os.chdir("/")
    print(f"| all | {sum(total)} | {total[0]} | {total[1]} | {total[2]} | |")
    print(f"{time.monotonic() - began:.0f} seconds", *defects, sep="\n", file=sys.stderr)
    raise typer.Exit(bool(defects))


if __name__ == "__main__":
    typer.run(main)
