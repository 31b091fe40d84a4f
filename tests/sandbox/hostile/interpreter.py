"""Attacks on the interpreter: crashes, recursion, exits, hostile exceptions, code that is hard to compile."""

from asterism.sandbox.inside.call import run_code
from tests.sandbox.hostile.record import (
    CRASHED,
    Hostile,
    any_outcome,
    died,
    hostile,
    ok,
    printed,
    raised,
    read_programs,
    timed_out,
)

_ENDS: list[Hostile] = [
    hostile(f"leaves with code {code}", f"import os\nprint('x', flush=True)\nos._exit({code})", died(code & 255, "x\n"))
    for code in (0, 1, 3, 70, 127, 128, 137, 255, 256 + 9, -1)
]
_EXITS: list[Hostile] = [
    hostile(f"exits with {name}", f"import sys\n{code}", *ends)
    for name, code, ends in (
        ("a negative number", "sys.exit(-1)", [died(255)]),
        ("a huge number", "sys.exit(10 ** 30)", [died(255)]),
        ("True", "sys.exit(True)", [died(1)]),
        ("a fraction", "sys.exit(3.5)", [died(1)]),
        ("a long text", "sys.exit('x' * 10_000_000)", [died(1)]),
        ("a tuple of things", "sys.exit((1, [2], {3: 4}))", [died(1)]),
        ("an object whose text raises", "class C:\n    def __str__(self): 1 / 0\nsys.exit(C())", [died(1)]),
        (
            "an object whose text hangs",
            "class C:\n    def __str__(self):\n        while True: pass\nsys.exit(C())",
            [timed_out("")],
        ),
        ("an object whose text exits", "class C:\n    def __str__(self): sys.exit(self)\nsys.exit(C())", [died(1)]),
        (
            "a hostile int",
            "class C(int):\n    def __and__(self, other): return 'x'\n    __rand__ = __and__\nsys.exit(C(5))",
            [died(5)],
        ),
        (
            "a hostile SystemExit",
            "class E(SystemExit):\n    @property\n    def code(self): raise ValueError\nraise E",
            [died(1)],
        ),
        ("a lone surrogate", "sys.exit('\\ud800')", [died(1)]),
    )
]

# Programs that can harm only their own call and notebook.
_HARM_THEIR_OWN_CALL = {
    "overwrites None and 1": """
        import ctypes
        ctypes.memset(id(1) + 24, 5, 4)
        ctypes.memset(id(None), 255, 8)
        print(1 + 1)
        """,
    "runs code objects of garbage": """
        import types
        def f(a, b): return a + b
        for seed in range(256):
            code = f.__code__.replace(co_code=bytes((seed * 7 + n * 13) & 255 for n in range(64)))
            try: types.FunctionType(code, {})(1, 2)
            except BaseException: pass
        """,
    "throws an exception into the harness's thread": """
        import ctypes, threading, time
        main = threading.main_thread().ident
        def throw():
            time.sleep(0.02)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(SystemExit))
        threading.Thread(target=throw, daemon=True).start()
        """,
}

_PROGRAMS = {
    "runs an illegal instruction": """
        # died(-4), died(-11), raised()
        import ctypes, mmap
        m = mmap.mmap(-1, 4096, prot=7)
        m.write(b'\\x0f\\x0b' * 8)
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
        """,
    "frees objects in use": """
        # *CRASHED, ok(), keeps_notebook=False
        import ctypes
        x = [object() for _ in range(99)]
        for o in x:
            for _ in range(9): ctypes.pythonapi.Py_DecRef(ctypes.py_object(o))
        """,
    "registers hostile exit functions": """
        # ok()
        import atexit, os, time
        atexit.register(lambda: 1 / 0)
        atexit.register(print, 'bye')
        atexit.register(lambda: atexit.register(print, 'bye again'))
        """,
    "hangs in an exit function": """
        # timed_out(""), as_cell=(printed(""),)
        import atexit, time
        atexit.register(time.sleep, 60)
        """,
    "sets every hook and raises": """
        # raised("ZeroDivisionError: division by zero")
        import os, sys, threading
        def hook(*_): os._exit(5)
        sys.excepthook = sys.unraisablehook = sys.displayhook = threading.excepthook = sys.breakpointhook = hook
        1 / 0
        """,
    "does harm in finalizers": """
        # printed("")
        import os
        class Bomb:
            def __del__(self): os.write(1, b'bomb'); os._exit(5)
        bomb = Bomb()
        cycle = [Bomb()]
        cycle.append(cycle)
        """,
    "raises a class with a hostile metaclass": """
        # raised(), died()
        class Meta(type):
            def __getattribute__(cls, name): raise ValueError(name)
            def __repr__(cls): raise ValueError
        class E(BaseException, metaclass=Meta): pass
        raise E
        """,
}

INTERPRETER = [
    *read_programs(_PROGRAMS),
    *_ENDS,
    *_EXITS,
    hostile("recurses without end", "def f(): f()\nf()", raised("RecursionError")),
    hostile(
        "recurses without end and without limit",
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        *CRASHED,
    ),
    hostile(
        "shows a value that is nested too deep",
        "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 5): x = [x]\nprint(len(repr(x)))",
        *CRASHED,
        ok(),
    ),
    *[
        hostile(f"overflows the stack by {name}", f"import sys\nsys.setrecursionlimit(10 ** 9)\n{code}", *CRASHED, ok())
        for name, code in {
            "JSON": "import json\njson.loads('[' * 10 ** 6)",
            "a pattern": "import re\nre.compile('(' * 10 ** 5 + ')' * 10 ** 5)",
            "pickling": "import pickle\nx = []\nfor _ in range(10 ** 5): x = [x]\npickle.dumps(x)",
            "copying": "import copy\nx = []\nfor _ in range(10 ** 5): x = [x]\ncopy.deepcopy(x)",
            "comparing": "x, y = [], []\nfor _ in range(10 ** 5): x, y = [x], [y]\nx == y",
            "hashing": "x = ()\nfor _ in range(10 ** 5): x = (x,)\nhash(x)",
            "attributes": "class C:\n    def __getattr__(self, name): return getattr(self, name + 'x')\nC().x",
            "a callback": "import ctypes\nF = ctypes.CFUNCTYPE(None)\ndef f(): g()\ng = F(f)\ng()",
            "compiling": "compile('-' * 10 ** 6 + '1', 'x', 'eval')",
        }.items()
    ],
    hostile("reads from address 0", "import ctypes\nctypes.string_at(0)", died(-11)),
    hostile("writes to address 8", "import ctypes\nctypes.memset(8, 1, 8)", died(-11)),
    hostile("aborts", "import os\nos.abort()", died(-6), died(-11)),
    hostile("sends itself SIGFPE", "import ctypes, os\nos.kill(os.getpid(), 8)\nprint('x')", printed("x\n"), died(-8)),
    *[hostile(name, code, *any_outcome(), keeps_notebook=False) for name, code in _HARM_THEIR_OWN_CALL.items()],
    hostile(
        "runs garbage from marshal",
        "import marshal\nexec(marshal.loads(b'\\xe3' + bytes(range(200)) * 9))",
        *any_outcome(),
    ),
    hostile(
        "asks for a dump when it crashes",
        "import faulthandler, sys\nfaulthandler.enable()\nfaulthandler._sigsegv()",
        died(-11),
        ok(),  # process 1 of a namespace ignores signals that it sends to itself
    ),
    hostile(
        "is ended by a watchdog of its own",
        "import faulthandler, sys\nfaulthandler.dump_traceback_later(0.1, exit=True, file=sys.__stderr__)\nwhile True: pass",
        died(1),
    ),
    hostile(
        "dumps tracebacks into the harness's socket",
        "import faulthandler, time\nfaulthandler.dump_traceback_later(0.02, repeat=True, file=3)\ntime.sleep(60)",
        died(-9),
        timed_out(""),
    ),
    hostile(
        "exits in an exit function", "import atexit, os\natexit.register(os._exit, 5)", died(5), as_cell=(printed(""),)
    ),
    hostile(
        "is interrupted by itself",
        "import _thread\n_thread.interrupt_main()\nwhile True: pass",
        raised("KeyboardInterrupt"),
    ),
    *[
        hostile(
            f"raises an exception whose str {acts}",
            f"import os\nclass E(Exception):\n    def __str__(self): {body}\nraise E",
            end,
        )
        for acts, body, end in (
            ("raises", "1 / 0", raised("E: <exception str() failed>")),
            ("raises the same exception", "raise E", raised("E: <exception str() failed>")),
            ("has the wrong type", "return 5", raised("E: <exception str() failed>")),
            ("hangs", "\n        while True: pass", timed_out("")),
            ("exits", "os._exit(5)", died(5)),
        )
    ],
    hostile(
        "raises causes in a circle",
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        raised("ValueError: a"),
    ),
    hostile(
        "raises a long chain",
        "error = None\nfor n in range(100_000):\n    new = ValueError(n)\n    new.__context__ = error\n    error = new\nraise error",
        raised("ValueError"),
    ),
    hostile(
        "raises groups in groups",
        "error = ValueError()\nfor _ in range(20_000): error = ExceptionGroup('g', [error])\nraise error",
        *CRASHED,
    ),
    hostile(
        "raises a class with a hostile module name",
        "class L(str):\n    def __eq__(self, other): 1 / 0\n    __hash__ = str.__hash__\n"
        "class E(Exception): pass\nE.__module__ = L('builtins')\nE.__qualname__ = 'x' * 100_000\nraise E",
        raised(),
        died(),
    ),
    hostile(
        "raises a syntax error of its own making",
        "e = SyntaxError('m')\ne.filename, e.lineno, e.msg = 5, 'x', None\nraise e",
        raised("SyntaxError"),
    ),
    hostile(
        "raises a syntax error that points anywhere",
        "raise SyntaxError('m', ('/etc/passwd', 10 ** 30, -5, 'x', None, None))",
        raised("SyntaxError: m"),
    ),
    hostile(
        "raises from a hundred thousand frames",
        "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n): f(n - 1) if n else 1 / 0\nf(100_000)",
        raised("ZeroDivisionError"),
        *CRASHED,
    ),
    hostile(
        "raises from code with the harness's names",
        f"exec(compile('1 / 0', '/opt/asterism/{run_code.__name__.replace('.', '/')}.py', 'exec'))",
        raised("ZeroDivisionError"),
    ),
]

_ONE_LINE = "x = 1; " * 140_000
TEXTS = [  # any outcome is allowed if no other call is harmed
    hostile("is a line of a megabyte", _ONE_LINE, *any_outcome()),
    hostile("is a sum of many thousand", "+".join(["1"] * 300_000), *any_outcome()),
    *[
        hostile(f"is {name} nested deep", opening * 100_000 + "1", *any_outcome())
        for name, opening in {
            **{"parentheses": "(", "lists": "[", "signs": "-", "negations": "not ", "functions": "lambda:"},
        }.items()
    ],
    *[
        hostile(f"is {name} nested deep, with numpy", "import numpy\n" + opening * 8000 + "1", *any_outcome())
        for name, opening in {
            **{"parentheses": "(", "signs": "-", "conditions": "1 if ", "calls": "f(", "sums": "1+"},
        }.items()
    ],
    hostile("is a chain of conditions", "if 0: pass\n" + "elif 0: pass\n" * 60_000, *any_outcome()),
    hostile("holds NUL bytes", "print('a')\0print('b')", raised()),
    hostile("begins with a mark of byte order", "\ufeffprint('x')", raised("SyntaxError"), printed("x\n")),
    hostile("names another encoding", "# -*- coding: utf-7 -*-\nprint('+AGE-')", printed("+AGE-\n")),
    hostile("names an unknown encoding", "# coding: evil\nprint('x')", printed("x\n"), raised("SyntaxError")),
    hostile("holds lone surrogates", "print('\ud800')", printed("?\n"), printed("\\ud800\n")),
    hostile("ends its lines in every way", "print(1)\r\nprint(2)\rprint(3)\x0c\nprint(4)", printed("1\n2\n3\n4\n")),
    hostile("is a long number", "x = " + "9" * 900_000, raised("SyntaxError")),
    hostile("is a long name", "x" * 1_000_000, raised("NameError")),
    hostile("is a long comment", "#" + "\U0001f600" * 1_000_000, ok()),
    hostile("warns", "x = '\\d'\n1 is 1\nimport warnings\nwarnings.warn('evil')\nassert (1, 2)", ok()),
]
