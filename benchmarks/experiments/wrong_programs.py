"""Programs that look right and are wrong, by kind and name. Their output has a plausible result."""

Programs = dict[str, dict[str, str]]

RAISES = {
    "name_after_result": "print('The answer is 42.')\nprint(answer)",
    "division_after_success": "print('success')\nratio = 1 / 0",
    "assertion": "print('area = 12')\nassert 3 * 4 == 13",
    "plain_exception": "print('area = 12')\nraise Exception('no such triangle')",
    "stop_iteration": "print('first: 1')\nnumbers = iter([1])\nnext(numbers)\nnext(numbers)",
    "keyboard_interrupt": "print('all 10 cases pass')\nraise KeyboardInterrupt",
    "own_exception": "class NoSolution(Exception):\n    pass\n\nprint('x = 5')\nraise NoSolution('x must be even')",
    "failing_exit_handler": "print('ok')\nclass Done(BaseException):\n    pass\n\nraise Done",
    "long_output_before": "for n in range(400):\n    print(n, 'ok')\nraise LookupError('the last case')",
}

EXITS = {
    "exit_code_1": "import sys\nprint('success')\nsys.exit(1)",
    "exit_with_text": "import sys\nprint('42')\nsys.exit('result does not converge')",
    "immediate_exit_code": "import os\nprint('PASSED', flush=True)\nos._exit(3)",
    "aborted": "import os\nprint('PASSED', flush=True)\nos.abort()",
    "segmentation_fault": "import ctypes\nprint('42', flush=True)\nctypes.string_at(0)",
}

LIMITS = {
    "endless_loop": "print('42', flush=True)\nwhile True:\n    pass",
    "endless_wait": "import time\nprint('almost done', flush=True)\ntime.sleep(10_000)",
    "slow_search": "print('searching', flush=True)\nn = 1\nwhile n**3 + 1 != 3 * n**2:\n    n += 1\nprint(n)",
    "too_much_memory": "print('table of 10^7 cells', flush=True)\nrows = []\nwhile True:\n    rows.append(bytearray(10**7))",
    "infinite_recursion": "print('f(0) = 1')\n\ndef f(n):\n    return f(n - 1)\n\nprint(f(3))",
}

NOT_STARTED = {
    "missing_parenthesis": "print('42'\nprint('success')",
    "indentation": "print('42')\n  print('success')",
    "natural_language": "The answer is 42.",
    "null_byte": "print('42')\0",
}

HIDDEN_KIND = "a hidden failure, exit code 0"
HIDDEN_FAILURES: dict[str, tuple[str, str]] = {
    "swallowed": (
        "sum 6",
        """
try:
    print("sum", sum([1, 2, "3"]))
except Exception:
    pass
print("success")
""",
    ),
    "failed_thread": (
        "sum 6",
        """
import threading
thread = threading.Thread(target=lambda: print("sum", sum([1, 2, "3"])))
thread.start()
thread.join()
print("success")
""",
    ),
    "failed_process": (
        "sum 6",
        """
import os
if (child := os.fork()) == 0:
    os._exit(1)
os.waitpid(child, 0)
print("success")
""",
    ),
    "forgotten_task": (
        "sum 6",
        """
import asyncio

async def add():
    print("sum", sum([1, 2, "3"]))

async def main():
    await asyncio.gather(add(), return_exceptions=True)

asyncio.run(main())
print("success")
""",
    ),
    "output_cut": ("the sum is 499999500000", "print('n ' * 400_000)\nprint('the sum is', sum(range(10**6)))"),
}

MALFORMED_KIND = "a call that cannot be parsed"
MALFORMED_CALLS = {
    "unclosed_string": '{"name": "jupyter_code", "arguments": {"code": "print(42)}}',
    "raw_line_break": '{"name": "jupyter_code", "arguments": {"code": "print(4)\nprint(2)"}}',
    "missing_arguments": '{"name": "jupyter_code"}',
    "unknown_tool": '{"name": "python", "arguments": {"code": "print(42)"}}',
    "wrong_type": '{"name": "jupyter_code", "arguments": {"code": 42}}',
}

WRONG_PROGRAMS: Programs = {
    "an exception after the result": RAISES,
    "a failed process": EXITS,
    "a limit": LIMITS,
    "code that does not compile": NOT_STARTED,
}
ONLY_PROGRAMS_WRONG: Programs = {
    "an exception after the result": {
        "end_of_input": "n = int(input())\nprint('n =', n)\nprint('m =', int(input()))",
    },
    "a failed process": {
        "failing_atexit": "import sys, atexit\natexit.register(lambda: print('cleaned up'))\nprint(4)\nsys.exit(7)",
    },
}
