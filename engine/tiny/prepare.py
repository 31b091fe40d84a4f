"""Makes a run's own data and starting model: `python -m engine.tiny.prepare --run-folder FOLDER`.

data/train.jsonl, data/test.jsonl   questions and answers, in GSM8K's layout
data/sft.jsonl                      dialogues for the cold start
data/tokenizer/                     trained on those dialogues
checkpoints/init/                   a Qwen3 of random weights, as a transformers folder

All of it follows from the run's seed. The files are then read like anybody's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bus.last_words import say_last_words
from configs.disk import writing
from configs.errors import UNUSABLE, UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run, Tiny
from engine.checkpoint import save_model
from engine.qwen3 import Qwen3, Qwen3Config, initialize
from engine.tiny import sft, task, tokenizer

NUM_TOKENIZER_DIALOGUES = 3000  # more give the same merges


def prepare(run: Run, folder: RunFolder) -> None:
    """Write the files. Raises UnusableInput for a configuration that does not fit, OSError if the disk refuses."""
    if run.tiny is None:
        raise UnusableInput("the run has no [tiny] table, so there is nothing to prepare")
    if run.dialogue.tools != (sft.TOOL,):
        raise UnusableInput(f'dialogue.tools: the tiny task knows one tool, ["{sft.TOOL}"]')
    folder.data.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (
        ("train", run.tiny.num_train_questions, False),
        ("test", run.tiny.num_test_questions, True),
    ):
        questions = task.questions(run.seed, count, held_out=held_out)
        rows = ({"question": question.text, "answer": f"#### {question.answer}"} for question in questions)
        _write_jsonl(folder.data / f"{name}.jsonl", rows)
    dialogues = sft.dialogues(run.seed, run.tiny.num_sft_dialogues, run.dialogue.result_characters)
    _write_jsonl(folder.data / "sft.jsonl", ({"messages": messages} for messages in dialogues))
    trained = tokenizer.train(tokenizer_texts(dialogues[:NUM_TOKENIZER_DIALOGUES]))
    tokenizer.save(trained, folder.data / "tokenizer")
    _write_model(run.tiny, run.seed, trained.get_vocab_size(), folder)


def tokenizer_texts(dialogues: Iterable[sft.Messages]) -> Iterator[str]:
    """What is to be tokenized: contents, and the code as it stands in a call's JSON."""
    for message in (message for messages in dialogues for message in messages):
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield json.dumps(json.loads(call["function"]["arguments"])["code"])[1:-1]


def model_config(tiny: Tiny, vocab_size: int) -> Qwen3Config:
    """The shape of the tiny model."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        tie_word_embeddings=True,
    )


def _write_model(tiny: Tiny, seed: int, vocab_size: int, folder: RunFolder) -> None:
    config = model_config(tiny, vocab_size)
    model = Qwen3(config)
    initialize(model, seed)
    save_model(folder.checkpoints / "init", config, model.state_dict(), folder.data / "tokenizer")


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="engine.tiny.prepare", description="Makes the tiny task's data, tokenizer and starting model."
    )
    parser.add_argument("--run-folder", type=Path, required=True, help="the run's folder, with its config.toml")
    folder = RunFolder(parser.parse_args().run_folder)
    try:
        with writing(folder.data):
            prepare(load_resolved(folder.config), folder)
    except (UnusableInput, OSError) as error:
        say_last_words(folder, "prepare", error)
        return UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
