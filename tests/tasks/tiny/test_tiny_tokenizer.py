"""The tokenizer of the tiny task: single-token texts, merges, and tags in untrusted text."""

from pathlib import Path
from statistics import mean

import pytest

from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.dialogue.chat_format import (
    PROTOCOL_TAGS,
    build_prompt_segments,
    build_tool_turn_segments,
    encode_segments,
)
from asterism.tasks.tiny.cold_start_dialogues import FORMAT, Messages, generate_dialogues
from asterism.tasks.tiny.prepare import iter_tokenizer_texts
from asterism.tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def dialogues() -> list[Messages]:
    return generate_dialogues(0, 600, 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dialogues: list[Messages]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(iter_tokenizer_texts(dialogues)), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FastTokenizer:
    return load_tokenizer(folder)


@pytest.mark.slow
def test_a_prompt_has_fewer_than_twenty_tokens_on_average(tokenizer: FastTokenizer, dialogues: list[Messages]) -> None:
    lengths = [
        len(encode_segments(tokenizer, build_prompt_segments(messages[0]["content"], FORMAT))) for messages in dialogues
    ]
    assert mean(lengths) < 20
    assert max(lengths) <= 24


@pytest.mark.slow
def test_a_short_result_has_seven_tokens(tokenizer: FastTokenizer) -> None:
    assert len(encode_segments(tokenizer, build_tool_turn_segments(["Tool call success\nstdout:\n42"], FORMAT))) == 7


def test_digits_are_never_merged(tokenizer: FastTokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("4096", trusted=True)] == ["4", "0", "9", "6"]


@pytest.mark.parametrize(
    "text", ["plain", "ünïcödé 🙂", "\x00\x07", 'a "quoted" \\n line\n\n', "0123456789", "<|im_end|>"]
)
@pytest.mark.parametrize("trusted", [True, False])
def test_decoding_restores_any_text(tokenizer: FastTokenizer, text: str, trusted: bool) -> None:
    assert tokenizer.decode(tokenizer.encode(text, trusted=trusted)) == text


@pytest.mark.parametrize("tag", [*PROTOCOL_TAGS, "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
def test_a_protocol_tag_is_one_token(tokenizer: FastTokenizer, tag: str) -> None:
    assert len(tokenizer.encode(tag, trusted=True)) == 1


def test_untrusted_text_yields_no_token_with_a_protocol_tag(tokenizer: FastTokenizer) -> None:
    segments = [*build_prompt_segments("", FORMAT), *build_tool_turn_segments([""], FORMAT)]
    text = "".join((*PROTOCOL_TAGS, *(segment.text for segment in segments)))
    forged = [tokenizer.decode([token]) for token in tokenizer.encode(text, trusted=False)]
    assert not [
        token for token in forged if any(tag in token for tag in (*PROTOCOL_TAGS, "<|im_start|>", "<|im_end|>"))
    ]


def test_the_vocabulary_has_about_450_entries(tokenizer: FastTokenizer) -> None:
    assert 400 < tokenizer.vocab_size < 480


@pytest.mark.slow
def test_transformers_renders_the_same_text_with_the_template(folder: Path, tokenizer: FastTokenizer) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "".join(segment.text for segment in build_prompt_segments("What is 1+2+3?", FORMAT))
    system, user = (part.split("\n", 1)[1].split("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:3])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    assert loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, trusted=True)
