"""A fake interpreter with SGLang. It prints its version, or runs a server with one worker process.

The server responds to the requests of a start, and ignores SIGTERM like a server that drains its
requests. It has few imports, so that it starts quickly.
"""

import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[4]


PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.engine.sglang.server.fake_interpreter import main
main(sys.argv, __file__)
"""


def write_script(folder: Path, text: str) -> str:
    script = folder / "python"
    script.write_text(text)
    script.chmod(0o755)
    return str(script)


def write_interpreter(folder: Path, server_info: bytes) -> str:
    """Write the interpreter. `server_info`: the response to /server_info."""
    (folder / "server_info").write_bytes(server_info)
    return write_script(folder, PROGRAM)


class Responder(BaseHTTPRequestHandler):
    server_info = b""

    def do_GET(self) -> None:
        answer = self.server_info if self.path == "/server_info" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def main(argv: list[str], script: str) -> None:
    if argv[1] == "-c":
        sys.stdout.write("0.5.23\n")
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["bash", "-c", "exec -a sglang::scheduler sleep 1000"])
    Responder.server_info = Path(script).with_name("server_info").read_bytes()
    port = int(argv[argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Responder).serve_forever()
