"""Signals, timers, limits and priorities of the program itself and of its neighbours."""

from tests.sandbox.hostile.record import NEIGHBOURS, hostile, printed, read_programs, timed_out

# Programs that end only at the time limit.
_NEVER_END = {
    "switches its alarm off and sleeps": "import signal, time\nsignal.alarm(0)\ntime.sleep(60)",
    "ignores all signals and spins": """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """,
    "blocks all signals and spins": """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True: pass
        """,
    "swallows every signal and exception": """
        import signal
        def swallow(*_): raise RuntimeError
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):
            signal.signal(number, swallow)
        def spin(depth):
            while True:
                try:
                    if depth: spin(depth - 1)
                    while True: pass
                except BaseException: pass
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        spin(20)  # a signal between two `except` blocks ends only one level
        """,
    "waits for a child that has stopped": """
        import os, signal
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(child, 0)
        """,
}

_PROGRAMS = {
    "is stopped by its child": """
        # printed("still here\\n"), timed_out("")
        import os, signal
        if not os.fork():
            os.kill(os.getppid(), signal.SIGSTOP)
            os._exit(0)
        os.wait()
        print('still here')
        """,
    "kills all that it can": """
        # printed("still here\\n"), died(-9), signals_others=True
        import os
        for pid in (-1, 0, 1, os.getppid()):
            try: os.kill(pid, 9)
            except OSError: pass
        print('still here')
        """,
    "guesses its neighbours' process ids": f"""
        # printed("[]\\n"), signals_others=True
        import os, signal
        reached = []
        for pid in {NEIGHBOURS}:
            for number in (0, signal.SIGSTOP, signal.SIGKILL):
                try: os.kill(pid, number); reached.append(pid)
                except OSError: pass
            try: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL); reached.append(pid)
            except OSError: pass
        print(reached)
        """,
    "changes its neighbours' limits, processors and priorities": f"""
        # printed("[]\\n"), signals_others=True
        import os, resource
        reached = []
        for pid in {NEIGHBOURS}:
            for change in (
                lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
                lambda: os.sched_setaffinity(pid, {{0}}),
                lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
                lambda: os.setpriority(os.PRIO_PGRP, pid, 19),
            ):
                try: change(); reached.append(pid)
                except OSError: pass
        for which in (os.PRIO_USER, os.PRIO_PGRP):
            try: os.setpriority(which, 0, 19)
            except OSError: pass
        os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
        print(reached)
        """,
    "changes the limits and priorities of all processes of its user": """
        # printed("[] [-1, -1, -1]\\n")
        import ctypes, os, resource
        changed, libc, user = [], ctypes.CDLL(None, use_errno=True), ctypes.c_uint(os.getuid())
        def set_priority(user):  # os.setpriority refuses users above 2**31
            if libc.setpriority(os.PRIO_USER, user, 19): raise OSError(ctypes.get_errno(), 'setpriority')
        for change in (
            lambda: os.setpriority(os.PRIO_USER, 0, 19),
            lambda: set_priority(user),
            lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
            lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
            lambda: os.sched_setaffinity(1, {0}),
            lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
            lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
        ):
            try: change(); changed.append(change)
            except PermissionError: pass
        ioprio_set = 251 if os.uname().machine == 'x86_64' else 30
        print(changed, [libc.syscall(ioprio_set, *target, 3 << 13) for target in ((3, 0), (3, user), (1, 1))])
        """,
    "takes a better priority": """
        # printed("[]\\n")
        import os
        taken = []
        for take in (
            lambda: os.nice(-20),
            lambda: os.setpriority(os.PRIO_PROCESS, 0, -1),
            lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
            lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
        ):
            try: taken.append(take())
            except OSError: pass
        print(taken)
        """,
    "raises its limits": """
        # printed("")
        import resource
        for name in [name for name in dir(resource) if name.startswith('RLIMIT_')]:
            kind = getattr(resource, name)
            soft, hard = resource.getrlimit(kind)
            wanted = -1 if hard != -1 else None
            try:
                if wanted is not None: resource.setrlimit(kind, (wanted, wanted)); print('raised', name)
            except (ValueError, OSError): pass
        """,
    "has a hard limit for each critical resource": """
        # printed("[]\\n")
        import resource
        names = 'AS CORE CPU FSIZE MEMLOCK MSGQUEUE NOFILE NPROC SIGPENDING'
        print([name for name in names.split() if resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))[1] == -1])
        """,
    "sets timers that kill": """
        # timed_out(""), died(-14), died(-26), died(-27)  # process 1 of a namespace ignores these signals
        import signal
        for timer in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL, signal.ITIMER_REAL):
            signal.setitimer(timer, 0.01, 0.01)
        while True: pass
        """,
    "makes timers without end": """
        # printed("True\\n")
        import ctypes
        libc, made, timer = ctypes.CDLL(None), 0, ctypes.c_void_p()
        while made < 20_000 and libc.timer_create(0, None, ctypes.byref(timer)) == 0:
            made += 1
        print(made < 20_000)
        """,
    "is interrupted after its end": """
        # ok(), raised("ZeroDivisionError"), keeps_notebook=False
        import signal
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        """,
}

SIGNALS = [
    *read_programs(_PROGRAMS),
    *[hostile(name, code, timed_out("")) for name, code in _NEVER_END.items()],
    hostile(
        "stops itself",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('still here')",
        printed("still here\n"),  # process 1 of a namespace ignores the signal
        timed_out(""),
    ),
]
