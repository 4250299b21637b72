"""The teaching guide and its table of costs: counted witnesses, and names of what exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import call

from config import BACKBONES
from experiments import cost
from mfac import mfac, recursion

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("form", ["mfac", "recursion"])
def test_the_formulas_of_mfac_are_its_counted_operations(form: str) -> None:
    """Every product of both functions is counted while they run; m is small beside p."""
    s = cost.Sizes(K=3, p=40, m=5, N_U=2)
    G = torch.randn(s.K, s.m, s.p, generator=torch.Generator().manual_seed(0))
    formula = cost.closed_form(s) if form == "mfac" else cost.recursion(s)
    with cost.Counter() as line_10:
        solve = mfac(G, 0.1) if form == "mfac" else recursion(G, 0.1)
    with cost.Counter() as lines_13:
        for _ in range(s.N_U):
            solve(G[:, 0])
    assert (line_10.operations, lines_13.operations) == formula


def test_an_upper_step_counts_the_layers_of_the_network() -> None:
    """The linear layers by hand: forward, and backward to the tokens, since ψ is frozen."""
    arch = BACKBONES["vit_mini"]
    tokens = 1 + (arch.image_size // arch.patch_size) ** 2
    weights = arch.depth * (4 + 2 * arch.mlp_ratio) * arch.dim**2  # q, k, v, projection, MLP
    passes = 2 * 2 * 2 * tokens * weights  # at two θ, forward and backward, 2 for a weight
    counted = cost.count(arch, rank=1).upper
    assert 1.0 < counted / passes < 1.15  # attention, patches and LoRA are in it, too


def test_a_product_with_the_hessian_costs_about_a_gradient() -> None:
    per_image = cost.count(BACKBONES["vit_mini"], rank=8)
    assert 0.5 < per_image.product / per_image.lower < 1.5


def numbers(row: str) -> list[float]:
    """The numbers in a row of a table, without that in the backbone's name."""
    cells = row.replace(",", "").split("|")[3:]
    return [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]


@pytest.mark.slow
def test_the_page_has_the_table_that_the_script_prints() -> None:
    """Up to 5 %: how torch divides an operation into others changes with its version."""
    page = (ROOT / "experiments/cost.md").read_text()
    said = call(cost, "--backbone vit_b16")
    printed = [line for line in said.splitlines() if line.startswith("| vit_b16 |")]
    told = [line for line in page.splitlines() if line.startswith("| vit_b16 |")]
    assert len(printed) == len(told) == 4
    for ours, theirs in zip(told, printed, strict=True):
        assert ours.split("|")[2] == theirs.split("|")[2]
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=0.05)


@pytest.mark.parametrize("way", ["zip", "gztar", "git"])
def test_the_first_cell_of_a_hosted_notebook_finds_the_repository(way: str, tmp_path: Path) -> None:
    """From an archive, which has a folder of its own, or from an address; and once more.

    In the place of pip is a module that writes down what it was asked.
    """
    readme = (ROOT / "examples/README.md").read_text()
    (cell,) = re.findall(r"```python\n(ADDRESS = \"\".*?)```", readme, re.S)
    source, here, pip = (tmp_path / name for name in ("source/repository-main", "here", "pip"))
    (source / "examples").mkdir(parents=True)
    for name in ("bisslight.py", "examples/one_page.py"):
        (source / name).write_text((ROOT / name).read_text())
    here.mkdir()
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text("import sys; open('asked', 'a').write(repr(sys.argv[1:]))")
    if way == "git":
        for words in ("init --quiet", "add .", "-c user.name=a -c user.email=b commit -qm c"):
            subprocess.run(["git", *words.split()], cwd=source, check=True)
        cell = cell.replace('ADDRESS = ""', f'ADDRESS = "{source}"')
    else:
        shutil.make_archive(str(here / "any"), way, source.parent)
    names = os.environ | {"PYTHONPATH": str(tmp_path)}
    for text in (cell + "\n" + cell, cell):  # again in the same kernel, and in a new one
        text += "assert os.path.exists('examples/one_page.py')"
        subprocess.run([sys.executable, "-c", text], cwd=here, env=names, check=True)
    (asked,) = here.rglob("asked")
    assert asked.read_text() == 2 * "['install', '--quiet', '--editable', '.']"
