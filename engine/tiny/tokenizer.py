"""A byte-level BPE tokenizer for the tiny task: a prompt of about 20 tokens, a trajectory of about 50.

What every dialogue repeats (the system's text, the frame of a call, the head of a traceback) is one token each.
A scaffold that holds a protocol tag is a special token, so that a question or a tool's output cannot write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.tiny.sft import COMPUTE, CONCLUDE, GIVE_UP, GUESS, REPAIR, TOOL, TRACEBACK_HEAD
from policies.dialogue import PROTOCOL_TAGS, TURN_END, TURN_START, prompt_pieces, tool_turn_pieces
from policies.tool_text import FAILURE, SUCCESS

END_OF_TEXT = "<|endoftext|>"
BPE_ENTRIES = 416  # 256 bytes and the merges; the added tokens come on top

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<reason>' }}{%- endif -%}"
)


def special_tokens() -> list[str]:
    head, _, tail = prompt_pieces("", [TOOL])
    user, opening, _, closing, assistant = tool_turn_pieces([""])
    scaffolds = [piece.text for piece in (head, tail, user, opening, closing, assistant)]
    return list(dict.fromkeys([END_OF_TEXT, TURN_START, TURN_END, *PROTOCOL_TAGS, *scaffolds]))


def plain_tokens() -> list[str]:
    """Scaffolds without a protocol tag: anyone may write them."""
    call, results = '\n{"name": "jupyter_code", "arguments": {"code": "', (f"{SUCCESS}\nstdout:\n", f"{FAILURE}\n")
    sentences = (text.removesuffix("</reason>\n") for text in (COMPUTE, REPAIR, GIVE_UP, CONCLUDE, GUESS))
    return [call, '"}}\n', "\\boxed{", *results, f"{FAILURE}\n{TRACEBACK_HEAD}", *sentences]


def train(texts: Iterable[str]) -> Tokenizer:
    """BPE over `texts`, in which a merge never crosses an added token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special, plain = special_tokens(), plain_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_between(texts, [*special, *plain]), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return tokenizer


def _between(texts: Iterable[str], added: list[str]) -> Iterator[str]:
    cut = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
    for text in texts:
        yield from filter(None, cut.split(text))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """As a transformers folder keeps it: tokenizer.json and tokenizer_config.json."""
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
