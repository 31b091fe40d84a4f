"""The engine of OpenAI's completions API with a real server, compared with the engine of SGLang's own API."""

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray

from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.openai.openai_engine import OpenAIEngine
from tests.engine.contract.bench import request
from tests.engine.started_engines import started
from tests.sglang.bench import SGLangBench

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]


async def test_completions_have_the_tokens_and_logprobs_of_the_servers_own_api(bench: SGLangBench) -> None:
    greedy = request(1, 40, temperature=0.0)
    async with bench.engine() as (own, capacity):
        wanted = await own.generate(greedy)
        stop = int(wanted.token_ids[20])
        length = wanted.token_ids.tolist().index(stop) + 1
        url, tokenizer, longest = bench._shared.server.url, load_tokenizer(bench.model), capacity.sequence_tokens
        async with started(OpenAIEngine(url, tokenizer, sequence_tokens=longest)) as (engine, served):
            assert served.sequence_tokens == longest
            pieces = asyncio.Queue[NDArray[np.int32]]()
            found = await engine.generate(greedy, pieces.put_nowait)
            reported = np.concatenate([pieces.get_nowait() for _ in range(pieces.qsize())])
            assert found.token_ids.tolist() == reported.tolist() == wanted.token_ids.tolist()
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=bench.traits.logprob_error)
            assert found.finish == "length"
            stopped = await engine.generate(request(1, 40, temperature=0.0, stop_token_ids=(stop,)))
            assert (stopped.token_ids.tolist(), stopped.finish) == (wanted.token_ids.tolist()[:length], "stop")
            call = asyncio.ensure_future(engine.generate(request(2, bench.traits.long_turn), pieces.put_nowait))
            await pieces.get()
            engine.abort(2)
            assert (await call).finish == "abort"
