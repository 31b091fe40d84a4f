"""The demo's program for [prepare], which writes the files of a run below the run's folder (docs/tasks.md).

data/train.jsonl, data/test.jsonl   questions and answers of the demo, in GSM8K's layout
data/sft.jsonl                      dialogues for the demo's cold start
data/tokenizer/                     a tokenizer, trained on these dialogues
checkpoints/init/                   a model with random weights, as a transformers folder

The run's seed determines all files. The run then reads the files as it reads a user's files. A run with [[tasks]] has
its own data, so this program writes only a tokenizer for the texts of the tasks, and the model.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import asdict
from tokenizers import Tokenizer

from asterism.configs.atomic_write import replacing_file, replacing_folder
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import list_files, write_manifest
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import PositiveInt
from asterism.engine.data.task_inputs import load_task_formats
from asterism.engine.hf.model_config import DecoderConfig
from asterism.policies.dialogue.chat_format import TURN_END
from asterism.tasks.prepare_program import PrepareProgram
from asterism.tasks.tiny.cold_start_dialogues import DEFAULT_SHARES, TOOL, BehaviorShares, Messages, generate_dialogues
from asterism.tasks.tiny.questions import generate_questions
from asterism.tasks.tiny.task_texts import collect_added_texts, iter_task_texts
from asterism.tasks.tiny.tiny_tokenizer import DEMO_TEXTS, save_tokenizer, train_tokenizer

MAX_VOCABULARY = 512  # upper bound of the generated tokenizer's entries
NUM_TOKENIZER_DIALOGUES = 3000  # number of dialogues that train the tokenizer; more dialogues produce the same merges


class TinyDemo(PrepareProgram, frozen=True):
    """The parameters of the program: sizes of the generated data and of the model."""

    num_train_questions: PositiveInt = 4096  # generated training questions
    num_test_questions: PositiveInt = 512  # generated test questions
    num_sft_dialogues: PositiveInt = 16_000  # generated dialogues for the cold start
    behaviors: BehaviorShares = DEFAULT_SHARES  # frequencies of behaviors in the generated dialogues
    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"  # transformers' model_type of the model
    num_layers: PositiveInt = 2  # layers of the model
    hidden_size: PositiveInt = 128  # width of the model
    num_heads: PositiveInt = 4  # query heads
    num_kv_heads: PositiveInt = 2  # key and value heads
    head_dim: PositiveInt = 32  # dimension of each head
    intermediate_size: PositiveInt = 384  # width of the feed-forward layers

    def check(self, run: RunConfig) -> DecoderConfig:
        """Return the configuration of the model with an upper bound of its vocabulary.

        Raises UnusableInput for dialogues that the tokenizer cannot express.
        """
        if any(task.get_dialogue().renderer for task in run.resolved_tasks):
            raise UnusableInput("dialogue.renderer: the tiny task's tokenizer lacks the tokens of model families")
        model, dialogue = self.build_model_config(MAX_VOCABULARY), run.dialogue
        if run.tasks:
            return model
        if dialogue.tools != (TOOL,):
            raise UnusableInput(f'dialogue.tools: the tiny task supports only ["{TOOL}"]')
        if not dialogue.has_default_texts:
            raise UnusableInput("dialogue: the tiny task supports only the default system, instruction and tags")
        if unknown := set(dialogue.stop_tokens) - set(DEMO_TEXTS.special):
            raise UnusableInput(f"dialogue.stop_tokens: the tiny task has no token {min(unknown)}; use {TURN_END}")
        return model

    def prepare(self, run: RunConfig, folder: RunFolder) -> None:
        """Write the files. Raises UnusableInput for an unsuitable configuration, and OSError on disk errors."""
        self.check(run)
        if run.tasks:
            formats = load_task_formats(run, folder)
            tokenizer = train_tokenizer(iter_task_texts(run, folder, formats), collect_added_texts(formats.values()))
            prefill = next(iter(formats.values())).prefill
        else:
            tokenizer, prefill = self._prepare_demo(run, folder), run.dialogue.prefill
        save_tokenizer(tokenizer, folder.data / "tokenizer", prefill)
        write_manifest(folder.data, list_files(folder.data))
        self._write_model(run.seed, tokenizer.get_vocab_size(), folder)

    def build_model_config(self, vocab_size: int) -> DecoderConfig:
        sizes = {key: value for key, value in asdict(self).items() if key in DecoderConfig.__struct_fields__}
        return DecoderConfig(model_type=self.architecture, vocab_size=vocab_size, tie_word_embeddings=True, **sizes)

    def _prepare_demo(self, run: RunConfig, folder: RunFolder) -> Tokenizer:
        """Write questions and dialogues, and train the tokenizer."""
        folder.data.mkdir(parents=True, exist_ok=True)
        for name, count, held_out in (
            ("train", self.num_train_questions, False),
            ("test", self.num_test_questions, True),
        ):
            questions = generate_questions(run.seed, count, held_out=held_out)
            rows = ({"question": question.text, "answer": f"#### {question.answer}"} for question in questions)
            _write_jsonl(folder.data / f"{name}.jsonl", rows)
        characters = run.dialogue.result_characters
        dialogues = generate_dialogues(run.seed, self.num_sft_dialogues, characters, self.behaviors)
        _write_jsonl(folder.data / "sft.jsonl", ({"messages": messages} for messages in dialogues))
        return train_tokenizer(iter_tokenizer_texts(dialogues[:NUM_TOKENIZER_DIALOGUES]))

    def _write_model(self, seed: int, vocab_size: int, folder: RunFolder) -> None:
        from asterism.engine.export.hf_export import save_model  # the launcher loads this class without torch
        from asterism.engine.model.causal_lm import CausalLM, initialize_weights

        config = self.build_model_config(vocab_size)
        model = CausalLM(config)
        initialize_weights(model, seed)
        with replacing_folder(folder.checkpoints / "init") as partial:
            save_model(partial, config, model.state_dict(), folder.data / "tokenizer")
            write_manifest(partial, list_files(partial))


def iter_tokenizer_texts(dialogues: Iterable[Messages]) -> Iterator[str]:
    """Yield the training texts of the demo's tokenizer: contents of messages, and code with JSON escapes."""
    for message in (message for messages in dialogues for message in messages):
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield json.dumps(json.loads(call["function"]["arguments"])["code"])[1:-1]


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with replacing_file(path) as file:  # a run whose files all exist does not prepare them again
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
