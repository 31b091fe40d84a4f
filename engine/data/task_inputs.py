"""The inputs of a run's tasks: descriptions in the run's folder, formats of dialogues, and layouts of rows."""

from collections.abc import Mapping

import msgspec

from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.datasets import DatasetProblem, RowLayout
from asterism.engine.data.family_dialogues import FamilyDialogues
from asterism.engine.hf.family_renderer import build_family_renderer
from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.policies.dialogue.chat_format import DialogueFormat, build_dialogue_format
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer, DialogueRenderer
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.tools.task_description import MATH, TaskDescription, TaskDescriptions, list_reward_functions


def write_task_descriptions(folder: RunFolder, descriptions: TaskDescriptions) -> None:
    """Write the descriptions into the run's folder. Raises OSError."""
    write_atomically(folder.task_descriptions, msgspec.json.format(msgspec.json.encode(descriptions)))


def read_task_descriptions(folder: RunFolder) -> TaskDescriptions:
    """Read the descriptions of all tasks. Raises UnusableInput if the launcher has not written the file."""
    path = folder.task_descriptions
    check_file(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, TaskDescription])
    except (OSError, msgspec.MsgspecError) as error:
        raise UnusableInput(f"{path}: {error}; `asterism run` writes this file") from None


def build_task_formats(run: RunConfig, descriptions: TaskDescriptions) -> dict[str, DialogueFormat]:
    """Build the formats by name of the task. Without [[tasks]], the only name is ""."""
    return {
        task.name: build_dialogue_format(task.get_dialogue(), descriptions[task.name]) for task in run.resolved_tasks
    }


def load_task_formats(run: RunConfig, folder: RunFolder) -> dict[str, DialogueFormat]:
    return build_task_formats(run, read_task_descriptions(folder))


def load_task_renderers(run: RunConfig, folder: RunFolder, tokenizer: FastTokenizer) -> dict[str, DialogueRenderer]:
    descriptions = read_task_descriptions(folder)
    return {
        task.name: build_renderer(task.get_dialogue(), descriptions[task.name], tokenizer)
        for task in run.resolved_tasks
    }


def build_renderer(config: DialogueConfig, description: TaskDescription, tokenizer: FastTokenizer) -> DialogueRenderer:
    """Build the renderer of a task. Raises UnusableInput for an unusable `renderer`."""
    dialogue = build_dialogue_format(config, description)
    return (
        build_family_renderer(config, dialogue, tokenizer) if config.renderer else ChatMLRenderer(tokenizer, dialogue)
    )


def build_task_rules(run: RunConfig, task: TaskConfig, description: TaskDescription, tokenizer: FastTokenizer) -> Rules:
    """Build the rules of a task's trajectories. Raises UnusableInput for an unusable `renderer`."""
    dialogue = task.get_dialogue()
    renderer = build_renderer(dialogue, description, tokenizer)
    return Rules(
        renderer=renderer,
        response_tokens=dialogue.response_tokens,
        max_turns=dialogue.max_turns,
        max_calls_per_turn=dialogue.max_calls_per_turn,
        result_characters=dialogue.result_characters,
        stop_token_ids=renderer.stop_token_ids,
        result_format=dialogue.result_format,
        kind=description.kind,
        prompt_tokens=dialogue.prompt_tokens,
        surplus_calls=dialogue.surplus_calls,
        graded_text=dialogue.graded_text,
        counts_release_marks=run.roc.penalty == "release",
        evaluated_response_tokens=run.evaluation.response_tokens,
    )


def build_family_dialogues(
    run: RunConfig, descriptions: Mapping[str, TaskDescription], tokenizer: FastTokenizer
) -> dict[str, FamilyDialogues]:
    """Build the FamilyDialogues of tasks with dialogue.renderer, by name. Raises UnusableInput for a wrong renderer."""
    families: dict[str, FamilyDialogues] = {}
    for task in run.resolved_tasks:
        if family := task.get_dialogue().renderer:
            dialogue = build_dialogue_format(task.get_dialogue(), descriptions[task.name])
            renderer = build_family_renderer(task.get_dialogue(), dialogue, tokenizer)
            families[task.name] = FamilyDialogues(family, renderer)
    return families


def get_row_layout(task: TaskConfig, description: TaskDescription) -> RowLayout:
    """Return the required fields of the task's rows. Environments and reward functions get all columns."""
    functions = list_reward_functions(task.get_reward(), description)
    is_graded = MATH in functions.values()
    return RowLayout(
        all_columns=description.has_instances or bool(task.get_reward().functions),
        needs_question=not description.has_instances,
        needs_answer=is_graded or not task.name,
    )


def encode_row(problem: DatasetProblem) -> bytes:
    """Encode the row as a JSON object, with the question and the ground truth as the run uses them."""
    row = {**problem.fields, "question": problem.question, "ground_truth": problem.ground_truth}
    return msgspec.json.encode(row, enc_hook=str)
