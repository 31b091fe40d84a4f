"""A real server that does not answer in time, that is of a version or has a model that is not the run's, and what is said.

What is never sent to it is in tests/engine/contract, a full queue in test_scarcity.py, another model in test_server.py, and
a server's death in test_run.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from actors.doctor_run import find_for_run
from configs.load import load_run
from engine.contract import EngineFailure
from engine.sglang import interpreter, protocol
from engine.sglang.attached import AttachedServer
from engine.sglang.client import SGLangClient
from engine.sglang.errors import ServerSlow, UnknownAnswer
from engine.sglang.fit import ServerUnusable, Wanted
from engine.sglang.interpreter import check_interpreter
from engine.sglang.server import SGLangServer
from tests.engine.contract.bench import request, tokens, until_generated
from tests.sglang.bench import TRAITS, SGLangBench, Shared, with_client
from tests.sglang.environment import PYTHON
from tests.sglang.serving import wanted

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

NO_MODEL_PORT = 31_330
PATIENCE_S = 3.0
LONG = 900


@pytest.fixture
def roomy(servers: tuple[Shared, Shared]) -> Shared:
    return servers[0]


def attaching(shared: Shared) -> Wanted:
    given = shared.wanted
    return given._replace(sglang=replace(given.sglang, attach=(shared.server.url,)))


# ---------------------------------------------------------------- a slow answer


@asynccontextmanager
async def held_by_another(client: SGLangClient) -> AsyncGenerator[None]:
    """The server generates nothing meanwhile, and nobody has told the engine."""
    await client.pause("in_place")
    try:
        yield
    finally:
        await client.resume()


async def decode_steps_when_idle(client: SGLangClient) -> float:
    while (load := (await client.loads())[0]).num_running_reqs:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(TRAITS.look_s)
    assert load.decode_moments is not None
    return load.decode_moments[0]


def test_a_turn_whose_answer_is_slow_keeps_what_came_and_ends_at_the_server_which_goes_on(
    loop: asyncio.Runner, bench: SGLangBench, roomy: Shared, tmp_path: Path
) -> None:
    impatient = SGLangBench(roomy, roomy, tmp_path, TRAITS, partial(SGLangClient, request_s=PATIENCE_S))

    async def scene(client: SGLangClient) -> None:
        async with bench.engine() as (engine, _):  # which has the server take the checkpoint's weights
            whole = await tokens(engine, request(1, LONG))
        async with impatient.engine() as (engine, _):
            before = await decode_steps_when_idle(client)
            begun = asyncio.ensure_future(engine.generate(request(1, LONG)))
            await until_generated(impatient, engine, 1, begun)
            async with held_by_another(client):
                with pytest.raises(ServerSlow, match=r"^/generate: nothing came within 3 s$"):
                    await engine.generate(request(2))
                part = await begun
                assert (await client.ready(), await client.answers()) == (False, True)
            count = len(part.token_ids)
            assert (part.finish, part.token_ids.tolist()) == ("abort", whole[:count])
            assert 0 < count < LONG // 2
            assert await tokens(engine, request(3)) == await tokens(engine, request(3))
            assert await decode_steps_when_idle(client) - before < LONG // 2  # it let go of what nobody waits for

    with capture_logs() as lines:
        with_client(loop, roomy, scene)
    broken_off = [line for line in lines if line["event"] == "turn.broken_off"]
    assert [(line["trajectory_id"], line["cause"]) for line in broken_off] == [
        (1, "/generate: nothing came within 3 s")
    ]


# ---------------------------------------------------------------- a version that is not known


@pytest.fixture
def other_version_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (protocol, interpreter):
        monkeypatch.setattr(module, "SUPPORTED", ("9.9.9",))


@pytest.mark.usefixtures("other_version_known")
def test_a_servers_version_that_is_not_known_is_said_with_those_that_are(loop: asyncio.Runner, roomy: Shared) -> None:
    said = f"SGLang {roomy.server.info.version} is not known here; known: 9.9.9"

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(UnknownAnswer) as answer:
            await client.server_info()
        assert str(answer.value) == said
        with pytest.raises(ServerUnusable) as refusal:
            await AttachedServer(attaching(roomy)).start()
        assert str(refusal.value) == f"sglang.attach[0] = {client.base_url}: {said}"
        with pytest.raises(ServerUnusable, match=f": has SGLang {roomy.server.info.version}; known here: 9.9.9$"):
            await check_interpreter(str(PYTHON), {})

    with_client(loop, roomy, scene)


# ---------------------------------------------------------------- no model


def test_a_folder_that_is_no_model_is_a_failure_with_what_the_server_says_of_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "none"}))
    given = wanted(tmp_path / "model", NO_MODEL_PORT)
    server = SGLangServer(given, log=tmp_path / "sglang-0.log", scratch=tmp_path / "scratch")
    with pytest.raises(EngineFailure) as caught:
        asyncio.run(server.start())
    first, _, last = str(caught.value).partition("\n")
    assert first == "the SGLang server sglang-0 ended with exit code 1:"
    assert "model type `none`" in last
    assert server.processes() == {}


# ---------------------------------------------------------------- what is found before a run


def test_the_doctor_finds_a_server_that_fits_or_what_does_not_and_that_its_port_is_taken(roomy: Shared) -> None:
    run = load_run(Path("configs/tiny_sglang.toml"), [f"sglang.port={roomy.wanted.sglang.port}"])
    statuses = {finding.name: finding.status for finding in find_for_run(run)}
    assert statuses == {"model.checkpoint": "ok", "sglang.python": "ok", "sglang.port": "missing", "GPUs": "ok"}

    url = roomy.server.url
    attached = [f'sglang.attach=["{url}"]', f"model.checkpoint={roomy.wanted.model}"]
    for kv_tokens, said in ((8192, f"SGLang 0.5.23 at {url}"), (9000, "engine.kv_tokens = 9000: sglang.attach[0] = ")):
        run = load_run(Path("configs/tiny_sglang.toml"), [*attached, f"engine.kv_tokens={kv_tokens}"])
        _, finding = find_for_run(run)
        assert (finding.name, finding.status) == ("sglang.attach[0]", "ok" if kv_tokens == 8192 else "missing")
        assert finding.detail.startswith(said)
