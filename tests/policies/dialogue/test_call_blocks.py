"""A block of calls ends after its complete JSON object, or else at the next closing tag."""

import pytest

from asterism.policies.dialogue.call_blocks import iter_call_blocks, replace_call_blocks
from asterism.policies.dialogue.json_calls import JSON_CALLS

CODE = '{"name": "t", "arguments": {"code": "%s"}}'


@pytest.mark.parametrize(
    "code",
    [
        "print('</tool_call>')",
        "</tool_call><tool_call>",
        '\\"</tool_call>\\"',
        '\\\\\\"</tool_call>',
        "}]</tool_call>{[",
        "a\nb</tool_call>",  # a line break makes the JSON invalid, but not the block
        "\\'</tool_call>",  # this escape also makes the JSON invalid, but not the block
    ],
)
def test_a_tag_in_a_string_does_not_end_the_block(code: str) -> None:
    content = "\n" + CODE % code + "\n"
    text = f"a<tool_call>{content}</tool_call>b<tool_call>{content}</tool_call>"
    assert [block.content for block in iter_call_blocks(text, JSON_CALLS)] == [content, content]
    assert replace_call_blocks(text, JSON_CALLS, lambda block: "-") == "a-b-"


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ("<tool_call>{</tool_call>x", ["{"]),
        ("<tool_call>x</tool_call>", ["x"]),
        ("<tool_call></tool_call>", [""]),
        ('<tool_call>{"a": "</tool_call>', ['{"a": "']),
        ("<tool_call>{} x</tool_call>", ["{} x"]),
        ("<tool_call>}{</tool_call>", ["}{"]),
        ("<tool_call>[</tool_call>]</tool_call>", ["["]),
        ("<tool_call>{}<tool_call>{}</tool_call>", ["{}<tool_call>{}"]),
        ("<tool_call>{", ["{"]),
        ("<tool_call>{}", ["{}"]),
        ("<tool_call>", [""]),
        ("</tool_call>{}", []),
    ],
)
def test_a_block_without_a_complete_object_ends_at_the_next_closing_tag(text: str, contents: list[str]) -> None:
    blocks = list(iter_call_blocks(text, JSON_CALLS))
    assert [block.content for block in blocks] == contents
    assert [block.is_closed for block in blocks] == ["</tool_call>" in text[block.start :] for block in blocks]
