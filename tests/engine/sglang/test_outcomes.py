"""What a server's answers become: tokens with logprobs and versions, or a failure that says what is wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.contract import EngineFailure, RequestRefused
from engine.sglang.errors import ServerRefused, ServerSlow, UnknownAnswer
from engine.sglang.outcomes import Part, failure_of, generation_of
from engine.sglang.protocol import GenerateAnswer
from tests.engine.sglang.stand_in import ABORTED, LENGTH, STOPPED, answer

BODY: dict[str, Any] = {"rid": "1;", "input_ids": [1, 2, 3]}
VOCABULARY = 10


def said(*token_ids: int, **changes: Any) -> GenerateAnswer:
    return msgspec.convert(answer(BODY, token_ids, **changes), GenerateAnswer)


def part_of(*answers: GenerateAnswer) -> Part:
    part = Part(VOCABULARY)
    for each in answers:
        part.take(each)
    return part


def incremental(total: int, *token_ids: int, **changes: Any) -> GenerateAnswer:
    """The new tokens alone, out of so many."""
    return said(*token_ids, completion_tokens=total, versions=[("0", 0, total)], **changes)


def test_answers_with_all_tokens_and_answers_with_the_new_ones_come_to_the_same():
    whole = part_of(said(4), said(4, 5), said(4, 5, 6, finish=LENGTH))
    pieces = part_of(incremental(1, 4), incremental(2, 5), incremental(3, 6, finish=LENGTH))
    for part in (whole, pieces):
        generation = generation_of([part], "length")
        assert generation.token_ids.tolist() == [4, 5, 6]
        assert generation.logprobs.tolist() == [-2.0, -2.5, -3.0]


def test_each_token_bears_the_version_of_the_weights_that_produced_it():
    part = part_of(said(4, 5, 6, 7, versions=[("7", 0, 1), ("8", 1, 3), ("9", 3, 4)]))
    assert generation_of([part], "length").versions.tolist() == [7, 8, 8, 9]


def test_without_spans_all_tokens_are_of_the_weights_in_force():
    assert part_of(said(4, 5, versions=[], weight_version="3")).versions == [3, 3]


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        ([("1", 0, 1), ("2", 2, 3)], "from 1 on with a span from 2 to 3"),
        ([("1", 0, 2)], "spans for 2 of 3 tokens"),
        ([("1", 0, 2), ("2", 2, 4)], "spans for 4 of 3 tokens"),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(versions: list[tuple[str, int, int]], wrong: str):
    with pytest.raises(UnknownAnswer, match=wrong):
        part_of(said(4, 5, 6, versions=versions))


def test_a_version_that_is_no_number_is_refused():
    with pytest.raises(UnknownAnswer, match="'latest', which is no number"):
        _ = part_of(said(4, versions=[("latest", 0, 1)])).versions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (said(4, 10), "new token 1 is 10, outside the vocabulary of 10"),
        (said(4, -1), "new token 1 is -1, outside the vocabulary"),
        (said(4, output_token_logprobs=[[-1.0, 5, None]]), "new token 0 is 4, its logprob is that of 5"),
        (said(4, output_token_logprobs=[[None, 4, None]]), "new token 0 has no logprob"),
        (said(4, 5, 6, output_token_logprobs=[]), "output_token_logprobs has 0 entries; 3 tokens have come, 3"),
        (said(4, 5, completion_tokens=3), "output_ids has 2 entries; 3 tokens have come, 3 of them are new"),
    ],
)
def test_an_answer_at_odds_with_itself_is_refused_and_changes_nothing(wrong: GenerateAnswer, message: str):
    part = part_of()
    with pytest.raises(UnknownAnswer, match=message):
        part.take(wrong)
    assert (part.token_ids, part.logprobs, part.meta) == ([], [], None)


def test_fewer_tokens_than_before_are_refused():
    part = part_of(said(4, 5))
    with pytest.raises(UnknownAnswer, match="completion_tokens is 1, 2 tokens had come"):
        part.take(said(4))


def test_a_last_word_that_repeats_a_token_adds_none():
    """An incremental server says so of a request that it aborts in its queue."""
    part = part_of(incremental(2, 4, 5), incremental(2, 5, finish=ABORTED))
    assert (part.token_ids, part.finish(())) == ([4, 5], "abort")


def test_an_end_at_a_token_that_was_not_asked_for_is_none():
    part = part_of(said(4, 7, finish=STOPPED))
    assert part.finish((7,)) == "stop"
    assert part.finish((5,)) is None
    assert part_of(said(4)).finish((7,)) is None


def test_several_requests_make_one_generation_and_the_first_says_what_was_cached():
    parts = [part_of(said(4, cached_tokens=2)), part_of(said(5, 6, cached_tokens=3))]
    generation = generation_of(parts, "length")
    assert (generation.token_ids.tolist(), generation.cached_tokens) == ([4, 5, 6], 2)


def test_what_never_began_is_an_abort_without_tokens():
    never = part_of(said(finish=ABORTED, without=("prompt_tokens", "cached_tokens", "num_retractions")))
    for parts in ([], [part_of()], [never]):
        generation = generation_of(parts, "abort")
        assert (len(generation.token_ids), generation.cached_tokens) == (0, 0)


def test_what_the_server_calls_bad_is_refused_and_all_else_stays_what_it_is():
    bad = failure_of(ServerRefused("/generate", 400, "too long"), 3)
    assert isinstance(bad, RequestRefused)
    assert str(bad) == "sequence 3: too long"
    for failure in (ServerRefused("/generate", 500, "broke"), ServerSlow("slow", 600.0), EngineFailure("other")):
        assert failure_of(failure, 3) is failure
