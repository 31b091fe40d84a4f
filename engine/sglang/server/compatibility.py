"""Checks that a server's context length, KV capacity and model fit the run. Errors name the key."""

from pathlib import Path
from typing import NamedTuple

from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SPARE_TOKENS, SGLangConfig
from asterism.engine.model.hf_checkpoint import load_model_config
from asterism.engine.model.lora_options import LoraOptions, get_published_adapters
from asterism.engine.sglang.http_api import ServerInfo
from asterism.engine.sglang.server.server_arguments import list_lora_flags
from asterism.engine.sglang.weights.server_parameters import get_fused_name


class ServerUnusable(UnusableInput):
    """The configured server is missing or unsuitable; the message starts with the key."""


class ServerRequirements(NamedTuple):
    engine: EngineConfig
    sglang: SGLangConfig
    model: Path  # the run's checkpoint
    sequence_tokens: int  # number of tokens of the longest trajectory
    lora: LoraOptions | None = None  # the adapters that the server receives
    serves_own_model: bool = False  # whether to keep the server's weights; `model` then has only the tokenizer
    sequence_keys: str = "dialogue.prompt_tokens + response_tokens"  # keys that add up to `sequence_tokens`


def make_requirements(run: RunConfig, model: Path, *, serves_own_model: bool = False) -> ServerRequirements:
    lora = get_published_adapters(run.learner)
    return ServerRequirements(
        run.engine, run.sglang, model, run.sequence_tokens, lora, serves_own_model, run.sequence_keys
    )


def check_compatibility(info: ServerInfo, requirements: ServerRequirements, server_name: str) -> None:
    """Raise ServerUnusable with all problems of a server. `server_name` appears in the messages."""
    problems = [
        *_find_capacity_problems(info, requirements, server_name),
        *_find_model_problems(info, requirements, server_name),
        *_find_transport_problems(info, requirements, server_name),
        *_find_adapter_problems(info, requirements.lora, server_name),
    ]
    if problems:
        raise ServerUnusable("\n".join(problems))


def _find_capacity_problems(info: ServerInfo, requirements: ServerRequirements, server_name: str) -> list[str]:
    need, kv_tokens = requirements.sequence_tokens, requirements.engine.kv_tokens
    has = info.max_total_num_tokens * info.dp_size
    problems: list[str] = []
    if info.max_req_input_len < need:
        problems.append(
            f"{requirements.sequence_keys} = {need}: {server_name} accepts at most "
            f"{info.max_req_input_len} (its --context-length is {info.context_length}; {need + SPARE_TOKENS} is enough)"
        )
    if kv_tokens > has:
        problems.append(f"engine.kv_tokens = {kv_tokens}: {server_name} has room for {has}; 0 uses all of it")
    return problems


def _find_model_problems(info: ServerInfo, requirements: ServerRequirements, server_name: str) -> list[str]:
    """List the problems of a different model. A model of the same shape fits: the run loads its own weights first."""
    server_model = Path(info.model_path)
    if requirements.serves_own_model or server_model.resolve() == requirements.model.resolve():
        return []
    try:
        same = load_model_config(server_model) == load_model_config(requirements.model)
    except UnusableInput:  # this machine cannot read the server's model
        same = False
    return (
        []
        if same
        else [f"model.checkpoint = {requirements.model}: {server_name} has a different model, {server_model}"]
    )


def _find_transport_problems(info: ServerInfo, requirements: ServerRequirements, server_name: str) -> list[str]:
    transport = requirements.sglang.weights
    if info.dp_size == 1 or WEIGHT_TRANSFERS[transport].reaches_copies:
        return []
    return [
        f'sglang.weights = "{transport}": {server_name} has {info.dp_size} model replicas; set sglang.weights = "disk"'
    ]


def _find_adapter_problems(info: ServerInfo, lora: LoraOptions | None, server_name: str) -> list[str]:
    """List the problems of LoRA limits. A server without these limits takes them from its loaded adapters."""
    if lora is None:
        return []
    key, flags = 'learner.lora.publish = "adapters"', " ".join(list_lora_flags(lora))
    if not info.enable_lora:
        return [f"{key}: {server_name} runs without --enable-lora; start it with {flags}"]
    problems: list[str] = []
    if info.dp_size > 1 or info.enable_dp_attention:
        kind = f"{info.dp_size} model replicas" if info.dp_size > 1 else "--enable-dp-attention"
        problems.append(f'{key}: {server_name} has {kind} and loads no adapters; set learner.lora.publish = "merged"')
    if info.max_lora_rank is not None and info.max_lora_rank < lora.rank:
        problems.append(f"learner.lora.rank = {lora.rank}: {server_name} has --max-lora-rank {info.max_lora_rank}")
    accepted = set(info.lora_target_modules or ("all",))
    missing = set(map(get_fused_name, lora.targets)) - set(map(get_fused_name, accepted))
    if missing and "all" not in accepted:
        problems.append(
            f"learner.lora.targets = {list(lora.targets)}: {server_name} has --lora-target-modules "
            f"{' '.join(sorted(accepted))}; start it with {flags}"
        )
    return problems
