"""Tests of requests that every engine refuses."""

from typing import Any

import msgspec
import numpy as np
import pytest

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import GenerationRequest, RequestRefused, check_request

GOOD = GenerationRequest(sequence_id=5, token_ids=np.array([1, 2, 3], np.int32), max_new_tokens=7)


def ids(*values: int) -> dict[str, Any]:
    return {"token_ids": np.array(values, np.int32)}


def test_a_request_at_the_limits_is_accepted() -> None:
    check_request(msgspec.structs.replace(GOOD, **ids(0, 99, 50)), vocab_size=100, sequence_tokens=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ids(), "sequence 5: the prompt is empty"),
        (ids(1, 2, 100), "token id 100 at position 2 is outside the vocabulary of 100"),
        (ids(1, -1, 100), "token id -1 at position 1 is outside the vocabulary of 100"),
        (ids(1, 2, 3, 4), "4 tokens and up to 7 new tokens exceed the limit of 10 tokens per sequence"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"sampling": Sampling(temperature=-0.5)}, r"sampling: Expected `float` >= 0.0 - at `\$.temperature`"),
        ({"sampling": Sampling(temperature=float("nan"))}, r"Expected `float` .* - at `\$.temperature`"),
        ({"sampling": Sampling(top_p=0.0)}, r"Expected `float` > 0.0 - at `\$.top_p`"),
        ({"sampling": Sampling(top_p=1.5)}, r"Expected `float` <= 1.0 - at `\$.top_p`"),
        ({"sampling": Sampling(top_k=-1)}, r"Expected `int` >= 0 - at `\$.top_k`"),
        ({"stop_token_ids": tuple(range(17))}, "17 stop tokens; the limit is 16"),
    ],
)
def test_the_error_for_a_bad_request_names_the_problem(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        check_request(msgspec.structs.replace(GOOD, **changes), vocab_size=100, sequence_tokens=10)
