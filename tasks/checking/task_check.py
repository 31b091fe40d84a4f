"""Checks one task: its rows and prompts, three plays of scripted turns, an answer for each row, its host process after
the plays, and hollow answers."""

import contextlib
import statistics
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import ModelConfig, RunConfig
from asterism.configs.schema.success import SuccessRule
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.data_files import DatasetError, list_data_files
from asterism.engine.data.datasets import DatasetProblem, read_problems
from asterism.engine.data.task_inputs import build_task_rules, get_row_layout
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.dialogue.chat_format import (
    PROTOCOL_TAGS,
    TURN_END,
    TURN_START,
    build_dialogue_format,
    get_call_format,
)
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.tools.task_description import TaskDescription, list_success_warnings
from asterism.sandbox.contract import Sandbox
from asterism.sandbox.select_backend import make_sandbox
from asterism.tasks.checking.hollow_answers import list_hollow_answers
from asterism.tasks.checking.lazy_sandbox import LazySandbox
from asterism.tasks.checking.play import UNLIMITED, Play, PlayedTurn, play_script
from asterism.tasks.checking.row_problems import find_row_score_problems
from asterism.tasks.checking.row_scores import RowScores, score_rows
from asterism.tasks.checking.task_problems import (
    AttackPlay,
    CheckFinding,
    find_blocking_calls,
    find_call_problems,
    find_constant_reward,
    find_false_passes,
    find_leaks,
    find_long_prompts,
    find_replay_problems,
    find_row_problem,
    name_opening,
)
from asterism.tasks.checking.turn_scripts import TurnScript, fill_columns, format_signature, generate_script
from asterism.tasks.hosting.task_services import build_task_services
from asterism.tasks.hosting.wire import Inspected
from asterism.tasks.solo_driver import SoloTask
from asterism.tasks.tiny.tiny_tokenizer import END_OF_TEXT, AddedTexts, save_tokenizer, train_tokenizer

NUM_PLAYS = 3
_MAX_ROWS = 100_000  # rows to read, as at the start of a run
_MAX_COUNTED_PROMPTS = 10_000


class CheckedTool(msgspec.Struct, frozen=True):
    signature: str
    description: str


class CheckedLimits(msgspec.Struct, frozen=True):
    prompt_tokens: int
    response_tokens: int
    max_turns: int
    call_limit_s: float
    reward_limit_s: float


class CheckedPrompt(msgspec.Struct, frozen=True):
    row: str
    text: str
    token_ids: list[int]


class CheckedPlay(msgspec.Struct, frozen=True):
    row: str
    turns: list[PlayedTurn]
    ending: str
    response_tokens: int
    reward: float | None
    components: dict[str, float]
    failure: str


class CheckedAttack(msgspec.Struct, frozen=True):
    """All hollow answers of one kind."""

    name: str
    plays: int
    passes: int  # answers that pass by evaluation.success
    max_reward: float | None  # None: no play has a reward


class CheckedTimes(msgspec.Struct, frozen=True):
    name: str
    calls: int
    median_ms: float
    max_ms: float


class TaskCheck(msgspec.Struct, frozen=True):
    task: str
    import_path: str
    kind: str
    tools: tuple[CheckedTool, ...]
    is_replayable: bool
    limits: CheckedLimits
    data: str
    rows: int
    tokenizer: str  # tokenizer's folder; empty: one token for each byte
    prompts: tuple[CheckedPrompt, ...]
    plays: tuple[CheckedPlay, ...]
    times: tuple[CheckedTimes, ...]
    attacks: tuple[CheckedAttack, ...]  # empty without --attack
    findings: tuple[CheckFinding, ...]

    @property
    def has_problems(self) -> bool:
        return any(finding.status == "problem" for finding in self.findings)


class CheckInputs(NamedTuple):
    run: RunConfig
    task: TaskConfig  # a task of run.resolved_tasks
    description: TaskDescription
    tokenizer_folder: Path
    is_model_tokenizer: bool
    script: TurnScript | None  # None: a script is generated for each play
    attacks: bool = False  # whether to play hollow answers too

    @property
    def data(self) -> Path:
        return RunFolder(Path(self.run.runs_folder) / self.run.name).expand_path(self.task.data)

    @property
    def has_instances(self) -> bool:
        return self.description.has_instances


def write_byte_tokenizer(folder: Path, dialogue: DialogueConfig) -> None:
    """Write a tokenizer with one token for each byte, and one for each tag of the dialogue."""
    calls = get_call_format(dialogue)
    tags = (END_OF_TEXT, TURN_START, TURN_END, *PROTOCOL_TAGS, calls.opening, calls.closing, *dialogue.stop_tokens)
    tags = dict.fromkeys((*tags, dialogue.answer_open, dialogue.answer_close))
    save_tokenizer(train_tokenizer([], AddedTexts(list(tags), [])), folder, dialogue.prefill)


async def check_task_code(inputs: CheckInputs) -> TaskCheck:
    """Check a task. Raises UnusableInput, and HostFailure if the host process cannot start."""
    tokenizer = load_tokenizer(inputs.tokenizer_folder)
    rules = _build_rules(inputs, tokenizer)
    rows, findings = _read_rows(inputs)
    played = await _play_rows(inputs, rules, tokenizer, rows) if rows else _Played([], [])
    counted = {play.row: len(play.prompt_ids) for play in played.plays if play.failed_at != "opening"}
    if not inputs.has_instances:
        counted |= {row.name: len(rules.renderer.render_prompt(row.question)) for row in rows[:_MAX_COUNTED_PROMPTS]}
    limit = inputs.task.get_dialogue().prompt_tokens
    findings += find_long_prompts(counted, limit, has_model_tokenizer=inputs.is_model_tokenizer)
    findings += _find_problems(inputs, played)
    attacked = await _attack_rows(inputs, rules, tokenizer, _choose_rows(rows)) if inputs.attacks and rows else []
    findings += find_false_passes(attacked, inputs.run.success)
    return _build_check(inputs, len(rows), played.plays, attacked, findings)


def _build_rules(inputs: CheckInputs, tokenizer: FastTokenizer) -> Rules:
    """Build the rules of a rollout without limits of tokens and turns."""
    rules = build_task_rules(inputs.run, inputs.task, inputs.description, tokenizer)
    is_limited = rules.kind == "dialogue"  # the dialogue answers each turn, so the last turn must end it
    num_turns = len(inputs.script.turns) if inputs.script else NUM_PLAYS
    max_turns = num_turns if is_limited else UNLIMITED
    return replace(rules, response_tokens=UNLIMITED, prompt_tokens=UNLIMITED, max_turns=max_turns)


# ---------------------------------------------------------------- rows


def _read_rows(inputs: CheckInputs) -> tuple[list[DatasetProblem], list[CheckFinding]]:
    """Return the rows before the first unusable one. Raises DatasetError if there is no such file."""
    list_data_files(inputs.data)
    rows: list[DatasetProblem] = []
    layout = get_row_layout(inputs.task, inputs.description)
    try:
        for row in read_problems(inputs.data, max_rows=_MAX_ROWS, layout=layout):
            rows.append(row)
    except DatasetError as error:
        return rows, [find_row_problem(str(error), len(rows))]
    return rows, []


def _choose_rows(rows: Sequence[DatasetProblem]) -> list[DatasetProblem]:
    """Return the first, a middle and the last row; a row can occur more than once."""
    return [rows[0], rows[len(rows) // 2], rows[-1]]


# ---------------------------------------------------------------- plays


class _Played(NamedTuple):
    plays: list[Play]
    repeated: list[Play]  # plays in another process; empty without instances
    before: Inspected | None = None
    after: Inspected | None = None
    scores: RowScores | None = None  # scores of all rows; None with instances, and after a timeout


async def _play_rows(
    inputs: CheckInputs, rules: Rules, tokenizer: FastTokenizer, rows: Sequence[DatasetProblem]
) -> _Played:
    config = replace(inputs.run.sandbox, backend="process")
    sandbox = LazySandbox(make_sandbox(config, inputs.run.seed, "check", inputs.run.acceptance))
    chosen = _choose_rows(rows)
    scripts = [_get_script(inputs, rules, row, number) for number, row in enumerate(chosen)]
    numbered = list(enumerate(zip(chosen, scripts, strict=True)))
    scores: RowScores | None = None
    try:
        async with _playing(inputs, rules, tokenizer, sandbox) as task:
            before = after = await task.services.inspect(task.name)
            plays: list[Play] = []
            for number, (row, script) in numbered:
                plays.append(await play_script(task, row, script, number))
                after = await task.services.inspect(task.name)
                if plays[-1].has_timeout:
                    break
            if not inputs.has_instances and not plays[-1].has_timeout:
                scores = await score_rows(task, rows)
        repeated: list[Play] = []
        if inputs.has_instances and not plays[-1].has_timeout:
            async with _playing(inputs, rules, tokenizer, sandbox) as task:
                for number, (row, script) in reversed(numbered):
                    repeated.insert(0, await play_script(task, row, script, number))
    finally:
        await sandbox.close()
    return _Played(plays, repeated, before, after, scores)


async def _attack_rows(
    inputs: CheckInputs, rules: Rules, tokenizer: FastTokenizer, rows: Sequence[DatasetProblem]
) -> list[AttackPlay]:
    """Play each row with hollow answers as last turns."""
    config = replace(inputs.run.sandbox, backend="process")
    sandbox = LazySandbox(make_sandbox(config, inputs.run.seed, "check", inputs.run.acceptance))
    attacked: list[AttackPlay] = []
    try:
        async with _playing(inputs, rules, tokenizer, sandbox) as task:
            for row in rows:
                for attack, text in list_hollow_answers(rules.dialogue, row):
                    script = TurnScript((text,) * (NUM_PLAYS if rules.kind == "dialogue" else 1))
                    attacked.append(AttackPlay(attack, text, await play_script(task, row, script, len(attacked))))
    finally:
        await sandbox.close()
    return attacked


@contextlib.asynccontextmanager
async def _playing(
    inputs: CheckInputs, rules: Rules, tokenizer: FastTokenizer, sandbox: Sandbox
) -> AsyncGenerator[SoloTask]:
    """Yield the task with its own host process."""
    task = replace(inputs.task, processes=1)
    run = replace(inputs.run, tasks=(task,), model=ModelConfig(checkpoint=str(inputs.tokenizer_folder)))
    descriptions = {task.name: inputs.description}
    services = build_task_services(run, RunFolder(Path(run.runs_folder) / run.name), descriptions, sandbox)
    sends_row = get_row_layout(task, inputs.description).all_columns
    try:
        yield SoloTask(task.name, rules, tokenizer, services, sandbox, sends_row)
    finally:
        await services.close()


def _get_script(inputs: CheckInputs, rules: Rules, row: DatasetProblem, number: int) -> TurnScript:
    if inputs.script is not None:
        return fill_columns(inputs.script, row)
    # Reward functions may read answers without tags.
    is_bare = number == NUM_PLAYS - 1 and bool(inputs.task.get_reward().functions)
    return generate_script(rules.kind, rules.dialogue, row, number, is_bare=is_bare)


# ---------------------------------------------------------------- result


def _find_problems(inputs: CheckInputs, played: _Played) -> list[CheckFinding]:
    plays, description = played.plays, inputs.description
    findings = find_call_problems(plays, description, is_generated=inputs.script is None)
    if len({play.row for play in plays}) > 1:
        findings += find_constant_reward(plays, has_instances=inputs.has_instances)
    if played.scores is not None:
        findings = _merge_findings(findings, find_row_score_problems(played.scores, inputs.run.success))
    findings += [
        CheckFinding("hint", "success", warning, "Set evaluation.success; docs/rewards.md has its forms.")
        for warning in list_success_warnings(inputs.task, description, inputs.run.success)
    ]
    findings += find_replay_problems(plays, played.repeated, description) if played.repeated else []
    if played.before is not None and played.after is not None:
        findings += find_blocking_calls(played.after)
        if not plays[-1].has_timeout:  # Python cannot stop the thread of a timed-out call
            findings += find_leaks(played.before, played.after, len(plays))
    return findings


def _merge_findings(of_plays: list[CheckFinding], of_rows: list[CheckFinding]) -> list[CheckFinding]:
    """Merge findings. If the rows have a problem, omit the findings of plays about the reward."""
    has_failures = any(finding.status == "problem" for finding in of_rows)
    kept = [finding for finding in of_plays if not (has_failures and finding.subject == "reward")]
    return [*kept, *of_rows]


def _build_check(
    inputs: CheckInputs,
    num_rows: int,
    plays: Sequence[Play],
    attacked: Sequence[AttackPlay],
    findings: Sequence[CheckFinding],
) -> TaskCheck:
    task, description = inputs.task, inputs.description
    dialogue = task.get_dialogue()
    tools = build_dialogue_format(dialogue, description).tools
    return TaskCheck(
        task=task.name,
        import_path=task.import_path,
        kind=description.kind,
        tools=tuple(CheckedTool(format_signature(tool), tool.description) for tool in tools),
        is_replayable=description.is_replayable,
        limits=CheckedLimits(
            dialogue.prompt_tokens,
            dialogue.response_tokens,
            dialogue.max_turns,
            task.call_limit_s,
            task.get_reward().time_limit_s,
        ),
        data=str(inputs.data),
        rows=num_rows,
        tokenizer=str(inputs.tokenizer_folder) if inputs.is_model_tokenizer else "",
        prompts=tuple(_list_prompts(plays)),
        plays=tuple(map(_describe_play, plays)),
        times=tuple(_measure_times(plays, description)),
        attacks=tuple(_sum_attacks(attacked, inputs.run.success)),
        findings=tuple(sorted(findings, key=lambda finding: finding.status != "problem")),
    )


def _list_prompts(plays: Sequence[Play]) -> Iterator[CheckedPrompt]:
    """Return one prompt for each row, without prompts that lack their opening."""
    by_row = {play.row: play for play in plays if play.failed_at != "opening"}
    for row, play in by_row.items():
        yield CheckedPrompt(row, play.prompt, play.prompt_ids)


def _describe_play(play: Play) -> CheckedPlay:
    return CheckedPlay(
        play.row, play.turns, play.ending, play.response_tokens, play.reward, play.components, play.failure
    )


def _sum_attacks(attacked: Sequence[AttackPlay], success: SuccessRule) -> Iterator[CheckedAttack]:
    for name in dict.fromkeys(each.attack for each in attacked):
        tried = [each for each in attacked if each.attack == name]
        rewards = [each.play.reward for each in tried if each.play.reward is not None]
        yield CheckedAttack(name, len(tried), sum(each.passes(success) for each in tried), max(rewards, default=None))


def _measure_times(plays: Sequence[Play], description: TaskDescription) -> Iterator[CheckedTimes]:
    durations_s: defaultdict[str, list[float]] = defaultdict(list)
    for play in plays:
        if play.opening_s is not None:
            durations_s[name_opening(description)].append(play.opening_s)
        for call in (call for turn in play.turns for call in turn.calls if call.method):
            durations_s[call.method].append(call.duration_s)
    durations_s["reward"] += [play.scoring_s for play in plays if play.scoring_s is not None]
    for name, each in durations_s.items():
        if each:
            yield CheckedTimes(name, len(each), 1000 * statistics.median(each), 1000 * max(each))
