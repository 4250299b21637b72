"""A server on loopback: it serves `files` by name and lacks everything else."""

import http.server
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """`cuts`: how many bytes each of the next answers ends after; None: not at all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.files.get(self.path.rpartition("/")[2])
        if content is None:
            return self.send_error(404)
        cut = self.server.cuts.pop(0) if self.server.cuts and self.command == "GET" else None
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content[:cut])
        return None

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Quiet."""
