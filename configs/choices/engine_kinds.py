"""The kinds of engines: one record for each value of engine.kind.

A record has the facts that the configuration, the launcher and the plan read, and the import path of the kind's code,
which is imported on demand. To add a kind, add a record here and a package: docs/engine.md.
"""

import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from asterism.configs.choices.weight_transfers import WeightTransfer


class Servers(NamedTuple):
    """The servers of a run's engines, one per engine. The defaults describe engines without servers."""

    urls: Sequence[str] = ()  # URLs of external servers; empty: the run starts its engines
    tensor_parallel: int = 1  # GPUs that share one copy of the model
    data_parallel: int = 1  # copies of the model in one server
    spare_tokens: int = 0  # part of each copy's KV tokens that sequences cannot use
    startup_timeout_s: float = 0.0
    memory_share: float = 0.0  # share of a GPU for weights and KV cache, if engine.kv_tokens = 0
    transfer: WeightTransfer = WeightTransfer()
    bucket_mib: int = 0  # size of a bucket of a weight transfer
    has_own_torch: bool = False  # the servers' torch can find GPUs that the run's torch does not find


class EngineKind(NamedTuple):
    code: str  # import path of the kind's asterism.engine.engine_code.EngineCode
    in_process: bool = False  # the engine runs in the generator, in [engine]'s memory; batches do not change results
    trains: bool = True  # engines load published weights, and return exact token ids and logprobs
    releases_memory: bool = False  # engines can release memory while the learner trains: sglang.colocate
    stop_allowance_s: float = 0.0  # time between Shutdown and the kill, in addition to every process's time
    has_options: bool = False  # [engine.options] has the kind's options; other kinds have own tables

    def load_code(self) -> Any:
        """Import the kind's code, which does not import torch."""
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
