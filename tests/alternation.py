"""Which functions of the project one alternation of `bisslight align` passes through.

    python tests/alternation.py WEIGHTS OUT

Counts named functions (no lambdas, comprehensions, class or module bodies) from the command line
to the adapter on disk, without linear probing.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
LINE = (
    "align --backbone vit_mini --dataset quilts --alternations 1 --lower-steps 2 --upper-steps 2 "
    "--p-batch 8 --d-batch 8 --probe-epochs 0 --quiet --weights {weights} --out {out}"
)


def trace(run: Callable[[], object]) -> set[tuple[str, str]]:
    """(file, qualified name) of every function of the project that is called meanwhile."""
    seen: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<") and code.co_flags & inspect.CO_OPTIMIZED
        path = Path(code.co_filename)  # a class body is no function: it is not optimised
        if event == "call" and named and path.parent in (ROOT, ROOT / "extras"):
            seen.add((path.name, code.co_qualname))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def traced(weights: Path, out: Path) -> set[tuple[str, str]]:
    """The functions of one alternation."""
    import cli

    return trace(lambda: cli.run(LINE.format(weights=weights, out=out).split()))


if __name__ == "__main__":
    found = traced(Path(sys.argv[1]), Path(sys.argv[2]))
    for file in sorted({file for file, _ in found}):
        names = sorted(name for f, name in found if f == file)
        print(f"{file:16} {len(names):3}  {' '.join(names)}")
    print(f"{len(found)} functions in {len({file for file, _ in found})} files")
