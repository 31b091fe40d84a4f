"""`asterism task check` checks a task without a model."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.cli.console import check_json_path, make_console, make_table, print_line, write_json
from asterism.actors.cli.log.subcommands import JsonOption
from asterism.configs.errors import UnusableInput

if TYPE_CHECKING:  # the imports take a second, and each command imports this file
    from asterism.configs.schema.run_config import RunConfig
    from asterism.configs.schema.tasks import TaskConfig
    from asterism.policies.tools.task_description import TaskDescription
    from asterism.tasks.checking.play import PlayedTurn
    from asterism.tasks.checking.task_check import CheckedPlay, CheckedPrompt, TaskCheck

task_app = typer.Typer(help="Check the code and the rows of a task without a model.", no_args_is_help=True)

CodeArgument = Annotated[
    str,
    typer.Argument(
        help="Tool functions, an environment or a dialogue: the value of `import`.",
        metavar="FILE.py:Name",
        show_default=False,
    ),
]
DataOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Rows of the task.")]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="CONFIG", help="Check a task of this TOML file instead, with --task.")
]
TaskOption = Annotated[str, typer.Option(metavar="NAME", help="Name of the task in CONFIG (default: the only one).")]
TaskSetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the task, such as call_limit_s=5; may be repeated."),
]
TurnsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Turns of the assistant: JSON lines, or text with --- lines between them (default: made from the tools).",
    ),
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder of a model (default: one token for each byte).")
]

AttackOption = Annotated[
    bool, typer.Option("--attack", help="Also play answers that solve nothing, and report those with a reward.")
]

_SHOWN_TOKENS = 16  # limit of shown ids of a prompt
_SHOWN_LINES = 15  # limit of shown lines, at the start and at the end of a text
_SHOWN_CHARACTERS = 3000  # limit of shown characters of a text
_STYLES = {"problem": "bold red", "hint": "yellow"}


@task_app.callback()
def keep_subcommands() -> None:
    pass  # without a callback, typer would drop the name of the only command


@task_app.command(
    epilog="Example: asterism task check env.py:Counter --data rows.jsonl --set parameters.low=1 "
    "--set reward.functions.short=rewards.py:score_length"
)
def check(
    code: CodeArgument = "",
    data: DataOption = None,
    config: ConfigOption = None,
    task: TaskOption = "",
    override: TaskSetOption = None,
    turns: TurnsOption = None,
    tokenizer: TokenizerOption = None,
    attack: AttackOption = False,
    json_file: JsonOption = None,
) -> None:
    """Play scripted turns with a task and report problems, each with a remedy.

    Exit with 1 if there is a problem.
    """
    check_json_path(json_file)
    run = _load_config(code, data, config, task, override or [])
    checked = _check_task(run, _find_task(run, task), turns, tokenizer, attacks=attack)
    _print_check(checked, make_console())
    write_json(json_file, checked)
    raise typer.Exit(int(checked.has_problems))


# ---------------------------------------------------------------- inputs


def _load_config(code: str, data: Path | None, config: Path | None, task: str, overrides: Sequence[str]) -> RunConfig:
    """Load CONFIG, or build a configuration with one task. Raises UnusableInput."""
    from asterism.configs.load import load_run

    if config is not None:
        if code or data is not None:
            raise UnusableInput("--config: cannot be combined with FILE.py:Name or --data; use one of them")
        name = task or _find_task(load_run(config), "").name
        return load_run(config, _add_prefix(name, overrides))
    if not code or data is None or task:
        raise UnusableInput("expected FILE.py:Name --data FILE, or --config CONFIG --task NAME")
    name = re.sub(r"[^A-Za-z0-9_-]", "", code.rpartition(":")[2]).lstrip("_-") or "task"
    texts = {"name": name, "import": code, "data": str(data)}
    table = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in texts.items())
    # No engine runs here: its cache must not limit the length of a trajectory.
    settings = ["name=check", "engine.kv_tokens=1000000000000", f"tasks=[{{{table}}}]"]
    return load_run(None, [*settings, *_add_prefix(name, overrides)])


def _add_prefix(task: str, overrides: Iterable[str]) -> list[str]:
    return [f"tasks.{task}.{each}" for each in overrides]


def _find_task(run: RunConfig, name: str) -> TaskConfig:
    """Find the task by name; `name` may be empty if there is only one. Raises UnusableInput."""
    found = [task for task in run.resolved_tasks if run.tasks and name in ("", task.name)]
    if len(found) == 1:
        return found[0]
    if not run.tasks:
        raise UnusableInput("--config: the configuration has no [[tasks]]; add one, or give FILE.py:Name --data FILE")
    names = ", ".join(task.name for task in run.tasks)
    problem = f"--task {name}: there is no such task" if name else "--task: name the task"
    raise UnusableInput(f"{problem}; the configuration has {names}")


def _check_task(
    run: RunConfig, task: TaskConfig, turns: Path | None, tokenizer: Path | None, *, attacks: bool
) -> TaskCheck:
    """Play the script, or turns made from the tools. Raises UnusableInput."""
    from asterism.actors.cli.sandbox_commands import suppress_logs
    from asterism.policies.dialogue.chat_format import get_call_format
    from asterism.tasks.checking.task_check import CheckInputs, check_task_code, write_byte_tokenizer
    from asterism.tasks.checking.turn_scripts import read_turn_script
    from asterism.tasks.hosting.host_process import HostFailure

    suppress_logs()
    script = None if turns is None else read_turn_script(turns, get_call_format(task.get_dialogue()))
    description = _load_code(run, task)
    with tempfile.TemporaryDirectory(prefix="asterism-check-") as folder:
        if tokenizer is None:
            if task.get_dialogue().renderer:
                raise UnusableInput("dialogue.renderer needs the model's tokenizer; add --tokenizer FOLDER")
            write_byte_tokenizer(Path(folder), task.get_dialogue())
        inputs = CheckInputs(run, task, description, tokenizer or Path(folder), tokenizer is not None, script, attacks)
        try:
            return asyncio.run(check_task_code(inputs))
        except HostFailure as error:
            raise UnusableInput(str(error)) from None


def _load_code(run: RunConfig, task: TaskConfig) -> TaskDescription:
    """Check the code in other processes, as at the start of a run. Raises UnusableInput with the key."""
    from asterism.actors.launch.checks.task_code_checks import check_reward_function, describe_tasks
    from asterism.policies.tools.task_description import MATH

    description = describe_tasks(run, task.name)[task.name]
    for name, spec in task.get_reward().functions.items():
        if spec != MATH:
            try:
                check_reward_function(task, name, spec)
            except UnusableInput as error:
                raise UnusableInput(f"{task.key_prefix}reward.functions.{name}: {error}") from error
    return description


# ---------------------------------------------------------------- output


def _print_check(checked: TaskCheck, console: Console) -> None:
    console.print(_build_summary(checked))
    for prompt in checked.prompts:
        count = f"{len(prompt.token_ids):,} of {checked.limits.prompt_tokens:,} tokens"
        console.print(f"\n[bold]prompt of {escape(prompt.row)}[/]: {count}", highlight=False, soft_wrap=True)
        _print_prompt(console, prompt, checked.prompts[0])
    for number, play in enumerate(checked.plays, 1):
        _print_play(console, number, play)
    if checked.times:
        console.print()
        console.print(_build_times_table(checked))
    if checked.attacks:
        console.print()
        console.print(_build_attack_table(checked))
    console.print()
    console.print(_build_findings(checked))


def _print_prompt(console: Console, prompt: CheckedPrompt, first: CheckedPrompt) -> None:
    """Print the prompt without the lines at its start that it shares with the first prompt."""
    lines = prompt.text.splitlines()
    pairs = zip(lines, first.text.splitlines(), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) if prompt is not first else 0
    if shared:
        console.print(f"  ... {shared} lines as in the first prompt", style="dim", highlight=False)
    _print_text(console, "\n".join(lines[shared:]), "  ")
    ids = " ".join(map(str, prompt.token_ids[:_SHOWN_TOKENS]))
    more = " ..." if len(prompt.token_ids) > _SHOWN_TOKENS else ""
    console.print(f"  ids {ids}{more}", style="dim", highlight=False, soft_wrap=True)


def _build_summary(checked: TaskCheck) -> Table:
    limits = checked.limits
    rows = {
        "code": checked.import_path or "only Python tools",
        "kind": checked.kind,
        "tools": "\n".join(tool.signature for tool in checked.tools) or "none",
        "replayable": "yes" if checked.is_replayable else "no",
        "limits": f"prompt {limits.prompt_tokens:,} tokens, response {limits.response_tokens:,} tokens, "
        f"{limits.max_turns} turns; a call {limits.call_limit_s:g} s, a reward {limits.reward_limit_s:g} s",
        "rows": f"{checked.data}: {checked.rows:,} usable",
        "tokens": f"of {checked.tokenizer}"
        if checked.tokenizer
        else "one for each byte; --tokenizer FOLDER counts those of a model",
    }
    if checked.kind == "tools":
        del rows["replayable"]
    title = f"asterism task check: {escape(checked.task)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column("", no_wrap=True, style="bold")
    table.add_column("", overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _print_play(console: Console, number: int, play: CheckedPlay) -> None:
    console.print(f"\n[bold]play {number}[/]: {escape(play.row)}", highlight=False, soft_wrap=True)
    for turn in play.turns:
        _print_turn(console, turn)
    if play.failure:
        console.print(f"  [bold red]failed[/] {escape(play.failure)}", highlight=False, soft_wrap=True)
    if play.reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in play.components.items())
        suffix = f" ({escape(parts)})" if parts else ""
        ending = f"ended: {play.ending}, {play.response_tokens:,} response tokens"
        console.print(f"  reward {play.reward:g}{suffix}; {ending}", highlight=False, soft_wrap=True)


def _print_turn(console: Console, turn: PlayedTurn) -> None:
    console.print("  assistant", style="cyan", highlight=False)
    _print_text(console, turn.text, "    ")
    for call in turn.calls:
        status = "refused before the call" if call.status == "refused" else f"{call.method}, {call.status}"
        extra = "".join(f", {name} {value:+g}" for name, value in call.rewards.items()) + ", ends" * call.stops
        console.print(f"  result ({escape(status + extra)})", style="green", highlight=False)
        _print_text(console, call.text, "    ")


def _print_text(console: Console, text: str, indent: str) -> None:
    """Print the text without the middle of a long text."""
    from asterism.policies.dialogue.tool_results import truncate_middle

    lines = truncate_middle(text, _SHOWN_CHARACTERS).splitlines()
    if (cut := len(lines) - 2 * _SHOWN_LINES) > 0:
        lines = [*lines[:_SHOWN_LINES], f"... {cut} lines cut ...", *lines[-_SHOWN_LINES:]]
    for line in lines:
        print_line(console, f"{indent}{line}")


def _build_times_table(checked: TaskCheck) -> Table:
    table = make_table("call", ">calls", ">median, ms", ">max, ms")
    for each in checked.times:
        table.add_row(escape(each.name), str(each.calls), f"{each.median_ms:.1f}", f"{each.max_ms:.1f}")
    return table


def _build_attack_table(checked: TaskCheck) -> Table:
    table = make_table("attack", ">answers", ">passed", ">highest reward")
    for each in checked.attacks:
        highest = "no reward" if each.max_reward is None else f"{each.max_reward:g}"
        table.add_row(each.name, str(each.plays), str(each.passes), highest)
    return table


def _build_findings(checked: TaskCheck) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, style="bold")
    table.add_column("", overflow="fold")
    if not checked.has_problems:
        table.add_row("[green]ok[/]", "", "no problems")
    for finding in checked.findings:
        status = f"[{_STYLES[finding.status]}]{finding.status}[/]"
        table.add_row(status, escape(finding.subject), escape(finding.detail))
        table.add_row("", "", f"[italic]-> {escape(finding.remedy)}[/]")
    return table
