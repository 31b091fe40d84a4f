"""Tests: the tokenizer encodes markup as special tokens only in trusted text, and its vocabulary fits the model."""

from pathlib import Path

import pytest

from asterism.engine.hf.tokenizer import FastTokenizer, UnusableTokenizer, check_vocabulary, load_tokenizer
from tests.engine.tiny_models import small_config, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("tag", ["<|im_end|>", "<tool_call>"])  # in the file, only <|im_end|> is special
def test_trusted_markup_is_one_token_and_untrusted_markup_is_text(tokenizer: FastTokenizer, tag: str) -> None:
    assert tokenizer.encode(tag, trusted=True) == [tokenizer.get_token_id(tag)]
    assert tokenizer.get_token_id(tag) not in tokenizer.encode(f"a{tag}b", trusted=False)


def test_plain_added_words_stay_tokens_in_untrusted_text(tokenizer: FastTokenizer) -> None:
    assert tokenizer.get_token_id("print(") in tokenizer.encode("print(1)", trusted=False)


@pytest.mark.parametrize("trusted", [True, False])
def test_decoding_restores_the_text_and_its_special_tokens(tokenizer: FastTokenizer, trusted: bool) -> None:
    text = "<|im_start|>user\n  Was heißt 2+2? \N{SNOWMAN}<tool_call><|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text, trusted=trusted)) == text


def test_the_tokenizer_has_the_end_of_turn_and_the_vocabulary_size(tokenizer: FastTokenizer) -> None:
    assert tokenizer.decode([tokenizer.end_of_turn_id]) == "<|im_end|>"
    assert tokenizer.vocab_size == tokenizer.get_token_id("print(") + 1


def test_the_error_for_a_missing_token_names_the_file(tokenizer: FastTokenizer) -> None:
    with pytest.raises(UnusableTokenizer, match=r"tokenizer\.json: the vocabulary has no token '<nothing>'"):
        tokenizer.get_token_id("<nothing>")


def test_a_missing_and_an_invalid_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UnusableTokenizer, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnusableTokenizer, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_a_model_with_fewer_embeddings_than_token_ids_is_refused(tokenizer: FastTokenizer) -> None:
    size = tokenizer.vocab_size
    check_vocabulary(small_config(vocab_size=size), tokenizer)
    check_vocabulary(small_config(vocab_size=size + 64), tokenizer)  # padded embeddings are common
    message = rf"tokenizer\.json has token ids up to {size - 1}, but .*config\.json has vocab_size {size - 1}"
    with pytest.raises(UnusableTokenizer, match=message):
        check_vocabulary(small_config(vocab_size=size - 1), tokenizer)


def test_a_vocabulary_that_differs_is_refused(tokenizer: FastTokenizer, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    load_tokenizer(tmp_path).check_same_vocabulary(tokenizer)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"print("', '"input("'))
    with pytest.raises(UnusableTokenizer, match=rf"{file}: vocabulary differs from .* in 2 entries"):
        load_tokenizer(tmp_path).check_same_vocabulary(tokenizer)
