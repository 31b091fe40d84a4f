"""Attacks on the harness in the call's own process: they affect only their own call."""

from asterism.sandbox.inside.call.call_process import CallIsolation
from asterism.sandbox.inside.call.notebook_process import NotebookProcess
from asterism.sandbox.inside.isolation.landlock import LandlockRules
from asterism.sandbox.inside.isolation.seccomp import SeccompFilter
from asterism.sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from asterism.sandbox.inside.server.fork_server import ForkServer
from asterism.sandbox.inside.server.warm_processes import WarmProcesses
from asterism.sandbox.inside.wire.call_wire import CallRequest
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from tests.sandbox.hostile.record import any_outcome, died, hostile, ok, printed, read_programs, timed_out

# Attributes of the harness that attacks use, by class. tests/sandbox/test_hostile_catalogue.py checks them.
ATTACKED: dict[type, tuple[str, ...]] = {
    ForkServer: ("_executor", "_poll", "_processes_by_fd", "_processes_by_call"),
    WarmProcesses: ("_waiting", "_notebooks"),
    NotebookProcesses: ("_processes",),
    CallProcess: ("control", "pidfd"),
    CallRequest: ("nonce", "cells"),
    NotebookProcess: ("_shared", "_write_shared", "_checkpoint", "serve", "_pid", "_num_cells"),
}
_KINDS = tuple(
    kind.__name__
    for kind in (*ATTACKED, ServerSettings, CallIsolation, SeccompFilter, LandlockRules)
    if kind is not NotebookProcess
)
_RESOURCES = (*ATTACKED[ForkServer], *ATTACKED[WarmProcesses], *ATTACKED[NotebookProcesses], *ATTACKED[CallProcess])

# Programs that can harm only their own call and notebook.
_HARM_THEIR_OWN_CALL = {
    "replaces every builtin": """
        import builtins
        for name in dir(builtins):
            if name[0] != '_': setattr(builtins, name, None)
        """,
    "replaces compile and exec for later cells": """
        import builtins
        builtins.compile = builtins.exec = builtins.eval = lambda *_, **__: print('forged')
        """,
    "breaks the harness's tools": """
        import os, json, sys
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
        os._exit = os.write = json.dumps = None
        """,
    "puts streams of its own in place of the output": """
        import sys
        class Stream:
            def write(self, text): raise KeyboardInterrupt
            def flush(self): raise SystemExit('flushed')
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = Stream()
        """,
    "forgets all modules": "import sys\nsys.modules.clear()",
    "puts modules of its own in place of the library's": """
        import sys, types
        evil = types.ModuleType('evil')
        evil.__getattr__ = lambda name: 1 / 0
        for name in list(sys.modules): sys.modules[name] = evil
        """,
    "traces all that the harness does": """
        import os, sys, threading
        def trace(*_): raise ValueError('traced')
        sys.settrace(trace)
        sys.setprofile(trace)
        threading.settrace(trace)
        threading.setprofile(trace)
        """,
    "audits all that the harness does": """
        import sys
        def hook(name, _):
            if name in ('compile', 'exec', 'open', 'import'): raise ValueError('audited')
        sys.addaudithook(hook)
        """,
    "changes the harness's functions by walking up the frames": """
        import sys
        frame = sys._getframe()
        while frame:
            for name in list(frame.f_globals):
                if name.startswith('_') and callable(frame.f_globals[name]) and not name.startswith('__'):
                    frame.f_globals[name] = lambda *_: ['ok']
            frame = frame.f_back
        """,
    "changes its process id": "import os\nos.getpid = lambda: 12345",
    "lets a child forge answers of later cells": """
        import os, struct, time
        if not os.fork():
            while True:
                time.sleep(0.01)
                os.write(3, struct.pack('<cIQI', b'a', 2, 0, 1) + b'ok')
        """,
}

_PROGRAMS = {
    "replaces print, exit and the display hook": """
        # printed(""), keeps_notebook=False  # `print` no longer works
        import builtins, sys
        builtins.print = builtins.repr = builtins.exit = builtins.input = None
        sys.displayhook = None
        """,
    "replaces os._exit": """
        # ok(), keeps_notebook=False, outlives_answer=True  # the answer counts, and the process is killed
        import os, time
        os._exit = lambda code: time.sleep(60)
        print('x')
        """,
    "exits when the harness calls a function": """
        # died(0), keeps_notebook=False
        import os, sys
        sys.setprofile(lambda *_: os._exit(0))
        """,
    "closes the harness's objects, found by the garbage collector": f"""
        # *any_outcome()
        import gc
        for thing in gc.get_objects():
            if type(thing).__name__ in {_KINDS}:
                for name in {_RESOURCES}:
                    other = getattr(thing, name, None)
                    for attempt in ('close', 'clear'):
                        try: getattr(other, attempt)()
                        except Exception: pass
        """,
    "puts hooks in the way of imports": """
        # printed("")
        import builtins, sys
        class Finder:
            def find_spec(self, *_): print('evil'); raise ImportError('evil')
        sys.meta_path.insert(0, Finder())
        sys.path_hooks.insert(0, lambda path: 1 / 0)
        sys.path_importer_cache.clear()
        sys.path[:] = ['.']
        builtins.__import__ = lambda *_, **__: 1 / 0
        """,
    "unpickles code": r"""
        # printed("pickled\nagain")
        import pickle
        pickle.loads(b"cos\nwrite\n(I3\nVok\n\x85R.") if False else None
        pickle.loads(b"cos\nsystem\n(S'echo pickled'\ntR.")
        class Bomb:
            def __reduce__(self): return (exec, ("import os; os.write(1, b'again')",))
        pickle.loads(pickle.dumps(Bomb()))
        """,
    "shows a value that raises": """
        # printed(""), as_cell=(died(0),), shows=True
        class C:
            def __repr__(self): raise SystemExit(0)
        C()
        """,
    "shows a value whose repr is not a string": """
        # printed(""), as_cell=(raised("TypeError"),), shows=True
        class C:
            def __repr__(self): return 5
        C()
        """,
    "ends between two cells": """
        # died(9), as_cell=(ok(), died(9)), keeps_notebook=False
        import os, threading
        threading.Timer(0.005, os._exit, (9,)).start()
        """,
    "lets a thread run between two cells": """
        # ok(), keeps_notebook=False
        import threading, os
        def spin():
            while True:
                try: os.write(1, b'thread\\n'); os.write(3, b'')
                except OSError: pass
        threading.Thread(target=spin, daemon=True).start()
        """,
}

HARNESS = [
    *read_programs(_PROGRAMS),
    *[hostile(name, code, *any_outcome(), keeps_notebook=False) for name, code in _HARM_THEIR_OWN_CALL.items()],
    hostile("replaces os.write", "import os\nos.write = lambda fd, data: 0", timed_out(), keeps_notebook=False),
    hostile(
        "puts a stream that hangs in place of the output",
        "import sys, time\nclass Stream:\n    def flush(self): time.sleep(60)\nsys.stdout = sys.__stdout__ = Stream()",
        timed_out(),
        keeps_notebook=False,
    ),
    hostile(
        "unfreezes and collects all garbage",
        "import gc\ngc.unfreeze()\ngc.collect()\ngc.set_threshold(1)\nprint(gc.callbacks)\ngc.callbacks.append(lambda *_: 1 / 0)",
        ok(),
        keeps_notebook=False,
    ),
    hostile(
        "seeds and breaks the random generators",
        "import random\nrandom.seed = None\nrandom.Random.random = lambda self: 4",
        printed(""),
        keeps_notebook=False,
    ),
    hostile("changes the clock", "import time\ntime.monotonic = lambda: float('inf')", printed("")),
    hostile(
        "replaces the main module",
        "import sys, types\nsys.modules['__main__'] = types.ModuleType('__main__')\nglobals().pop('__builtins__')\n",
        *any_outcome(),
    ),
    hostile(
        "shows a value with a huge repr",
        "class C:\n    def __repr__(self): return 'x' * 100_000_000\n    __str__ = __repr__\nC()",
        *any_outcome(),
        shows=True,
    ),
    hostile("exits so that later cells may succeed", "exit()", printed(""), as_cell=(died(0),)),
    *[
        hostile(
            f"finds the shared state of its notebook and {what}",
            f"""
            import os, signal, sys, time
            frame, found = sys._getframe(), None
            while frame:
                for value in list(frame.f_locals.values()):
                    if type(value).__name__ == {NotebookProcess.__name__!r}: found = value
                frame = frame.f_back
            if found: {doing}
            """,
            *any_outcome(),
            keeps_notebook=False,
        )
        for what, doing in {
            "fills it with zeros": "found._shared[:] = bytes(len(found._shared))",
            "fills it with ones": "found._shared[:] = b'\\xff' * len(found._shared)",
            "names other processes": "found._write_shared(1, 1, 1)",
            "names itself as its checkpoint": "found._write_shared(os.getpid(), os.getpid(), 0); os._exit(3)",
            "ends its checkpoint and itself": "os.kill(found._checkpoint or 2, 9); os._exit(3)",
            "wakes its checkpoint": "os.kill(found._checkpoint or 2, signal.SIGCONT)",
            "stops its checkpoint for good": "os.kill(found._checkpoint or 2, 9)",
            "goes back to it": "found.serve.__func__(found, type('C', (), dict(cells=0, nonce=0))())",
            "has two workers answer": "os.fork(); os.getpid = lambda: found._pid",
            "lies about the number of its cells": "found._num_cells = 5",
        }.items()
    ],
]
