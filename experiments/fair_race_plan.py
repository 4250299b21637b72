"""The plan of the fair race: its arms, candidates and cells, and the runs that were measured.

fair_race.md says why. fair_race.py runs what is named here.
"""

import json
from itertools import product
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("fair_race")
EPOCHS_OF_ALTERNATION = 1.6  # the work of an alternation and of its part of the probe


class Arm(NamedTuple):
    """What comes before PEFT, and the rate and the length of PEFT."""

    rate: float
    epochs: int
    alternations: int = 0
    implicit: bool = True  # False: q = 0, so θ_D is trained by its own loss alone
    first_epochs: int = 0  # of a PEFT before, at rate 0.03, whose θ this one starts from

    @property
    def work(self) -> float:
        """The work of the arm, with what comes before PEFT, in epochs of PEFT."""
        return self.first_epochs + EPOCHS_OF_ALTERNATION * self.alternations + self.epochs


CANDIDATES: dict[str, list[Arm]] = {"direct": [], "restart": [], "aligned": []}
for rate in (0.02, 0.04):
    CANDIDATES["direct"] += [Arm(rate, 95), Arm(rate, 175)]
    CANDIDATES["restart"] += [Arm(rate, 95, first_epochs=80), Arm(rate, 25, first_epochs=150)]
    CANDIDATES["aligned"] += [Arm(rate, 95, alternations=50), Arm(rate, 40, alternations=85)]
# A third rate, for the division that the two above chose.
BETWEEN = 0.03
CANDIDATES["direct"].append(Arm(BETWEEN, 95))
CANDIDATES["restart"].append(Arm(BETWEEN, 95, first_epochs=80))
CANDIDATES["aligned"].append(Arm(BETWEEN, 95, alternations=50))
CHOSEN = {  # by phase 1, one each; q = 0 has what aligned has
    "direct": [Arm(0.03, 95)],
    "restart": [Arm(0.03, 95, first_epochs=80)],
    "aligned": [Arm(0.02, 95, alternations=50)],
    "q = 0": [Arm(0.02, 95, alternations=50, implicit=False)],
}


class Cell(NamedTuple):
    """A task, a backbone with its split of the drawers, and a seed."""

    alphabet: str
    backbone: int  # the seed of its pretraining and its split; 0 comes with the program
    seed: int


CHOICE = [Cell(name, 0, seed) for seed, name in product((0, 1), ("Early_Aramaic", "Tagalog"))]
BACKBONES = range(4, 12)  # and splits; no earlier study had these
RACE: list[Cell] = []  # in rounds: one alphabet and one seed on all backbones
for seed, alphabet, number in product(range(3), ("Greek", "Balinese", "Latin"), BACKBONES):
    RACE.append(Cell(alphabet, number, seed))


class Unit(NamedTuple):
    """One run to do."""

    name: str  # of the arm
    arm: Arm
    cell: Cell


class Run(NamedTuple):
    """One run and what it ended with, a line of a file."""

    name: str  # of the arm
    arm: Arm
    cell: Cell
    images: int  # of the test
    test: dict[int, float]  # test accuracy (%) by epoch of PEFT; the last one is the end
    held_out: float  # accuracy (%) on validation and test images together, at the end
    cpu: float  # seconds, without pretraining, and without a start that another run has made


def units_of(cells: list[Cell], arms: dict[str, list[Arm]]) -> list[Unit]:
    """Every arm in every cell, cell by cell."""
    units = []
    for cell, name in product(cells, arms):
        units += [Unit(name, arm, cell) for arm in arms[name]]
    return units


def read_runs(results: Path) -> list[Run]:
    """The runs in the file `results`; none if it is not there."""
    runs = []
    lines = results.read_text().splitlines() if results.exists() else []
    for line in lines:
        name, arm, cell, images, test, held_out, cpu = json.loads(line)
        curve = {int(epoch): accuracy for epoch, accuracy in test.items()}
        runs.append(Run(name, Arm(*arm), Cell(*cell), images, curve, held_out, cpu))
    return runs
