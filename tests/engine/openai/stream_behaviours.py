"""Behaviours of servers with OpenAI's completions API: complete answers, and answers that must count as failed.

The sources are the rows `sse-...` of the public bug reports in bug_reports.jsonl, and variations of these rows.
"""

import json
from typing import Any

from tests.engine.openai.scripted_stream import Script

TEXT = "<answer>\\boxed{5}</answer>"
DONE = b"data: [DONE]\n\n"
TYPE = "Content-Type"


def make_chunk(text: Any, finish: str | None = None, **others: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **others}).encode()


def make_event(content: bytes, end: bytes = b"\n", name: bytes = b"data: ") -> bytes:
    return name + content + 2 * end


def make_stream(*contents: bytes, end: bytes = b"\n", name: bytes = b"data: ") -> bytes:
    return b"".join(make_event(content, end, name) for content in contents)


HEAD, TAIL, STOP = make_chunk("<answer>\\box"), make_chunk("ed{5}</answer>"), make_chunk("", "stop")
CHUNKS = (HEAD, TAIL, STOP)
FIRST, SECOND, LAST = (make_event(content) for content in CHUNKS)
WHOLE = FIRST + SECOND + LAST + DONE
JSON_TYPE = {TYPE: "application/json"}


def with_field(line: bytes, *, first: bool) -> Script:
    """Return a script whose events have an additional field, before or after the data."""
    data = [b"data: " + content + b"\n" for content in (*CHUNKS, b"[DONE]")]
    return Script([b"".join((line + each if first else each + line) + b"\n" for each in data)])


def between(piece: bytes) -> Script:
    return Script([FIRST, piece, SECOND, piece, LAST, piece, DONE])


def in_bytes(stream: bytes) -> Script:
    return Script([stream[place : place + 1] for place in range(len(stream))])


def whole_json(*choices: dict[str, Any], **others: Any) -> Script:
    return Script([json.dumps({"choices": choices, **others}).encode()], headers=JSON_TYPE)


def _split_in_lines(content: bytes) -> bytes:
    """Return an event whose JSON object is split into lines, each in its own `data` field."""
    indented = json.dumps(json.loads(content), indent=1).encode()
    return b"".join(b"data: " + line + b"\n" for line in indented.splitlines()) + b"\n"


ANSWERED: dict[str, Script] = {
    "line_feeds": Script([WHOLE]),
    "an_event_a_piece": Script([FIRST, SECOND, LAST, DONE]),
    "carriage_returns_with_line_feeds": Script([make_stream(*CHUNKS, b"[DONE]", end=b"\r\n")]),
    "carriage_returns": Script([make_stream(*CHUNKS, b"[DONE]", end=b"\r")]),
    "mixed_line_ends": Script([make_event(HEAD, b"\r\n"), make_event(TAIL, b"\r"), LAST, DONE]),
    "bytes_with_line_feeds": in_bytes(WHOLE),
    "bytes_with_both": in_bytes(make_stream(*CHUNKS, b"[DONE]", end=b"\r\n")),
    "cut_between_both": Script([b"data: " + HEAD + b"\r", b"\n\r", b"\n" + SECOND + LAST + DONE]),
    "byte_order_mark": Script([b"\xef\xbb\xbf" + WHOLE]),
    "byte_order_mark_in_bytes": in_bytes(b"\xef\xbb\xbf" + WHOLE),
    "comment_events": between(b": ping\n\n"),
    "comment_glued_before": between(b": ping\n"),
    "comment_glued_behind": with_field(b": ping\n", first=False),
    "comment_without_text": between(b":\n"),
    "event_before": with_field(b"event: message\n", first=True),
    "event_behind": with_field(b"event: completion.chunk\n", first=False),
    "id_before": with_field(b"id: 1\n", first=True),
    "id_behind": with_field(b"id: 1\n", first=False),
    "retry": with_field(b"retry: 3000\n", first=True),
    "unknown_field": with_field(b"trace: {}\n", first=True),
    "field_without_colon": with_field(b"trace\n", first=False),
    "no_space_after_the_colon": Script([make_stream(*CHUNKS, b"[DONE]", name=b"data:")]),
    "several_data_lines": Script([b"".join(map(_split_in_lines, CHUNKS)) + DONE]),
    "empty_data": between(b"data: \n\n"),
    "data_without_colon": between(b"data\n\n"),
    "blank_data": between(b"data:   \n\n"),
    "empty_lines": between(b"\n\n\n"),
    "text_null": Script([make_stream(make_chunk(None), HEAD, make_chunk(None), TAIL, make_chunk(None, "stop")) + DONE]),
    "empty_texts": Script([make_stream(make_chunk(""), HEAD, make_chunk(""), TAIL, STOP) + DONE]),
    "no_text_at_the_end": Script(
        [FIRST, SECOND, make_event(b'{"choices": [{"index": 0, "finish_reason": "stop"}]}'), DONE]
    ),
    "empty_finish_reasons": Script([make_stream(make_chunk("<answer>\\box", ""), TAIL, STOP) + DONE]),
    "finish_with_the_last_text": Script([FIRST, make_event(make_chunk("ed{5}</answer>", "stop")), DONE]),
    "one_chunk": Script([make_event(make_chunk(TEXT, "stop")) + DONE]),
    "no_done_after_the_finish": Script([FIRST, SECOND, LAST]),
    "broken_after_the_finish": Script([FIRST, SECOND, LAST], "abort"),
    "held_after_the_finish": Script([FIRST, SECOND, LAST], "hold"),
    "held_after_done": Script([WHOLE], "hold"),
    "done_twice": Script([WHOLE + DONE]),
    "done_with_a_blank": Script([FIRST, SECOND, LAST, b"data: [DONE] \n\n"]),
    "usage_behind": Script([FIRST, SECOND, LAST, make_event(b'{"choices": [], "usage": {"total_tokens": 9}}'), DONE]),
    "usage_without_choices": Script([FIRST, SECOND, LAST, make_event(b'{"usage": {"total_tokens": 9}}'), DONE]),
    "usage_in_each": Script([make_stream(*(make_chunk(*pair, usage={}) for pair in [(TEXT, None), ("", "stop")]))]),
    "null_error": Script([make_stream(make_chunk(TEXT, error=None), STOP) + DONE]),
    "no_index": Script([make_event(b'{"choices": [{"text": "' + TEXT.replace("\\", "\\\\").encode() + b'"}]}') + LAST]),
    "stream_ignored": whole_json({"index": 0, "text": TEXT, "finish_reason": "stop"}),
    "length": Script([FIRST, SECOND, make_event(make_chunk("", "length")), DONE]),
    "charset": Script([WHOLE], headers={TYPE: "text/event-stream; charset=utf-8"}),
    "other_type": Script([WHOLE], headers={TYPE: "text/plain"}),
    "compressed": Script([FIRST, SECOND, LAST, DONE], is_compressed=True),
    "long_event": Script([make_event(HEAD + b" " * 300_000), SECOND, LAST, DONE]),
}

_ERROR = b'{"error": {"message": "out of memory", "code": 500}}'
_NO_CHAT = "the server must have the completions API"
_CUT = "the stream ended early, without a finish reason"
_INVALID = "the server sent an invalid chunk"
_BROKEN = "the connection broke"

# Faulty behaviours, each with a text that the failure's message must contain.
FAILED: dict[str, tuple[Script, str]] = {
    "ends_early": (Script([FIRST, SECOND]), _CUT),
    "done_without_a_finish": (Script([FIRST, SECOND, DONE]), _CUT),
    "done_at_once": (Script([DONE]), _CUT),
    "empty": (Script([]), _CUT),
    "comments_only": (Script([b": ping\n\n" * 3]), _CUT),
    "breaks": (Script([FIRST, SECOND], "abort"), _BROKEN),
    "breaks_at_once": (Script([], "abort"), _BROKEN),
    "breaks_within_an_event": (Script([FIRST, SECOND[:20]], "abort"), _BROKEN),
    "ends_within_an_event": (Script([FIRST, SECOND[:20]]), _CUT),
    "last_event_without_an_empty_line": (Script([FIRST, SECOND, LAST[:-1]]), _CUT),
    "fewer_bytes_than_announced": (
        Script([FIRST, SECOND], "abort", headers={TYPE: "text/event-stream", "Content-Length": "9999"}),
        _BROKEN,
    ),
    "silent": (Script([FIRST], "hold"), "no response within"),
    "silent_at_once": (Script([], "hold"), "no response within"),
    "comment_forever": (Script([FIRST, b": ping\n\n"], "hold"), "no response within"),
    "error_in_the_middle": (Script([FIRST, make_event(_ERROR), SECOND, LAST, DONE]), "500 out of memory"),
    "error_as_a_text": (Script([FIRST, make_event(b'{"error": "out of memory"}'), DONE]), "500 out of memory"),
    "error_with_a_message": (Script([FIRST, make_event(b'{"message": "out of memory"}'), DONE]), "500 out of memory"),
    "error_beside_choices": (
        Script([FIRST, make_event(make_chunk("", error={"message": "out of memory"})), SECOND, LAST, DONE]),
        "500 out of memory",
    ),
    "error_of_another_form": (Script([FIRST, make_event(b'{"detail": "x"}'), SECOND, LAST, DONE]), _INVALID),
    "error_event": (Script([FIRST, b"event: error\n" + make_event(_ERROR), SECOND, LAST, DONE]), "500 out of memory"),
    "error_event_as_a_text": (Script([FIRST, b"event: error\ndata: out of memory\n\n", LAST]), "500 out of memory"),
    "error_field": (Script([FIRST, b"error: {}\n\n"]), _CUT),
    "text_in_the_middle": (Script([FIRST, make_event(b"overloaded"), SECOND, LAST, DONE]), _INVALID),
    "number_in_the_middle": (Script([FIRST, make_event(b"7"), SECOND, LAST, DONE]), _INVALID),
    "half_an_object": (Script([FIRST, make_event(TAIL[:30]), SECOND, LAST, DONE]), _INVALID),
    "two_objects_in_an_event": (Script([b"data: " + HEAD + b"\n" + SECOND, LAST, DONE]), _INVALID),
    "no_choices": (Script([FIRST, make_event(b"{}"), SECOND, LAST, DONE]), "it has no `choices`"),
    "null_choices": (Script([FIRST, make_event(b'{"choices": null}'), SECOND, LAST, DONE]), "it has no `choices`"),
    "text_of_another_type": (Script([FIRST, make_event(make_chunk(5)), SECOND, LAST, DONE]), _INVALID),
    "no_text": (Script([FIRST, make_event(b'{"choices": [{"index": 0}]}'), SECOND, LAST, DONE]), _NO_CHAT),
    "other_choice": (
        Script([FIRST, make_event(b'{"choices": [{"index": 1, "text": "x"}]}'), SECOND, LAST]),
        "it has choice 1",
    ),
    "chat_chunks": (Script([make_event(b'{"choices": [{"delta": {"content": "5"}}]}'), LAST, DONE]), _NO_CHAT),
    "chat_message": (whole_json({"message": {"content": "5"}, "finish_reason": "stop"}), _NO_CHAT),
    "invalid_utf8": (Script([FIRST, make_event(TAIL.replace(b"ed", b"\xff\xfe")), LAST, DONE]), _INVALID),
    "half_a_surrogate": (Script([FIRST, make_event(TAIL.replace(b"ed", b"\\ud83d")), LAST, DONE]), _INVALID),
    "text_after_the_finish": (Script([FIRST, LAST, SECOND, DONE]), "new tokens after the finish reason"),
    "filtered": (Script([FIRST, SECOND, make_event(make_chunk("", "content_filter")), DONE]), "content_filter"),
    "finish_error": (Script([FIRST, SECOND, make_event(make_chunk("", "error")), DONE]), "the completion: error"),
    "page_of_a_proxy": (Script([b"<html>Welcome</html>"], headers={TYPE: "text/html"}), "of the type text/html"),
    "lines_of_json": (
        Script([b"\n".join(CHUNKS)], headers={TYPE: "application/x-ndjson"}),
        "application/x-ndjson, not text/event-stream",
    ),
    "json_without_a_finish": (whole_json({"index": 0, "text": TEXT}), _CUT),
    "json_cut": (Script([HEAD[:20]], headers=JSON_TYPE), _INVALID),
    "json_error": (Script([_ERROR], headers=JSON_TYPE), "500 out of memory"),
    "overloaded": (Script([b'{"error": {"message": "slow down"}}'], status=429, headers=JSON_TYPE), "429 slow down"),
    "broken_inside": (Script([_ERROR], status=500, headers=JSON_TYPE), "500 out of memory"),
    "broken_inside_with_a_stream": (Script([WHOLE], status=500), "500 data: "),
    "bad_gateway": (Script([b"<html>502</html>"], status=502, headers={TYPE: "text/html"}), "502 <html>"),
    "no_content": (Script([], status=204, headers={}), "204"),
}
