"""Tokenizers with the properties of model families: added tokens, normalizer, pre-tokenizer, post-processor, template."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from asterism.engine.export.hf_export import save_model
from tests.engine.export.family_templates import LLAMA3_TEMPLATE, QWEN3_TEMPLATE, QWEN25_TEMPLATE
from tests.engine.export.smollm2 import copy_smollm2, copy_smollm2_tokenizer
from tests.engine.tiny_models import small_architecture, small_model

QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_REGEX = QWEN_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>")  # not a special token in Qwen's files
QWEN3_TAGS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
# The added tokens of Llama. As in Hermes 3, tokens of ChatML replace reserved tokens.
LLAMA_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(40)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
# Merges that cross a boundary of the run's texts: ">" or "." and a line break, two line breaks, ">" and a letter.
TEXTS = (
    "</tool_response>\n<tool_response>\nSee it.\n\nSolve it: 1 + 1 = 2.\n</reason>\n<reason>I add.\n\n\n",
    '<answer>\\boxed{42}</answer>\n<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "print(6 * 7)"}}\n',
    'assistant\n\n user\nresult:\n\n>I >The >a <b> </b>\n."\n)\n]\n}\n',
)


class FamilyKind(NamedTuple):
    """The files of a small model, or a real model, whose other fields are empty."""

    model_type: str
    tokenizer_class: str
    regex: str
    special: Sequence[str]
    tags: Sequence[str]
    bos: str | None
    eos: str
    template: str
    is_real: bool = False


FAMILY_KINDS = {
    "qwen2.5": FamilyKind(
        "qwen2", "Qwen2Tokenizer", QWEN_REGEX, QWEN_SPECIAL, QWEN_TAGS, None, "<|im_end|>", QWEN25_TEMPLATE
    ),
    "qwen3": FamilyKind(
        "qwen3",
        "Qwen2Tokenizer",
        QWEN_REGEX,
        QWEN_SPECIAL,
        (*QWEN_TAGS, *QWEN3_TAGS),
        None,
        "<|im_end|>",
        QWEN3_TEMPLATE,
    ),
    "llama3": FamilyKind(
        "llama",
        "PreTrainedTokenizerFast",
        LLAMA_REGEX,
        LLAMA_SPECIAL,
        (),
        "<|begin_of_text|>",
        "<|eot_id|>",
        LLAMA3_TEMPLATE,
    ),
    "smollm2": FamilyKind("llama", "", "", (), (), None, "", "", is_real=True),
}
NIGHTLY_SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.nightly)
FAMILIES = [*(name for name, kind in FAMILY_KINDS.items() if not kind.is_real), NIGHTLY_SMOLLM2]


@cache
def train_family_tokenizer(kind: FamilyKind) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind.bos is not None))
    if kind.bos is None:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(kind.regex), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in kind.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in kind.tags])
    if kind.bos is not None:
        bos = (kind.bos, tokenizer.token_to_id(kind.bos))
        tokenizer.post_processor = processors.TemplateProcessing(f"{kind.bos} $A", special_tokens=[bos])
    return tokenizer


def write_family_tokenizer(folder: Path, kind: FamilyKind) -> Path:
    """Write the tokenizer with the family's added tokens and template, and a config.json of the architecture."""
    if kind.is_real:
        return copy_smollm2_tokenizer(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_family_tokenizer(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(token_id): {
            **{"content": token.content, "lstrip": False, "normalized": False, "rstrip": False},
            **{"single_word": False, "special": token.special},
        }
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": kind.bos,
        "eos_token": kind.eos,
        "pad_token": kind.special[0],
        "chat_template": kind.template,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": kind.tokenizer_class,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind.model_type}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": kind.eos, "pad_token": kind.special[0]}))
    return folder


def write_family_model(folder: Path, kind: FamilyKind, seed: int = 0) -> Path:
    """Write a model of the family's architecture with random weights, and its tokenizer. A real model is copied."""
    if kind.is_real:
        return copy_smollm2(folder)
    source = write_family_tokenizer(folder.with_name(f"{folder.name}_tokenizer"), kind)
    vocab_size = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
    model = small_model(seed, small_architecture(kind.model_type, vocab_size=vocab_size))
    save_model(folder, model.config, model.state_dict(), source)
    return folder
