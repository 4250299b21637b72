"""The paper's tables, and beside which runs their figures stand."""

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import shared
from test_evaluate import finished

from config import BACKBONES
from experiments import accuracy


def test_the_papers_figure_stands_only_beside_what_the_paper_measured(tmp_path: Path) -> None:
    official = "x/mae_pretrain_vit_large_full.pth"
    cases: list[tuple[str | None, dict[str, Any], str | None]] = [
        (None, {}, "84.4±0.4"),
        ("mfac", {}, "85.6±0.3"),
        (None, {"weights": official}, "84.4±0.4"),
        (None, {"weights": "x/backbone.pth"}, None),
        ("identity", {}, None),
        (None, {"partial": True}, None),
        (None, {"batch": 64}, None),
        ("mfac", {"aligned": {"pretext": "rotation"}}, None),
        ("mfac", {"pretext": "ijepa", "backbone": "vit_h14"}, "86.8±0.2"),
        (None, {"min_crop": 1.0}, None),
        (None, {"amp": False}, "84.4±0.4"),
        (None, {"origin": {"stage": "finetune"}}, None),  # a restart
        ("mfac", {"aligned": {"data_sha256": "of others"}}, None),
        ("mfac", {"aligned": {"lam": 1.0}}, None),
        ("mfac", {"aligned": {"amp": False}}, "85.6±0.3"),
        (None, {"dataset": "folder:/cub200"}, None),
    ]
    for i, (by, changes, expected) in enumerate(cases):
        found = accuracy.find_in_paper(finished(tmp_path / f"{i}", [70.0], by, **changes))
        assert (found and found.split()[0]) == expected, (by, changes)


def test_the_papers_tables_are_copied_right() -> None:
    """Every number of the LaTeX source's tables, in order."""
    text = shared("paper/bisslight.tex").read_text()

    def table_of(label: str) -> str:
        start = text.index(f"\\label{{{label}}}")
        return text[start : text.index("\\end{tabular}", start)]

    def pairs(label: str) -> list[tuple[float, float]]:
        found = re.findall(r"(\d+\.\d)\}?\\scriptstyle\{\\pm (\d+\.\d)\}", table_of(label))
        return [(float(a), float(b)) for a, b in found]

    main, other = "tab:mae_bisslight_main_results", "tab:classificaiton_acc_bisslight_ijepa"
    bissl = "tab:classificaiton_acc_bissl_orig"
    floats: dict[str, list[tuple[float, float]]] = {main: [], other: [], bissl: []}
    for label, row in accuracy.ACCURACIES.values():
        for figure in row.split():
            mean, deviation = figure.split("±")
            floats[label].append((float(mean), float(deviation)))
    assert {k: pairs(k) for k in (main, other)} == {k: floats[k] for k in (main, other)}
    assert pairs(bissl) == floats[main][:12] + floats[bissl]  # the rows of ViT-B and its own
    head = re.findall(r"& (\w+)", table_of(main).split("midrule")[0])
    assert [name.lower() for name in head] == [*accuracy.COLUMNS]
    body = table_of("tab:lora_param_count").split("midrule")[1]
    millions = [float(x) for x in re.findall(r"\d+\.\d\d", body)]  # the ninth is the backbone's
    for k, name in enumerate(("vit_b16", "vit_l16", "vit_h14")):
        arch = BACKBONES[name]
        ours = [4 * arch.depth * arch.dim * 2**i / 1e6 for i in range(8)]
        assert millions[9 * k : 9 * k + 8] == pytest.approx(ours, abs=0.0051)
