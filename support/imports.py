"""Program: the files that a pretext task of one's own imports, since a run is theirs, too."""

import ast
import hashlib
import runpy
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from config import Record
from support.errors import UsageError
from support.files import sha256

PROGRAM = Path(__file__).resolve().parents[1]  # the folder of this program


class RunFile(NamedTuple):
    """What `run_file` left behind in Python."""

    folder: str | None  # that it added to the path, if any
    imports: dict[str, Path]  # what the file may have loaded, see `find_imports`


EARLIER: list[RunFile] = []  # the file that was run last


def find_imports(file: Path) -> dict[str, Path]:
    """Return the modules in the folder of a Python file that it imports, and their files, by name.

    What they import there themselves is among them, and so is what a function imports. Known are
    `import` statements alone, not modules whose names are put together while the program runs. A
    module of this program or of Python goes before one of the same name in the folder, so such a
    one is none of them. Raises OSError and SyntaxError.
    """
    folder = file.resolve().parent  # of a link it is that of its target, as in `run_file`
    taken = sys.stdlib_module_names | names_of_program()
    found: dict[str, Path] = {}
    to_read = [(file, "")]  # files, and the package that each one is in; "": none
    for source, package in to_read:  # it grows
        for name in names_imported(ast.parse(source.read_bytes()), package):
            parts = name.split(".")
            for k in range(1, len(parts) + 1):  # of a.b.c also a and a.b
                path = folder.joinpath(*parts[:k])
                module = ".".join(parts[:k])
                if parts[0] in taken or module in found:
                    continue
                if (path / "__init__.py").is_file():
                    found[module] = path / "__init__.py"
                    to_read.append((found[module], module))
                elif path.with_name(f"{path.name}.py").is_file():
                    found[module] = path.with_name(f"{path.name}.py")
                    to_read.append((found[module], ".".join(parts[: k - 1])))
    return found


def names_imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the names that `import` statements may mean as modules, such as "a.b" of `import a.b`.

    Of `from a import b` these are a and a.b, since b may be a module. `package` is what dots before
    a name count from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            above = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


@cache  # as they were at first: beside them, a pretext task may load files of its own
def names_of_program() -> frozenset[str]:
    """Return the names of this program's modules and packages that are loaded."""
    names = set[str]()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file and "." not in name:
            path = Path(file).resolve()
            place = path.parent.parent if path.name == "__init__.py" else path.parent
            if place == PROGRAM:
                names.add(name)
    return frozenset(names)


def digest_of_imports(file: Path) -> str:
    """Return sha256 of the names and contents of `find_imports`, also where there are none."""
    found = find_imports(file)
    lines = [f"{name} {sha256(found[name])}\n" for name in sorted(found)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def run_file(file: Path) -> Record:
    """Run the file of a pretext task, which may import others beside it; return what it defines.

    What it imports is read anew, since it may have been edited after an earlier run. Raises
    UsageError as `check_loaded` does.
    """
    leave_earlier_files()
    folder = str(file.resolve().parent)
    is_new = folder not in sys.path
    if is_new:
        # It comes last, so that a `data.py` there does not take the place of this program's. It
        # stays, since a function may import when it is called.
        sys.path.append(folder)
    found = find_imports(file)
    EARLIER.append(RunFile(folder if is_new else None, found))
    check_loaded(file)
    forget(found)
    defined = runpy.run_path(str(file))
    check_loaded(file)
    return defined


def leave_earlier_files() -> None:
    """Undo what `run_file` did for the task before, whose helpers may have the same names."""
    for folder, imports in EARLIER:
        if folder:
            sys.path.remove(folder)
        forget(imports)
    EARLIER.clear()


def forget(imports: Mapping[str, Path]) -> None:
    """Make Python read these modules anew when they are imported next.

    `imports` are as `find_imports` returns them. A module of another file, such as that of an
    installed package, is left as it is.
    """
    for name, path in imports.items():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is None or Path(loaded).resolve() != path.resolve():
            continue
        del sys.modules[name]
        package, _, own_name = name.rpartition(".")
        if hasattr(sys.modules.get(package), own_name):  # `from package import it` would take that
            delattr(sys.modules[package], own_name)


def check_loaded(file: Path) -> None:
    """Refuse (UsageError) a file that imports others under names that Python knows otherwise.

    Such a name is that of an installed package, or of a file that the caller's own script imports
    or has beside it. Python takes those, and the digest would be of a file that is not used.
    """
    for name, path in find_imports(file).items():
        taken = file_taken_by_python(name)
        if taken and taken.resolve() != path.resolve():
            raise UsageError(
                f"--pretext {file}: imports {path}, but Python takes {taken}, of the same name;"
                " rename one of them, or run each in a process of its own"
            )


def file_taken_by_python(name: str) -> Path | None:
    """Return the file of a module that is loaded, or that `import` would load; None if unknown.

    Where a module inside of a package would come from is not asked before the package is loaded.
    """
    if name in sys.modules:
        loaded = getattr(sys.modules[name], "__file__", None)
    elif "." in name:
        return None
    else:
        spec = PathFinder.find_spec(name)
        loaded = spec.origin if spec and spec.has_location else None
    return Path(loaded) if loaded else None
