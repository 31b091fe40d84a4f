"""A byte-level BPE tokenizer for the tiny task: about 20 tokens per prompt, 50 per trajectory.

Repeated texts (system message, frame of a call, head of a traceback) are one token each. A text
with a protocol tag is a special token, so that questions and tool outputs cannot produce it.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from policies.dialogue.chat_format import (
    PROTOCOL_TAGS,
    TURN_END,
    TURN_START,
    build_prompt_segments,
    build_tool_turn_segments,
)
from policies.dialogue.tool_results import FAILURE, SUCCESS
from tasks.tiny.cold_start_dialogues import COMPUTE, CONCLUDE, FORMAT, GIVE_UP, GUESS, REPAIR, TRACEBACK_HEAD

END_OF_TEXT = "<|endoftext|>"
BPE_ENTRIES = 416  # 256 bytes and the merges, without the added tokens

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<reason>' }}{%- endif -%}"
)


def list_special_tokens() -> list[str]:
    head, _, tail = build_prompt_segments("", FORMAT)
    user, opening, _, closing, assistant = build_tool_turn_segments([""], FORMAT)
    scaffolds = [piece.text for piece in (head, tail, user, opening, closing, assistant)]
    return list(dict.fromkeys([END_OF_TEXT, TURN_START, TURN_END, *PROTOCOL_TAGS, *scaffolds]))


def list_plain_tokens() -> list[str]:
    """Repeated texts without a protocol tag: any text may contain them."""
    call, results = '\n{"name": "jupyter_code", "arguments": {"code": "', (f"{SUCCESS}\nstdout:\n", f"{FAILURE}\n")
    sentences = (text.removesuffix("</reason>\n") for text in (COMPUTE, REPAIR, GIVE_UP, CONCLUDE, GUESS))
    return [call, '"}}\n', "\\boxed{", *results, f"{FAILURE}\n{TRACEBACK_HEAD}", *sentences]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains BPE on `texts`. No merge crosses an added token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special, plain = list_special_tokens(), list_plain_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_split_at_added_tokens(texts, [*special, *plain]), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return tokenizer


def _split_at_added_tokens(texts: Iterable[str], added: list[str]) -> Iterator[str]:
    cut = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
    for text in texts:
        yield from filter(None, cut.split(text))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as in a transformers folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
