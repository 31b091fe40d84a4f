"""Fixtures: a model, and one torch thread. With several threads, the bits of a row depend on the batch."""

from collections.abc import Iterator

import pytest
import torch

from asterism.engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import small_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def model() -> CausalLM:
    return small_model()
