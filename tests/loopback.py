"""A server on loopback that cuts, lies and is missing."""

import http.server
import os
from typing import Any

CONTENT = os.urandom(3_000_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT at every path but /missing; `cut` ends an answer early, `ranges` honours Range."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.tag = CONTENT, '"one"'
        self.cuts: list[int] = []  # how many bytes each of the next answers ends after
        self.ranges, self.length, self.asked = True, True, list[str | None]()
        self.faults: list[int] = []  # HTTP statuses that come first

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, start = self.server, 0
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if self.path == "/missing" or server.faults:
            return self.send_error(server.faults.pop(0) if server.faults else 404)
        cut = server.cuts.pop(0) if server.cuts else None  # now: once headers are out, the test may go on
        if asked and server.ranges and self.headers.get("If-Range") == server.tag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        total = len(server.content)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if server.length:
            self.send_header("Content-Length", str(total - start))
        self.send_header("ETag", server.tag)
        self.end_headers()
        body = server.content[start:]
        self.wfile.write(body[:cut])
        return None

    def log_message(self, *args: Any) -> None:
        """Quiet."""
