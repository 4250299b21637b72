"""Files that a pretext task of one's own imports: which they are, and that a run is theirs, too."""

import colorsys
import importlib
import json
import py_compile
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from toy import done, refusal

import lora
from config import OMNIGLOT
from support.errors import UsageError
from support.imports import (
    check_loaded,
    digest_of_imports,
    find_imports,
    leave_earlier_files,
    run_file,
)

EXAMPLE = Path(__file__).parents[1] / "examples/rotation.py"
TASK = """
import json
import helper, nets.deep as deep
import numpy
from data import rng
from nets import norm
def lazily():
    from later import function
"""
FILES = {
    "task.py": TASK,
    "helper.py": "import second\nfrom json import dumps\n",
    "second.py": "import helper\n",  # they import each other
    "later.py": "def function(): pass\n",
    "data.py": "raise RuntimeError\n",  # the program's goes before it, and so does Python's json
    "json.py": "raise RuntimeError\n",
    "unused.py": "import helper\n",
    "nets/__init__.py": "",
    "nets/deep.py": "from .parts import block\nfrom . import other\nfrom ..helper import no\n",
    "nets/parts.py": "block = 1\n",
    "nets/other.py": "",
    "nets/norm.py": "",
    "nets/unused.py": "",
}
IMPORTED = ["helper", "later", "nets", "nets.deep", "nets.norm", "nets.other", "nets.parts"]
IMPORTED += ["second"]


def write(folder: Path, files: dict[str, str]) -> None:
    """Write these files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_imports_are_those_of_the_folder_whoever_imports_them(tmp_path: Path) -> None:
    """Python itself, in a process of its own, loads the same files."""
    write(tmp_path, {**FILES, "nets/deep.py": "from .parts import block\nfrom . import other\n"})
    assert sorted(find_imports(tmp_path / "task.py").used) == IMPORTED
    (tmp_path / "data.py").write_text("def rng(): pass\n")
    (tmp_path / "json.py").unlink()
    script = (
        "import sys; sys.path.append(sys.argv[1]); import task; task.lazily();"
        "print(*sorted(n for n, m in sys.modules.items() if sys.argv[1] in str(m)))"
    )
    call = [sys.executable, "-c", script, str(tmp_path)]
    loaded = subprocess.run(call, capture_output=True, text=True, check=True, cwd="/").stdout
    assert {*loaded.split()} - {"data", "task"} == {*IMPORTED}


def test_a_name_that_python_knows_otherwise_is_refused(tmp_path: Path) -> None:
    """That of an installed package, whether or not it was loaded before."""
    write(tmp_path, {"folder/task.py": "import timm\n", "folder/timm.py": ""})
    import timm

    with pytest.raises(UsageError, match=r"imports .*folder/timm\.py, but .* rename one"):
        run_file(tmp_path / "folder/task.py")
    leave_earlier_files()
    assert sys.modules["timm"] is timm
    with pytest.raises(UsageError, match=r"imports .*folder/timm\.py, but .* rename one"):
        check_loaded(tmp_path / "folder/task.py")


def test_a_link_to_a_task_takes_the_helper_beside_the_file_that_it_leads_to(tmp_path: Path) -> None:
    """So does Python itself; the digest is of that helper, and of none beside the link."""
    write(tmp_path, {"real/task.py": "from helper import K\nprint(K)\n"})
    write(tmp_path, {"real/helper.py": "K = 1\n", "folder/helper.py": "K = 100\n"})
    link = tmp_path / "folder/task.py"
    link.symlink_to(tmp_path / "real/task.py")
    call = [sys.executable, str(link)]
    printed = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    before = digest_of_imports(link)
    assert run_file(link)["K"] == int(printed) == 1
    write(tmp_path, {"folder/helper.py": "K = 200\n"})
    assert digest_of_imports(link) == before
    write(tmp_path, {"real/helper.py": "K = 10\n"})
    assert digest_of_imports(link) != before
    assert run_file(link)["K"] == 10


def test_a_helper_that_python_would_take_from_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of tasks/task.py imports helper_98; the script's folder has one, too."""
    write(tmp_path, {"tasks/task.py": "def f():\n    import helper_98\n", "helper_98.py": "A = 0"})
    write(tmp_path, {"tasks/helper_98.py": "A = 1"})
    task = tmp_path / "tasks/task.py"
    monkeypatch.syspath_prepend(tmp_path / "tasks")
    check_loaded(task)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"imports .*tasks/helper_98\.py, but .*/helper_98\.py"):
        check_loaded(task)
    assert "helper_98" not in sys.modules  # it was not loaded for this
    import helper_98  # type: ignore[import-not-found]  # as `f` would

    assert helper_98.A == 0
    del sys.modules["helper_98"]


def test_an_own_copy_of_a_module_of_the_program_or_of_python_is_refused_once_it_is_changed(
    tmp_path: Path,
) -> None:
    """Python takes the program's or its own; whoever has changed the copy wants that to be used."""
    write(tmp_path, {"task.py": "from lora import features\nimport colorsys\n"})
    for module in (lora, colorsys):
        copy = Path(shutil.copy(str(module.__file__), tmp_path))
        assert run_file(tmp_path / "task.py")["features"] is lora.features
        copy.write_text(copy.read_text() + "\n# changed\n")
        told = rf"imports {copy}, but .*{module.__file__} as {module.__name__}; rename"
        with pytest.raises(UsageError, match=told):
            run_file(tmp_path / "task.py")
        copy.unlink()


@pytest.mark.parametrize(
    ("task", "file", "text", "is_refused"),
    [
        ("from data import rng", "data.py", "def load(): pass", False),
        ("from data import rng", "data.py", "def rng(): pass", True),
        ("from data import rng", "data.py", "from more import *", True),
        ("from data import rng", "data/__init__.py", "def load(): pass", False),
        ("from data import rng", "data/load.py", "def rng(): pass", False),
        ("from data import rng", "data/rng.py", "", True),
        ("from data import *", "data.py", "def load(): pass", True),
        ("import data", "data.py", "def load(): pass", True),
        ("def f():\n    import data", "data.py", "def load(): pass", True),
        ("from types import SimpleNamespace", "types.py", "Weight = float", False),
        ("import colorsys", "colorsys.py", "", True),
        ("import time", "time.py", "def measure(): pass", False),
    ],
)
def test_an_own_file_that_the_import_cannot_mean_is_no_reason_to_refuse(
    tmp_path: Path, task: str, file: str, text: str, is_refused: bool
) -> None:
    """It is another script's: Python itself, without this program, would not find the name in it.

    Whether another script alone uses an own copy that has the name, nobody can see.
    """
    write(tmp_path, {"task.py": f"{task}\n", file: f"{text}\n", "more.py": "def rng(): pass\n"})
    if is_refused:
        with pytest.raises(UsageError, match=rf"imports {tmp_path}/.*; rename one of them"):
            check_loaded(tmp_path / "task.py")
    else:
        check_loaded(tmp_path / "task.py")
        run_file(tmp_path / "task.py")
        leave_earlier_files()


def test_a_file_in_a_package_of_ones_own_is_told_what_python_takes_as_the_package(
    tmp_path: Path,
) -> None:
    """This program's data.py has no module `loader`, so no file of that name is taken."""
    write(tmp_path, {"task.py": "from data import loader\n", "data/loader.py": ""})
    with pytest.raises(UsageError) as refused:
        run_file(tmp_path / "task.py")
    taken = Path(lora.__file__).with_name("data.py")
    assert f"imports {tmp_path}/data/loader.py, but Python takes {taken} as data;" in str(
        refused.value
    )
    leave_earlier_files()


def test_a_compiled_module_is_in_the_digest_and_is_read_anew(tmp_path: Path) -> None:
    """As Python's own compiler writes it; there is no source beside it."""
    digests = []
    for k in (1, 100):
        write(tmp_path, {"source.txt": f"K = {k}\n", "task.py": "from compiled_98 import K\n"})
        py_compile.compile(str(tmp_path / "source.txt"), str(tmp_path / "compiled_98.pyc"))
        assert run_file(tmp_path / "task.py")["K"] == k
        digests.append(digest_of_imports(tmp_path / "task.py"))
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "endings",
    [".py", ".pyc", ".so", ".abi3.so .so", ".py .pyc", ".so .py", "/__init__.pyc .py .so", "/a.py"],
)
def test_of_several_files_of_a_helper_the_one_that_python_takes_is_known(
    endings: str, tmp_path: Path
) -> None:
    """Python itself says which that is. A folder without __init__ has no file."""
    write(tmp_path, {"task.py": "import helper_85\n"})
    write(tmp_path, {f"helper_85{ending}": "" for ending in endings.split()})
    spec = PathFinder.find_spec("helper_85", [str(tmp_path)])
    assert spec is not None
    taken = {"helper_85": Path(spec.origin)} if spec.origin else {}
    assert find_imports(tmp_path / "task.py").used == taken


def test_a_compiled_library_that_was_changed_needs_a_new_process(tmp_path: Path) -> None:
    """Python would go on with the one that it loaded first."""
    write(tmp_path, {"task.py": "def later():\n    import helper_87\n", "helper_87.so": "one"})
    before = digest_of_imports(tmp_path / "task.py")
    run_file(tmp_path / "task.py")
    run_file(tmp_path / "task.py")
    write(tmp_path, {"helper_87.so": "two"})
    assert digest_of_imports(tmp_path / "task.py") != before
    with pytest.raises(UsageError, match=r"helper_87\.so was changed, .*; start Python anew$"):
        run_file(tmp_path / "task.py")
    leave_earlier_files()


@pytest.mark.usefixtures("elsewhere")
def test_modules_that_a_task_finds_by_a_path_of_its_own_are_not_the_next_tasks() -> None:
    """Each has them in a folder below; one is edited in between. Other modules stay loaded."""
    text = "import sys\nfrom pathlib import Path\n"
    text += "sys.path.insert(0, str(Path(__file__).parent / 'lib'))\nfrom helper_97 import K\n"
    for place, k in (("a", 1), ("b", 100)):
        write(Path(place), {"task.py": text, "lib/helper_97.py": f"K = {k}"})
    leave_earlier_files()  # of another test
    path = [*sys.path]
    assert [run_file(Path(place, "task.py"))["K"] for place in "ab"] == [1, 100]
    write(Path("a"), {"lib/helper_97.py": "K = 1000"})
    assert run_file(Path("a/task.py"))["K"] == 1000
    leave_earlier_files()
    assert sys.path == path and "helper_97" not in sys.modules and "lora" in sys.modules


def test_the_digest_is_of_all_that_is_imported_and_of_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    before = digest_of_imports(tmp_path / "task.py")
    shutil.copytree(tmp_path, tmp_path / "moved")
    assert digest_of_imports(tmp_path / "moved/task.py") == before
    for name in FILES:
        write(tmp_path, {name: FILES[name] + "\n# changed\n"})
        is_known = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") in IMPORTED
        assert (digest_of_imports(tmp_path / "task.py") != before) == is_known, name
        write(tmp_path, {name: FILES[name]})
    nothing = digest_of_imports(tmp_path / "later.py")
    write(tmp_path, {"later.py": "try:\n    import nets\nexcept ImportError:\n    pass\n"})
    assert digest_of_imports(tmp_path / "later.py") != nothing
    shutil.rmtree(tmp_path / "nets")
    assert digest_of_imports(tmp_path / "later.py") == nothing


@pytest.mark.usefixtures("elsewhere")
def test_an_edited_import_is_another_run_and_is_read_anew() -> None:
    """In one process, as in a notebook; the loss tells which helper was taken.

    A run of before, which does not know its imports, goes on.
    """
    steps = "--alternations 1 --lower-steps 1 --upper-steps 1 --p-batch 8 --d-batch 8 --rank 2"
    steps += " --probe-epochs 0 --warmup 0 --quiet"
    text = EXAMPLE.read_text() + "\n\nfrom helper import SCALE\n\n\nclass Scaled(Rotation):\n"
    text += "    def loss(self, *args):\n        return SCALE * super().loss(*args)\n"
    for place, scale in (("a", 1), ("b", 100)):
        write(Path(place), {"task.py": text, "helper.py": f"SCALE = {scale}\n"})

    def line(place: str, out: str) -> str:
        """The command of a run on the task in `place`."""
        return (
            f"align --backbone vit_mini --weights {OMNIGLOT} --dataset omniglot:Greek --pool"
            f" omniglot --pretext {place}/task.py:Scaled {steps} --out {out}"
        )

    def loss(out: str) -> float:
        """The first pretext loss of a run."""
        last = Path(out, "metrics.jsonl").read_text().splitlines()[-1]
        return float(json.loads(last)["loss_P"][0])

    done(line("a", "r1"))
    write(Path("a"), {"helper.py": "SCALE = 10\n"})
    assert "a file that --pretext imports was changed" in refusal(line("a", "r1"))
    done(line("a", "r2"))
    assert loss("r2") == pytest.approx(10 * loss("r1"), rel=1e-5)
    done(line("b", "r3"))
    assert loss("r3") == pytest.approx(100 * loss("r1"), rel=1e-5)
    line_of_finetune = (
        f"finetune --from . --lr 1e-2 --epochs 1 --warmup-epochs 0 --weights {OMNIGLOT}"
    )
    shutil.rmtree("r3", ignore_errors=True)
    done(line("a", "r4").replace("--out", "--seed 1 --out"))
    Path("arm").mkdir()
    shutil.move("r1", "arm/r1")
    shutil.move("r4", "arm/r4")
    said = refusal(line_of_finetune.replace("--from .", "--from arm") + " --seeds 2 --out f")
    assert "imports_sha256" in said
    # Another class of the same file is another arm, also if its name differs in case alone.
    text = text.replace("class Scaled(", "class SCALED(Rotation):\n    pass\n\n\nclass Scaled(")
    write(Path("c"), {"task.py": text, "helper.py": "SCALE = 1\n"})
    for k, name in enumerate(("Scaled", "SCALED")):
        done(line("c", f"cases/{k}").replace(":Scaled", f":{name}") + f" --seed {k}")
    said = refusal(line_of_finetune.replace("--from .", "--from cases") + " --seeds 2 --out f")
    assert "the seed from" in said and "pretext_class" in said
    config = json.loads(Path("r2/config.json").read_text())
    del config["imports_sha256"]
    Path("r2/config.json").write_text(json.dumps(config))
    done(line("a", "r2"))


@pytest.mark.usefixtures("elsewhere")
def test_an_edited_module_of_a_folder_without_init_is_read_anew() -> None:
    """`from folder import module` would take the one that the folder was loaded with."""
    write(
        Path("a"), {"task.py": "from bare_folder import scale\n", "bare_folder/scale.py": "K = 1"}
    )
    task = Path("a/task.py")
    assert run_file(task)["scale"].K == 1
    write(Path("a"), {"bare_folder/scale.py": "K = 100"})
    assert run_file(task)["scale"].K == 100


@pytest.mark.usefixtures("elsewhere")
def test_a_task_does_not_find_the_files_of_the_task_before() -> None:
    """A task that goes on without a file must not take that of another task's folder."""
    text = "try:\n    from helper import K\nexcept ImportError:\n    K = 1\n"
    write(Path("a"), {"task.py": text, "helper.py": "K = 100"})
    write(Path("b"), {"task.py": text})
    leave_earlier_files()  # of another test
    path = [*sys.path]
    assert [run_file(Path(place, "task.py"))["K"] for place in "ab"] == [100, 1]
    leave_earlier_files()
    assert sys.path == path


def test_a_module_that_a_notebook_imports_after_a_run_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import json\n")
    (tmp_path / "of_notebook.py").write_text("")
    run_file(tmp_path / "task.py")
    own = importlib.import_module("of_notebook")  # the task's folder is where Python looks, too
    run_file(tmp_path / "task.py")
    assert sys.modules.pop("of_notebook") is own
