"""Programs that look wrong and are right, by kind and name: a part of the wanted output, and the code.

Each one does its task and ends with exit code 0. Its output has a word, a traceback or a warning of a failure.
"""

Programs = dict[str, dict[str, tuple[str, str]]]

QUANTITIES = {
    "relative_error": (
        "relative error: 0.000",
        """
x = 1.0
for _ in range(6):
    x = (x + 2 / x) / 2
print("sqrt(2) =", round(x, 9))
print(f"relative error: {abs(x - 2**0.5) / 2**0.5:.3f}")
""",
    ),
    "standard_error": (
        "standard error 0.707",
        """
import statistics
values = [1, 2, 3, 4, 5]
print(f"standard error {statistics.stdev(values) / len(values) ** 0.5:.3f}")
""",
    ),
    "squared_error": (
        "mean squared error = 2.0",
        "print('mean squared error =', sum((x - 3) ** 2 for x in range(1, 6)) / 5)",
    ),
    "error_function": ("erf(1) = 0.842701", "import math\nprint(f'error function: erf(1) = {math.erf(1):.6f}')"),
    "rounding_error": ("rounding error 5.55e-17", "print(f'rounding error {abs(0.1 + 0.2 - 0.3):.2e}')"),
    "truncation_error": (
        "True",
        """
import math
partial = sum(1 / math.factorial(k) for k in range(10))
error = math.e - partial
print("truncation error below 1e-6:", error < 1e-6)
""",
    ),
    "numpy_residual": (
        "max abs error 0.0",
        """
import numpy as np
matrix = np.array([[2.0, 0.0], [0.0, 4.0]])
x = np.linalg.solve(matrix, np.array([2.0, 8.0]))
print("x =", x, "max abs error", np.abs(matrix @ x - [2.0, 8.0]).max())
""",
    ),
    "error_rate": ("error_rate': 0.25", "print({'wrong': 5, 'total': 20, 'error_rate': 5 / 20})"),
    "nonzero_errors": (
        "errors = 3",
        "errors = sum(a != b for a, b in zip('karolin', 'kathrin'))\nprint(f'{errors = }')",
    ),
    "type_one_error": ("type I error 0.0625", "print('type I error', 2 * 0.5**5)"),
    "interval": ("12.0 +- 0.4 (error bar)", "print(f'{36 / 3:.1f} +- {2 / 5:.1f} (error bar)')"),
}

WORDS = {
    "no_errors": (
        "0 errors",
        "checked = [n * n >= 0 for n in range(9)]\nprint(checked.count(False), 'errors, 9 checks')",
    ),
    "failed_checks": ("0 failed, 12 passed", "print('0 failed,', sum(n < 12 for n in range(12)), 'passed')"),
    "null_field": ('"error": null', "import json\nprint(json.dumps({'result': 6 * 7, 'error': None}))"),
    "error_correcting": ("[1, 0, 1, 1]", "print('error-correcting code word:', [1, 0, 1, 1])"),
    "count_letters": ("5", "print('letters of ERROR:', len('ERROR'))"),
    "word_in_text": (
        "('errors', 2)",
        """
from collections import Counter
text = "small errors grow and large errors shrink"
print(Counter(text.split()).most_common(1))
""",
    ),
    "terrors": ("TERRORS", "print('Anagrams:', 'terrors'.upper(), 'RESTORR')"),
    "printed_traceback": ("Traceback (most recent call last): no", "print('Traceback (most recent call last): no')"),
    "printed_failure": ("Tool call failure: 0", "print('Tool call failure:', 0)"),
    "http_phrase": ("Internal Server Error", "from http import HTTPStatus\nprint(HTTPStatus(500).phrase)"),
    "exception_names": (
        "ZeroDivisionError",
        "import builtins\nprint([name for name in dir(builtins) if name.startswith('Z') or name == 'OSError'])",
    ),
    "exception_class": ("<class 'ValueError'>", "print(ValueError, ValueError.__mro__[1].__name__)"),
    "printed_source": (
        "raise ValueError(n)",
        """
source = "def check(n):\\n    if n < 0:\\n        raise ValueError(n)\\n"
print(source)
print("lines:", source.count("\\n"))
""",
    ),
    "division_table": ("inf", "print('1/0 ->', float('inf'), '(ZeroDivisionError in exact arithmetic)')"),
}

HANDLED = {
    "caught_and_printed": (
        "total 7",
        """
total = 0
for text in ("3", "x", "4"):
    try:
        total += int(text)
    except ValueError as error:
        print("skipped:", repr(error))
print("total", total)
""",
    ),
    "named_exception": (
        "ZeroDivisionError for 0",
        """
for n in (2, 0):
    try:
        print(6 // n)
    except Exception as caught:
        print(type(caught).__name__, "for", n)
""",
    ),
    "printed_exc": (
        "42",
        """
import traceback
try:
    {}["missing"]
except KeyError:
    traceback.print_exc()
print(6 * 7)
""",
    ),
    "format_exc": (
        "recovered",
        """
import traceback
try:
    [][0]
except IndexError:
    print(traceback.format_exc())
print("recovered")
""",
    ),
    "expected_raise": (
        "ok: raises TypeError",
        """
try:
    sum(["a"])
except TypeError:
    print("ok: raises TypeError")
""",
    ),
    "retry": (
        "attempt 3: 9",
        """
def compute(attempt):
    if attempt < 3:
        raise TimeoutError("too slow")
    return attempt**2

for attempt in (1, 2, 3):
    try:
        print(f"attempt {attempt}:", compute(attempt))
    except TimeoutError as error:
        print(f"attempt {attempt} failed: {type(error).__name__}: {error}")
""",
    ),
    "recursion_limit": (
        "deep enough",
        """
def descend(n):
    return descend(n + 1)

try:
    descend(0)
except RecursionError as error:
    print(error.__class__, "deep enough")
""",
    ),
    "missing_file": (
        "default 10",
        """
try:
    limit = int(open("limit.txt").read())
except FileNotFoundError as error:
    print(error.strerror, "- FileNotFoundError, default", limit := 10)
""",
    ),
    "exception_group": (
        "1 of 2 inputs",
        """
try:
    raise ExceptionGroup("inputs", [ValueError("x")])
except* ValueError as group:
    print(repr(group.exceptions[0]), "-", len(group.exceptions), "of 2 inputs")
""",
    ),
    "unittest": (
        "tests ok: True",
        """
import unittest

class CheckRaises(unittest.TestCase):
    @unittest.expectedFailure
    def test_difference(self):
        self.assertEqual(1, 2)

suite = unittest.defaultTestLoader.loadTestsFromTestCase(CheckRaises)
print("tests ok:", unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
""",
    ),
}

STDERR = {
    "warning": ("3.0", "import warnings\nwarnings.warn('may raise an Error in version 3')\nprint(9 ** 0.5)"),
    "deprecation": ("8", "import warnings\nwarnings.warn('use pow', FutureWarning)\nprint(2 ** 3)"),
    "numpy_division": ("[inf  1.]", "import numpy as np\nprint(np.array([1.0, 1.0]) / np.array([0.0, 1.0]))"),
    "logged_error": ("16", "import logging\nlogging.error('first guess was wrong')\nprint(4 * 4)"),
    "logged_warning": ("25", "import logging\nlogging.warning('slow path')\nprint(5 * 5)"),
    "logged_exception": (
        "done",
        """
import logging
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("ignored")
print("done")
""",
    ),
    "progress": ("55", "import sys\nprint('step 1 of 1', file=sys.stderr)\nprint(sum(range(11)))"),
    "error_estimate": ("1.57", "import sys\nsys.stderr.write('error estimate 2e-16\\n')\nprint(round(3.14159 / 2, 2))"),
    "usage_text": (
        "ok",
        "import sys\nprint('usage: solve [N]; fatal errors exit with 2', file=sys.stderr)\nprint('ok')",
    ),
}

RIGHT_PROGRAMS: Programs = {
    "a quantity named error": QUANTITIES,
    "a word of a failure": WORDS,
    "a handled exception": HANDLED,
    "warnings and logs": STDERR,
}
ONLY_PROGRAMS_RIGHT: Programs = {
    "an early exit with code 0": {
        "sys_exit": ("4 lines, 0 errors", "import sys\nprint('4 lines, 0 errors')\nsys.exit(0)"),
        "sys_exit_none": ("finished", "import sys\nprint('no error: finished')\nsys.exit()"),
        "raise_system_exit": ("16", "print(int(input()) ** 2)\nraise SystemExit"),
        "exit_in_branch": (
            "error in line: none",
            "import sys\nif input() == '4':\n    print('error in line: none')\n    sys.exit(False)\nsys.exit(2)",
        ),
        "immediate_exit": ("errors: 0", "import os\nprint('errors: 0', flush=True)\nos._exit(0)"),
    },
}
