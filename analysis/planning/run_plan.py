"""The plan of a run: all resources, the seconds of a step, and the changes with which a resource suffices."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations, product
from operator import attrgetter
from typing import Any, get_args

import msgspec

from asterism.analysis.planning.memory_plan import count_batch_bytes, plan_cache_tokens, plan_gpu, plan_host
from asterism.analysis.planning.plan_inputs import SEQUENCE_KEYS, PlanInputs
from asterism.analysis.planning.resources import KeyChange, PlannedCount, PlannedResource
from asterism.analysis.planning.step_seconds import StepSeconds, estimate_step
from asterism.analysis.planning.storage_plan import plan_disk, plan_largest_message, plan_shared_memory
from asterism.configs.schema.learner_config import Checkpointing

_ALTERNATIVES = 3  # maximum number of listed changes per resource
_FRACTIONS = 16  # denominator of the tried fractions of a present value
_NO_GPU_REMEDY = "no GPU here; name one with --gpu"
_FACTORS = tuple(2**power for power in range(1, 13))


class RunPlan(msgspec.Struct, frozen=True):
    name: str
    model_type: str
    parameters: int
    layers: int
    checkpointing: str
    resources: tuple[PlannedResource, ...]
    counts: tuple[PlannedCount, ...]
    batch_bytes: float  # bytes of a step's batch on disk
    trained_tokens: float  # tokens per step
    generated_tokens: float  # tokens per step
    seconds: StepSeconds
    changes: tuple[KeyChange, ...]  # changes with which the insufficient resources suffice
    assumptions: dict[str, float]
    notes: tuple[str, ...]  # further assumptions, in words

    @property
    def shortfalls(self) -> list[PlannedResource | PlannedCount]:
        return [each for each in (*self.counts, *self.resources) if not each.fits]


def build_plan(inputs: PlanInputs) -> RunPlan:
    resources, counts = _plan_resources(inputs), _plan_counts(inputs)
    short = [each for each in (*counts.values(), *resources.values()) if not each.fits]
    return RunPlan(
        name=inputs.run.name,
        model_type=inputs.config.model_type,
        parameters=inputs.size.total,
        layers=inputs.config.num_layers,
        checkpointing=inputs.run.learner.memory.activation_checkpointing,
        resources=tuple(resources.values()),
        counts=tuple(counts.values()),
        batch_bytes=count_batch_bytes(inputs),
        trained_tokens=inputs.trained_tokens,
        generated_tokens=inputs.generated_trajectories * inputs.mean_response_tokens,
        seconds=estimate_step(inputs),
        changes=tuple(change for each in short for change in find_changes(inputs, each.name, each.keys)),
        assumptions=inputs.assumptions._asdict(),
        notes=inputs.notes,
    )


def _plan_resources(inputs: PlanInputs) -> dict[str, PlannedResource]:
    found = plan_gpu(inputs), plan_host(inputs), plan_shared_memory(inputs), plan_disk(inputs)
    return {each.name: each for each in found if each is not None}


def _plan_counts(inputs: PlanInputs) -> dict[str, PlannedCount]:
    run, machines, positions = inputs.run, inputs.machines, inputs.config.max_position_embeddings
    counts: list[PlannedCount | None] = [
        plan_largest_message(inputs),
        PlannedCount("tokens of the model's context", run.sequence_tokens, positions, SEQUENCE_KEYS),
        PlannedCount("nodes", run.cluster.nodes, machines.nodes, ("cluster.nodes", "cluster.learner_nodes")),
    ]
    if run.learner.device == "cuda":
        counts.append(_plan_gpu_count("GPUs of the learner", run.learner.ranks, machines.gpus, ("learner.ranks",)))
    if run.engine.device == "cuda" and inputs.has_servers and not run.servers.urls:
        needed = run.engine.num_engines * inputs.gpus_per_engine
        keys = ("engine.num_engines", "sglang.tensor_parallel", "sglang.data_parallel")
        # The interpreter of sglang.python may find GPUs that the torch of this interpreter does not find.
        limit = None if machines.gpus == 0 and run.servers.has_own_torch else machines.gpus
        counts.append(_plan_gpu_count("GPUs of the engines", needed, limit, keys))
    counts.append(plan_cache_tokens(inputs))
    return {each.name: each for each in counts if each is not None}


def _plan_gpu_count(name: str, needed: int, limit: int | None, keys: tuple[str, ...]) -> PlannedCount:
    if limit == 0:  # no key helps: the machine has no GPU
        return PlannedCount(name, needed, limit, remedy=_NO_GPU_REMEDY)
    return PlannedCount(name, needed, limit, keys)


# ---------------------------------------------------------------- what to change


def find_changes(inputs: PlanInputs, name: str, keys: Sequence[str]) -> list[KeyChange]:
    """Return at most _ALTERNATIVES changes that make the resource suffice: one key each, or two if no single key helps.

    No change creates a new shortfall. A change for a resource also satisfies all counts with keys.
    """
    counts, resources = _plan_counts(inputs), _plan_resources(inputs)
    others = [*resources.values(), *(each for each in counts.values() if name in counts or not each.keys)]
    short = {each.name for each in others if not each.fits} - {name}
    values = {key: list(_list_values(inputs, key)) for key in keys}
    found = [change for key in keys if (change := _try(inputs, name, [{key: value} for value in values[key]], short))]
    if not found:
        pairs = combinations(keys, 2)
        tried = ([{a: x, b: y} for x, y in product(values[a], values[b])] for a, b in pairs)
        found = [change for changes in tried if (change := _try(inputs, name, changes, short))]
    return found[:_ALTERNATIVES]


def _try(inputs: PlanInputs, name: str, tried: Sequence[Mapping[str, Any]], short: Set[str]) -> KeyChange | None:
    """Return the first valid change of `tried` after which all resources except `short` suffice."""
    for changes in tried:
        try:
            changed = inputs.change(changes)
        except ValueError:
            continue
        planned = {**_plan_counts(changed), **_plan_resources(changed)}
        if name in planned and all(each.fits for each in planned.values() if each.name not in short):
            return KeyChange(name, dict(changes))
    return None


def _list_values(inputs: PlanInputs, key: str) -> Iterator[Any]:
    """Yield values to try, the smallest change first; for a share of memory, larger values follow the smaller ones."""
    value = attrgetter(key)(inputs.run)
    match key:
        case "learner.memory.activation_checkpointing":
            modes = get_args(Checkpointing)
            yield from modes[modes.index(value) + 1 :]
        case "learner.memory.reduce_gradients":
            yield from ["each_micro_batch"] if value == "once" else []
        case "learner.lora.publish":
            yield from ["adapters"] if value == "merged" else []
        case "engine.share_gpu_weights":
            yield from [False] if value else []
        case "sglang.weights":
            yield from ["tensor"] if value == "disk" else []
        case "learner.memory.offload":
            yield from (each for each in ("none", "between_steps", "optimizer") if each != value)
        case "learner.ranks" if inputs.run.learner.device == "cuda" and inputs.machines.gpus:
            yield from dict.fromkeys((*(value * factor for factor in _FACTORS), inputs.machines.gpus))
        case "sglang.tensor_parallel" | "cluster.learner_nodes":
            yield from (value * factor for factor in _FACTORS)
        case "sglang.memory_share":
            yield from (round(value - step / 20, 2) for step in range(1, 20) if value > step / 20)
            yield from (round(value + step / 20, 2) for step in range(1, 20) if value + step / 20 < 1)
        case "evaluation.every" | "rl.max_staleness":
            yield from range(value - 1, -1, -1)
        case "learner.checkpoints.keep" | "engine.num_engines" | "cluster.nodes":
            yield from range(value - 1, 0, -1)
        case "learner.dp_replicate":
            yield from (value // factor for factor in _FACTORS if value % factor == 0)
        case _:
            fractions = [value * part // _FRACTIONS for part in range(_FRACTIONS - 1, 0, -1)]
            halved = (value // _FRACTIONS // factor for factor in _FACTORS)
            yield from (each for each in dict.fromkeys((*fractions, *halved)) if each)
