"""Program: what a run is: its definition, and in what two definitions differ.

A definition is a flat record: a format number, the command, the versions of the program and torch,
all settings, and digests of what the settings name. It is the config.json of a run; checkpoints and
adapters carry it on. All comparisons ask it and nothing else: whether a directory is of this run,
whether runs are seeds of one arm, and in what arms differ.

A chain is a list of definitions: that of a run, that of the run it starts from, and so on.

This module does without torch, so that `bisslight evaluate` starts at once.
"""

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from config import (
    COMPUTING,
    PLACES,
    SEED_SETTINGS,
    AlignConfig,
    FinetuneConfig,
    Machine,
    PretrainConfig,
    Record,
    flag_of,
    without_path,
)
from support.errors import UsageError

FORMAT = 7  # of config.json, checkpoints, results and adapters; other formats are not read
Chain = Sequence[Record]
# How images are found and split, and how many there are. Digests cover it, wherever images lie.
FINDING = {"dataset", "data_seed", "split_file", "partial", "voc_difficult", "pool", "images"}
# Settings that may change as a run goes on: places, and how to compute.
MAY_CHANGE = COMPUTING | PLACES | FINDING | Machine.model_fields.keys()
# A directory may be added to under another version; a checkpoint is gone on with by its own alone.
MAY_CHANGE_IN_OUT = MAY_CHANGE | {"versions"}
OF_SEED = MAY_CHANGE | SEED_SETTINGS | {"start_sha256"}  # what differs between the seeds of an arm
MAY_DIFFER_IN_ARM = OF_SEED | {"versions"}  # an arm may be added to under another version
CONTENTS = {  # by digest: the setting that names what it is of
    "weights_sha256": "weights",
    "data_sha256": "dataset",
    "pool_sha256": "pool",
    "pretext_sha256": "pretext",
    "start_sha256": "start",
}
FIELDS = PretrainConfig.model_fields | AlignConfig.model_fields | FinetuneConfig.model_fields
COMMANDS = "commands"  # the name of a difference in the commands of two chains


class Difference(NamedTuple):
    """A setting, or the commands, in which two definitions or chains differ."""

    name: str  # of the setting, or COMMANDS
    own: str  # the value in the first of the two
    other: str  # the value in the second
    runs_before: int = 0  # 0: a setting of the run itself; 1: of the run that it starts from; ...

    @property
    def is_of_start(self) -> bool:
        """Whether it is in what was done before the run itself."""
        return self.name == COMMANDS or self.runs_before > 0


def check_format(said: Mapping[str, object], what: Path | str, remedy: str) -> None:
    """Refuse (UsageError) what another version has written in another format.

    `said` is what a file says of itself, such as a definition, and `what` names the file.
    """
    if said.get("format") != FORMAT:
        by = said.get("versions", "another version")
        raise UsageError(f"{what}: made by {by}; finish it with that version, or {remedy}")


def what_defines(definition: Record, but_for: Set[str] = MAY_CHANGE) -> Record:
    """Return a definition without the names in `but_for`: what has to stay the same.

    By default, without what may change as a run goes on.
    """
    fixed = {name: value for name, value in definition.items() if name not in but_for}
    if "pretext" in fixed:  # the file of a pretext task of one's own may lie elsewhere
        fixed["pretext"] = without_path(fixed["pretext"])
    return fixed


def tell_apart(
    own: Record, other: Record, but_for: Set[str] = OF_SEED, runs_before: int = 0
) -> list[Difference]:
    """Return in what two definitions differ; the names in `but_for` are not compared.

    `runs_before` is put into the differences, see `Difference`.

    >>> tell_apart({"command": "align", "rank": 8}, {"command": "align", "rank": 64})
    [Difference(name='rank', own='8', other='64', runs_before=0)]
    """
    own, other = what_defines(own, but_for), what_defines(other, but_for)
    return [
        Difference(name, say(name, own.get(name)), say(name, other.get(name)), runs_before)
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]


def tell_chains_apart(own: Chain, other: Chain, but_for: Set[str] = OF_SEED) -> list[Difference]:
    """Return in what two chains differ: in their commands, and in the settings of each run.

    Settings are compared from the last run backwards, until one of two runs is of another command.

    >>> direct, tuned = {"command": "finetune", "rank": 8}, {"command": "finetune", "rank": 64}
    >>> for difference in tell_chains_apart([direct], [tuned, {"command": "align"}]):
    ...     print(difference.name, difference.own, "/", difference.other)
    commands finetune / align, finetune
    rank 8 / 64
    """
    told = []
    if commands(own) != commands(other):
        told.append(Difference(COMMANDS, ", ".join(commands(own)), ", ".join(commands(other))))
    # Not strict: one chain may be longer, and then their commands differ, which is told above.
    for runs_before, (own_run, other_run) in enumerate(zip(own, other, strict=False)):
        if own_run["command"] != other_run["command"]:
            break
        told += tell_apart(own_run, other_run, but_for, runs_before)
    return told


def commands(chain: Chain) -> list[str]:
    """Return the commands of a chain in the order in which they were run."""
    return [definition["command"] for definition in reversed(chain)]


def say(name: str, value: object) -> str:
    """Return the value of a setting as text; of a digest its last digits.

    >>> say("lr", [0.1, 0.2]), say("data_sha256", "2:1234abcd5678"), say("micro_batch", None)
    ('0.1, 0.2', 'abcd5678', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)[-8:] if name in CONTENTS else str(value)


def explain(difference: Difference) -> str:
    """Return a setting by its flag and the first sentence of its help, and of which run it is.

    >>> explain(Difference("rank", "8", "64", runs_before=1))
    '--rank of the run before (Rank of LoRA (r), on queries and values of every layer)'
    >>> explain(Difference("pool_sha256", "1", "2"))
    'content of --pool'
    """
    name = difference.name
    of_run = " of the run before" * difference.runs_before
    if name in CONTENTS:
        return f"content of {flag_of(CONTENTS[name])}{of_run}"
    if name not in FIELDS:  # such as the versions, or the commands
        return f"{name}{of_run}"
    text = " ".join((FIELDS[name].description or "").split())
    # Sources stand behind it in brackets, such as [App. C.3].
    # A full stop before a capital letter or a bracket ends it; that of "Eq. 4" does not.
    sentence = re.split(r"\. (?=[A-Z[])| \[", text)[0].removesuffix(".")
    return f"{flag_of(name)}{of_run} ({sentence})"


def find_repeated(starts: Sequence[str | None], seeds: Sequence[Sequence[int]]) -> list[str]:
    """Return why runs are not independent, in words; [] if they are.

    Args:
        starts: the digest of the adapter that each run starts from; None: a fresh θ.
        seeds: for each of these adapters, the seeds of its run and of the runs before that; [] if
            they are not known, or without an adapter.

    >>> find_repeated(["a", "b"], [[0], [0]])
    ['two starts have the same seed, 0']
    """
    reasons = []
    different = len({*starts})
    if 1 < different < len(starts):
        reasons.append(
            f"there are {different} starts for {len(starts)} seeds, neither one for all nor one for"
            " each"
        )
    # By the start, so that one for all counts once.
    seeds_by_start = {start: tuple(own) for start, own in zip(starts, seeds, strict=True)}
    known = [own for own in seeds_by_start.values() if own]
    # All seeds have to be equal; the last run's is the first of them. [0, 7] and [1, 7] are two
    # fine-tunings of one align run, which count as two.
    for own in sorted({own for own in known if known.count(own) > 1}):
        reasons.append(f"two starts have the same seed, {', '.join(map(str, own))}")
    return reasons
