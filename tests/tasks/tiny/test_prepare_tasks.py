"""The tokenizer and the model of a run with [[tasks]]: short prompts, safe tags, and errors with the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.sft_dialogues import iter_sft_dialogues
from asterism.engine.data.task_inputs import load_task_formats, write_task_descriptions
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.engine.model.hf_checkpoint import load_model
from asterism.policies.dialogue.chat_format import (
    build_prompt_segments,
    build_tool_turn_segments,
    build_user_turn_segments,
    encode_segments,
)
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.tiny.prepare import TinyDemo
from tests.engine.data.cold_start_rows import write_rows

LOOKUP = ToolSchema(
    "lookup",
    "Look a word up.",
    {"type": "object", "properties": {"word": {"type": "string"}, "k": {"type": "integer"}}, "required": ["word"]},
)
ROLL = ToolSchema("roll", "Roll.", {"type": "object", "properties": {"sides": {"type": "integer"}}})
DESCRIPTIONS = {"archive": TaskDescription("tools", (LOOKUP, ROLL)), "game": TaskDescription("dialogue")}
CALL = {"name": "lookup", "arguments": {"word": "harbour", "k": 2}}
ARCHIVE = [
    {"role": "user", "content": "Where is the harbour?"},
    {"role": "assistant", "content": "<think>", "tool_calls": [CALL]},
    {"role": "tool", "content": "The harbour is in the west."},
    {"role": "assistant", "content": "<think>west"},
]
GAME = [{"role": "user", "content": "Guess!"}, {"role": "assistant", "content": "<reason>5"}]


def build_run(folder: Path, **changes: Any) -> RunConfig:
    archive = DialogueConfig(tools=("jupyter_code",), prefill="<think>", stop_tokens=("<|im_end|>", "<stop>"))
    rows = write_rows(folder / "rows.jsonl", *[{"question": "Where is the lighthouse?", "answer": "north"}] * 20)
    with rows.open("a") as file:
        file.write("{\n")  # this row is unusable, but data.max_bad_rows allows one
    dialogues = ({"messages": ARCHIVE}, {"task": "game", "messages": GAME})
    keys: dict[str, Any] = {
        "name": "some",
        "sft": SftConfig(steps=1, data=str(write_rows(folder / "dialogues.jsonl", *dialogues * 20))),
        "tasks": (
            TaskConfig(name="archive", import_path="archive.py:TOOLS", data=str(rows), dialogue=archive),
            TaskConfig(name="game", import_path="game.py:Game", data=str(rows)),
        ),
    }
    return RunConfig(**{**keys, **changes})


def prepare_run(folder: Path, **changes: Any) -> tuple[RunConfig, RunFolder]:
    run, prepared = build_run(folder, **changes), RunFolder(folder / "run")
    prepared.path.mkdir()
    write_task_descriptions(prepared, DESCRIPTIONS)
    TinyDemo().prepare(run, prepared)
    return run, prepared


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunFolder]:
    return prepare_run(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def tokenizer(prepared: tuple[RunConfig, RunFolder]) -> FastTokenizer:
    return load_tokenizer(prepared[1].checkpoints / "init")


def test_only_a_tokenizer_and_a_model_are_written(prepared: tuple[RunConfig, RunFolder]) -> None:
    _, folder = prepared
    assert {path.name for path in folder.data.iterdir()} == {"tokenizer", MANIFEST_NAME}
    assert (
        load_model(folder.checkpoints / "init").config.vocab_size
        == load_tokenizer(folder.data / "tokenizer").vocab_size
    )


@pytest.mark.parametrize("task", ["archive", "game"])
def test_the_fixed_texts_of_a_dialogue_are_one_token_each(
    prepared: tuple[RunConfig, RunFolder], tokenizer: FastTokenizer, task: str
) -> None:
    dialogue = load_task_formats(*prepared)[task]
    for segments in (
        build_prompt_segments("", dialogue),
        build_tool_turn_segments([""], dialogue),
        build_user_turn_segments("", dialogue),
    ):
        fixed = [segment for segment in segments if segment.text]
        assert len(encode_segments(tokenizer, fixed)) == len(fixed)


def test_words_of_the_cold_start_and_of_the_data_are_one_token_each(tokenizer: FastTokenizer) -> None:
    assert len(tokenizer.encode("Where is the harbour?", trusted=False)) == 5
    assert len(tokenizer.encode("Where is the lighthouse?", trusted=False)) == 5


def test_the_text_of_a_call_before_its_first_value_is_one_token(tokenizer: FastTokenizer) -> None:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, trusted=True))

    assert count('<tool_call>\n{"name": "lookup", "arguments": {"word": "harbour"}}\n</tool_call>') == 5
    assert count('<tool_call>\n{"name": "roll", "arguments": {"sides": 6}}\n</tool_call>') == 5
    assert count('<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "') == 2


def test_untrusted_text_yields_no_special_token(
    prepared: tuple[RunConfig, RunFolder], tokenizer: FastTokenizer
) -> None:
    for dialogue in load_task_formats(*prepared).values():
        for segment in (*build_prompt_segments("", dialogue), *build_tool_turn_segments([""], dialogue)):
            ids = tokenizer.encode(segment.text + "<stop>", trusted=False)
            assert not [
                token for token in map(tokenizer.decode, ([each] for each in ids)) if "<|" in token or token == "<stop>"
            ]


def test_stop_tokens_and_answer_tags_are_tokens(tokenizer: FastTokenizer) -> None:
    for text in ("<|im_end|>", "<stop>", "<answer>", "</answer>"):
        assert tokenizer.encode(text, trusted=True) == [tokenizer.get_token_id(text)]


def test_the_cold_start_is_tokenized_with_the_prepared_tokenizer(
    prepared: tuple[RunConfig, RunFolder], tokenizer: FastTokenizer
) -> None:
    run, _ = prepared
    dialogues = iter_sft_dialogues(Path(run.sft.data), tokenizer, load_task_formats(*prepared))
    assert max(len(dialogue.token_ids) for dialogue in dialogues) < 40


def test_the_chat_template_starts_a_turn_with_the_first_tasks_prefill(prepared: tuple[RunConfig, RunFolder]) -> None:
    config = json.loads((prepared[1].data / "tokenizer" / "tokenizer_config.json").read_text())
    assert "assistant\\n<think>'" in config["chat_template"]


def test_a_run_without_a_cold_start_needs_no_dialogues(tmp_path: Path) -> None:
    _, folder = prepare_run(tmp_path, sft=SftConfig(steps=0))
    assert (folder.checkpoints / "init" / "tokenizer.json").exists()


def test_the_same_seed_gives_the_same_bytes(prepared: tuple[RunConfig, RunFolder], tmp_path: Path) -> None:
    _, folder = prepare_run(tmp_path)
    for name in ("data/tokenizer/tokenizer.json", "checkpoints/init/model.safetensors"):
        assert (folder.path / name).read_bytes() == (prepared[1].path / name).read_bytes()


def test_an_error_in_a_file_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder, missing = RunFolder(tmp_path / "run"), str(tmp_path / "missing.jsonl")
    with pytest.raises(UnusableInput, match=r"tasks.json: .*No such file"):
        TinyDemo().prepare(build_run(tmp_path), folder)
    write_task_descriptions(folder, {**DESCRIPTIONS, "lost": MATH_PYTHON})
    with pytest.raises(UnusableInput, match=r"sft.data: .*missing.jsonl: no such file"):
        TinyDemo().prepare(build_run(tmp_path, sft=SftConfig(steps=1, data=missing)), folder)
    with pytest.raises(UnusableInput, match=r'tasks: "lost": data: .*missing.jsonl: no such file'):
        TinyDemo().prepare(
            build_run(tmp_path, sft=SftConfig(steps=0), tasks=(TaskConfig(name="lost", data=missing),)), folder
        )
