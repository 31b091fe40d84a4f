"""Writes the files of a run with [tiny]: `python -m asterism.tasks.tiny.prepare --run-folder FOLDER`.

data/train.jsonl, data/test.jsonl   questions and answers of the demo, in GSM8K's layout
data/sft.jsonl                      dialogues for the demo's cold start
data/tokenizer/                     a tokenizer, trained on these dialogues
checkpoints/init/                   a model with random weights, as a transformers folder

The run's seed determines all files. The run then reads them like files of a user. A run with [[tasks]] has its
own data, so this program writes only a tokenizer for the texts of the tasks, and the model.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from asterism.bus.process.exit_reason import ExitReason, write_exit_reason
from asterism.configs.atomic_write import raising_disk_errors, replacing_folder
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.configs.file_manifest import list_files, write_manifest
from asterism.configs.load import check_tiny, load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tiny import TinyConfig
from asterism.engine.data.task_inputs import load_task_formats
from asterism.engine.export.hf_export import save_model
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.model_config import build_tiny_config
from asterism.tasks.tiny.cold_start_dialogues import Messages, generate_dialogues
from asterism.tasks.tiny.questions import generate_questions
from asterism.tasks.tiny.task_texts import collect_added_texts, iter_task_texts
from asterism.tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer

NUM_TOKENIZER_DIALOGUES = 3000  # more dialogues produce the same merges


def prepare(run: RunConfig, folder: RunFolder) -> None:
    """Write the files. Raises UnusableInput for an unsuitable configuration, and OSError on disk errors."""
    if run.tiny is None:
        raise UnusableInput("the configuration has no [tiny] table; add one to prepare a tiny model")
    check_tiny(run)
    if run.tasks:
        formats = load_task_formats(run, folder)
        tokenizer = train_tokenizer(iter_task_texts(run, folder, formats), collect_added_texts(formats.values()))
        prefill = next(iter(formats.values())).prefill
    else:
        tokenizer, prefill = _prepare_demo(run, run.tiny, folder), run.dialogue.prefill
    save_tokenizer(tokenizer, folder.data / "tokenizer", prefill)
    write_manifest(folder.data, list_files(folder.data))
    _write_model(run.tiny, run.seed, tokenizer.get_vocab_size(), folder)


def _prepare_demo(run: RunConfig, tiny: TinyConfig, folder: RunFolder) -> Tokenizer:
    """Write questions and dialogues, and train the tokenizer."""
    folder.data.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (
        ("train", tiny.num_train_questions, False),
        ("test", tiny.num_test_questions, True),
    ):
        questions = generate_questions(run.seed, count, held_out=held_out)
        rows = ({"question": question.text, "answer": f"#### {question.answer}"} for question in questions)
        _write_jsonl(folder.data / f"{name}.jsonl", rows)
    characters = run.dialogue.result_characters
    dialogues = generate_dialogues(run.seed, tiny.num_sft_dialogues, characters, tiny.behaviors)
    _write_jsonl(folder.data / "sft.jsonl", ({"messages": messages} for messages in dialogues))
    return train_tokenizer(iter_tokenizer_texts(dialogues[:NUM_TOKENIZER_DIALOGUES]))


def iter_tokenizer_texts(dialogues: Iterable[Messages]) -> Iterator[str]:
    """Yield the training texts of the demo's tokenizer: contents of messages, and code with JSON escapes."""
    for message in (message for messages in dialogues for message in messages):
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield json.dumps(json.loads(call["function"]["arguments"])["code"])[1:-1]


def _write_model(tiny: TinyConfig, seed: int, vocab_size: int, folder: RunFolder) -> None:
    config = build_tiny_config(tiny, vocab_size)
    model = CausalLM(config)
    initialize_weights(model, seed)
    with replacing_folder(folder.checkpoints / "init") as partial:
        save_model(partial, config, model.state_dict(), folder.data / "tokenizer")
        write_manifest(partial, list_files(partial))


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="asterism.tasks.tiny.prepare",
        description="Write the tokenizer and the initial model of [tiny], and the demo's data.",
    )
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder with a config.toml")
    folder = RunFolder(parser.parse_args().run_folder)
    try:
        with raising_disk_errors(folder.data):
            prepare(load_run(folder.config), folder)
    except (UnusableInput, OSError) as error:
        write_exit_reason(folder, "prepare", ExitReason(str(error)))
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
