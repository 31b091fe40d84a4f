"""Measure training, decoding and whole runs on one GPU. Prints a JSON line last.

    python -m benchmarks.gpu [--out FILE] [--budget-s SECONDS] [--only SECTION,SECTION] [--again] [--quick]

Each section runs in its own process group, which is killed at the section's limit. If a section fails, the figures of
other sections remain, the exit code is 1, and the JSON has the error as SECTION.error, or as SECTION.PART_error next to
the figures of the section's other parts. Facts of the machine come first, then the sections, the most valuable first:

    step_MODEL_TOKENS    a GRPO step with two micro batches of up to TOKENS packed tokens, of sequences with unequal
                         lengths: share_of_gemm (model FLOP/s over those of a square product in the same process),
                         peak_gib, peak_over_plan (analysis/planning)
    head                 log probabilities and gradients of 16K tokens with a vocabulary of 151,936: head_gib
    decode_1.7B          decoded_tokens_per_s, and share_of_bandwidth
    weights_1.7B         weights_s: from the learner's weights to the weights of an embedded engine on the same GPU
    passes_8B            forward and backward of a model with 8B parameters, in bfloat16
    demo                 RL steps from one cold start with the learner on the CPU and on the GPU, with equal seeds
    run_1.7B             three steps with learner and engine on the GPU, 8 layers of the width of 1.7B
    step_MODEL_TOKENS_VARIANT  the step with another setting of compilation or checkpointing, or with equal lengths

With `--out`, each result is appended to FILE when its section ends, and a later call skips the sections that have
figures in FILE: an interrupted measurement continues. `--budget-s` skips sections with an estimate that
exceeds the remaining time. `--quick` uses small models; on a machine without a GPU it runs on the CPU.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.process_group import adopt_orphans, run_limited
from benchmarks.gpu.result_file import (
    MACHINE,
    Figures,
    append_result,
    find_figures,
    has_failed,
    read_commit,
    read_results,
    send_figures,
)
from benchmarks.gpu.sections import GpuSection, list_sections
from benchmarks.support.benchmark_main import HIDDEN, Flag, FlagError, Options, benchmark_main, choose_names

_FACTS_LIMIT_S = 120.0
_MARGIN_S = 5.0  # seconds of the budget that remain for the end of a killed section and of this program


class SharedOptions(NamedTuple):
    """Options and facts that are common to all sections of one call."""

    is_quick: bool
    out: Path | None
    deadline: float  # time.monotonic()
    facts: dict[str, Any]  # added to each line of `out`


def print_figures(section: str, figures: Mapping[str, float | str]) -> None:
    for name, value in figures.items():
        text = value if isinstance(value, str) else f"{value:,.4g}"
        print(f"{section}.{name:24} {text}", flush=True)


def run_section(name: str, limit_s: float, shared: SharedOptions) -> Figures:
    """Run a section in another process. Print its figures or its error, append them to `out`, and return them."""
    arguments = ["-m", "benchmarks.gpu", "--section", name, *(["--quick"] if shared.is_quick else [])]
    finished = run_limited(arguments, limit_s)
    figures = find_figures(finished, limit_s)
    print_figures(name, figures)
    if name == MACHINE:
        shared.facts.update({"card": figures.get("gpu", ""), "torch": figures.get("torch", "")})
    append_result(shared.out, name, figures, finished.seconds, shared.facts)
    return figures


def run_sections(sections: Mapping[str, GpuSection], shared: SharedOptions) -> tuple[dict[str, Figures], list[str]]:
    """Return figures by section, and the sections that did not fit into the budget."""
    found: dict[str, Figures] = {}
    skipped: list[str] = []
    for name, section in sections.items():
        rest_s = shared.deadline - time.monotonic() - _MARGIN_S
        if section.estimate_s > rest_s:
            needed, left = f"{section.estimate_s:.0f} s", f"{max(0, rest_s):.0f} s"
            print(f"{name}: skipped; it takes about {needed}, and {left} are left", flush=True)
            skipped.append(name)
        else:
            found[name] = run_section(name, min(section.limit_s, rest_s), shared)
    return found, skipped


def measure(options: Options) -> dict[str, Any] | None:
    if options.section:
        send_figures(compute_section(options.section, is_quick=options.quick))
        return None
    adopt_orphans()
    sections = select_sections(options)
    facts = {"commit": read_commit(), "quick": options.quick}
    shared = SharedOptions(options.quick, options.out, time.monotonic() + options.budget_s, facts)
    earlier = {} if options.again else read_results(options.out, is_quick=options.quick)
    kept = {name: earlier[name] for name in sections if name in earlier}
    for name, figures in kept.items():
        print(f"{name}: kept from {options.out}; --again repeats it", flush=True)
        print_figures(name, figures)
    machine = run_section(MACHINE, _FACTS_LIMIT_S, shared)
    if machine.get("gpu") == "" and not options.quick:
        raise FlagError("no GPU is available; --quick runs small models on the CPU")
    remaining = {name: section for name, section in sections.items() if name not in kept}
    found, skipped = run_sections(remaining, shared)
    by_name = {MACHINE: machine, **kept, **found}
    line: dict[str, Any] = {f"{name}.{key}": value for name, each in by_name.items() for key, value in each.items()}
    if machine.get("gpu"):
        line["gpu"] = machine["gpu"]
    return {**line, "skipped": skipped, "kept": list(kept)}


def select_sections(options: Options) -> dict[str, GpuSection]:
    sections, limit_s = list_sections(is_quick=options.quick), options.limit_s
    chosen = {name: sections[name] for name in choose_names(options.only, list(sections), "--only: ")}
    return chosen if limit_s is None else {name: each._replace(limit_s=limit_s) for name, each in chosen.items()}


def compute_section(name: str, *, is_quick: bool) -> Figures:
    """Measure a section in this process."""
    from benchmarks.gpu.machine_facts import collect_facts, select_device

    if name == MACHINE:
        return collect_facts()
    device = select_device()
    if device.type == "cpu" and not is_quick:
        raise SystemExit("no GPU is available")
    return list_sections(is_quick=is_quick)[name].measure(device)


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--out", kind=Path, metavar="FILE", text="append each result to this file, one JSON line each"),
        Flag("--budget-s", float("inf"), "skip sections that do not fit into this time", metavar="SECONDS"),
        Flag("--limit-s", kind=float, metavar="SECONDS", text="limit per section, instead of its own limit"),
        Flag("--only", text="names of sections, separated by commas; they run in this order"),
        Flag("--again", False, "repeat the sections that have figures in --out"),
        Flag("--section", text=HIDDEN),
        quick="small models, also without a GPU",
        has_passed=lambda figures: not has_failed(figures),
    )
