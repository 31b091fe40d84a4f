"""Text to ids and back, with the `tokenizers` library alone: importing transformers takes seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from configs.errors import UnusableInput
from policies.dialogue import TURN_END

if TYPE_CHECKING:  # importing torch takes seconds, and the head and the rollouts need none of it
    from engine.qwen3 import Qwen3Config


class UnusableTokenizer(UnusableInput):
    """A tokenizer that is missing, broken, or does not fit its model; the message names the files."""


class FastTokenizer:
    """Implements policies.dialogue.TextTokenizer on a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = path.read_text(encoding="utf-8")
            self._trusted = Tokenizer.from_str(content)
            self._untrusted = Tokenizer.from_str(_with_markup_special(content))
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
        """Special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._trusted.decode(list(token_ids), skip_special_tokens=False)

    def token_id(self, text: str) -> int:
        """The id of one token; UnusableTokenizer if there is no such token."""
        found = self._trusted.token_to_id(text)
        if found is None:
            raise UnusableTokenizer(f"{self.path}: there is no token {text!r}")
        return found

    def check_same_vocabulary(self, other: FastTokenizer) -> None:
        """Raise UnusableTokenizer unless both give every id the same meaning."""
        mine, others = (each._trusted.get_vocab(with_added_tokens=True) for each in (self, other))
        if mine != others:
            differing = len({*mine.items()} ^ {*others.items()})
            raise UnusableTokenizer(f"{self.path}: another vocabulary than {other.path}: {differing} entries differ")

    @property
    def end_of_turn_id(self) -> int:
        return self.token_id(TURN_END)


def _with_markup_special(content: str) -> str:
    """The same tokenizer with every added token that looks like a tag marked special.

    Qwen's files leave `<tool_call>` and others unmarked, so that a question could otherwise forge them.
    """
    fields: dict[str, Any] = json.loads(content)
    for token in fields.get("added_tokens", ()):
        token["special"] = token["special"] or (token["content"].startswith("<") and token["content"].endswith(">"))
    return json.dumps(fields, ensure_ascii=False)


def load_tokenizer(folder: Path | str) -> FastTokenizer:
    return FastTokenizer(Path(folder) / "tokenizer.json")


def check_vocabulary(model_config: Qwen3Config, tokenizer: FastTokenizer) -> None:
    """Raise UnusableTokenizer if the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise UnusableTokenizer(
            f"{tokenizer.path} has token ids up to {tokenizer.vocab_size - 1}, "
            f"but {tokenizer.path.parent / 'config.json'} says vocab_size {model_config.vocab_size}: "
            "the tokenizer belongs to another model"
        )
