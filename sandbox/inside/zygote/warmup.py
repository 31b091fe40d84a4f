"""Warms up the zygote, so that calls start with loaded modules and filled caches.

Typical code runs a few times: this loads lazy imports, fills sympy's caches, and lets the
interpreter specialize its instructions. Otherwise each call would repeat this work in its own
copies of the pages. Memory then moves into huge pages (Linux 6.1): a fork copies one page table
entry in place of 512.
"""

import builtins
import ctypes
import importlib
import io
import os
import random
import sys

from asterism.sandbox.inside.call import run_code
from asterism.sandbox.inside.isolation import syscalls

_HUGE_PAGE_BYTES = 2 << 20  # a kernel with another size refuses the call, without effect
_MADV_COLLAPSE = 25
# The interpreter specializes a function after eight calls. sympy would take too long.
_ROUNDS = {"bare": 10, "numpy": 10, "scientific": 2}
_PRELOADED_MODULES = {
    "bare": "ast bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator "
    "random re string typing",
    "numpy": "numpy numpy.random numpy.linalg numpy.fft",
    "scientific": "sympy",
}
_WARM_UP_CODE = {
    "bare": """
import math
numbers = [int(word) for word in "3 1 2".split()]
def total(values):
    result = 0
    for value in values:
        result += value
    return result
print(total(numbers), f"{sum(numbers) / len(numbers):.2f}", max(numbers), sorted(numbers))
print(math.sqrt(2), {n: n * n for n in range(3)}, math.gcd(12, 18))
""",
    # This code avoids OpenBLAS, which would allocate a buffer of 33 MB in each process.
    "numpy": """
import numpy as np
a = np.arange(6).reshape(2, 3)
print(a.sum(), a.mean(axis=0), a.max(), a * 2 + 1, a.T, a[a > 2], np.array([[1.0, 2.0], [3.0, 4.0]]))
print(np.zeros(3), np.ones((2, 2)), np.linspace(0, 1, 5), np.sqrt(a), np.cumsum(a), np.where(a > 1, a, 0))
np.random.seed(1)
print(np.random.rand(2), np.random.randint(0, 10))
""",
    "scientific": """
import sympy
from sympy import *
x, y = symbols("x y")
z = sympy.Symbol("z")
print(solve(x**2 - (n + 3)*x + n + 2, x), solve([x + y - n, x - y - 1], [x, y]), expand((x + n)**3))
print(factor(x**2 - n**2), simplify((x**2 - n**2) / (x - n)), diff(x**n, x), integrate(n * x**2, x), Rational(1, n) + 1)
print(sqrt(8 * n), latex(x**2 / n), Matrix([[1, n], [3, 4]]).det(), N(n * pi, 10), (x + n).subs(x, 2), factorint(12 * n))
""",
}
_PRELOADS_BY_SIZE = ("bare", "numpy", "scientific")  # each preload includes the ones before it


def warm_up(preload: str) -> None:
    """Load the modules and run the code. Raises ImportError if a module is missing or broken."""
    builtins.exit = builtins.quit = run_code.exit_program  # pyright: ignore[reportAttributeAccessIssue]
    included = _PRELOADS_BY_SIZE[: _PRELOADS_BY_SIZE.index(preload) + 1]
    for name in " ".join(_PRELOADED_MODULES[each] for each in included).split():
        importlib.import_module(name)
    stdout, sys.stdout = sys.stdout, io.StringIO()
    main = sys.modules["__main__"]
    try:
        for each in included:
            for number in range(_ROUNDS[each]):
                _run_warm_up(_WARM_UP_CODE[each], number + 2)
    finally:
        random.seed(0)
        sys.stdout, sys.modules["__main__"] = stdout, main


def _run_warm_up(code: str, number: int) -> None:
    main = run_code.make_main_module()
    main.__dict__["n"] = number  # a new value in each round, because sympy caches results
    outcome = run_code.run_cell(code, main)
    if outcome != ["ok"]:
        raise ImportError(f"the installed modules do not work; reinstall them: {outcome[-1]}")


def collapse_written_memory(proc_fd: int) -> None:
    """Move this process's written memory into huge pages. `proc_fd` is a descriptor of /proc."""
    size = _HUGE_PAGE_BYTES
    for start, end in _list_written_regions(proc_fd):
        for address in range(-(-start // size) * size, end - size + 1, size):
            syscalls.LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_COLLAPSE)


def _list_written_regions(proc_fd: int) -> list[tuple[int, int]]:
    """Return the private anonymous memory: the heap, and mappings of the interpreter and of libraries."""
    fd = os.open("self/maps", os.O_RDONLY, dir_fd=proc_fd)
    try:
        lines = b"".join(iter(lambda: os.read(fd, 65_536), b"")).splitlines()
    finally:
        os.close(fd)
    regions: list[tuple[int, int]] = []
    for line in lines:
        bounds, rights, _, _, _, *name = line.split()
        if rights == b"rw-p" and name in ([], [b"[heap]"]):
            start, end = bounds.split(b"-")
            regions.append((int(start, 16), int(end, 16)))
    return regions
