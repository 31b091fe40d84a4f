"""Greedy programs and cells by name, which take as many resources from other calls as possible."""

from tests.sandbox.kernel_counters import COUNTERS

# A test replaces {name} and finds the processes of a program by this name.
PREAMBLE = """
import ctypes, hashlib, mmap, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None)
libc.prctl(15, b"{name}", 0, 0, 0)

def fork(count, body):
    for _ in range(count):
        try:
            pid = os.fork()
        except OSError:
            return
        if pid == 0:
            try:
                body()
            finally:
                os._exit(0)

def spin():
    while True: pass

def take(mib, delay=0.0):
    time.sleep(delay)
    kept = bytearray(b"x") * (mib << 20)
    time.sleep(60)

def new_session(body):
    def run():
        os.setsid()
        body()
    return run

def new_group(body):
    def run():
        os.setpgid(0, 0)
        body()
    return run

def daemon(body):
    def run():
        os.setsid()
        if os.fork() == 0:
            body()
    return run

def start_threads(count, body):
    for _ in range(count):
        threading.Thread(target=body, daemon=True).start()

def forge_answer():
    frame = sys._getframe()
    while frame:
        call = frame.f_locals.get("call")
        if hasattr(call, "nonce"):
            os.write(3, struct.pack("<cIQI", b"a", 2, call.nonce, call.cells + 1) + b"ok")
            return
        frame = frame.f_back
"""

_MAP_OFTEN = """
size = 100 << 20
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, size, 4096): area[page] = 1
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
for page in range(0, size, 8192): libc.mprotect(ctypes.c_void_p(start + page), 4096, 1)
"""

_CONTINUE_BY_TIMER = """
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("pad", ctypes.c_char * 48)]
timer = ctypes.c_void_p()
libc.timer_create(0, ctypes.byref(Event(0, signal.SIGCONT, 0)), ctypes.byref(timer))
libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 1_000_000, 0, 1_000_000), None)
start_threads(14, spin)
"""

_FORGE_START = """
def find_harness():
    frame = sys._getframe()
    while frame:
        if "write_started" in frame.f_globals: return frame.f_globals
        frame = frame.f_back
    return {}
find_harness()["write_started"] = lambda *_: None
def forge_start(worker, checkpoint, at=0.0):
    os.write(3, struct.pack("<cddII", b"s", at or time.monotonic(), 0.0, worker, checkpoint))
"""
_LOCK = 'library = os.open(os.__file__, os.O_RDONLY)\nlock = struct.pack("hhqqi4x", 1, 0, 0, 1, 0)\nimport fcntl\n'
_SEND = """
import array
def send(number):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        while True: ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [number or theirs.fileno()] * 60))])
    except OSError: time.sleep(60)
"""

# One test runs these programs together; a nightly test runs each program alone.
REPRESENTATIVES = {
    "returns while children in their own sessions spin": "fork(14, new_session(spin))",
    "returns before its children grow": "fork(14, lambda: take(100, 0.2))",
    "has many mappings and idle children": _MAP_OFTEN + "fork(14, lambda: time.sleep(60))\ntime.sleep(60)",
    "answers early and computes": "forge_answer()\nfork(10, spin)\nspin()",
}
GREEDY = {
    **REPRESENTATIVES,
    "spins": "spin()",
    "spins with its children": "fork(14, spin)\nspin()",
    "returns while its children spin": "fork(14, spin)",
    "spins with children in their own groups": "fork(14, new_group(spin))\nspin()",
    "spins with children in their own sessions": "fork(14, new_session(spin))\nspin()",
    "returns while daemons spin": "fork(7, daemon(spin))",
    "starves its first thread": "os.nice(19)\nfork(14, spin)\nspin()",
    "spins in threads": "start_threads(14, spin)\nspin()",
    "returns while threads spin": "start_threads(14, spin)",
    "returns while a thread polls": "start_threads(4, lambda: [time.sleep(0.0001) for _ in iter(int, 1)])",
    "hashes in threads": "start_threads(14, lambda: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9))\nspin()",
    "returns while threads hash": "start_threads(14, lambda: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9))",
    "computes in one instruction": "pow(3, 10**9)",
    "spins in threads without a first one": "start_threads(4, spin)\nlibc.pthread_exit(None)",
    "grows": "kept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 20))",
    "grows in its children": "fork(14, lambda: take(100))\ntime.sleep(60)",
    "grows in its children's own sessions": "fork(14, new_session(lambda: take(100)))\ntime.sleep(60)",
    "grows in daemons": "fork(7, daemon(lambda: take(100, 0.1)))\ntime.sleep(60)",
    "allocates and frees": "while True: bytearray(b'x') * (100 << 20)",
    "shares its memory with children": "kept = bytearray(b'x') * (96 << 20)\nfork(14, spin)\nspin()",
    "writes to memory that it shares": """
kept = bytearray(b'x') * (96 << 20)
def write():
    for page in range(0, len(kept), 4096): kept[page] = 1
    time.sleep(60)
fork(14, write)
time.sleep(60)
""",
    "forks a chain of processes": "def chain():\n    while os.fork() == 0: pass\nfork(1, chain)\ntime.sleep(60)",
    "returns while a chain of processes forks": "def chain():\n    while os.fork() == 0: pass\nfork(8, chain)",
    "forks without end": """
def bomb():
    while True:
        try: os.fork()
        except OSError: pass
fork(1, bomb)
""",
    "starts programs without end": "while True: subprocess.run(['true'])",
    "returns while a thread starts programs": "start_threads(4, lambda: [subprocess.run(['true']) for _ in iter(int, 1)])",
    "continues its stopped children": """
def wake():
    while True: os.kill(-1, signal.SIGCONT)
if os.getpid() != 1 and hasattr(os, 'fork'):
    fork(2, lambda: [os.killpg(os.getpgrp(), signal.SIGCONT) for _ in iter(int, 1)])
fork(10, spin)
""",
    "continues itself by a timer": _CONTINUE_BY_TIMER,
    "fills pipes": """
def fill():
    ends = [os.pipe() for _ in range(100)]
    for _, end in ends:
        os.set_blocking(end, False)
        try:
            while True: os.write(end, bytes(65536))
        except BlockingIOError: pass
    time.sleep(60)
fork(14, fill)
""",
    "holds descriptors": "fork(14, lambda: ([os.open('x', os.O_CREAT | os.O_RDWR) for _ in range(250)], time.sleep(60)))",
    "fills its folder": "fork(4, lambda: [open('x', 'wb').write(bytes(4 << 20)) for _ in iter(int, 1)])",
    "prints without end": "while True: os.write(1, bytes(65536))",
    "returns while children print": "fork(14, lambda: [os.write(1, bytes(65536)) for _ in iter(int, 1)])",
    "calls the kernel without end": "fork(14, lambda: [os.getppid() for _ in iter(int, 1)])\nspin()",
    "sleeps": "time.sleep(60)",
    "names a spinning child as its checkpoint": _FORGE_START
    + """
child = os.fork()
if not child:
    start_threads(11, lambda: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9))
    spin()
forge_start(os.getpid(), child)
time.sleep(60)
""",
    "names no process as its worker": _FORGE_START + "forge_start(999_999, 0)\nfork(14, spin)\nspin()",
    "names a stopped child as its worker": _FORGE_START
    + """
child = os.fork()
if not child: os.kill(os.getpid(), signal.SIGSTOP)
forge_start(child, 0)
spin()
""",
    "reports a late start": _FORGE_START + "while time.process_time() < 0.8: pass\nforge_start(os.getpid(), 0)\nspin()",
    "reports no start": _FORGE_START + "fork(14, spin)\nspin()",
    "holds empty pipes": COUNTERS["pipe pages"].greedy + "time.sleep(60)",
    "holds epoll watches": COUNTERS["epoll watches"].greedy + "time.sleep(60)",
    "holds descriptors in flight": _SEND + "fork(14, lambda: send(0))\ntime.sleep(60)",
    "sends standard output to itself": _SEND + "fork(14, lambda: send(1))\ntime.sleep(60)",
    "takes timers without end": """
def take_timers():
    while True: libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))
fork(4, take_timers)
time.sleep(60)
""",
    "queues signals without end": """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
fork(4, lambda: [libc.sigqueue(os.getppid(), signal.SIGRTMIN, None) for _ in iter(int, 1)])
time.sleep(60)
""",
    "holds timers and events as descriptors": "fork(14, lambda: ([os.eventfd(0) for _ in range(250)], time.sleep(60)))",
    "locks a library's file": _LOCK
    + "[fcntl.lockf(library, fcntl.LOCK_SH, 1, 2 * n) for n in range(900)]\ntime.sleep(60)",
    "asks for locks of its own file without end": _LOCK
    + """
own = os.open("own", os.O_RDWR | os.O_CREAT)
def ask():
    while True: fcntl.fcntl(own, fcntl.F_GETLK, lock)
fork(14, ask)
time.sleep(60)
""",
    "asks for locks of a library without end": _LOCK
    + """
def ask():
    while True:
        try: fcntl.fcntl(library, fcntl.F_GETLK, lock)
        except OSError: pass
fork(14, ask)
time.sleep(60)
""",
    "asks for core scheduling": "fork(14, lambda: [libc.prctl(62, 1, 0, 1, 0) for _ in iter(int, 1)])\nspin()",
    "closes its socket and spins": "os.close(3)\nspin()",
}
