"""Reads what the run's folder knows of its tasks: the texts and tools of their dialogues."""

import msgspec

from configs.atomic_write import write_atomically
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from policies.dialogue.chat_format import DialogueFormat, build_dialogue_format
from policies.tools.task_description import TaskDescription, TaskDescriptions


def write_task_descriptions(folder: RunFolder, descriptions: TaskDescriptions) -> None:
    """Raises OSError."""
    write_atomically(folder.task_descriptions, msgspec.json.format(msgspec.json.encode(descriptions)))


def read_task_descriptions(folder: RunFolder) -> TaskDescriptions:
    """Empty if no task of the run has an import path."""
    path = folder.task_descriptions
    return msgspec.json.decode(path.read_bytes(), type=dict[str, TaskDescription]) if path.exists() else {}


def build_task_formats(run: RunConfig, descriptions: TaskDescriptions) -> dict[str, DialogueFormat]:
    """By name of the task; the only one is "" without [[tasks]]."""
    return {
        task.name: build_dialogue_format(task.get_dialogue(), descriptions.get(task.name))
        for task in run.resolved_tasks
    }


def load_task_formats(run: RunConfig, folder: RunFolder) -> dict[str, DialogueFormat]:
    return build_task_formats(run, read_task_descriptions(folder))
