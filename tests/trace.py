"""Functions that one alternation of `bisslight align` calls: `python tests/trace.py WEIGHTS OUT`.

Counts named functions (no lambdas, comprehensions, class or module bodies) from the command line
to the adapter on disk, without linear probing.
"""

import inspect
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
LINE = (
    "align --backbone vit_mini --dataset quilts --alternations 1 --lower-steps 2 --upper-steps 2 "
    "--p-batch 8 --d-batch 8 --probe-epochs 0 --quiet --weights {weights} --out {out}"
)


def traced(weights: Path, out: Path) -> set[tuple[str, str]]:
    """(file, qualified name) of every function of the project that is called meanwhile."""
    import cli
    import data

    data.quilts.cache_clear()  # of another run in this process
    seen: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<") and code.co_flags & inspect.CO_OPTIMIZED
        path = Path(code.co_filename)  # a class body is no function: it is not optimised
        if event == "call" and named and path.parent in (ROOT, ROOT / "extras"):
            seen.add((path.name, code.co_qualname))

    sys.setprofile(profile)
    try:
        cli.run(LINE.format(weights=weights, out=out).split())
    finally:
        sys.setprofile(None)
    return seen


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # before this folder, where data/ is another thing
    found = traced(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(f"{file:16} {name}" for file, name in sorted(found)))
    print(f"{len(found)} functions in {len({file for file, _ in found})} files")
