"""Record a command on a terminal of this width, as asciinema does: `asciinema play FILE` shows it.

    python docs/record.py FILE COLUMNS TEXT COMMAND ...

Ctrl-C is typed once TEXT is shown, "" for never. A .cast file has a header, then lines
[seconds, "o", what is shown].
"""

import json
import os
import pty
import select
import struct
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path


def main(file: str, columns: str, text: str, *command: str) -> int:
    """Run the command and write what it shows; the exit code."""
    size = {"width": int(columns), "height": 24}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["height"], size["width"], 0, 0))
    header = {"version": 2, **size, "idle_time_limit": 1, "env": {"TERM": "xterm-256color"}}
    lines = [json.dumps(header), json.dumps([0.0, "o", f"$ {' '.join(command)}\r\n"])]
    started = time.monotonic()
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.05)
        now = time.monotonic() - started
        try:
            shown = os.read(terminal, 65536) if ready else b""
        except OSError:  # the command has ended
            break
        if shown:
            lines.append(json.dumps([round(now, 3), "o", shown.decode(errors="replace")]))
        if text and text.encode() in shown:
            os.write(terminal, b"\x03")
            text = ""
    Path(file).write_text("\n".join(lines) + "\n")
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
