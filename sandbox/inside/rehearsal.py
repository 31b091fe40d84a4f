"""What a fork server loads and does before its first call, so that calls find it done. Standard library only.

Usual code is run a few times: that loads what is loaded on first use, fills sympy's caches, and lets the interpreter
specialize its instructions. Each of those would otherwise be done by every call anew, in pages copied for it alone.
"""

import builtins
import importlib
import io
import random
import sys

from sandbox.inside import program

_ROUNDS = {
    "bare": 10,
    "numpy": 10,
    "scientific": 2,
}  # the interpreter specializes a function after eight calls; sympy's are too many
_MODULES = {
    "bare": "ast bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator "
    "random re string typing",
    "numpy": "numpy numpy.random numpy.linalg numpy.fft",
    "scientific": "sympy",
}
_CODE = {
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
    # nothing that needs OpenBLAS: its buffer is another 33 MB in each process
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
_ORDER = ("bare", "numpy", "scientific")  # each holds what those before it hold


def rehearse(flavour: str) -> None:
    """Raises ImportError where a module is missing."""
    builtins.exit = builtins.quit = program.leave  # pyright: ignore[reportAttributeAccessIssue]
    held = _ORDER[: _ORDER.index(flavour) + 1]
    for name in " ".join(_MODULES[each] for each in held).split():
        importlib.import_module(name)
    stdout, sys.stdout = sys.stdout, io.StringIO()
    main = sys.modules["__main__"]
    try:
        for each in held:
            for number in range(_ROUNDS[each]):
                _run(_CODE[each], number + 2)
    finally:
        random.seed(0)
        sys.stdout, sys.modules["__main__"] = stdout, main


def _run(code: str, number: int) -> None:
    main = program.fresh_main()
    main.__dict__["n"] = number  # other each time, because sympy remembers results
    outcome = program.run_cell(code, main)
    if outcome != ["ok"]:
        raise ImportError(f"what is installed does not work: {outcome[-1]}")
