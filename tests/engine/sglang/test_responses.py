"""Tests: responses of a server give tokens with logprobs and versions, or a specific error."""

from typing import Any

import msgspec
import pytest

from asterism.engine.contract import EngineFailure, RequestRefused
from asterism.engine.http.errors import InvalidResponse, ServerStatusError, ServerTimeout
from asterism.engine.sglang.http_api import GenerateResponse
from asterism.engine.sglang.responses import RequestOutput, build_generation, to_engine_failure
from tests.engine.sglang.fake_server import ABORTED, LENGTH, STOPPED, make_response

BODY: dict[str, Any] = {"rid": "1;", "input_ids": [1, 2, 3]}
VOCABULARY = 10


def make_parsed_response(*token_ids: int, **changes: Any) -> GenerateResponse:
    return msgspec.convert(make_response(BODY, token_ids, **changes), GenerateResponse)


def make_output(*answers: GenerateResponse) -> RequestOutput:
    part = RequestOutput(VOCABULARY)
    for each in answers:
        part.add_response(each)
    return part


def incremental(total: int, *token_ids: int, **changes: Any) -> GenerateResponse:
    """Return a response that contains only the new tokens; `total` counts all tokens."""
    return make_parsed_response(*token_ids, completion_tokens=total, versions=[("0", 0, total)], **changes)


def test_cumulative_and_incremental_responses_give_the_same_generation():
    whole = make_output(
        make_parsed_response(4), make_parsed_response(4, 5), make_parsed_response(4, 5, 6, finish=LENGTH)
    )
    pieces = make_output(incremental(1, 4), incremental(2, 5), incremental(3, 6, finish=LENGTH))
    for part in (whole, pieces):
        generation = build_generation([part], "length")
        assert generation.token_ids.tolist() == [4, 5, 6]
        assert generation.logprobs.tolist() == [-2.0, -2.5, -3.0]


def test_each_token_has_the_version_of_its_weights():
    part = make_output(make_parsed_response(4, 5, 6, 7, versions=[("7", 0, 1), ("8", 1, 3), ("9", 3, 4)]))
    assert build_generation([part], "length").versions.tolist() == [7, 8, 8, 9]


def test_tokens_without_spans_have_the_current_version():
    assert make_output(make_parsed_response(4, 5, versions=[], weight_version="3")).versions == [3, 3]


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        ([("1", 0, 1), ("2", 2, 3)], "a span from 2 to 3 after position 1"),
        ([("1", 0, 2)], "covers 2 of 3 tokens"),
        ([("1", 0, 2), ("2", 2, 4)], "covers 4 of 3 tokens"),
    ],
)
def test_version_spans_that_do_not_cover_all_tokens_are_refused(versions: list[tuple[str, int, int]], wrong: str):
    with pytest.raises(InvalidResponse, match=wrong):
        make_output(make_parsed_response(4, 5, 6, versions=versions))


def test_a_version_that_is_not_a_number_is_refused():
    with pytest.raises(InvalidResponse, match="'latest', not a number"):
        _ = make_output(make_parsed_response(4, versions=[("latest", 0, 1)])).versions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (make_parsed_response(4, 10), "new token 1 is 10, outside the vocabulary of 10"),
        (make_parsed_response(4, -1), "new token 1 is -1, outside the vocabulary"),
        (
            make_parsed_response(4, output_token_logprobs=[[-1.0, 5, None]]),
            "new token 0 is 4, but its logprob is for token 5",
        ),
        (make_parsed_response(4, output_token_logprobs=[[None, 4, None]]), "new token 0 has no logprob"),
        (make_parsed_response(4, 5, 6, output_token_logprobs=[]), "output_token_logprobs has 0 entries, expected 3"),
        (make_parsed_response(4, 5, completion_tokens=3), "output_ids has 2 entries, expected 3 or the 3 new ones"),
    ],
)
def test_an_inconsistent_response_is_refused_and_changes_nothing(wrong: GenerateResponse, message: str):
    part = make_output()
    with pytest.raises(InvalidResponse, match=message):
        part.add_response(wrong)
    assert (part.token_ids, part.logprobs, part.meta) == ([], [], None)


def test_a_response_with_fewer_tokens_than_before_is_refused():
    part = make_output(make_parsed_response(4, 5))
    with pytest.raises(InvalidResponse, match="completion_tokens is 1, after 2 received tokens"):
        part.add_response(make_parsed_response(4))


def test_a_repeated_token_in_a_final_response_is_ignored():
    """An incremental server sends such a response for a request that it aborts in its queue."""
    part = make_output(incremental(2, 4, 5), incremental(2, 5, finish=ABORTED))
    assert (part.token_ids, part.get_finish(())) == ([4, 5], "abort")


def test_a_generation_continues_after_an_unrequested_stop_token():
    part = make_output(make_parsed_response(4, 7, finish=STOPPED))
    assert part.get_finish((7,)) == "stop"
    assert part.get_finish((5,)) is None
    assert make_output(make_parsed_response(4)).get_finish((7,)) is None


def test_a_generation_of_several_requests_has_the_cached_tokens_of_the_first():
    first, second = make_parsed_response(4, cached_tokens=2), make_parsed_response(5, 6, cached_tokens=3)
    generation = build_generation([make_output(first), make_output(second)], "length")
    assert (generation.token_ids.tolist(), generation.cached_tokens) == ([4, 5, 6], 2)


def test_a_request_that_never_started_is_aborted_without_tokens():
    never = make_output(
        make_parsed_response(finish=ABORTED, without=("prompt_tokens", "cached_tokens", "num_retractions"))
    )
    for parts in ([], [make_output()], [never]):
        generation = build_generation(parts, "abort")
        assert (len(generation.token_ids), generation.cached_tokens) == (0, 0)


def test_only_status_400_becomes_a_refused_request():
    bad = to_engine_failure(ServerStatusError("/generate", 400, "too long"), 3)
    assert isinstance(bad, RequestRefused)
    assert str(bad) == "sequence 3: too long"
    for failure in (ServerStatusError("/generate", 500, "broke"), ServerTimeout("slow", 600.0), EngineFailure("other")):
        assert to_engine_failure(failure, 3) is failure
