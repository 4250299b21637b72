"""The house rules: who imports whom, how large a module may be, what is packaged."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from trace import traced

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [  # a module imports only from lower floors
    "bisslight cg cli config data ijepa lora mae mfac",
    "commands training",
    "benchmarks evaluate run weights",
    "extras.datasets extras.report model",
    "align extras.look extras.plan extras.pretrain finetune",
    "extras.bench extras.demo extras.export extras.sweep",
]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")]
    if path.stem != "__init__"
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LINES, STATEMENTS, CODE, PARAMETERS = 350, 240, 50, 10  # of a module, of a function
BINARY = (".npz", ".png", ".npy", ".mat", ".gz", ".pth", ".tar", ".safetensors")
# Of the whole program, extras/__init__.py too. None rises without another falling
FUNCTIONS_AN_ALTERNATION = 100  # in 12 files
IN_ALL = {"statements": 2880, "lines": 5325, "nodes": 45_750, "root": 4050}  # root: lines


def imports(path: Path) -> set[str]:
    """Names of the project's modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names | {node.module or ""}
    return found & {*MODULES}


def documentation(tree: ast.AST) -> list[ast.Expr]:
    """Docstrings, those of attributes too."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return [n for n in nodes if isinstance(getattr(n.value, "value", None), str)]


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code."""
    lines = {n for n, x in enumerate(text.splitlines(), 1) if x.strip()[:1] not in ("", "#")}
    for node in documentation(ast.parse(text)):
        lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return lines


def size(path: Path) -> dict[str, int]:
    """Statements, lines and syntax nodes; docstrings are lines only."""
    text = path.read_text()
    tree = ast.parse(text)
    doc = {inner for node in documentation(tree) for inner in ast.walk(node)}
    nodes = [node for node in ast.walk(tree) if node not in doc]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    return {"statements": statements, "lines": len(text.splitlines()), "nodes": len(nodes)}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_only_go_down(name: str) -> None:
    floor = {module: i for i, row in enumerate(FLOORS) for module in row.split()}
    assert {other for other in imports(MODULES[name]) if floor[other] >= floor[name]} == set()


def test_every_module_has_a_floor() -> None:
    assert {*" ".join(FLOORS).split()} == {*MODULES}


def test_only_cli_names_extras() -> None:
    for name, path in MODULES.items():
        if name != "cli" and not name.startswith("extras."):
            tree = ast.parse(path.read_text())
            doc = {node.value for node in documentation(tree)}
            nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in doc]
            assert not any("extras" in str(node.value) for node in nodes), name
            assert not {other for other in imports(path) if other.startswith("extras")}, name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_is_short_and_so_are_its_functions(name: str) -> None:
    text = MODULES[name].read_text()
    found, lines = size(MODULES[name]), code_lines(text)
    assert found["lines"] <= LINES and found["statements"] <= STATEMENTS, found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            inside = lines & {*range(node.lineno, (node.end_lineno or 0) + 1)}
            given = [*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            count = len([a for a in given if a is not None and a.arg not in ("self", "cls")])
            assert len(inside) <= CODE and count <= PARAMETERS, (node.name, len(inside), count)


def test_the_whole_program_is_small() -> None:
    """Denser lines do not help: syntax nodes count, and a line of code holds at most 14 of them."""
    sizes = [size(path) for path in [*MODULES.values(), ROOT / "extras/__init__.py"]]
    total = {key: sum(found[key] for found in sizes) for key in sizes[0]}
    total["root"] = sum(size(path)["lines"] for path in ROOT.glob("*.py"))
    code = sum(len(code_lines(path.read_text())) for path in MODULES.values())
    assert {key for key in IN_ALL if total[key] > IN_ALL[key]} == set(), total
    assert total["nodes"] / code <= 14


def test_one_alternation_passes_through_few_functions(weights: Path, tmp_path: Path) -> None:
    """From the command line to the adapter on disk."""
    found = sorted(traced(weights, tmp_path / "a"))
    assert len(found) <= FUNCTIONS_AN_ALTERNATION and len({f for f, _ in found}) <= 12, found


def test_the_suite_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("tests/*.py")) <= 6225


def test_every_module_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools["py-modules"]) == sorted(name for name in MODULES if "." not in name)
    assert setuptools["packages"] == ["extras"]


def test_every_dependency_is_used_and_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    modules = {"pillow": "PIL"}
    for need in project["dependencies"]:
        name = re.split(r"[><=]", need)[0]
        pattern = rf"\b(import|from) {modules.get(name, name)}\b"
        assert any(re.search(pattern, path.read_text()) for path in MODULES.values()), name
    for need in [*project["dependencies"], *project["optional-dependencies"]["dev"][1:]]:
        assert re.search(rf'"{re.escape(need)}",? *# \w', text), need


def test_mypy_knows_every_test_module() -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    assert overrides[1]["module"] == sorted(path.stem for path in ROOT.glob("tests/*.py"))


def test_no_file_names_a_machine_path() -> None:
    listed = subprocess.getoutput(f"git -C '{ROOT}' ls-files 2> /dev/null").split()
    if not listed:
        pytest.skip("not a git checkout")
    for name in listed:
        if not name.endswith(BINARY) and (ROOT / name).is_file():
            assert not re.search(r"/(home|root|tmp|Users)/\w", (ROOT / name).read_text()), name
