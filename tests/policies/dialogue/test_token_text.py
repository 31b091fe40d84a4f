"""The shown text of tokens that end in the middle of a character."""

from collections.abc import Iterator, Sequence

import pytest

from asterism.policies.dialogue.token_text import TokenText, split_text


class BytesTokenizer:
    """A tokenizer with one token per byte."""

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def iter_pieces(text: bytes, size: int) -> Iterator[list[int]]:
    return (list(text[start : start + size]) for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_of_several_tokens_are_shown_complete(size: int) -> None:
    text = TokenText(BytesTokenizer(), {0})
    shown = [text.add(piece) for piece in iter_pieces("aä€😀 \0ok".encode(), size)]
    assert "".join([*shown, text.finish()]) == "aä€😀 ok"
    assert not any("\ufffd" in piece for piece in shown)


def test_invalid_bytes_are_shown_as_replacement_characters() -> None:
    text = TokenText(BytesTokenizer(), set())
    shown = "".join([*map(text.add, iter_pieces(b"a\xff\xff\xff\xff\xffb\xc3", 1)), text.finish()])
    assert shown.startswith("a\ufffd")
    assert shown.endswith("b\ufffd")


def test_a_character_of_several_tokens_is_the_text_of_its_last_token() -> None:
    texts = split_text(BytesTokenizer(), "aäb".encode() + b"\xc3")
    assert texts == ["a", "", "ä", "b", "\ufffd"]
    assert split_text(BytesTokenizer(), []) == []
