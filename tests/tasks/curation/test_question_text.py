"""The comparison of questions by words, numbers and operators."""

import pytest

from asterism.tasks.curation.question_text import compute_similarity, parse_question


@pytest.mark.parametrize(
    "other",
    [
        "what is  3x + 1,234 when x = 5",
        "What is $3x+1234$ when $x=5$?",
        "What is \\(3x + 1{,}234\\) when \\(x = 5\\)?",
        "**What is** `3x + 1234` when x\u00a0= 5 ?",
    ],
)
def test_notation_does_not_change_the_words(other: str) -> None:
    assert parse_question(other).words == parse_question("What is 3x + 1234 when x = 5?").words


@pytest.mark.parametrize(
    "other", ["What is 3x - 1234 when x = 5?", "What is 3x + 1235 when x = 5?", "What is 3y + 1234 when y = 5?"]
)
def test_operators_numbers_and_letters_change_the_words(other: str) -> None:
    assert parse_question(other).words != parse_question("What is 3x + 1234 when x = 5?").words


def test_symbols_equal_their_latex_commands() -> None:
    assert (
        parse_question("2 \u00d7 3 = 6").words == parse_question("2 \\times 3 = 6").words == ["2", "*", "3", "=", "6"]
    )
    assert parse_question("\\dfrac{1}{2} \\cdot 3").words == parse_question("\\frac{1}{2} \\times 3").words


def test_exponents_and_leading_decimal_points_are_kept() -> None:
    assert parse_question("10\u00b2").words == parse_question("10^2").words != parse_question("102").words
    assert parse_question("It costs $.50").numbers == [".50"]


def test_numbers_are_sorted_and_ngrams_have_the_requested_length() -> None:
    parsed = parse_question("Take 12 from 3.5 and 12")
    assert parsed.numbers == ["12", "12", "3.5"]
    assert parsed.list_ngrams(5) == {("take", "12", "from", "3.5", "and"), ("12", "from", "3.5", "and", "12")}
    assert parsed.list_ngrams(7) == set()


def test_similarity_is_the_jaccard_index_of_word_pairs() -> None:
    assert compute_similarity(parse_question("a b c d"), parse_question("a b c e")) == 2 / 4
    assert compute_similarity(parse_question("a"), parse_question("a")) == 1
    assert compute_similarity(parse_question(""), parse_question("?")) == 1
    assert compute_similarity(parse_question("a"), parse_question("")) == 0
