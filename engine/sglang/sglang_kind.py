"""Describes the servers of the engine kind "sglang" and checks them before a run starts. Does not import torch."""

from functools import partial
from pathlib import Path

from asterism.configs.choices.engine_kinds import Servers
from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS
from asterism.configs.errors import UnusableInput
from asterism.configs.loading.secret_references import describe_references
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import require
from asterism.configs.schema.sglang import PORTS_PER_SERVER, SPARE_TOKENS
from asterism.engine.engine_code import EngineCode, InputChecks
from asterism.engine.hf.model_config import load_model_config


def describe_servers(run: RunConfig) -> Servers:
    """Return the servers. Raises ValueError if they do not match the engines, or engines of two nodes share one."""
    sglang, engines, transfer = run.sglang, run.engine.num_engines, WEIGHT_TRANSFERS[run.sglang.weights]
    require(
        len(sglang.external_urls) in (0, engines),
        f"sglang.external_urls must name one server per engine, engine.num_engines = {engines}, or none:"
        f" it names {len(sglang.external_urls)}",
    )
    require(
        sglang.port + PORTS_PER_SERVER * engines <= 65_536,
        f"sglang.port must leave {PORTS_PER_SERVER} ports below 65536 for each of engine.num_engines = {engines}"
        f" servers: {sglang.port}",
    )
    require(
        not transfer.joins_group or sglang.group_backend != "nccl" or run.engine.device == "cuda",
        f'sglang.group_backend = "nccl" needs engine.device = "cuda"; use "gloo": "{run.engine.device}"',
    )
    require(
        run.cluster.key == "" or not sglang.remote_external_urls,
        "sglang.external_urls must name servers on 127.0.0.1, one set per node, if cluster.key is set:"
        f" {', '.join(sglang.remote_external_urls)}",
    )
    return Servers(
        sglang.external_urls,
        sglang.tensor_parallel,
        sglang.data_parallel,
        SPARE_TOKENS,
        sglang.startup_timeout_s,
        sglang.memory_share,
        transfer,
        sglang.bucket_mib,
        has_own_torch=sglang.python != "",
    )


def list_input_checks(run: RunConfig, checkpoint: Path | None) -> InputChecks:
    checks = {} if checkpoint is None else {"engine.kind": partial(_check_model, checkpoint)}
    if run.sglang.environment and not run.sglang.external_urls:
        checks["sglang.environment"] = partial(describe_references, run.sglang.environment, "sglang.environment")
    return checks


def _check_model(checkpoint: Path) -> str:
    config = load_model_config(checkpoint)
    dense = [layer for layer in range(config.num_layers) if config.experts and not config.experts.covers(layer)]
    if dense:
        raise UnusableInput(
            f"{checkpoint / 'config.json'}: layers without experts, such as layer {dense[0]} (mlp_only_layers, "
            f'decoder_sparse_step): SGLang gives each layer of a {config.model_type} model experts; use "embedded"'
        )
    return f"sglang; {config.model_type}"


CODE = EngineCode(
    "asterism.engine.sglang.sglang_factory:build_engine",
    describe_servers,
    list_input_checks,
    machine_checks="asterism.engine.sglang.server.sglang_machine:list_machine_checks",
    find_models="asterism.engine.sglang.server.sglang_machine:find_models",
)
