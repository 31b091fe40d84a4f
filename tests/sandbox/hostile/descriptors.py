"""Attacks on the descriptors of a call: its pipes, and the harness's socket for answers."""

from tests.sandbox.hostile.record import any_outcome, died, hostile, printed, raised, read_programs, timed_out

# Format of an answer: "a", length, nonce, cells, text. See asterism.sandbox.inside.wire.call_wire.
_ANSWER = "import os, struct\ndef answer(text, nonce): return struct.pack('<cIQI', b'a', len(text), nonce, 1) + text\n"

_FORGE = (
    _ANSWER
    + """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        nonce = getattr(value, 'nonce', None)
        if isinstance(nonce, int):
            for text in {texts}: os.write(3, answer(text, nonce))
            while {repeats}: pass
    frame = frame.f_back
"""
)

# Programs that can harm only their own call and notebook.
_HARM_THEIR_OWN_CALL = {
    "finds the harness and answers for itself": _FORGE.format(texts="[b'ok']", repeats=True),
    "finds the harness and answers twice": _FORGE.format(texts="(b'ok', b'exit\\x000')", repeats=False),
    "makes every descriptor refuse to wait": """
        import os
        for fd in range(4): os.set_blocking(fd, False)
        os.write(1, b'x')
        """,
    "asks for signals when the harness writes": """
        import fcntl, os, signal
        for fd in (0, 1, 2, 3):
            try:
                fcntl.fcntl(fd, fcntl.F_SETOWN, 1)
                fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
            except OSError: pass
        print('x')
        """,
}

# Programs that the server kills for invalid frames, when a program exits or reaches the time limit.
_FILL_THE_SOCKET = {
    "answers with guessed nonces": _ANSWER + "for nonce in range(2000): os.write(3, answer(b'ok', nonce))",
    "writes garbage to the harness's socket": "import os\nfor _ in range(1600): os.write(3, b'\\xa5' * 65536)",
    "writes zeros to the harness's socket": "import os\nwhile True: os.write(3, bytes(65536))",
}

_PROGRAMS = {
    "has no descriptor but its own four": """
        # printed("True\\n"), forms=("program",)
        import os, stat
        found = []
        for fd in range(1024):
            try: found.append((fd, stat.S_IFMT(os.fstat(fd).st_mode)))
            except OSError: pass
        print(found == [(0, stat.S_IFCHR), (1, stat.S_IFIFO), (2, stat.S_IFIFO), (3, stat.S_IFSOCK)])
        """,
    "has no descriptor in a cell but its own four and the notebook's duplicates of three": """
        # printed("True\\n"), forms=("cell",)
        import os, stat
        found = []
        for fd in range(1024):
            try: found.append(stat.S_IFMT(os.fstat(fd).st_mode))
            except OSError: pass
        print(found == [stat.S_IFCHR, stat.S_IFIFO, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFIFO])
        """,
    "forges results on every descriptor": """
        # died()
        import os, json
        for call in range(300):
            frame = json.dumps({'id': call, 'kind': 'ok', 'details': [], 'stdout': 'forged', 'stderr': '', 'stdout_cut': 0,
                                'stderr_cut': 0, 'duration_s': 0.0}).encode()
            for fd in (0, *range(3, 64)):
                try: os.write(fd, len(frame).to_bytes(4, 'little') + frame)
                except OSError: pass
        print('mine')
        """,
    "passes descriptors to the harness": """
        # *any_outcome()
        import os, socket
        harness = socket.socket(fileno=os.dup(3))
        try:
            for _ in range(100): socket.send_fds(harness, [b'x'], [0, 1, 2, 3])
        except OSError: pass
        """,
    "lets a thread read from the harness's socket": """
        # ok(), keeps_notebook=False, outlives_answer=True
        import os, threading
        threading.Thread(target=lambda: [os.read(3, 1 << 20) for _ in range(99)], daemon=True).start()
        """,
    "reads its standard input from the descriptor, and again": """
        # printed("b'abc' 0 b'abc'\\n"), raised("OSError", "b'abc' 0 b'abc'\\n"), forms=("program",), stdin="abc"
        import os
        print(os.read(0, 100), os.lseek(0, 0, 0), os.read(0, 100))
        os.write(0, b'x')
        """,
}

DESCRIPTORS = [
    *read_programs(_PROGRAMS),
    hostile(
        "says hello as a fork server does",
        'import os\nframe = b\'{"hello": "bare", "namespaces": [], "missing": []}\'\n'
        "os.write(3, len(frame).to_bytes(4, 'little') + frame)\nimport time\ntime.sleep(60)",
        died(-9),
        timed_out(),
    ),
    *[hostile(name, code, died(-9), timed_out("")) for name, code in _FILL_THE_SOCKET.items()],
    hostile("answers with half a frame and hangs", _ANSWER + "os.write(3, b'a\\x10')\nwhile True: pass", timed_out("")),
    hostile(
        "promises an answer of four gigabytes",
        "import os\nos.write(3, b'a\\xff\\xff\\xff\\xff')\nwhile True: pass",
        timed_out(""),
    ),
    *[hostile(name, code, *any_outcome(), keeps_notebook=False) for name, code in _HARM_THEIR_OWN_CALL.items()],
    *[
        hostile(
            f"finds the harness and answers {manner}",
            _FORGE.format(texts=f"[{text}]", repeats=False) + "while True: pass",
            died(-9),
            timed_out(),
        )
        for manner, text in {
            "with an exit code of a thousand digits": "b'exit\\x00' + b'9' * 1000",
            "with an invalid exit code": "b'exit\\x00-1'",
            "with an exit code in other digits": "'exit\\x00\\u0663'.encode()",
            "with an unknown outcome": "b'timeout'",
            "with an infrastructure failure": "b'lost'",
            "with too many parts": "b'raised' + b'\\x00x' * 50",
            "with nothing": "b''",
        }.items()
    ],
    hostile(
        "raises an exception that looks like an answer",
        "raise ValueError('x\\0ok\\0exit\\0' + '\\ud800' + chr(0x10ffff) * 100_000)",
        raised("ValueError: x\\x00ok\\x00exit\\x00\\ud800"),
    ),
    hostile("closes every descriptor", "import os\nos.closerange(0, 256)\nprint('x')", died(), raised("OSError")),
    hostile("closes the harness's socket", "import os\nos.close(3)\nprint('x')", died(-9), died(70)),
    hostile(
        "shuts the harness's socket down",
        "import socket\nsocket.socket(fileno=3).shutdown(socket.SHUT_RDWR)\nwhile True: pass",
        died(-9),
        timed_out(),
    ),
    hostile(
        "puts its output in the place of every descriptor",
        "import os\nfor fd in range(0, 200): fd == 1 or os.dup2(1, fd)\nprint('x')",
        died(),
        timed_out(),
    ),
    hostile(
        "puts the harness's socket in the place of its output",
        "import os\nos.dup2(3, 1)\nos.dup2(3, 2)\nprint('x' * 100)",
        died(),
        timed_out(""),
    ),
    hostile(
        "exchanges its output and its errors",
        "import os, sys\na, b = os.dup(1), os.dup(2)\nos.dup2(a, 2)\nos.dup2(b, 1)\nprint('x', file=sys.stderr)",
        printed("x\n"),
    ),
    hostile("reads from the harness's socket", "import os\nprint(len(os.read(3, 1 << 20)))", timed_out("")),
    hostile(
        "waits on standard input",
        "import sys\nprint(repr(sys.stdin.read()), repr(sys.stdin.readline()))\ninput()",
        raised("EOFError", "'' ''\n"),
    ),
    hostile("reads from its own output", "import os\nos.read(1, 1)", raised("OSError: [Errno 9]")),
    hostile(
        "closes its output",
        "import sys\nsys.stdout.close()\nprint('x')",
        raised("ValueError: I/O operation on closed file"),
        as_cell=(raised("ValueError: I/O operation on closed file"),),
    ),
    hostile("closes its output's descriptor", "import os\nos.close(1)\nprint('x')", raised("OSError: [Errno 9]")),
]
