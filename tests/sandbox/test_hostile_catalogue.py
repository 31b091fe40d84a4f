"""The hostile programs use names and formats of the present harness, so that a rename cannot disarm an attack."""

import inspect
import re

import pytest

from asterism.sandbox.inside.wire import call_wire
from tests.sandbox.hostile.catalogue import HOSTILE
from tests.sandbox.hostile.descriptors import DESCRIPTORS
from tests.sandbox.hostile.harness import ATTACKED, HARNESS
from tests.sandbox.hostile.without_namespaces import KNOWN_ESCAPES, NOT_RUN


@pytest.mark.parametrize("kind", ATTACKED, ids=lambda kind: kind.__name__)
def test_attacked_attributes_of_the_harness_exist(kind: type) -> None:
    source = inspect.getsource(kind)
    assert [
        name for name in ATTACKED[kind] if not hasattr(kind, name) and not re.search(rf"self\.{name}\b", source)
    ] == []


def test_attacks_on_the_harness_use_only_checked_attributes() -> None:
    used = {name for program in HARNESS for name in re.findall(r"\bfound\.(\w+)", program.code)}
    used |= {name for program in DESCRIPTORS for name in re.findall(r"getattr\(value, '(\w+)'", program.code)}
    assert used
    assert used <= {name for names in ATTACKED.values() for name in names}


def test_forged_answers_have_the_format_of_real_answers() -> None:
    answer = call_wire._ANSWER  # pyright: ignore[reportPrivateUsage]
    assert (answer.format, call_wire._ANSWER_TAG, call_wire.CONTROL_FD) == ("<cIQI", b"a", 3)  # pyright: ignore


def test_known_escapes_are_programs_of_the_catalogue() -> None:
    assert set(KNOWN_ESCAPES) | set(NOT_RUN) <= set(HOSTILE)
    assert not set(KNOWN_ESCAPES) & set(NOT_RUN)


def test_the_catalogue_is_complete() -> None:
    assert len(HOSTILE) >= 300
    assert sum(len(hostile.forms) for hostile in HOSTILE.values()) >= 550
