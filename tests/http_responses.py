"""Serves fixed HTTP responses on loopback."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Response(NamedTuple):
    status: int
    content: bytes = b""
    headers: Mapping[str, str] = {}


@contextmanager
def serving(respond: Callable[[str], Response | None]) -> Iterator[str]:
    """Answer GET and HEAD requests with `respond(path)`, and yield the URL. None closes the connection unanswered."""

    class Responder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (response := respond(self.path)) is not None:
                self.send_response(response.status)
                for name, value in {**response.headers, "Content-Length": str(len(response.content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(response.content if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Responder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
