"""Attacks by processes and threads: fork bombs, daemons, other programs, and privilege escalation."""

from tests.sandbox.hostile.record import died, hostile, ok, out_of_memory, printed, raised, read_programs, timed_out

_MANY_IN_MEMORY = """
import os, time
TOTAL_MIB, EACH_MIB = 0, 60
ready_read, ready_write = os.pipe()
for _ in range(14):
    try: child = os.fork()
    except OSError: break
    if not child:
        try: block = b'x' * (EACH_MIB << 20)
        except MemoryError: os._exit(0)
        os.write(ready_write, b'.')
        time.sleep(60)
os.close(ready_write)
os.set_blocking(ready_read, False)
end = time.monotonic() + 1
while time.monotonic() < end:
    try: TOTAL_MIB += EACH_MIB * len(os.read(ready_read, 100))
    except BlockingIOError: time.sleep(0.01)
print('held more than twice the limit after a second' if TOTAL_MIB > 256 else 'within')
"""

# Programs that end only at the time limit.
_NEVER_END = {
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "becomes a shell that stays": """
        import os
        os.execv('/bin/sh', ['sh', '-c', 'trap "" 1 2 3 15; while :; do :; done'])
        """,
    "waits for locks that it holds itself": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "lets a thread keep the lock of its output": """
        import os, sys, threading, time
        read, write = os.pipe()
        os.dup2(write, 1)
        thread = threading.Thread(target=print, args=('x' * 1_000_000,), daemon=True)
        thread.start()
        while thread.is_alive(): thread.join(0.05); print('x')
        """,
}

_PROGRAMS = {
    "forks until it may not": """
        # died(0, "True\\n")
        import os, time
        started = 0
        try:
            while started < 600:
                if not os.fork(): time.sleep(60)
                started += 1
        except OSError: pass
        print(started < 600)
        os._exit(0)
        """,
    "starts threads without end": """
        # raised("RuntimeError: can't start new thread"), timed_out(""), out_of_memory()
        import threading, time
        while True:
            threading.Thread(target=time.sleep, args=(60,)).start()
        """,
    "starts threads with huge stacks": """
        # raised("RuntimeError: can't start new thread")
        import threading, time
        threading.stack_size(1 << 30)
        threading.Thread(target=time.sleep, args=(60,)).start()
        """,
    "leaves a daemon that holds its output": """
        # printed("done\\n")
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(600)
            os._exit(0)
        print('done')
        """,
    "leaves a daemon that keeps writing": """
        # ok(), keeps_notebook=False  # the daemon writes to the notebook's output
        import os, signal
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            while True: os.write(1, b'daemon ' * 1000)
        """,
    "leaves a daemon that lets go of its output": """
        # ok()
        import ctypes, os, time
        if os.fork() == 0:
            os.setsid()
            ctypes.CDLL(None).prctl(1, 0)  # survives its parent
            if os.fork(): os._exit(0)
            os.closerange(0, 256)
            time.sleep(600)
        """,
    "ends while daemon threads run": """
        # ok(), keeps_notebook=False  # the thread writes to the notebook's output
        import threading
        def spin():
            while True: print('thread')
        threading.Thread(target=spin, daemon=True).start()
        """,
    "ends while non-daemon threads run": """
        # timed_out(""), as_cell=(ok(),)
        import threading, time
        threading.Thread(target=time.sleep, args=(60,)).start()
        """,
    "becomes another Python": """
        # died(0, "python\\n"), died(-9)
        import os, sys
        code = "import os; print('python'); os.write(3, b'x' * 64)"
        os.execv(sys.executable, [sys.executable, '-S', '-c', code])
        """,
    "starts shells that fork without end": """
        # timed_out()
        import subprocess
        while True:  # a shell ends when it may not fork
            try: subprocess.run(['/bin/sh', '-c', 'f() { f | f & }; f; while :; do :; done'])
            except OSError: pass
        """,
    "leaves a shell that forks without end": """
        # ok(), keeps_notebook=False  # the shell's processes write to the notebook's output
        import subprocess
        subprocess.Popen(['/bin/sh', '-c', 'f() { f | f & }; f; while :; do :; done'])
        """,
    "preloads a library into a program": """
        # printed("ran\\n")
        import os, subprocess
        open('evil.so', 'wb').write(b'\\x7fELF garbage')
        done = subprocess.run(['/bin/sh', '-c', 'echo ran'], env={'LD_PRELOAD': os.path.abspath('evil.so')},
                              capture_output=True, text=True)
        print(done.stdout, end='')
        """,
    "shares its memory with a child that never ends": """
        # timed_out(), died(), keeps_notebook=False
        import ctypes
        ctypes.CDLL(None).vfork()
        while True: pass
        """,
    "becomes root": """
        # printed("[] True True False\\n")
        import ctypes, os
        libc, became = ctypes.CDLL(None), []
        for change in (
            lambda: os.setuid(0), lambda: os.seteuid(0), lambda: os.setreuid(0, 0), lambda: os.setresuid(0, 0, 0),
            lambda: os.setgid(0), lambda: os.setegid(0), lambda: os.setresgid(0, 0, 0), lambda: os.setgroups([0]),
        ):
            try: change(); became.append('changed')
            except OSError: pass
        libc.setfsuid.restype = libc.setfsgid.restype = ctypes.c_uint  # ids are unsigned, also above 2**31
        libc.setfsuid(0)
        libc.setfsgid(0)
        print(became, libc.setfsuid(-1) == os.getuid(), libc.setfsgid(-1) == os.getgid(), 0 in os.getresuid())
        """,
    "takes capabilities": """
        # printed("-1 0 0\\n1 -1 -1\\n")
        import ctypes
        libc = ctypes.CDLL(None)
        capset, capget = (126, 125) if __import__('os').uname().machine == 'x86_64' else (91, 90)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        everything, held = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6), (ctypes.c_uint32 * 6)()
        print(libc.syscall(capset, header, everything), libc.syscall(capget, header, held), sum(held[0:2]) + sum(held[3:5]))
        print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(47, 2, 21, 0, 0), libc.prctl(38, 0, 0, 0, 0))  # no_new_privs, ambient
        """,
    "runs programs that belong to root": """
        # printed("False\\n"), raised("PermissionError"), timed_out("False\\n")
        import os, shutil, subprocess
        shutil.copy('/bin/sh', 'mine')
        os.chmod('mine', 0o6755)
        print(subprocess.run(['./mine', '-p', '-c', 'echo $(id -u)'], capture_output=True, text=True).stdout.strip() == '0')
        for name in ('su', 'mount', 'passwd', 'newgrp', 'sudo'):
            path = f'/usr/bin/{name}'
            if os.path.exists(path):
                subprocess.run([path], stdin=subprocess.DEVNULL, capture_output=True)
        """,
    "is locked out of imports by its own thread": """
        # *any_outcome(), keeps_notebook=False
        import _imp, threading
        taken = threading.Event()
        def hold():
            _imp.acquire_lock()
            taken.set()
            threading.Event().wait()
        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        import colorsys
        """,
}

PROCESSES = [
    *read_programs(_PROGRAMS),
    *[hostile(name, code, timed_out("")) for name, code in _NEVER_END.items()],
    hostile(
        "holds memory through many processes together",
        _MANY_IN_MEMORY,
        printed("within\n"),
        out_of_memory(),
        died(),
        raised(),
        keeps_notebook=False,  # the program's children still exceed the limit in the next cell
    ),
    hostile("leaves children that are dead", "import os\nfor _ in range(10):\n    if not os.fork(): os._exit(0)", ok()),
    hostile(
        "becomes a shell", "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo shell; exit 7'])", died(7, "shell\n")
    ),
]
