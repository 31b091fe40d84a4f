"""The kinds of engines: one record for each value of engine.kind.

A record has the facts that the configuration, the launcher and the plan read, and the import path of the kind's code, which
a process imports when it needs it. A further kind is one record here and a package: docs/engine.md.
"""

import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from asterism.configs.choices.weight_transfers import WeightTransfer


class Servers(NamedTuple):
    """The servers of a run's engines, one per engine. The defaults are the values of engines without servers."""

    urls: Sequence[str] = ()  # of servers that run already; empty: the run starts its engines
    tensor_parallel: int = 1  # GPUs that share one copy of the model
    data_parallel: int = 1  # copies of the model in one server
    spare_tokens: int = 0  # of each copy's KV tokens, unusable for sequences
    startup_timeout_s: float = 0.0
    memory_share: float = 0.0  # of a GPU, for weights and KV cache, if engine.kv_tokens = 0
    transfer: WeightTransfer = WeightTransfer()
    bucket_mib: int = 0  # of a transfer in buckets
    has_own_torch: bool = False  # of another interpreter, which may find GPUs that the run's torch does not find


class EngineKind(NamedTuple):
    code: str  # import path of its asterism.engine.engine_code.EngineCode
    in_process: bool = False  # computes in the generator, with [engine]'s memory and results that no batch changes
    trains: bool = True  # loads published weights, and returns exact token ids and logprobs
    releases_memory: bool = False  # while the learner trains: sglang.colocate
    stop_allowance_s: float = 0.0  # from Shutdown to the kill, in addition to every process's time
    has_options: bool = False  # [engine.options]; the other kinds have tables of their own

    def load_code(self) -> Any:
        """Import the kind's code, without torch."""
        return pkgutil.resolve_name(self.code)


ENGINE_KINDS = {
    "embedded": EngineKind("asterism.engine.engine_code:EMBEDDED", in_process=True),
    "sglang": EngineKind("asterism.engine.sglang.sglang_kind:CODE", releases_memory=True, stop_allowance_s=4.0),
    "openai": EngineKind("asterism.engine.openai.openai_factory:CODE", trains=False),
}


def list_kinds(**facts: bool) -> Iterator[str]:
    """Yield the quoted names of the kinds with these facts, for messages."""
    for name, kind in ENGINE_KINDS.items():
        if all(getattr(kind, fact) == value for fact, value in facts.items()):
            yield f'"{name}"'
