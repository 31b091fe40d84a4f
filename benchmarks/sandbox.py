"""Calls per second of the sandbox beside a process per call. `python -m benchmarks.sandbox --quick`; JSON last.

The service's fork servers share one core (`--core`); the rates are as they are seen by a caller that keeps
`--in-flight` calls in flight, its own cost included. Ratios are to `subprocess` per call on the same core, in this run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from bus.messages import AnswerSubmitted, CodeOk, CodeRequested
from configs.schema import Sandbox as SandboxConfig
from sandbox.process_backend import process_sandbox

PRINT = "print(1+1)"
NUMPY = "import numpy as np\nprint(np.arange(1000).sum())"


def subprocess_per_s(code: str, calls: int) -> float:
    """A fresh interpreter for each call, one after the other."""
    started = time.perf_counter()
    for _ in range(calls):
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return calls / (time.perf_counter() - started)


async def per_s(one: Callable[[int], Awaitable[object]], calls: int, in_flight: int) -> float:
    """`in_flight` callers, each asking for its next call when it has its answer."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await one(number)

    started = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(in_flight)])
    return calls / (time.perf_counter() - started)


async def measure(quick: bool, in_flight: int) -> dict[str, float]:
    scale = 1 if quick else 5
    sandbox = process_sandbox(SandboxConfig(fork_servers=1))
    isolation = await sandbox.start()
    print(f"namespaces: {', '.join(isolation.namespaces) or 'none'}; seccomp: {isolation.seccomp}")

    async def program(code: str, number: int) -> None:
        result = await sandbox.run(CodeRequested(number, 0, "python_code_with_standard_io", code, ""))
        assert isinstance(result.outcome, CodeOk), result

    async def cell(trajectory: int, number: int) -> None:
        result = await sandbox.run(CodeRequested(trajectory, number, "jupyter_code", "1+1", ""))
        assert isinstance(result.outcome, CodeOk), result

    async def session(number: int) -> None:
        await cell(1_000 + number, 0)
        await sandbox.end_session(1_000 + number)

    try:
        await per_s(lambda number: program(PRINT, number), 100, in_flight)
        print_per_s = await per_s(lambda number: program(PRINT, number), 1500 * scale, in_flight)
        await per_s(lambda number: program(NUMPY, number), 20, in_flight)
        numpy_per_s = await per_s(lambda number: program(NUMPY, number), 500 * scale, in_flight)
        await per_s(lambda number: cell(number % 16, number), 64, 1)
        cells_per_s = await per_s(lambda number: cell(number % 16, number), 5000 * scale, in_flight)
        session_start_ms = 1000 / await per_s(session, 200 * scale, 1)
        await sandbox.grade(AnswerSubmitted(0, "x+1", "1+x"))
        gradings_per_s = await per_s(
            lambda number: sandbox.grade(AnswerSubmitted(0, f"\\frac{{{number}}}{{7}}", f"{number}/7")),
            300 * scale,
            in_flight,
        )
    finally:
        await sandbox.close()
    return {
        "print_per_s": print_per_s,
        "numpy_per_s": numpy_per_s,
        "session_cells_per_s": cells_per_s,
        "session_start_ms": session_start_ms,
        "gradings_per_s": gradings_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the calls; about 10 s")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--core", type=int, default=0, help="the processor that all of it shares")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    repeats = 20 if options.quick else 60
    print_alone = subprocess_per_s(PRINT, repeats)
    numpy_alone = subprocess_per_s(NUMPY, repeats // 2)
    print(f"subprocess per call: {print_alone:.1f} print/s, {numpy_alone:.1f} numpy/s")
    figures = asyncio.run(measure(options.quick, options.in_flight))
    ratios = {
        "print_ratio": figures["print_per_s"] / print_alone,
        "numpy_ratio": figures["numpy_per_s"] / numpy_alone,
    }
    print(json.dumps({name: round(value, 3) for name, value in {**ratios, **figures}.items()}))


if __name__ == "__main__":
    main()
