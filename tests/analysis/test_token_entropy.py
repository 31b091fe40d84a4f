"""Kinds of tokens and statistics of their entropies, and the page with highlighted dialogues."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from asterism.analysis.entropy_page import write_entropy_page
from asterism.analysis.token_kinds import ScoredDialogue, ScoredToken, TurnTags, classify_turn, compute_statistics

TAGS = TurnTags((("<answer>", "</answer>"), ("<x>", "</x>")), (("<tool_call>", "</tool_call>"),))


def list_kinds(*texts: str, follows_result: bool = False) -> str:
    """Return the first two letters of each kind."""
    return " ".join(kind[:2] for kind in classify_turn(texts, TAGS, follows_result=follows_result))


def test_kinds_follow_tags_that_begin_or_end_within_a_token() -> None:
    assert list_kinds("I", " add", "<tool_call>", "{1}", "</tool_call>", "\n") == "re re ca ca ca re"
    assert list_kinds("so", "<ans", "wer>", "4", "</answer>") == "re an an an an"
    assert list_kinds("so", "<x>", "4", "</x>") == "re an an an"  # a task with tags of its own
    assert list_kinds("a<tool", "_call>", "x") == "ca ca ca"  # a turn that ends within a call
    assert list_kinds("a", "b", follows_result=True) == "re re"
    assert classify_turn(["a"], TAGS, follows_result=True) == ["reflection"]


def test_answer_tags_within_a_call_belong_to_the_call() -> None:
    assert list_kinds("<tool_call>", "print('<answer>')", "</tool_call>") == "ca ca ca"


def dialogue(*tokens: tuple[str, float]) -> ScoredDialogue:
    given = ScoredToken("system <b>&")
    reasoning = (ScoredToken(text, "reasoning", entropy) for text, entropy in tokens)
    return ScoredDialogue(7, 1.0, (given, *reasoning, ScoredToken("42", "answer", 0.0)))


def test_the_fifth_of_tokens_with_the_highest_entropy_is_forking() -> None:
    # Ten generated tokens, of which two are forking.
    statistics = compute_statistics([dialogue(("wait", 2.0), ("wait", 1.0), *(("a", 0.1 * each) for each in range(7)))])
    assert statistics.tokens == 10
    assert statistics.forking_nats == 1.0
    reasoning, answer = statistics.kinds["reasoning"], statistics.kinds["answer"]
    assert (reasoning.forking_tokens, reasoning.common_forking_texts) == (2, (("wait", 2),))
    assert reasoning.forking_share == pytest.approx(2 / 9)
    assert reasoning.mean_nats == pytest.approx((3 + 2.1) / 9)
    assert (answer.tokens, answer.forking_tokens) == (1, 0)
    assert set(statistics.kinds) == {"reasoning", "answer"}
    assert (statistics.lower_nats[0], statistics.lower_nats[-1]) == (0.0, 2.0)


def test_dialogues_without_generated_tokens_have_no_statistics() -> None:
    with pytest.raises(ValueError, match="no generated token"):
        compute_statistics([ScoredDialogue(1, 0.0, (ScoredToken("given"),))])


class PageReader(HTMLParser):
    """Collects the text of the dialogues, and the texts of underlined tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.forking = "", list[str]()
        self._is_forking = self._in_dialogue = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_dialogue |= tag == "pre"
        self._is_forking = ("class", "forking") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_dialogue &= tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_dialogue:
            self.text += data
            self.forking += [data] if self._is_forking else []


def test_the_page_has_the_text_of_the_dialogues_and_marks_forking_tokens(tmp_path: Path) -> None:
    shown = dialogue(("wait <i>", 2.0), *(("a", 0.1) for _ in range(8)))
    page = tmp_path / "page.html"
    write_entropy_page([shown], compute_statistics([shown]), "Run <1>", page)
    reader = PageReader()
    reader.feed(page.read_text())
    assert reader.text == "system <b>&wait <i>aaaaaaaa42"
    assert "wait <i>" in reader.forking
    assert "<title>Run &lt;1&gt;</title>" in page.read_text()
