"""A real server with slow responses or an invalid model.

tests/engine/contract covers refused requests, test_scarcity.py a full queue, and
test_run_faults.py a server's death.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from asterism.actors.cli.doctor.configuration_checks import check_run
from asterism.configs.load import load_run
from asterism.engine.contract import EngineFailure
from asterism.engine.http.errors import ServerTimeout
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.server.managed_server import SGLangServer
from tests.engine.contract.bench import request, tokens, until_generated
from tests.sglang.bench import TRAITS, SGLangBench, SharedServer
from tests.sglang.serving import make_requirements

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

NO_MODEL_PORT = 31_340
TIMEOUT_S = 3.0
LONG = 900


@asynccontextmanager
async def pause_externally(client: SGLangClient) -> AsyncGenerator[None]:
    """Pause the server with a client that does not belong to the engine."""
    await client.pause("in_place")
    try:
        yield
    finally:
        await client.resume()


async def wait_for_idle_decode_steps(client: SGLangClient) -> float:
    while (load := (await client.get_loads())[0]).num_running_reqs:  # noqa: ASYNC110 - the server sends no event
        await asyncio.sleep(TRAITS.look_s)
    assert load.decode_moments is not None
    return load.decode_moments[0]


async def test_a_turn_that_times_out_keeps_its_tokens_and_is_aborted_on_the_server(
    bench: SGLangBench, roomy: SharedServer, tmp_path: Path
) -> None:
    short_timeout = SGLangBench(roomy, roomy, tmp_path, TRAITS, partial(SGLangClient, request_timeout_s=TIMEOUT_S))

    with capture_logs() as lines:
        async with SGLangClient(roomy.server.url) as client:
            async with bench.engine() as (engine, _):  # the first engine loads the checkpoint's weights
                whole = await tokens(engine, request(1, LONG))
            async with short_timeout.engine() as (engine, _):
                before = await wait_for_idle_decode_steps(client)
                turn = asyncio.ensure_future(engine.generate(request(1, LONG)))
                await until_generated(short_timeout, engine, 1, turn)
                async with pause_externally(client):
                    with pytest.raises(ServerTimeout, match=r"^/generate: no response within 3 s$"):
                        await engine.generate(request(2))
                    part = await turn
                    assert (await client.is_ready(), await client.is_responsive()) == (False, True)
                count = len(part.token_ids)
                assert (part.finish, part.token_ids.tolist()) == ("abort", whole[:count])
                assert 0 < count < LONG // 2
                assert await tokens(engine, request(3)) == await tokens(engine, request(3))
                # The few further decode steps show that the server aborted the turn.
                assert await wait_for_idle_decode_steps(client) - before < LONG // 2
    truncations = [line for line in lines if line["event"] == "turn.truncated"]
    assert [(line["trajectory_id"], line["cause"]) for line in truncations] == [
        (1, "/generate: no response within 3 s")
    ]


def test_a_folder_without_a_model_fails_with_the_servers_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "none"}))
    given = make_requirements(tmp_path / "model", NO_MODEL_PORT)
    server = SGLangServer(given, log=tmp_path / "sglang-0.log", scratch=tmp_path / "scratch")
    with pytest.raises(EngineFailure) as caught:
        asyncio.run(server.start())
    first, _, last = str(caught.value).partition("\n")
    assert first == "the SGLang server sglang-0 ended with exit code 1:"
    assert "model type `none`" in last
    assert server.list_processes() == {}


def test_the_doctor_reports_compatible_servers_problems_and_ports_in_use(roomy: SharedServer) -> None:
    run = load_run(Path("configs/tiny_sglang.toml"), [f"sglang.port={roomy.requirements.sglang.port}"])
    statuses = {name: finding.status for name, finding in check_run(run).items()}
    assert statuses.pop("plan") in ("ok", "warning")  # the status depends on the machine's memory
    fine = ("prepare.import", "model.checkpoint", "sglang.python", "GPUs")
    assert statuses == {"sglang.port": "unusable", **dict.fromkeys(fine, "ok")}

    url = roomy.server.url
    attached = [f'sglang.external_urls=["{url}"]', f"model.checkpoint={roomy.requirements.model}"]
    for kv_tokens, message in (
        (8192, f"SGLang 0.5.23 at {url}"),
        (9000, "engine.kv_tokens = 9000: sglang.external_urls[0] = "),
    ):
        run = load_run(Path("configs/tiny_sglang.toml"), [*attached, f"engine.kv_tokens={kv_tokens}"])
        finding = check_run(run)["sglang.external_urls[0]"]
        assert finding.status == ("ok" if kv_tokens == 8192 else "unusable")
        assert finding.detail.startswith(message)
