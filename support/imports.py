"""Program: the files that a pretext task of one's own imports, since a run is theirs, too."""

import ast
import hashlib
import re
import runpy
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    BuiltinImporter,
    FrozenImporter,
    PathFinder,
)
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from config import Record
from support.errors import UsageError
from support.files import sha256

PROGRAM = Path(__file__).resolve().parents[1]  # the folder of this program
# How files of modules end, also of compiled ones, in the order in which Python looks for them.
SUFFIXES = [*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES]


class RunFile(NamedTuple):
    """A file that `run_file` has run, what it has loaded, and where Python looked before."""

    folder: Path  # that of the file
    imports: dict[str, Path]  # what the file may have loaded, see `find_imports`
    path: list[str]  # where Python looked for modules
    loaded: frozenset[str]  # names of the modules that it has loaded


EARLIER: list[RunFile] = []  # the file that was run last
LIBRARIES: dict[Path, str] = {}  # compiled libraries that tasks have imported, and their sha256


class Imports(NamedTuple):
    """What a Python file imports, by names of modules, and the files of these in its folder."""

    used: dict[str, Path]
    hidden: dict[str, Path]  # a module of this program or of Python has the name, and goes before


def find_imports(file: Path) -> Imports:
    """Find the modules in the folder of a Python file that it imports.

    What they import there themselves is among them, and so is what a function imports. Known are
    `import` statements alone, not modules whose names are put together while the program runs.
    Raises OSError and SyntaxError.
    """
    folder = file.resolve().parent  # of a link it is that of its target, as in `run_file`
    taken = sys.stdlib_module_names | names_of_program()
    imports = Imports({}, {})
    names = set[str]()
    to_read = [(file, "")]  # files, and the package that each one is in; "": none
    for source, package in to_read:  # it grows
        for name in names_imported(ast.parse(source.read_bytes()), package):
            names.add(name)
            for module, path in find_modules(folder, name):
                first, _, _ = module.partition(".")
                if module in imports.used or module in imports.hidden or is_built_in(first):
                    continue
                if first in taken:
                    imports.hidden[module] = path
                    continue
                imports.used[module] = path
                if path.suffix == ".py":  # of what is compiled, imports are not known
                    above, _, _ = module.rpartition(".")
                    to_read.append((path, module if path.stem == "__init__" else above))
    hidden = {
        module: path for module, path in imports.hidden.items() if is_meant(module, path, names)
    }
    return imports._replace(hidden=hidden)


def find_modules(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules below a folder that are loaded for a name, and their files: a for a.b."""
    for module in accumulate(name.split("."), "{}.{}".format):
        if path := file_of_module(folder.joinpath(*module.split("."))):
            yield module, path


def is_built_in(module: str) -> bool:
    """Whether a module, such as `time`, is in Python itself, which then looks into no folder."""
    return any(finder.find_spec(module) for finder in (BuiltinImporter, FrozenImporter))


def is_meant(module: str, path: Path, names: Iterable[str]) -> bool:
    """Whether import statements may mean the file of a module: it has a name that they ask for.

    `names` are as of `names_imported`. A data.py of another script, in which "rng" is no word, is
    not what `from data import rng` means. Where only `import data` asks for it, or `from data
    import *`, it may be.
    """
    start = f"{module}."
    asked = {name.removeprefix(start).split(".")[0] for name in names if name.startswith(start)}
    text = path.read_bytes().decode(errors="replace")
    words = {*re.findall(r"\w+", text)}
    return asked <= {"*"} or not asked.isdisjoint(words) or "import *" in text


def file_of_module(path: Path) -> Path | None:
    """Return the file of a module, such as a/b.py or a/b/__init__.py of the path a/b, if any."""
    for start in (path / "__init__", path):  # Python's order
        for suffix in SUFFIXES:
            file = start.with_name(start.name + suffix)
            if file.is_file():
                return file
    return None


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
    """Return sha256 of the names and contents of what a file imports, also where that is none."""
    found = find_imports(file).used
    lines = [f"{name} {sha256(found[name])}\n" for name in sorted(found)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def run_file(file: Path) -> Record:
    """Run the file of a pretext task, which may import others beside it; return what it defines.

    What it imports is read anew, since it may have been edited after an earlier run. Raises
    UsageError as `check_loaded` and `check_libraries` do.
    """
    leave_earlier_files()
    folder = file.resolve().parent
    imports = find_imports(file).used
    before = frozenset(sys.modules)
    EARLIER.append(RunFile(folder, imports, [*sys.path], frozenset()))
    if str(folder) not in sys.path:
        # It comes last, so that a `data.py` there does not take the place of this program's. It
        # stays, since a function may import when it is called.
        sys.path.append(str(folder))
    check_libraries(imports)
    check_loaded(file)
    forget(imports)
    defined = runpy.run_path(str(file))
    check_loaded(file)
    loaded = sys.modules.keys() - before
    EARLIER[-1] = EARLIER[-1]._replace(loaded=frozenset(loaded))
    return defined


def leave_earlier_files() -> None:
    """Undo what the task before did to Python, whose helpers may have the same names.

    These are all modules below its folder that its file has loaded, however it found them, and the
    folders there in which it made Python look. Installed packages stay, wherever they lie, and so
    does what a notebook has imported from there since.
    """
    for folder, imports, path, loaded in EARLIER:
        forget(imports)
        forget(find_own_modules(folder, loaded))
        is_below = [folder in [place, *place.parents] for place in map(resolved, sys.path)]
        sys.path[:] = [
            place
            for place, below in zip(sys.path, is_below, strict=True)
            if place in path or not below
        ]
    EARLIER.clear()


def find_own_modules(folder: Path, names: Collection[str]) -> dict[str, Path]:
    """Return those of some loaded modules that are the user's own and lie below a folder.

    This program, Python and installed packages may lie there, too, and are none of them.
    """
    own = dict[str, Path]()
    for name in names:
        file = file_of_loaded(name)
        if file is None or folder not in file.parents:
            continue
        is_of_program = folder in (PROGRAM, *PROGRAM.parents) and PROGRAM in file.parents
        is_installed = {"site-packages", "dist-packages"} & {*file.parts}
        is_of_python = name.partition(".")[0] in sys.stdlib_module_names
        if not (is_of_program or is_installed or is_of_python):
            own[name] = file
    return own


def forget(imports: Mapping[str, Path]) -> None:
    """Make Python read these modules anew when they are imported next.

    `imports` are as `find_imports` returns them. A module of another file, such as that of an
    installed package, is left as it is.
    """
    for name, path in imports.items():
        if file_of_loaded(name) != path.resolve():
            continue
        del sys.modules[name]
        package, _, own_name = name.rpartition(".")
        if hasattr(sys.modules.get(package), own_name):  # `from package import it` would take that
            delattr(sys.modules[package], own_name)


def check_libraries(imports: Mapping[str, Path]) -> None:
    """Refuse (UsageError) a compiled library, such as a .so, that was changed after its first use.

    A process loads a library once: a second run would use the first one, and not what the digest is
    of. `imports` are the files of modules by their names.
    """
    for path in imports.values():
        if path.name.endswith((*EXTENSION_SUFFIXES,)):
            digest = sha256(path)
            if LIBRARIES.setdefault(path.resolve(), digest) != digest:
                raise UsageError(
                    f"--pretext: {path} was changed, and this process keeps the one that it has"
                    " loaded; start Python anew"
                )


def check_loaded(file: Path) -> None:
    """Refuse (UsageError) a file that imports others under names that Python knows otherwise.

    Such a name is that of an installed package, of a module of this program or of Python, or of a
    file that the caller's own script imports or has beside it. Python takes those, and the file in
    the folder would not be used. One that is a copy of what is taken is no matter.
    """
    imports = find_imports(file)
    for name, path in (imports.used | imports.hidden).items():
        taken = file_taken_by_python(name)
        if name in imports.hidden:
            if taken is None:  # a/b.py, where the module that Python takes as a has no b
                name, _, _ = name.partition(".")
                taken = file_taken_by_python(name)
            is_well = taken is not None and taken.read_bytes() == path.read_bytes()
        else:
            is_well = taken is None or taken.resolve() == path.resolve()
        if not is_well:
            raise UsageError(
                f"--pretext {file}: imports {path}, but Python takes {taken or 'its own module'}"
                f" as {name}; rename one of them, or run each in a process of its own"
            )


def resolved(place: str) -> Path:
    """Return a folder in which Python looks for modules; "" is the current one."""
    return Path(place or ".").resolve()


def file_of_loaded(name: str) -> Path | None:
    """Return the file of a module that is loaded; None if it is not, or has none."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    return Path(loaded).resolve() if loaded else None


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
