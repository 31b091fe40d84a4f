"""Finds problems in the plays of a task and in its host process. Each problem has a remedy; hints fail no check."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from asterism.configs.schema.success import SuccessRule
from asterism.policies.dialogue.tool_results import FAILURE
from asterism.policies.tools.python_tools import PYTHON_TOOLS
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks.checking.hollow_answers import PROGRAM_ATTACKS
from asterism.tasks.checking.play import Play
from asterism.tasks.hosting.wire import Inspected

_BLOCKED_S = 0.05  # seconds; a longer delay of the event loop is a problem
_MAX_CHARACTERS = 200  # limit of a quoted text
_ROWS_SHOWN = 3


class CheckFinding(msgspec.Struct, frozen=True):
    status: Literal["problem", "hint"]
    subject: str
    detail: str
    remedy: str


def name_opening(description: TaskDescription) -> str:
    return "init" if description.kind == "dialogue" else "reset"


# ---------------------------------------------------------------- rows and prompts


def find_row_problem(error: str, num_rows: int) -> CheckFinding:
    remedy = "Correct or remove the row; the rows after it are not checked."
    return CheckFinding("problem", "rows", f"{error} (usable rows before it: {num_rows:,})", remedy)


def find_long_prompts(tokens_by_row: Mapping[str, int], limit: int, *, has_model_tokenizer: bool) -> list[CheckFinding]:
    long = {row: count for row, count in tokens_by_row.items() if count > limit}
    if not long:
        return []
    names = ", ".join(list(long)[:_ROWS_SHOWN])
    detail = (
        f"{len(long):,} of {len(tokens_by_row):,} prompts have more than dialogue.prompt_tokens = {limit} tokens, "
        f"up to {max(long.values()):,}: {names}"
    )
    if not has_model_tokenizer:
        remedy = "A model's tokenizer needs fewer tokens: count them with --tokenizer FOLDER."
        return [CheckFinding("hint", "prompts", f"{detail} (one token for each byte)", remedy)]
    remedy = "Increase dialogue.prompt_tokens, or shorten the rows: a run skips longer prompts."
    return [CheckFinding("problem", "prompts", detail, remedy)]


# ---------------------------------------------------------------- calls


def find_call_problems(
    plays: Sequence[Play], description: TaskDescription, *, is_generated: bool
) -> list[CheckFinding]:
    findings = list(_find_failed_plays(plays, description))
    found: dict[tuple[str, str], CheckFinding] = {}
    for call in (call for play in plays for turn in play.turns for call in turn.calls):
        if call.status not in ("raised", "timed out") or (call.method, call.status) in found:
            continue
        error = call.text.removeprefix(f"{FAILURE}\n")
        detail = f"{call.method}({shorten(call.arguments)}): {shorten(error)}"
        if call.status == "timed out":
            remedy = "Make the call faster, or increase call_limit_s of the task."
            found[call.method, call.status] = CheckFinding("problem", call.method, detail, remedy)
            continue
        # By convention, a ValueError has a text for the model. Made-up arguments may fail.
        status = "hint" if is_generated or error.startswith("ValueError:") else "problem"
        remedy = "Correct the tool; the model reads the error as the result of its call."
        if is_generated:
            remedy = (
                "The arguments are made up. Give useful calls with --turns FILE; if a useful one raises too, correct the "
                "tool. The model reads the error as the result of its call."
            )
        found[call.method, call.status] = CheckFinding(status, call.method, detail, remedy)
    return [*findings, *found.values(), *_find_uncalled_tools(plays, description)]


def _find_failed_plays(plays: Sequence[Play], description: TaskDescription) -> Iterator[CheckFinding]:
    for place in ("opening", "call", "reward"):
        failures = Counter(play.failure for play in plays if play.failed_at == place)
        for failure, count in failures.items():
            subject = name_opening(description) if place == "opening" else place
            remedy = "Correct the code. A run leaves such a trajectory out of the training."
            if place == "reward":
                remedy = "Correct the function. A run leaves a trajectory without a reward out of the training."
            yield CheckFinding("problem", subject, f"{shorten(failure)} ({count} of {len(plays)} plays)", remedy)


def _find_uncalled_tools(plays: Sequence[Play], description: TaskDescription) -> list[CheckFinding]:
    called = {call.method for play in plays for turn in play.turns for call in turn.calls}
    tools = [tool.name for tool in description.tools]
    missing = [name for name in tools if name not in called and name not in PYTHON_TOOLS]
    if not missing:
        return []
    detail = f"never called: {', '.join(missing)}; the plays ended before"
    return [CheckFinding("hint", "tools", detail, "Give turns with a call of each tool with --turns FILE.")]


# ---------------------------------------------------------------- rewards


def find_constant_reward(plays: Sequence[Play], *, has_instances: bool) -> list[CheckFinding]:
    scored = [play for play in plays if play.reward is not None]
    if len(scored) < 2 or len({play.reward for play in scored}) > 1:
        return []
    detail = f"{scored[0].reward:g} in all {len(scored)} plays"
    answers = {play.script.has_truth for play in scored if play.script.is_generated}
    if answers == {True, False} and not has_instances:
        detail += ", for the row's ground truth as the answer and for a wrong answer"
        remedy = "Check the reward functions and the ground truth: a group with equal rewards teaches nothing."
        return [CheckFinding("problem", "reward", detail, remedy)]
    remedy = "Give turns of which some should be rewarded with --turns FILE; `{column}` stands for the row's value."
    return [CheckFinding("hint", "reward", detail, remedy)]


_REMEDIES = {
    False: "Compare the whole answer, and not a part of it (docs/rewards.md).",
    True: "Run tests outside of the process of the program, as asterism.tasks.rewards.unit_tests does (docs/rewards.md).",
}


class AttackPlay(NamedTuple):
    attack: str
    text: str  # text of the last turn
    play: Play

    def passes(self, success: SuccessRule) -> bool:
        return self.play.reward is not None and success.is_met(self.play.reward, self.play.components)


def find_false_passes(attacked: Sequence[AttackPlay], success: SuccessRule) -> list[CheckFinding]:
    """Find hollow answers that are a success, one for each kind of attack."""
    passed: dict[str, list[AttackPlay]] = {}
    for each in attacked:
        if each.passes(success):
            passed.setdefault(each.attack, []).append(each)
    return [
        CheckFinding(
            "problem",
            f"attack: {name}",
            f"{_describe_pass(first)} ({len(others) + 1} such answers)",
            f"{_REMEDIES[name in PROGRAM_ATTACKS]} If its form alone deserves this reward, set evaluation.success.",
        )
        for name, (first, *others) in passed.items()
    ]


def _describe_pass(attacked: AttackPlay) -> str:
    play = attacked.play
    return f"{play.row}: reward {play.reward:g} for {shorten(attacked.text)!r}"


# ---------------------------------------------------------------- instances


def find_replay_problems(
    plays: Sequence[Play], repeated: Sequence[Play], description: TaskDescription
) -> list[CheckFinding]:
    """Compare plays with `repeated`: the same scripts in instances of another process, in the order of `plays`."""
    difference = next(filter(None, map(_find_difference, plays, repeated)), "")
    if difference and description.is_replayable:
        remedy = (
            "Let results depend only on the row and the calls (seed random generators from the row; no clock, no "
            "global state), or remove `replayable = True`."
        )
        name = f"replayable = True, but {difference.format(opening=name_opening(description))}"
        return [CheckFinding("problem", "replayable", name, remedy)]
    has_calls = any(len(play.outcomes) > 1 for play in plays)
    if not difference and not description.is_replayable and has_calls and not any(play.failure for play in plays):
        remedy = "Set `replayable = True` on the class: instances of a process that dies are then created again."
        detail = "not declared, although each script had the same results in two processes"
        return [CheckFinding("hint", "replayable", detail, remedy)]
    return []


def _find_difference(play: Play, repeated: Play) -> str:
    """Describe a difference. `{opening}` is replaced by the name of the method that opens an instance."""
    for place, (one, other) in enumerate(zip(play.outcomes, repeated.outcomes, strict=False)):
        if one.digest != other.digest:
            method = one.method or "{opening}"
            texts = f"{shorten(play.texts[place])!r} and {shorten(repeated.texts[place])!r}"
            return f"{method} has two results for {play.row}: {texts.replace('{', '{{').replace('}', '}}')}"
    return ""


def find_blocking_calls(inspected: Inspected) -> list[CheckFinding]:
    """Find calls that block the event loop, except calls that are slow only once, such as a first import."""
    findings: list[CheckFinding] = []
    for function, delays_s in inspected.delays_s.items():
        largest = sorted(delays_s)[-2:]
        if largest and largest[0] >= _BLOCKED_S:
            detail = f"blocks the event loop for {1000 * largest[-1]:.0f} ms; all other calls of the process wait"
            remedy = "Await the slow part (asyncio.sleep, an async client), or make the function a plain `def`."
            findings.append(CheckFinding("problem", function, detail, remedy))
    return findings


def find_leaks(before: Inspected, after: Inspected, num_plays: int) -> list[CheckFinding]:
    """Find live instances, and threads or processes if at least one per play is left: shared ones can stay."""
    findings: list[CheckFinding] = []
    if (live := after.live_instances - before.live_instances) > 0:
        detail = f"{live} of {num_plays} instances are alive after `close`"
        remedy = "Remove all references to an instance in `close`: global lists, caches, callbacks, threads."
        findings.append(CheckFinding("problem", "instances", detail, remedy))
    for subject, old, new, remedy in (
        ("threads", before.threads, after.threads, "End the threads of an instance in `close`."),
        ("child processes", before.children, after.children, "End the processes of an instance in `close`."),
    ):
        left = list((Counter(new) - Counter(old)).elements())
        if len(left) >= num_plays:
            detail = f"{len(left)} are left after {num_plays} plays: {shorten(', '.join(left))}"
            findings.append(CheckFinding("problem", subject, detail, remedy))
    return findings


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
