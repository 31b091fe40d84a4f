"""For each resource that the kernel counts by user: a program that takes all of it, and an innocent program."""

from typing import NamedTuple


class Counter(NamedTuple):
    greedy: str  # code that prints how many units it took, and holds them
    innocent: str  # code that prints "right"


_FILL_IN_CHILDREN = """
import os, signal
read, write = os.pipe()
kept, children = [], 0
for _ in range(14):
    try:
        pid = os.fork()
    except OSError:
        break
    if not pid:
        os.write(write, b"%d;" % fill())
        signal.pause()
    children += 1
got = b""
while got.count(b";") < children:
    got += os.read(read, 4096)
print(sum(map(int, got.split(b";")[:-1])))
"""
_TIMERS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def make_timers(number):
    made = [libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) for _ in range(number)]
    return made.count(0)
"""

COUNTERS = {
    "processes": Counter(
        "import os, signal\nchildren = 0\ntry:\n    while os.fork() or signal.pause(): children += 1\n"
        "except OSError: print(children)",
        "import os\npids = [os.fork() or os._exit(0) for _ in range(4)]\n"
        "for pid in pids: os.waitpid(pid, 0)\nprint('right')",
    ),
    "pending signals": Counter(
        _TIMERS + "print(make_timers(1000))",
        _TIMERS + "print('right' if make_timers(50) == 50 else ctypes.get_errno())",
    ),
    "epoll watches": Counter(
        """
import select
def fill():
    events = []
    try:
        for _ in range(125): kept.append(select.epoll())
        while True: events.append(os.eventfd(0))
    except OSError: pass
    num_watches = 0
    for poll in kept:
        for event in events:  # not the other polls: the kernel limits what a watched poll may watch
            try: poll.register(event, select.EPOLLIN)
            except OSError: continue
            num_watches += 1
    return num_watches
"""
        + _FILL_IN_CHILDREN,
        "import os, select\npoll = select.epoll()\nfor _ in range(20): poll.register(os.eventfd(0))\nprint('right')",
    ),
    "pipe pages": Counter(
        """
def fill():
    try:
        while True: kept.append(os.pipe())
    except OSError: return len(kept)
"""
        + _FILL_IN_CHILDREN,
        "import os\nread, write = os.pipe()\nos.write(write, bytes(20_000))\nprint('right' * (len(os.read(read, 20_000)) == 20_000))",
    ),
    "descriptors in flight": Counter(
        """
import array, socket
ours, theirs = socket.socketpair()
number = 0
try:
    while True:
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 60))])
        number += 60
except OSError:
    print(number)
""",
        "import array, socket\nours, theirs = socket.socketpair()\n"
        "ours.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])\nprint('right')",
    ),
}
