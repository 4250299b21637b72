"""What align, finetune and evaluate do without, and the table of its commands; `cli` reads it."""

import os
from pathlib import Path
from typing import Any

RUN = "out config force dry_run json quiet"
COMMANDS = {  # what it does; function, class of its settings, options and arguments; an example
    "demo": ("The method on drawn images, offline, in two minutes on two CPU cores.",
        "extras.demo:demo", "", "out data_seed jobs force json quiet", "--out runs/demo"),
    "pretrain": ("Train a backbone from scratch with MAE or I-JEPA, without a checkpoint.",
        "extras.pretrain:pretrain", "extras.pretrain:PretrainConfig", RUN,
        "--backbone vit_mini --pool quilts"),
    "sweep": ("Accuracy against LoRA rank, λ, N_L, T or a rate: the one that has a comma list.",
        "extras.sweep:sweep", "extras.sweep:SweepConfig", RUN,
        "--backbone vit_b16 --dataset dtd --rank 1,4,16,64"),
    "report": ("Write one HTML page about runs: accuracies, curves, settings, pictures.",
        "extras.report:report", "", "runs out json", "runs/cub runs/cub-peft --out report.html"),
    "bench": ("Time and memory of an alternation: M-FAC, CG, no curvature.",
        "extras.bench:bench", "", "backbone rank p_batch d_batch lower_steps upper_steps "
        "repeats seed device amp recompute micro_batch json quiet",
        "--backbone vit_l16 --micro-batch 64"),
    "export": ("Write a run's adapter for HF peft, for timm and for the released program.",
        "extras.export:export", "", "run out seed weights json", "runs/cub-peft --out exported"),
    "data list": ("The paper's datasets: whether they are there, and the terms of their use.",
        "extras.datasets:list_all", "", "root json", "--data-root DIR"),
    "data check": ("Open every image of a dataset or folder, count, list what is wrong.",
        "extras.datasets:check", "", "name root partial json", "cub200 --data-root DIR"),
    "data download": ("Fetch and unpack a dataset; its digests are verified.",
        "extras.datasets:download", "", "name root json", "cub200 --data-root DIR"),
}  # fmt: skip
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default (...: an argument, no flag), help
    "runs": (list[Path], ..., "Runs, or directories that hold some."),
    "name": (str, ..., "A dataset by name, or folder:DIR."),
    "root": (Path, os.environ.get("BISSLIGHT_DATA", "data"), "Where the benchmarks are."),
    "data_seed": (int, 0, "Draws the images; 0 has a backbone, others are pretrained first."),
    "jobs": (int, 2, "Runs at a time."),
    "partial": (bool, False, "It is a subset; missing images are no problem."),
    "repeats": (int, 3, "Timed alternations per method, after one that warms up."),
}
