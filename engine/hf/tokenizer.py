"""Encodes and decodes text with `tokenizers` only: importing transformers takes seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.policies.dialogue.chat_format import TURN_END

if TYPE_CHECKING:  # importing torch takes seconds, and the head and the rollouts do not need it
    from asterism.engine.hf.model_config import DecoderConfig


class UnusableTokenizer(UnusableInput):
    """A missing or invalid tokenizer, or a tokenizer of another model. The message names the files."""


class FastTokenizer:
    """An asterism.policies.dialogue.chat_format.TextTokenizer that reads a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_file(path)
        try:
            content = path.read_text(encoding="utf-8")
            self._trusted = Tokenizer.from_str(content)
            self._untrusted = Tokenizer.from_str(_mark_tags_special(content))
        except FileNotFoundError:
            raise UnusableTokenizer(f"{path}: no such file") from None
        except Exception as error:  # tokenizers raises bare Exception
            raise UnusableTokenizer(f"{path}: {error}") from error
        self._untrusted.encode_special_tokens = True  # special tokens become ordinary text
        self.vocab_size = 1 + max(self._trusted.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        tokenizer = self._trusted if trusted else self._untrusted
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, with special tokens. Invalid UTF-8 becomes U+FFFD."""
        return self._trusted.decode(list(token_ids), skip_special_tokens=False)

    def get_token_id(self, text: str) -> int:
        """Return the id of one token. Raises UnusableTokenizer if the vocabulary does not contain it."""
        token_id = self._trusted.token_to_id(text)
        if token_id is None:
            raise UnusableTokenizer(f"{self.path}: the vocabulary has no token {text!r}")
        return token_id

    def find_token_id(self, text: str) -> int | None:
        return self._trusted.token_to_id(text)

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids, by text, of the tokens that are added to the model's vocabulary, such as special tokens."""
        return {token.content: token_id for token_id, token in self._trusted.get_added_tokens_decoder().items()}

    def check_same_vocabulary(self, other: FastTokenizer) -> None:
        """Raise UnusableTokenizer if the vocabularies differ."""
        mine, others = (each._trusted.get_vocab(with_added_tokens=True) for each in (self, other))
        if mine != others:
            differing = len({*mine.items()} ^ {*others.items()})
            raise UnusableTokenizer(f"{self.path}: vocabulary differs from {other.path} in {differing} entries")

    @property
    def end_of_turn_id(self) -> int:
        return self.get_token_id(TURN_END)


def _mark_tags_special(content: str) -> str:
    """Mark all `<...>` tokens as special, so that a question's text `<tool_call>` does not become Qwen's token."""
    fields: dict[str, Any] = json.loads(content)
    for token in fields.get("added_tokens", ()):
        token["special"] = token["special"] or (token["content"].startswith("<") and token["content"].endswith(">"))
    return json.dumps(fields, ensure_ascii=False)


def load_tokenizer(folder: Path | str) -> FastTokenizer:
    return FastTokenizer(Path(folder) / "tokenizer.json")


def check_vocabulary(model_config: DecoderConfig, tokenizer: FastTokenizer) -> None:
    """Raise UnusableTokenizer if the model has no embedding for some token ids."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise UnusableTokenizer(
            f"{tokenizer.path} has token ids up to {tokenizer.vocab_size - 1}, "
            f"but {tokenizer.path.parent / 'config.json'} has vocab_size {model_config.vocab_size}: "
            "the tokenizer belongs to another model"
        )
