"""Measure `asterism data clean` on generated word problems. Prints a JSON line last.

    python -m benchmarks.curation [--rows N] [--tests N] [--seed N] [--quick]

The rows are cleaned against a test set; one row in fifty is a copy of another row or of a test question. `peak_mib` is
the peak of the command and its workers together, sampled ten times a second; each core has a worker.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random

from benchmarks.curation.word_problems import WordProblem, copy_exactly, copy_nearly, draw_word_problems
from benchmarks.support.benchmark_main import SEED, Flag, Options, benchmark_main
from benchmarks.support.process_memory import list_descendants, read_proportional_mib

COPIED_EVERY = 50
_SAMPLE_INTERVAL_S = 0.1


def write_rows(path: Path, problems: Iterable[WordProblem]) -> None:
    with path.open("w") as file:
        for each in problems:
            file.write(json.dumps({"question": each.question, "answer": each.answer}) + "\n")


def generate_rows(count: int, tests: list[WordProblem], random: Random) -> Iterable[WordProblem]:
    drawn = draw_word_problems(random)
    before = next(drawn)
    for number in range(count):
        if number % COPIED_EVERY == COPIED_EVERY - 1:
            kind = number // COPIED_EVERY % 3
            yield (copy_exactly, copy_nearly, copy_nearly)[kind](random.choice(tests) if kind == 2 else before, random)
        else:
            before = next(drawn)
            yield before


def measure_peak(command: list[str]) -> float:
    """Run the command to its end and return its peak memory in MiB. Raises CalledProcessError."""
    process, peak = subprocess.Popen(command), 0.0
    while process.poll() is None:
        peak = max(peak, read_proportional_mib(list_descendants([process.pid])))
        time.sleep(_SAMPLE_INTERVAL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def measure(options: Options) -> dict[str, float]:
    rows, folder, random = options.rows, options.scratch, Random(options.seed)
    print(f"seed {options.seed}, {rows:,} rows")
    tests = list(islice(draw_word_problems(random), options.tests))
    write_rows(folder / "test.jsonl", tests)
    write_rows(folder / "rows.jsonl", generate_rows(rows, tests, random))
    command = [sys.executable, "-m", "asterism.actors.cli.main", "data", "clean", str(folder / "rows.jsonl")]
    command += ["--output", str(folder / "out.jsonl"), "--against", str(folder / "test.jsonl")]
    began = time.monotonic()
    peak_mib = measure_peak([*command, "--json", str(folder / "report.json")])
    seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((folder / "report.json").read_bytes())
    return {
        "rows": rows,
        "seconds": round(seconds, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "rows_per_s": round(rows / seconds),
        "peak_mib": round(peak_mib),
        "kept": report["num_kept"],
        "removed": report["num_removed"],
    }


if __name__ == "__main__":
    flags = (Flag("--rows", 1_000_000, quick=5_000), Flag("--tests", 1_000), SEED)
    benchmark_main(__doc__, measure, *flags, quick="5,000 rows")
