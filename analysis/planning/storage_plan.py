"""Plans the shared memory, the disk and the largest message of a run."""

from asterism.analysis.planning.activation_memory import FLOAT32_BYTES
from asterism.analysis.planning.memory_plan import RECORD_BYTES, count_batch_bytes, list_shared_items
from asterism.analysis.planning.plan_inputs import SEQUENCE_KEYS, VALUE_BYTES, PlanInputs
from asterism.analysis.planning.resources import PlanItem, PlannedCount, PlannedResource
from asterism.bus.transport.packets import MAX_FRAME_BYTES
from asterism.policies.groups.selection import MAX_PART_BYTES

# Checkpoints besides learner.checkpoints.keep: one before RL, the last one, and an unfinished one.
_FURTHER_CHECKPOINTS = 3
_EVALUATED_CHECKPOINTS = 2  # checkpoints with evaluation.keep_best: the best one, and one in evaluation
_SHARED_REMEDY = (
    "enlarge /dev/shm (`mount -o remount,size=...`, `docker run --shm-size`) or use a smaller model.checkpoint"
)
_DISK_REMEDY = "free some space or set runs_folder to a larger disk"
_TURN_BYTES = 4  # bytes of a token in a request to an engine


def plan_shared_memory(inputs: PlanInputs) -> PlannedResource:
    run = inputs.run
    can_publish_adapters = run.learner.lora.rank > 0 and run.servers.data_parallel == 1
    adapter_keys = ("learner.lora.publish",) if can_publish_adapters else ()
    transport_keys = ("sglang.weights",) if inputs.has_servers and run.servers.data_parallel == 1 else ()
    keys = (*adapter_keys, *transport_keys, "rl.max_staleness", "evaluation.every")
    items = tuple(list_shared_items(inputs))
    return PlannedResource("shared memory", items, inputs.machines.shared_memory_bytes, keys, _SHARED_REMEDY)


def plan_disk(inputs: PlanInputs) -> PlannedResource:
    """Plan the disk of the run's folder. Event logs are not counted: log.keep_steps bounds them."""
    run, size = inputs.run, inputs.size
    count = run.learner.checkpoints.keep + _FURTHER_CHECKPOINTS
    count += _EVALUATED_CHECKPOINTS if run.evaluation.saves_evaluated_steps else 0
    export_dtype = run.learner.resolve_auto(run.engine.dtype).checkpoints.export_dtype
    exported = VALUE_BYTES[export_dtype] * size.total
    items = [
        PlanItem("checkpoints", _count_state_bytes(inputs, count), f"{count} of master weights and moments, float32"),
        PlanItem("exported models", count * exported, f"{count} in {export_dtype}"),
    ]
    if batches := run.learner.checkpoints.every * count_batch_bytes(inputs):
        items.append(PlanItem("batches", batches, "since the last checkpoint"))
    keys = ("learner.checkpoints.keep", "evaluation.every")
    return PlannedResource("disk", tuple(items), inputs.machines.disk_bytes, keys, _DISK_REMEDY)


def _count_state_bytes(inputs: PlanInputs, count: int) -> float:
    """Count checkpoint bytes. With adapters, one checkpoint has frozen weights; an unfinished cold start has all."""
    state = (1 + inputs.run.optimizer_moments) * FLOAT32_BYTES
    if inputs.adapters is None:
        return count * state * inputs.size.total
    of_cold_start = state * inputs.size.total if inputs.run.sft.is_enabled else 0.0
    return count * state * inputs.adapters + FLOAT32_BYTES * inputs.size.total + of_cold_start


def plan_largest_message(inputs: PlanInputs) -> PlannedCount:
    """Plan the longest frame: a group's part for the learner, a longer trajectory, or a turn's request."""
    run, token_bytes = inputs.run, max(RECORD_BYTES, _TURN_BYTES)
    group = run.trained_sequence_tokens * token_bytes * run.rl.rollouts
    needed = max(run.sequence_tokens * token_bytes, min(MAX_PART_BYTES, group))
    return PlannedCount("largest message", needed, MAX_FRAME_BYTES, SEQUENCE_KEYS, "bytes")
