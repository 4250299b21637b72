"""Record the golden runs anew: `OMP_NUM_THREADS=1 PYTHONPATH=. python tests/record_golden.py [NAME ...]`.

Only from a program whose numbers are known to be right: what it gives becomes what every later program must give.
"""

import sys
import tempfile
from pathlib import Path

from golden import RUNS, make_data, read, record, run


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder) / "data", Path(folder) / "runs"
        make_data(data)
        for name in names or RUNS:
            record(name, read(name, run(name, data, runs), data))
            print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
