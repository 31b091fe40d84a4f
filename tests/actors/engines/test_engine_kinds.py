"""A new kind of engine needs only a package and one record in a table; no other code names the package."""

import asyncio
import pkgutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.actors.cli.doctor.configuration_checks import check_run
from asterism.actors.launch.checks.input_checks import check_inputs, list_input_checks
from asterism.actors.process import run_generator
from asterism.actors.runtime.decider_process import ProcessIncarnation
from asterism.actors.runtime.wiring import STOP_TIMEOUT_S, get_stop_timeout_s
from asterism.analysis.planning.plan_inputs import PlanInputs
from asterism.analysis.planning.run_plan import build_plan
from asterism.bus.messages import EngineJoined, Shutdown, TurnGenerated, WeightsLoaded, WeightsPublished
from asterism.bus.transport.in_process import Hub
from asterism.configs.choices.engine_kinds import ENGINE_KINDS, EngineKind
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from tests.actors.generators import turn
from tests.analysis.planning.shipped_plans import make_inputs, make_machines
from tests.engine.tiny_models import save_small_model

ADDRESS = "http://10.0.0.1:8000"
KIND = """
import msgspec

from asterism.configs.choices.engine_kinds import Servers
from asterism.configs.errors import UnusableInput
from asterism.engine.engine_code import EngineCode


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    urls: tuple[str, ...] = ()
    tensor_parallel: int = 1


def describe_servers(run):
    options = msgspec.convert(run.engine.options, VllmOptions)
    return Servers(options.urls, options.tensor_parallel, startup_timeout_s=90.0)


def list_input_checks(run, checkpoint):
    def check():
        if run.engine.dtype != "bfloat16":
            raise UnusableInput("vLLM needs engine.dtype = \\"bfloat16\\"")
        return f"vllm; {checkpoint.name}"

    return {"engine.options": check}


CODE = EngineCode(
    "vllm_kind.vllm_factory:build_engine",
    describe_servers,
    list_input_checks,
    machine_checks="vllm_kind.vllm_checks:list_machine_checks",
)
"""
FACTORY = """
from tests.actors.generators import ScriptedEngine


def build_engine(start):
    assert start.checkpoint.name == "model"
    return ScriptedEngine(start.version)
"""
CHECKS = """
from asterism.engine.engine_code import EngineCheck


def list_machine_checks(run, checkpoint):
    yield EngineCheck("vllm", lambda: "0.12")
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the package `vllm_kind` in a separate folder, and add its record to the table."""
    folder = tmp_path / "packages" / "vllm_kind"
    folder.mkdir(parents=True)
    for name, text in {"__init__": KIND, "vllm_factory": FACTORY, "vllm_checks": CHECKS}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setitem(ENGINE_KINDS, "vllm", EngineKind("vllm_kind:CODE", stop_allowance_s=1.0, has_options=True))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_small_model(tmp_path / "model")


def load(*settings: str) -> RunConfig:
    return load_run(None, ["name=a", "engine.kind=vllm", "model.checkpoint=/model", *settings])


def test_a_configuration_has_the_options_of_the_kind() -> None:
    run = load(f'engine.options.urls=["{ADDRESS}"]', "engine.kv_tokens=0")
    assert (run.servers.urls, run.servers.tensor_parallel, run.servers.startup_timeout_s) == ((ADDRESS,), 1, 90.0)
    assert get_stop_timeout_s(run, "generator-0") == STOP_TIMEOUT_S + 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.kind=vlm"], '`engine`: kind must be one of "embedded", "sglang", "openai", "vllm", got "vlm"'),
        (["engine.options.url=a"], "Object contains unknown field `url`"),
        (["engine.kind=sglang", "engine.options.url=a"], 'options must be empty: kind = "sglang" has none'),
        (
            ["sglang.colocate=true", "rl.max_staleness=0"],
            'needs engine.kind = "sglang", which can release memory: "vllm"',
        ),
        (["sglang.weights=paper"], '`sglang`: weights must be one of "disk", "tensor", "group", "ipc", got "paper"'),
    ],
)
def test_unusable_kinds_and_options_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        load(*settings)


def test_the_launch_and_the_doctor_make_the_checks_of_the_kind(checkpoint: Path) -> None:
    settings = (f"model.checkpoint={checkpoint}", "data.train=", "data.test=", "evaluation.questions=0")
    assert list_input_checks(load("engine.dtype=bfloat16", *settings))["engine.options"]().description == "vllm; model"
    with pytest.raises(UnusableInput, match=r'^engine\.options: vLLM needs engine.dtype = "bfloat16"'):
        check_inputs(load(*settings))
    findings = check_run(load(*settings))
    assert (findings["vllm"].detail, findings["engine.options"].status) == ("0.12", "unusable")


@pytest.mark.slow
def test_a_plan_counts_the_gpus_of_the_kind() -> None:
    inputs = make_inputs("4B", machines=make_machines("h100"))
    engine = replace(inputs.run.engine, kind="vllm", num_engines=2, options={"tensor_parallel": 3})
    run = replace(inputs.run, engine=engine, sglang=SGLangConfig())
    counts = {each.name: each.needed for each in build_plan(PlanInputs(run, inputs.config, inputs.machines)).counts}
    assert counts["GPUs of the engines"] == 6


async def test_a_generator_has_the_engine_that_the_kind_builds(tmp_path: Path) -> None:
    hub, run, folder = Hub(), load(), RunFolder(tmp_path)
    head, rollout = hub.join("head", 100), hub.join("rollout-0", 100)
    generator = ProcessIncarnation("generator-0", 0)
    running = asyncio.create_task(run_generator(generator, run, folder, lambda name, _: hub.join(name, 100)))
    assert (await head.receive()).message == EngineJoined("generator-0", 1024, 16, -1, 1)
    await rollout.send("generator-0", WeightsPublished(4, "/w", 0, "", 1))
    assert isinstance((await rollout.receive()).message, WeightsLoaded)
    await rollout.send("generator-0", turn(1, 3, incarnation=1))
    answer = (await rollout.receive()).message
    assert isinstance(answer, TurnGenerated)
    assert (answer.trajectory_id, answer.finish, len(answer.token_ids)) == (1, "length", 3 * 4)
    await rollout.send("generator-0", Shutdown())
    await running


def test_each_import_path_of_a_kind_can_be_imported() -> None:
    for name in ("embedded", "sglang", "openai"):
        code = ENGINE_KINDS[name].load_code()
        for path in filter(None, (code.factory, code.machine_checks, code.find_models)):
            assert callable(pkgutil.resolve_name(path))
