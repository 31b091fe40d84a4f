"""These checks load the user's code in another process, as a run loads it."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.configs.errors import UnusableInput
from asterism.configs.loading.error_messages import prefix_key
from asterism.configs.loading.secret_references import describe_references
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import RewardConfig, TaskConfig
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.hosting.task_services import build_host_command


class CheckedInput(NamedTuple):
    description: str
    warnings: tuple[str, ...] = ()


def check_task(task: TaskConfig, descriptions: dict[str, TaskDescription]) -> CheckedInput:
    """Describe the task in another process, and add the description to `descriptions`."""
    found = run_host(replace(task, reward=RewardConfig()), f"{task.key_prefix}import", f"{task.key_prefix}parameters")
    description = msgspec.json.decode(found, type=TaskDescription)
    reward, dialogue = task.get_reward(), task.get_dialogue()
    if description.kind == "environment" and not (description.has_reward or reward.functions):
        raise UnusableInput(
            f"{task.import_path} has no `get_reward`, and {task.key_prefix}reward.functions names no function"
        )
    if dialogue.tools and not description.takes_tools:
        raise UnusableInput(
            f"{task.import_path} is a dialogue, which has no tools; remove {task.key_prefix}dialogue.tools"
        )
    if "{tools}" in dialogue.system and not (description.tools or dialogue.tools):
        raise UnusableInput(f"{task.import_path} has no tools, but {task.key_prefix}dialogue.system contains {{tools}}")
    descriptions[task.name] = description
    tools = ", ".join(tool.name for tool in description.tools)
    return CheckedInput(f"{task.import_path}: {description.kind}{f' with {tools}' if tools else ''}")


def describe_tasks(run: RunConfig, name: str = "") -> dict[str, TaskDescription]:
    """Describe the task `name`, or all tasks. Raises UnusableInput with the key."""
    descriptions: dict[str, TaskDescription] = {}
    for task in run.resolved_tasks:
        if name not in ("", task.name):
            continue
        if not task.import_path:
            descriptions[task.name] = DEFAULT_TASK
        else:
            try:
                check_task(task, descriptions)
            except UnusableInput as error:
                raise UnusableInput(prefix_key(f"{task.key_prefix}import", str(error))) from error
    return descriptions


def check_reward_function(task: TaskConfig, name: str, spec: str) -> CheckedInput:
    reward = RewardConfig(functions={name: spec})
    run_host(replace(task, import_path="", reward=reward), f"{task.key_prefix}reward.functions.{name}")
    return CheckedInput(spec)


def list_references(run: RunConfig) -> Mapping[str, Mapping[str, object]]:
    """Return, by key, the tables of the configuration that may have references to environment variables."""
    tables: dict[str, Mapping[str, object]] = {}
    for task in run.resolved_tasks:
        tables |= {f"{task.key_prefix}parameters": task.parameters, f"{task.key_prefix}variables": task.variables}
    return {key: table for key, table in tables.items() if table}


def check_references(table: Mapping[str, object], key: str) -> CheckedInput:
    return CheckedInput(describe_references(table, key))


def run_host(task: TaskConfig, *keys: str) -> str:
    """Load the task's code in another process, and return the last line that it prints. Raises UnusableInput
    with a text that omits the first of `keys`."""
    command = build_host_command(task, DEFAULT_TASK, "")  # the host loads all code that the settings name
    if task.python and not Path(task.python).is_file():
        raise UnusableInput(f"{task.key_prefix}python: {task.python}: no such file")
    return _run_program(command.build_arguments(), command.build_environment(), keys, command.build_input())


def check_import_path(key: str, spec: str, known: Sequence[str]) -> CheckedInput:
    if ":" not in spec:
        raise UnusableInput(f'"{spec}" is unknown; known: {", ".join(known)}, or an import path such as "file.py:name"')
    _run_program([sys.executable, "-P", "-m", "asterism.configs.import_path", key, spec], None, [key])
    return CheckedInput(spec)


def _run_program(
    command: Sequence[str], environment: Mapping[str, str] | None, keys: Sequence[str], content: bytes = b""
) -> str:
    """Run the program with `content` as its stdin, and return its last line of output."""
    found = subprocess.run(command, input=content, capture_output=True, env=environment)
    if found.returncode:
        last_line = found.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UnusableInput(last_line.removeprefix(f"{keys[0]}: ") or f"exit code {found.returncode}")
    return found.stdout.decode(errors="replace").strip().rpartition("\n")[2]
