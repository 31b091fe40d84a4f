"""Decodes tokens to texts, where a character may need several tokens.

TokenText    decodes tokens that arrive in pieces: each text ends with a complete character
split_text   decodes each token
"""

from collections.abc import Collection, Sequence

from asterism.policies.dialogue.chat_format import TextTokenizer

_INCOMPLETE = "\ufffd"  # placeholder at the end of a text that ends within a character
_MAX_HELD = 4  # limit of tokens per character


class TokenText:
    """Decodes tokens as they arrive, without cutting characters or losing the spaces between tokens."""

    def __init__(self, tokenizer: TextTokenizer, hidden_ids: Collection[int] = ()) -> None:
        """`hidden_ids`: ids of tokens without a text."""
        self._tokenizer, self._hidden_ids = tokenizer, hidden_ids
        self._ids: list[int] = []
        self._context = self._shown = 0  # numbers of tokens: before the last returned piece, and up to its end

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the new text up to the last complete character."""
        self._ids += [token for token in token_ids if token not in self._hidden_ids]
        for end in range(len(self._ids), max(self._shown, len(self._ids) - _MAX_HELD), -1):
            text = self._tokenizer.decode(self._ids[self._context : end])
            if not text.endswith(_INCOMPLETE):
                return self._take(text, end)
        return "" if len(self._ids) - self._shown < _MAX_HELD else self.finish()

    def finish(self) -> str:
        """Return the rest, complete or not."""
        return self._take(self._tokenizer.decode(self._ids[self._context :]), len(self._ids))

    def _take(self, text: str, end: int) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        self._context, self._shown = self._shown, end
        return text[len(before) :]


def split_text(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token. A character of several tokens belongs to the last one."""
    text = TokenText(tokenizer)
    texts = [text.add([token_id]) for token_id in token_ids]
    return [*texts[:-1], texts[-1] + text.finish()] if texts else []
