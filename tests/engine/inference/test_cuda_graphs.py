"""Tests of decode steps in graphs. recorded_graph.py replaces only the CUDA graphs."""

import pytest

from asterism.configs.schema.algorithm import GREEDY
from asterism.engine.contract import Capacity, Generation, GenerationRequest
from asterism.engine.inference.buffer_sizes import pad_to_bucket
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.kernels.attention_kernels import SdpaKernels
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import (
    alone,
    assert_as_alone,
    assert_greedy,
    assert_logprobs,
    assert_same,
    draw_request,
    generate,
    new_core,
    step,
)
from tests.engine.inference.recorded_graph import Recorded
from tests.engine.tiny_models import small_model


def requests(count: int, new_tokens: int = 12) -> list[GenerationRequest]:
    return [draw_request(number, 3 + 5 * number, new_tokens) for number in range(count)]


@pytest.mark.slow
def test_graphs_keep_the_bits_of_joining_leaving_and_growing_sequences(model: CausalLM) -> None:
    capture = Recorded()
    core = new_core(model, prefill_tokens=20, capture=capture)
    found: dict[int, Generation] = {}
    for request in requests(9, 20):
        core.submit(request)
        found |= step(core, 3)
    found |= generate(core)
    assert_as_alone(model, found, *requests(9, 20))
    assert capture.replays > 30


@pytest.mark.slow
def test_one_graph_serves_all_batches_of_its_size_bucket(model: CausalLM) -> None:
    capture = Recorded()
    core = new_core(model, capture=capture)
    asked = [draw_request(number, 3, count) for number, count in enumerate((5, 7, 9, 28))]
    found = generate(core, *asked)
    assert (capture.graphs, capture.replays) == (1, 28 - 1)  # the prefill step generates the first token
    assert_as_alone(model, found, *asked)


@pytest.mark.slow
def test_graphs_read_the_latest_weights() -> None:
    core, other = new_core(small_model(), capture=Recorded()), small_model(seed=5)
    generate(core, requests(1)[0])
    core.install_weights(1, other.state_dict())
    assert_same(generate(core, requests(2)[1])[1], alone(other, requests(2)[1]))


def test_graph_sizes_pad_by_at_most_a_quarter() -> None:
    sizes = {1: 4, 4: 4, 5: 8, 9: 12, 32: 32, 33: 40, 64: 64, 65: 80, 129: 160, 256: 256}
    assert {count: pad_to_bucket(count, 4) for count in sizes} == sizes
    for count in range(1, 1000):
        assert count <= pad_to_bucket(count, 4) < 1.25 * count + 4


@pytest.mark.slow
def test_cuda_kernels_match_the_training_forward(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asterism.engine.inference.kernels.attention.select_kernels", lambda _: SdpaKernels())
    core = EngineCore(model, Capacity(1024, 8, 96), prefill_tokens=40, capture=Recorded())
    asked = [GenerationRequest(each.sequence_id, each.token_ids, 12, GREEDY) for each in requests(6)]
    for number, found in generate(core, *asked).items():
        assert_greedy(model, asked[number], found)
        assert_logprobs(model, asked[number], found)
