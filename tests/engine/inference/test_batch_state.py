"""Tests: each change of the batch takes one copy to the device, for any number of sequences."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from asterism.engine.contract import GenerationRequest
from asterism.engine.inference import batch_state
from asterism.engine.inference.decoder import Decoder
from asterism.engine.inference.pending_step import PendingStep
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import PAGE, new_core, submit
from tests.engine.tiny_models import random_ids


def test_packed_arrays_keep_their_values_dtypes_and_shapes() -> None:
    arrays = [
        np.array([2**40, -1, 3]),
        np.array([7], np.int32),
        np.array([[0.5, -2.0], [1e-30, np.inf]], np.float32).T,  # not contiguous
        np.zeros(0, np.int64),
        np.arange(6).reshape(2, 3)[:, ::2],
    ]
    found = batch_state.unpack_arrays(torch.from_numpy(batch_state.pack_arrays(arrays)), arrays)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.tolist() == array.tolist()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count copies to the device."""
    counts: Counter[str] = Counter()

    def upload(arrays: Any, device: torch.device) -> list[torch.Tensor]:
        counts["upload"] += 1
        return batch_state.unpack_arrays(torch.from_numpy(batch_state.pack_arrays(arrays)), arrays)

    monkeypatch.setattr("asterism.engine.inference.batch_state.upload", upload)
    monkeypatch.setattr("asterism.engine.inference.step_inputs.upload", upload)
    return counts


@pytest.mark.parametrize("count", [1, 9])
def test_the_number_of_copies_per_step_does_not_depend_on_the_number_of_sequences(
    model: CausalLM, copies: Counter[str], count: int
) -> None:
    core = new_core(model)
    copies.clear()
    submit(core, [GenerationRequest(number, random_ids(PAGE - 1, number), 20, seed=number) for number in range(count)])
    found: list[int] = []
    for _ in range(4):
        copies.clear()
        core.step()
        found.append(copies["upload"])
    # first step: joining rows, batch, prompts; third step: a page for the tokens from position PAGE on
    assert found == [3, 0, 1, 0]


def test_a_step_is_launched_before_the_tokens_of_the_previous_step_are_read(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def log(place: type, name: str, event: str) -> None:
        before = getattr(place, name)

        def logged(*args: Any) -> Any:
            events.append(event)
            return before(*args)

        monkeypatch.setattr(place, name, logged)

    log(Decoder, "forward", "launch")
    log(PendingStep, "read", "read")
    for overlaps, wanted in (
        (False, "launch read launch read launch read"),
        (True, "launch launch read launch read read"),
    ):
        events.clear()
        core = new_core(model, overlaps_steps=overlaps)
        core.submit(GenerationRequest(1, random_ids(1, 1), 3, seed=1))
        while core.has_work:
            core.step()
        assert " ".join(events) == wanted
