"""Compare the learner and the embedded engine on one GPU with the same computation on a CPU. Prints a JSON line last.

    python -m benchmarks.gpu.check [--only CHECK,CHECK] [--device cpu] [--quick] [--limit-s SECONDS]

Each measured error is printed at once with its limit; the exit code is 1 if an error exceeds its limit. The checks run
in one process. A check that raises an exception, crashes or exceeds --limit-s fails, and the others run in a new process.

    float32_MODEL    logits and gradients of each architecture against the CPU, without TF32
    bfloat16_MODEL   the same in bfloat16 against float32 on the same device
    segments         attention of packed sequences against attention of each sequence
    non_finite       the name of the parameter that has a NaN or an infinity
    weights          bits of published and loaded weights
    collectives      reductions in the learner's group of one rank with FSDP units: NCCL on a GPU
    prefill          greedy tokens after prompts in chunks and after whole prompts
    graphs           greedy tokens with CUDA graphs and without
    offload          bits of weights and moments after they were in main memory
    shared_weights   bits of published and loaded weights of an engine in another process: CUDA IPC, or a file on a CPU
    head_DTYPE       log probabilities, entropies and gradients of the output matrix against float64
    trainer_step     a GRPO step in float32 against the same step on the CPU
    cold_start       steps in bfloat16, with the group of FSDP units and without, against float32 on the CPU
    compiled         compiled layers against eager ones

With `--device cpu`, the CPU is compared with itself: this tests the program. `--quick` has a small vocabulary.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.process_group import adopt_orphans, run_limited
from benchmarks.support.benchmark_main import HIDDEN, Flag, FlagError, Options, benchmark_main, choose_names

_LIMITS_S = {"cuda": 120.0, "cpu": 600.0}  # seconds between two measured errors, with the compilation of kernels
_FINISHED = "finished"  # key of the line that follows a check's last error in the file of results


# ---------------------------------------------------------------- the process that checks


def run_checks(names: Sequence[str], options: Options) -> None:
    """Print each error, and append it to the file of results."""
    import torch

    from benchmarks.gpu.checks.check_table import list_checks, prepare_device

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    prepare_device(device)
    checks = list_checks(is_quick=options.quick)
    with options.results.open("a") as file:
        for name in names:
            began = time.monotonic()
            for measured in checks[name](device):
                verdict = "pass" if measured.has_passed else "FAIL"
                label = f"{name}: {measured.name}"
                print(f"{label:50} error {measured.error:8.2g}  limit {measured.limit:8.2g}  {verdict}", flush=True)
                _write_line(file, {"check": name, **measured._asdict(), "passed": measured.has_passed})
            _write_line(file, {"check": name, _FINISHED: time.monotonic() - began})


def _write_line(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


# ---------------------------------------------------------------- the process that starts the checks


def run_all(names: Sequence[str], options: Options) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run all checks. Return the lines of the file of results, and the reason of each unfinished check by name."""
    failures: dict[str, str] = {}
    results = options.scratch / "results.jsonl"
    remaining = list(names)
    while remaining:
        finished = run_limited([*_build_arguments(remaining, options, results)], options.limit_s, progress=results)
        lines = _read_lines(results)
        done = {line["check"] for line in lines if _FINISHED in line}
        remaining = [name for name in remaining if name not in done]
        if remaining:  # the process ended during the first remaining check
            name = remaining.pop(0)
            late = f"no result after {options.limit_s:g} s"
            failures[name] = late if finished.code is None else finished.last_error
            print(f"{name:50} FAIL: {failures[name].splitlines()[-1]}", flush=True)
    return _read_lines(results), failures


def _build_arguments(names: Sequence[str], options: Options, results: Path) -> Iterator[str]:
    yield from ("-m", "benchmarks.gpu.check", "--device", options.device, "--results", str(results))
    yield from ("--only", ",".join(names))
    if options.quick:
        yield "--quick"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(lines: Sequence[dict[str, Any]], failures: dict[str, str]) -> dict[str, Any]:
    """Build the JSON object of the last line."""
    measured = [line for line in lines if _FINISHED not in line]
    failed = [f"{line['check']}: {line['name']}" for line in measured if not line["passed"]]
    return {
        "passed": not failed and not failures,
        "failed": [*failed, *failures],
        "errors": {f"{line['check']}: {line['name']}": line["error"] for line in measured},
        "failures": failures,
        "seconds": {line["check"]: round(line[_FINISHED], 2) for line in lines if _FINISHED in line},
    }


def measure(options: Options) -> dict[str, Any] | None:
    options.limit_s = options.limit_s or _LIMITS_S[options.device]
    if options.results:
        run_checks(options.only.split(","), options)
        return None

    import torch

    from benchmarks.gpu.checks.check_table import list_checks

    if options.device == "cuda" and not torch.cuda.is_available():
        raise FlagError("no GPU is available; --device cpu compares the CPU with itself")
    names = choose_names(options.only, list(list_checks(is_quick=options.quick)), "--only: ")
    adopt_orphans()
    return {"device": options.device, "torch": torch.__version__, **summarize(*run_all(names, options))}


if __name__ == "__main__":
    defaults = ", ".join(f"{limit_s:g} on {device}" for device, limit_s in _LIMITS_S.items())
    benchmark_main(
        __doc__,
        measure,
        Flag("--only", text="names of checks, separated by commas"),
        Flag("--device", "cuda", "device to check", choices=("cuda", "cpu")),
        Flag("--limit-s", kind=float, text=f"limit of a measurement (default: {defaults})"),
        Flag("--results", kind=Path, text=HIDDEN),
        quick="a small vocabulary of the output matrix",
        has_passed=lambda figures: figures["passed"],
    )
