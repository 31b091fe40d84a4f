"""Small engine cores and references for their tokens: a batch with one request, and the training forward."""

from collections.abc import Iterable

import torch

from asterism.engine.contract import Capacity, EngineFailure, Generation, GenerationRequest
from asterism.engine.inference.cuda_graphs import GraphCapture
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.kernels.attention_kernels import AttentionKernels
from asterism.engine.inference.kernels.matmul import Matmul
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import compute_logprobs, get_batch_invariant_matmul, measure_errors, random_ids

LONGEST = 96
PAGE = 8


def new_core(
    model: CausalLM,
    pages: int = 64,
    *,
    page_tokens: int = PAGE,
    prefill_tokens: int = 512,
    max_running: int = 256,
    capture: GraphCapture | None = None,
    matmul: Matmul | None = None,
    attention_kernels: AttentionKernels | None = None,
    overlaps_steps: bool = False,
) -> EngineCore:
    capacity = Capacity(pages * page_tokens, page_tokens, min(LONGEST, pages * page_tokens))
    return EngineCore(
        model,
        capacity,
        prefill_tokens=prefill_tokens,
        max_running=max_running,
        capture=capture,
        matmul=matmul or get_batch_invariant_matmul(model.config),
        attention_kernels=attention_kernels,
        overlaps_steps=overlaps_steps,
    )


def step(core: EngineCore, steps: int = 1) -> dict[int, Generation]:
    """Run steps, and return the generations of the requests that end, by sequence."""
    found: dict[int, Generation] = {}
    for _ in range(steps):
        for sequence_id, outcome in core.step():
            assert isinstance(outcome, Generation)
            found[sequence_id] = outcome
    return found


def generate(core: EngineCore, *requests: GenerationRequest) -> dict[int, Generation]:
    """Submit these requests and step until all have finished. Return the generations in the order of completion."""
    submit(core, requests)
    found: dict[int, Generation] = {}
    while core.has_work:
        found |= step(core)
    return found


def submit(core: EngineCore, requests: Iterable[GenerationRequest]) -> None:
    for request in requests:
        core.submit(request)


def fail_with_infinite_weights(core: EngineCore, name: str, whole: CausalLM) -> None:
    """Check that a request fails while this parameter is infinite; then load the weights of `whole`."""
    weights = whole.state_dict()
    core.install_weights(1, weights | {name: torch.full_like(weights[name], float("inf"))})
    core.submit(GenerationRequest(1, random_ids(8, 1), 3))
    while not (outcomes := core.step()):
        pass
    assert isinstance(outcomes[0][1], EngineFailure)
    core.release_cache(1)
    core.install_weights(2, weights)


def draw_request(number: int, prompt_tokens: int, new_tokens: int, *stops: int) -> GenerationRequest:
    ids = random_ids(prompt_tokens, number)
    return GenerationRequest(number, ids, new_tokens, stop_token_ids=stops, seed=number)


def alone(model: CausalLM, request: GenerationRequest, matmul: Matmul | None = None) -> Generation:
    return generate(new_core(model, page_tokens=32, matmul=matmul), request)[request.sequence_id]


def assert_same(found: Generation, wanted: Generation) -> None:
    """Check that two generations are equal in every bit."""
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.logprobs.tolist() == wanted.logprobs.tolist()


def assert_as_alone(model: CausalLM, found: dict[int, Generation], *requests: GenerationRequest) -> None:
    """Check that each generation has the same bits as its request in a batch of one."""
    for request in requests:
        assert_same(found[request.sequence_id], alone(model, request))


def assert_greedy(model: CausalLM, asked: GenerationRequest, found: Generation) -> None:
    """Check by a training forward of the whole sequence that each token is the most likely one after its prefix."""
    assert found.token_ids.tolist() == compute_logprobs(model, asked, found).argmax(-1).tolist()


def assert_logprobs(model: CausalLM, asked: GenerationRequest, found: Generation) -> None:
    """Check that the logprobs of the generated tokens equal those of the training forward."""
    assert measure_errors(model, asked, found).max() < 1e-4
