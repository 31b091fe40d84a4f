"""Classify calls of labelled programs as failed: by status, and by the word "error". Prints JSON last.

    python -m benchmarks.experiments.error_classification [--seeds 5] [--backend process|docker] [--output PNG] [--quick]

Each program runs in the sandbox with each tool that fits. Three rules then decide whether the call failed:

    status            this project: the outcome of the call is not CodeOk (policies/dialogue/tool_results.py)
    release           the public release of rStar2-Agent: its result text contains "error" in any case
    release_defaults  roc.penalty = "release" without its texts: the same word in the default result text

A false positive is a right call that a rule counts as failed, a false negative a wrong call that it does not count.
Keys of the JSON line, of all seeds together: `programs`, `right_programs`, `calls`, `right_calls`, `wrong_calls` and
`seeds`; for each rule RULE_false_positives and RULE_false_negatives (numbers of calls, mean of the seeds) and
RULE_false_positive_share and RULE_false_negative_share; `differing_calls`: calls that a rule counts differently with
another seed; `wrongly_counted`: by rule, the names of the programs.

--quick: one seed and a fifth of the programs.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asterism.bus.messages import CodeOutcome, CodeRequested
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import SandboxConfig
from asterism.policies.dialogue.chat_format import DialogueFormat, build_dialogue_format
from asterism.policies.dialogue.parse_turn import MalformedCall, parse_assistant_turn
from asterism.policies.dialogue.tool_results import (
    ResultFormat,
    contains_error,
    format_malformed_call,
    format_result,
    is_failure,
)
from asterism.policies.tools.python_tools import build_program
from asterism.sandbox.contract import Sandbox, SandboxFailure
from asterism.sandbox.select_backend import make_sandbox
from asterism.tasks.math_python import MATH_PYTHON
from benchmarks.experiments.classification_figure import draw_classification
from benchmarks.experiments.labelled_programs import NOTEBOOK, PROGRAM, LabelledCall, list_calls, list_programs

STATUS, RELEASE, RELEASE_DEFAULTS = RULES = ("status", "release", "release_defaults")
_RESULT_CHARACTERS: dict[ResultFormat, int] = {"default": DialogueConfig().result_characters, "rstar2_release": 256}
DEFAULT_OUTPUT = Path("runs/experiments/error_classification.png")
_TIME_LIMIT_S, _MEMORY_MIB = 1.0, 256  # shorter and smaller than the defaults: several programs reach them
_PATIENCE = 40.0  # max_call_extension: a busy machine changes no outcome
_IN_FLIGHT = 4
_QUICK_STRIDE = 5


class Verdict(NamedTuple):
    call: LabelledCall
    outcome: CodeOutcome | MalformedCall
    counts_as_failed: tuple[bool, ...]  # one value per rule, in the order of RULES

    def is_wrongly_counted(self, rule: str) -> bool:
        return self.counts_as_failed[RULES.index(rule)] == self.call.program.is_right


def build_format() -> DialogueFormat:
    return build_dialogue_format(DialogueConfig(tools=(NOTEBOOK, PROGRAM)), MATH_PYTHON)


async def run_calls(sandbox: Sandbox, calls: Sequence[LabelledCall]) -> list[Verdict]:
    """Run each call as the first call of a trajectory. Raises SandboxFailure."""
    free = asyncio.Semaphore(_IN_FLIGHT)
    dialogue = build_format()

    async def run_one(trajectory: int, call: LabelledCall) -> Verdict:
        (parsed,) = parse_assistant_turn(dialogue.calls.wrap(call.text), dialogue).calls
        if isinstance(parsed, MalformedCall):
            return judge_call(call, parsed)
        program = build_program(parsed.tool, parsed.arguments)
        async with free:
            result = await sandbox.run(CodeRequested(trajectory, 0, call.tool, *program))
            await sandbox.end_notebook(trajectory)
        return judge_call(call, result.outcome)

    return list(await asyncio.gather(*(run_one(number, call) for number, call in enumerate(calls))))


def judge_call(call: LabelledCall, outcome: CodeOutcome | MalformedCall) -> Verdict:
    ran = None if isinstance(outcome, MalformedCall) else outcome
    formats: tuple[ResultFormat, ResultFormat] = ("rstar2_release", "default")
    by_word = (contains_error(ran, _format_text(call, outcome, kind), kind) for kind in formats)
    return Verdict(call, outcome, (ran is None or is_failure(ran), *by_word))


def _format_text(call: LabelledCall, outcome: CodeOutcome | MalformedCall, kind: ResultFormat) -> str:
    """Format the result that the model reads."""
    limit = _RESULT_CHARACTERS[kind]
    if isinstance(outcome, MalformedCall):
        return format_malformed_call(outcome, limit, kind)
    return format_result(outcome, limit, kind, call.program.code)


async def run_in_sandbox(calls: Sequence[LabelledCall], backend: str, seed: int) -> list[Verdict]:
    """Run all calls in a sandbox with this seed. Raises SandboxFailure."""
    limits: dict[str, Any] = {"time_limit_s": _TIME_LIMIT_S, "max_call_extension": _PATIENCE, "memory_mib": _MEMORY_MIB}
    config = SandboxConfig(backend=backend, **limits)  # pyright: ignore[reportArgumentType]
    sandbox = make_sandbox(config, seed, "error-classification")
    await sandbox.start()
    try:
        return await run_calls(sandbox, calls)
    finally:
        await sandbox.close()


def compute_figures(by_seed: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    verdicts = [verdict for of_seed in by_seed for verdict in of_seed]
    seeds = len(by_seed)
    programs = {verdict.call.program for verdict in verdicts}
    right = sum(verdict.call.program.is_right for verdict in by_seed[0])
    wrong = len(by_seed[0]) - right
    figures: dict[str, Any] = {
        "programs": len(programs),
        "right_programs": sum(program.is_right for program in programs),
        "calls": right + wrong,
        "right_calls": right,
        "wrong_calls": wrong,
        "seeds": seeds,
        "differing_calls": sum(
            len({verdict.counts_as_failed for verdict in of_call}) > 1 for of_call in zip(*by_seed, strict=True)
        ),
    }
    for rule in RULES:
        mistakes = [verdict.call.program.is_right for verdict in verdicts if verdict.is_wrongly_counted(rule)]
        for name, number, total in (
            ("false_positive", mistakes.count(True) / seeds, right),
            ("false_negative", mistakes.count(False) / seeds, wrong),
        ):
            figures |= {f"{rule}_{name}s": round(number, 2), f"{rule}_{name}_share": round(number / total, 4)}
    figures["wrongly_counted"] = {
        rule: sorted({verdict.call.program.name for verdict in verdicts if verdict.is_wrongly_counted(rule)})
        for rule in RULES
    }
    return figures


def compute_shares(verdicts: Sequence[Verdict], *, is_right: bool) -> dict[str, dict[str, float]]:
    """Return, by kind of program and rule, the share of calls that the rule counts wrongly."""
    kinds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.call.program.is_right == is_right:
            kinds.setdefault(verdict.call.program.kind, []).append(verdict)
    return {
        kind: {rule: sum(each.is_wrongly_counted(rule) for each in of_kind) / len(of_kind) for rule in RULES}
        for kind, of_kind in kinds.items()
    }


def print_table(shares: dict[str, dict[str, float]], title: str) -> None:
    print(f"{title:34}" + "".join(f"{rule:>18}" for rule in RULES))
    for kind, by_rule in shares.items():
        print(f"  {kind:32}" + "".join(f"{by_rule[rule]:18.0%}" for rule in RULES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="sandbox seeds: 0 to N - 1 (default 5)")
    parser.add_argument("--backend", choices=["process", "docker", "auto"], default="process")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="path of the picture")
    parser.add_argument("--quick", action="store_true", help="one seed and a fifth of the programs")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1: {options.seeds}")
    programs = list_programs()[:: _QUICK_STRIDE if options.quick else 1]
    calls = list(list_calls(programs))
    try:
        by_seed = [
            asyncio.run(run_in_sandbox(calls, options.backend, seed))
            for seed in range(1 if options.quick else options.seeds)
        ]
    except SandboxFailure as error:
        sys.exit(f"--backend {options.backend}: {error}")
    verdicts = [verdict for of_seed in by_seed for verdict in of_seed]
    positives, negatives = (compute_shares(verdicts, is_right=is_right) for is_right in (True, False))
    print_table(positives, "false positives: right calls")
    print_table(negatives, "false negatives: wrong calls")
    figures = compute_figures(by_seed)
    try:
        print(f"picture: {draw_classification(positives, negatives, figures, options.output)}")
    except OSError as error:
        sys.exit(f"--output {options.output}: {error}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
