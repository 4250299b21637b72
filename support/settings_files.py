"""Program: settings that are read from files: of --config, and the config.json of a run."""

import json
import tomllib
from pathlib import Path
from typing import Any

from support.suggestions import say_not_here

Content = dict[str, Any]  # what a file has by name
NO_RUN = (  # the remedy where --from names nothing
    "give an align or finetune run, or plan before it is there: --dry-run with its --backbone and"
    " --dataset"
)


def read_settings(path: Path) -> Content:
    """Read settings from a TOML file, or from JSON such as a run's config.json.

    Raises ValueError, as `read_table`.
    """
    # A config.json also says this of its run, and digests: see `runs.define`.
    no_settings = {"format", "command", "versions", "images"}
    return {
        name: value
        for name, value in read_table(path).items()
        if name not in no_settings and not name.endswith("_sha256")
    }


def read_table(path: Path) -> Content:
    """Read all that a TOML or JSON file has by name. Raises ValueError where it is no such file."""
    if not path.is_file():  # to open a pipe would wait for its writer
        raise ValueError("there is no such file")
    text = path.read_text("utf-8-sig")  # Windows' editor writes a mark before the text
    content = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it holds no settings by name")
    return content


def find_runs(path: Path) -> list[Path]:
    """Return [path] if this is a run, which has a config.json; else the runs in this directory.

    Returns [path], too, if there is no run in it: who reads it refuses it by this name.
    """
    if (path / "config.json").exists():
        return [path]
    runs = [file.parent for file in path.glob("*/config.json")]
    # By the length of their names, so that s2 comes before s10.
    return sorted(runs, key=lambda run: (len(run.name), run)) or [path]


def read_run(run: Path) -> Content:
    """Read the config.json of the run that --from names.

    For an adapter file, it is the run that the file lies in; for a folder of runs, the first one.
    Returns {} for an adapter file without a run. Raises ValueError where there is no run, and for a
    pretrain run, which has no adapter.
    """
    if not run.exists():
        raise ValueError(say_not_here(run, NO_RUN))
    is_adapter = run.is_file()
    # Of a folder the first: fine-tuning refuses runs that differ in more than the seed.
    directory = run.parent if is_adapter else find_runs(run)[0]
    file = directory / "config.json"
    if is_adapter and not file.exists():
        return {}
    if not file.exists():
        raise ValueError("is no align or finetune run, and no folder of them")
    try:
        settings = read_table(file)
        command = settings["command"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged ({error}); give another run") from error
    if command == "pretrain":
        raise ValueError("is a pretrain run, which has no adapter; give it as --weights")
    return settings
