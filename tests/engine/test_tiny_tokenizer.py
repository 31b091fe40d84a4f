"""The tiny task's tokenizer: what it keeps whole, what it never merges, and what nobody may forge."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from engine.tiny import sft
from engine.tiny.prepare import tokenizer_texts
from engine.tiny.tokenizer import save, train
from engine.tokenizer import FastTokenizer, load_tokenizer
from policies.dialogue import PROTOCOL_TAGS, encode_pieces, prompt_pieces, tool_turn_pieces

DIALOGUES = sft.dialogues(0, 1000, 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save(train(tokenizer_texts(DIALOGUES)), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FastTokenizer:
    return load_tokenizer(folder)


def test_a_prompt_has_about_fifteen_tokens(tokenizer: FastTokenizer) -> None:
    lengths = [
        len(encode_pieces(tokenizer, prompt_pieces(messages[0]["content"], ["jupyter_code"]))) for messages in DIALOGUES
    ]
    assert mean(lengths) < 20
    assert max(lengths) <= 24


def test_a_results_frame_has_few_tokens(tokenizer: FastTokenizer) -> None:
    assert len(encode_pieces(tokenizer, tool_turn_pieces(["Tool call success\nstdout:\n42"]))) == 7


def test_digits_are_never_merged(tokenizer: FastTokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("4096", trusted=True)] == ["4", "0", "9", "6"]


@pytest.mark.parametrize(
    "text", ["plain", "ünïcödé 🙂", "\x00\x07", 'a "quoted" \\n line\n\n', "0123456789", "<|im_end|>"]
)
@pytest.mark.parametrize("trusted", [True, False])
def test_any_text_survives_encoding(tokenizer: FastTokenizer, text: str, trusted: bool) -> None:
    assert tokenizer.decode(tokenizer.encode(text, trusted=trusted)) == text


@pytest.mark.parametrize("tag", [*PROTOCOL_TAGS, "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
def test_a_protocol_tag_is_one_token(tokenizer: FastTokenizer, tag: str) -> None:
    assert len(tokenizer.encode(tag, trusted=True)) == 1


def test_untrusted_text_never_becomes_a_token_that_holds_a_protocol_tag(tokenizer: FastTokenizer) -> None:
    pieces = [*prompt_pieces("", ["jupyter_code"]), *tool_turn_pieces([""])]
    text = "".join((*PROTOCOL_TAGS, *(piece.text for piece in pieces)))
    forged = [tokenizer.decode([token]) for token in tokenizer.encode(text, trusted=False)]
    assert not [
        token for token in forged if any(tag in token for tag in (*PROTOCOL_TAGS, "<|im_start|>", "<|im_end|>"))
    ]


def test_the_vocabulary_has_about_450_entries(tokenizer: FastTokenizer) -> None:
    assert 400 < tokenizer.vocab_size < 480


@pytest.mark.slow
def test_transformers_loads_it_and_its_chat_template_gives_the_same_text(
    folder: Path, tokenizer: FastTokenizer
) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "".join(piece.text for piece in prompt_pieces("What is 1+2+3?", ["jupyter_code"]))
    system, user = (part.split("\n", 1)[1].split("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:3])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    assert loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, trusted=True)
