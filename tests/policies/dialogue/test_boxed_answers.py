"""Tests of boxed answers: forms of a box, escaped braces, and boxes that are cut off."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.dialogue.boxed_answers import extract_last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *(("\\boxed{5}", "5"), ("\\boxed {5}", "5"), ("\\boxed\n{5}", "5"), ("\\fbox{5}", "5"), ("\\fbox {5}", "5")),
        ("\\boxed{1} \\fbox{2}", "2"),
        ("\\fbox{1} \\boxed{2}", "2"),
        ("\\\\boxed{5}", "5"),  # two backslashes
        ("x \\\\\\boxed{5}", "5"),  # after a LaTeX line break
        *(("\\\\\\\\boxed{5}", "5"), ("\\boxed{}", ""), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}")),
        ("\\boxed{\\boxed{1}}", "1"),
        ("\\boxed{a \\boxed{1}", "1"),
        # These boxes have a number without braces.
        *(("\\boxed 5", "5"), ("\\boxed  -3.5", "-3.5"), ("\\boxed +3/4", "+3/4"), ("\\boxed \u22125.", "\u22125")),
        *(("\\boxed 1,234,567, so it is", "1,234,567"), ("$\\boxed 5$", "5"), ("$\\boxed 5 $.", "5")),
        *(("\\(\\boxed 5\\)", "5"), ("\\[\\boxed 5.\\]", "5"), ("\\boxed 5</answer>", "5")),
        *(("\\boxed 5\nand more", "5"), ("\\boxed 5 is the answer", "5"), ("\\fbox 5", "5")),
        ("\\boxed{1} and \\boxed 2", "2"),
        ("\\boxed 1 and \\boxed{2}", "2"),
        # Escaped braces are inside or outside the box.
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{\\left. x \\right\\}}", "\\left. x \\right\\}"),
        ("\\boxed{\\{x \\mid x>0\\}} \\{", "\\{x \\mid x>0\\}"),
        ("\\{ \\boxed{5} \\}", "5"),
        ("\\boxed{a \\\\ {b}}", "a \\\\ {b}"),  # a LaTeX line break, then a brace
        ("\\boxed{a \\\\{b}}", "a \\\\{b}"),
        ("\\boxed{\\%5\\$}", "\\%5\\$"),
    ],
)
def test_the_last_box_is_read_in_each_form(text: str, content: str) -> None:
    assert extract_last_boxed(text) == content
    assert extract_last_boxed(f"\\boxed{{0}} {text}") == content


@pytest.mark.parametrize(
    "text",
    [
        *("\\boxed{5", "\\boxed {5", "\\fbox{\\frac{1}{2}", "\\boxed{5\\}", "\\boxed{", "\\boxed{{5}"),
        *("\\boxed 5 + 3", "\\boxed 5x", "\\boxed 5^2", "\\boxed 1,2", "\\boxed 5 \\text{ cm}", "\\boxed 5\\%"),
    ],
)
def test_a_text_has_no_answer_if_its_last_box_is_cut_or_unreadable(text: str) -> None:
    assert extract_last_boxed(text) is None
    assert extract_last_boxed(f"\\boxed{{3}}, so {text}") is None


@pytest.mark.parametrize(
    "text", ["boxed{5}", "\\boxedx{5}", "\\boxed", "put it in \\boxed and", "\\boxed5", "\\boxed x", "\\mbox{5}", "{5}"]
)
def test_similar_words_and_commands_are_not_boxes(text: str) -> None:
    assert extract_last_boxed(text) is None
    assert extract_last_boxed(f"\\boxed{{3}} {text}") == "3"


def find_by_definition(text: str) -> str | None:
    """Find the last box by its definition: try every closing brace, in quadratic time."""
    marked = re.sub(r"\\\\(?!boxed)|\\[{}]", "__", text)  # the replacement keeps the length of the text
    openings = list(re.finditer(r"\\boxed\{", marked))
    if not openings:
        return None
    begin, depth = openings[-1].end(), 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(marked[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


PIECES = st.sampled_from(["\\boxed{", "{", "}", "}", "\\{", "\\}", "\\\\ ", "x", "<answer>", "boxed{"])


@given(st.lists(PIECES, max_size=30).map("".join))
def test_the_last_box_agrees_with_its_definition(text: str) -> None:
    assert extract_last_boxed(text) == find_by_definition(text)


@pytest.mark.slow
@given(st.text(alphabet="{}ab\\ 1.", max_size=40))
def test_any_text_is_accepted_and_the_content_of_a_box_has_balanced_braces(text: str) -> None:
    found = extract_last_boxed("\\boxed{" + text)
    if found is not None:
        bare = re.sub(r"\\.", "", found)
        assert bare.count("{") == bare.count("}")


@pytest.mark.slow
def test_repeated_openings_are_read_in_linear_time() -> None:
    """Quadratic time would need minutes."""
    for opening in ("\\boxed{", "\\boxed  ", "\\boxed 1+", "\\fbox \\", "\\", "{", "\\boxed" + " " * 50):
        assert extract_last_boxed(opening * 20_000) is None
    assert extract_last_boxed("\\boxed 1 " * 20_000) == "1"
