from typing import Annotated

import msgspec
import pytest

from asterism.configs.loading.error_messages import explain_problem, prefix_key
from asterism.configs.schema.schema_tree import Section


@pytest.mark.parametrize(
    ("key", "message", "expected"),
    [
        ("tasks.t.import", "tasks.t.parameters.width: missing", "tasks.t.parameters.width: missing"),
        ("tasks.t.import", "tasks.t.py: no such file", "tasks.t.import: tasks.t.py: no such file"),
        ("data.train", "data.jsonl: no such file", "data.train: data.jsonl: no such file"),
        ("model", "model.checkpoint: absent", "model: model.checkpoint: absent"),
    ],
    ids=["another_key_of_the_table", "a_file_named_as_the_task", "a_file_named_as_the_table", "no_table"],
)
def test_a_message_begins_with_one_key(key: str, message: str, expected: str) -> None:
    assert prefix_key(key, message) == expected


class Parameters(Section, frozen=True):
    code: Annotated[str, msgspec.Meta(pattern="^[a-z]+$")]


def test_the_pattern_of_a_programs_own_parameter_is_shown() -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"code": "A1"}, Parameters)
    explained = explain_problem(str(refused.value), {"code": "A1"}, Parameters)
    assert explained == "`code` must be a string matching regex '^[a-z]+$', got \"A1\""
