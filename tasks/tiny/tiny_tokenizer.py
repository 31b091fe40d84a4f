"""A byte-level BPE tokenizer for a tiny model: a prompt of the demo has about 20 tokens, a trajectory 50.

Each repeated text (system message, frame of a call, head of a traceback) is one token. A text with a
protocol tag is a special token, so that questions and tool outputs cannot contain it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from asterism.policies.dialogue.chat_format import (
    PROTOCOL_TAGS,
    TURN_END,
    TURN_START,
    DialogueFormat,
    build_prompt_segments,
    build_tool_turn_segments,
)
from asterism.policies.dialogue.tool_results import FAILURE, SUCCESS
from asterism.tasks.tiny.cold_start_dialogues import COMPUTE, CONCLUDE, FORMAT, GIVE_UP, GUESS, REPAIR, TRACEBACK_HEAD

END_OF_TEXT = "<|endoftext|>"
BPE_ENTRIES = 416  # vocabulary of 256 bytes and the merges, without the added tokens

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\nPREFILL' }}{%- endif -%}"
)


class AddedTexts(NamedTuple):
    """Texts that are single tokens."""

    special: list[str]  # only trusted text contains these tokens
    plain: list[str]  # any text can contain these tokens


def list_special_texts(formats: Iterable[DialogueFormat]) -> list[str]:
    """List the tags, and the fixed texts of the dialogues from the system turn to the start of an assistant turn."""
    tags, scaffolds = list[str](), list[str]()
    for dialogue in formats:
        tags += [dialogue.answer_open, dialogue.answer_close, *dialogue.stop_tokens]
        head, _, tail = build_prompt_segments("", dialogue)
        user, opening, _, closing, assistant = build_tool_turn_segments([""], dialogue)
        scaffolds += [piece.text for piece in (head, tail, user, opening, closing, assistant)]
    return list(dict.fromkeys([END_OF_TEXT, TURN_START, TURN_END, *PROTOCOL_TAGS, *tags, *scaffolds]))


def _list_plain_texts() -> list[str]:
    call, results = '\n{"name": "jupyter_code", "arguments": {"code": "', (f"{SUCCESS}\nstdout:\n", f"{FAILURE}\n")
    sentences = (text.removesuffix("</reason>\n") for text in (COMPUTE, REPAIR, GIVE_UP, CONCLUDE, GUESS))
    return [call, '"}}\n', "\\boxed{", *results, f"{FAILURE}\n{TRACEBACK_HEAD}", *sentences]


DEMO_TEXTS = AddedTexts(list_special_texts([FORMAT]), _list_plain_texts())


def train_tokenizer(texts: Iterable[str], added: AddedTexts = DEMO_TEXTS) -> Tokenizer:
    """Train BPE on `texts`. No merge crosses an added token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_split_at_added_texts(texts, [*added.special, *added.plain]), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added.special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added.plain])
    return tokenizer


def _split_at_added_texts(texts: Iterable[str], added: Sequence[str]) -> Iterator[str]:
    cut = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
    for text in texts:
        yield from filter(None, cut.split(text))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, prefill: str = FORMAT.prefill) -> None:
    """Write tokenizer.json and tokenizer_config.json, as in a transformers folder.

    `prefill` starts each assistant turn in the chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    quoted = prefill.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
        "chat_template": _CHAT_TEMPLATE.replace("PREFILL", quoted),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
