"""Requests and responses of SGLang's HTTP API, and the supported SGLang versions.

Unknown fields of a response are ignored; a missing or ill-typed field raises InvalidResponse.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, structs

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import EngineFailure
from asterism.engine.http.errors import InvalidResponse

SUPPORTED_VERSIONS = ("0.5.23",)

Answer = TypeVar("Answer")


# ---------------------------------------------------------------- errors


class UpdateRefused(EngineFailure):
    """The server refused a weight update, an adapter or a process group, with its message."""


# ---------------------------------------------------------------- requests


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling of one request. Each field is sent: the server's --preferred-sampling-params fill omitted fields."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 to sample from all tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # True also ignores stop_token_ids
    sampling_seed: int | None = None  # signed 64-bit integer; used only with --enable-deterministic-inference
    stream_interval: int | None = None  # number of new tokens per response of a stream
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


def format_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return a request's fields of SamplingParams. The server's `top_k` for all tokens is -1."""
    return {**structs.asdict(sampling), "top_k": sampling.top_k or -1}


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = 0  # first position with a logprob; -1: only new tokens; 0 bypasses the prefix cache
    stream: bool = False
    extra_key: str | None = None  # the prefix cache matches only requests with the same key
    priority: int | None = None  # larger priorities first, with --enable-priority-scheduling
    routed_dp_rank: int | None = None
    lora_path: str | None = None  # name of a loaded adapter; None: the server's own weights


# ---------------------------------------------------------------- responses


class FinishedByLength(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """The request reached max_new_tokens or the server's limit."""


class FinishedByStop(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    matched: int | str | None = None


class FinishedByAbort(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    message: str = ""
    status_code: int | None = None  # None if the abort was requested


FinishReason = FinishedByLength | FinishedByStop | FinishedByAbort


class VersionSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True):
    """Metadata of a response. Fields are UNSET only if the request was aborted before it started."""

    id: str
    completion_tokens: int  # number of tokens generated so far
    weight_version: str
    # (logprob, token id, text) of `output_ids`: of all tokens so far, or of the new ones.
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    finish_reason: FinishReason | None = None  # None while the request is running
    weight_versions: list[VersionSpan] = []  # versions of all tokens so far
    prompt_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    num_retractions: int | UnsetType = UNSET
    dp_rank: int | None = None


class GenerateResponse(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: MetaInfo


class ServerInfo(msgspec.Struct, frozen=True):
    version: str
    model_path: str
    max_total_num_tokens: int  # number of KV tokens per rank
    max_req_input_len: int  # exclusive bound of the prompt's length
    context_length: int | None
    page_size: int
    dp_size: int
    tp_size: int
    device: str
    dtype: str
    quantization: str | None
    enable_dp_attention: bool
    enable_deterministic_inference: bool
    enable_priority_scheduling: bool
    disable_radix_cache: bool
    enable_lora: bool | None
    max_lora_rank: int | None
    lora_target_modules: list[str] | None  # "all", or names of projections


class ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str


class RankLoad(msgspec.Struct, frozen=True):
    """A snapshot of one rank's load, up to a few steps old."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # KV tokens of running requests, without tokens that are only cached
    max_total_num_tokens: int
    # [0]: decode steps since the server's start, without steps that include a prefill.
    decode_moments: list[float] | None


class LoadsResponse(msgspec.Struct, frozen=True):
    loads: list[RankLoad]


class UpdateResponse(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class AdaptersResponse(msgspec.Struct, frozen=True):
    success: bool
    message: str | None = msgspec.field(name="error_message", default=None)
    loaded_adapters: dict[str, msgspec.Raw] | None = None  # all loaded adapters by name, after the call


class ParallelismInfo(msgspec.Struct, frozen=True):
    tp_rank: int
    pp_rank: int


class RankChecksums(msgspec.Struct, frozen=True):
    checksums: Mapping[str, str]  # checksums by parameter name, after the server's fusing
    per_gpu_checksum: str  # checksum of all parameters
    parallelism_info: list[ParallelismInfo]  # [0]: the model; the rest: draft models

    @property
    def model_shard(self) -> tuple[int, int]:
        """The tensor- and pipeline-parallel rank: ranks with the same shard hold the same parameters."""
        return self.parallelism_info[0].tp_rank, self.parallelism_info[0].pp_rank


class ChecksumsResponse(msgspec.Struct, frozen=True):
    ranks: list[RankChecksums]


def parse_response(content: bytes, kind: type[Answer], version: str) -> Answer:
    """Parse a response. Raises InvalidResponse with the field and the server's version ("": unknown)."""
    try:
        return msgspec.json.decode(content, type=kind)
    except ValueError as error:  # invalid JSON or UTF-8
        raise InvalidResponse(
            f"SGLang {version or '(version unknown)'} sent an invalid {kind.__name__}: {error}"
        ) from error


def check_version(version: str) -> None:
    if version not in SUPPORTED_VERSIONS:
        raise InvalidResponse(f"SGLang {version} is not supported; supported: {', '.join(SUPPORTED_VERSIONS)}")
