"""Plans the memory of a GPU and of a node's host: learner, engines, weights in transfer."""

from functools import cache
from math import prod

from asterism.analysis.planning.activation_memory import FLOAT32_BYTES, compute_activation_memory
from asterism.analysis.planning.learner_memory import (
    RankMemory,
    RankShare,
    compute_offloaded_memory,
    compute_rank_memory,
)
from asterism.analysis.planning.plan_inputs import GIB, SEQUENCE_KEYS, PlanInputs
from asterism.analysis.planning.resources import PlanItem, PlannedCount, PlannedResource
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.buffer_sizes import MIN_PACKED_SIZE, PAGE_TOKENS_STEP, BufferShape, count_buffer_bytes
from asterism.engine.learner.batches.sample_files import BYTES_PER_TOKEN
from asterism.engine.weight_transfer.published_bytes import (
    count_folder_bytes,
    count_folders,
    count_slot_bytes,
    count_version_bytes,
    shares_gpu_weights,
)

CONTEXT_BYTES = GIB / 2  # CUDA context of a generator with sglang.weights = "ipc"; assumed, never measured
# The same number in asterism.engine.learner.weight_publisher and asterism.engine.export.hf_export, which import torch.
WRITE_BYTES = 64 * 2**20
RECORD_BYTES = 13  # bytes of a token on the bus: id, logprob, version, mask
_LEARNER_KEYS = (
    "learner.memory.micro_batch_tokens",
    "learner.memory.activation_checkpointing",
    "learner.memory.reduce_gradients",
    "learner.memory.offload",
    "learner.dp_replicate",
    "learner.ranks",
    "cluster.learner_nodes",
    "dialogue.response_tokens",
    "sft.max_tokens",
)
_GPU_REMEDY = "use GPUs with more memory or a smaller model.checkpoint"
_HOST_REMEDY = "use nodes with more memory or a smaller model.checkpoint"
_ENGINE_KEYS = ("sglang.memory_share", "engine.kv_tokens", "sglang.tensor_parallel", "engine.num_engines")
_CACHE_KEYS = ("sglang.memory_share", "sglang.tensor_parallel", *SEQUENCE_KEYS, "engine.num_engines")


def compute_learner_rank(inputs: PlanInputs) -> RankMemory:
    learner = inputs.run.learner
    activations = compute_activation_memory(
        inputs.config,
        inputs.micro_batch_tokens,
        inputs.learner_value_bytes,
        learner.memory.activation_checkpointing,
        has_packed_kernel=learner.device == "cuda" and learner.dtype == "bfloat16",
        has_entropy_gradient=learner.loss.entropy_coef > 0,
        is_compiled=learner.compiles,
    )
    return compute_rank_memory(inputs.size, _make_share(inputs), activations)


def _make_share(inputs: PlanInputs) -> RankShare:
    learner = inputs.run.learner
    has_offload = learner.memory.offload == "optimizer"
    return RankShare(
        dp_shard=inputs.ranks // learner.dp_replicate,
        value_bytes=inputs.learner_value_bytes,
        has_units=inputs.ranks > 1 or has_offload,
        keeps_casts=learner.memory.activation_checkpointing == "none",
        moments=inputs.run.optimizer_moments,
        has_reference=learner.loss.kl_coef > 0 and learner.lora.rank == 0,
        offloads=has_offload and learner.device == "cuda",
        adapters=None if inputs.run.sft.is_enabled else inputs.adapters,
        accumulates=inputs.micro_batches > 1,
        reduces_once=learner.memory.reduce_gradients == "once",
    )


# ---------------------------------------------------------------- engines


def compute_engine_weights(inputs: PlanInputs) -> float:
    """Return the bytes of an engine's weights on one of its GPUs, or in main memory for an engine on a CPU.

    An embedded engine has a tied embedding twice, and on a CPU also packed copies of large matrices.
    """
    size = inputs.size
    parameters = size.total if inputs.has_servers or size.head else size.total + size.embedding
    if not inputs.has_servers and inputs.run.engine.device == "cpu":
        parameters += _count_packed_sizes(inputs.config)
    return inputs.engine_value_bytes * parameters / inputs.run.servers.tensor_parallel


def compute_cached_token_bytes(inputs: PlanInputs) -> float:
    """Return the bytes of one KV token on a GPU. With more GPUs than key heads, several GPUs hold the same head."""
    config = inputs.config
    heads = -(-config.num_kv_heads // inputs.run.servers.tensor_parallel)
    return 2 * config.num_layers * heads * config.head_dim * inputs.engine_value_bytes


def compute_cache_tokens(inputs: PlanInputs) -> int | None:
    """Return the KV tokens of one copy of the model.

    With engine.kv_tokens = 0, sglang.memory_share of the GPU sets the number. Without a GPU, it is None.
    """
    run, gpu = inputs.run, inputs.machines.gpu
    if run.engine.kv_tokens:
        return run.engine.kv_tokens // run.servers.data_parallel
    if gpu is None:
        return None
    free = run.servers.memory_share * gpu.memory_bytes - compute_engine_weights(inputs)
    return max(0, int(free // compute_cached_token_bytes(inputs)))


def plan_cache_tokens(inputs: PlanInputs) -> PlannedCount | None:
    """Plan a server's KV tokens for one trajectory, or return None if sglang.memory_share does not bound its cache."""
    run, tokens = inputs.run, compute_cache_tokens(inputs)
    is_bounded = inputs.has_servers and run.engine.device == "cuda" and not run.servers.urls
    if not is_bounded or run.engine.kv_tokens or tokens is None:
        return None
    return PlannedCount("KV tokens of a server", run.sequence_tokens + run.servers.spare_tokens, tokens, _CACHE_KEYS)


def _list_engine_items(inputs: PlanInputs, count: int) -> list[PlanItem]:
    tokens = compute_cache_tokens(inputs)
    cache = 0.0 if tokens is None else tokens * compute_cached_token_bytes(inputs)
    if inputs.run.engine.kv_tokens == 0:  # room for at least one trajectory
        cache = max(cache, inputs.run.sequence_tokens * compute_cached_token_bytes(inputs))
    engines = "1 engine" if count == 1 else f"{count} engines"
    items = [
        PlanItem("engine weights", count * compute_engine_weights(inputs), f"{engines}, {inputs.run.engine.dtype}"),
        PlanItem("KV cache", count * cache, f"{tokens:,} tokens" if tokens is not None else "of one trajectory"),
    ]
    if not inputs.has_servers:
        note = f"sampling of {inputs.run.engine.max_running} sequences, gathered keys and values"
        items.append(PlanItem("engine buffers", count * _count_buffer_bytes(inputs), note))
    if inputs.run.engine.device == "cuda" and (bucket := _compute_bucket_bytes(inputs)):
        items.append(_plan_device_buckets(inputs, count, bucket))
    return items


def _count_buffer_bytes(inputs: PlanInputs) -> int:
    """Count the buffer bytes of one embedded engine.

    With bfloat16 on a GPU, torch 2.12 or later is assumed: attention can then read pages in place.
    """
    run, engine, config = inputs.run, inputs.run.engine, inputs.config
    is_gpu, asked = engine.device == "cuda", (run.sampling, run.evaluation_sampling)
    shape = BufferShape(
        rows=min(engine.max_running, engine.kv_tokens // engine.page_tokens),
        vocab_size=config.vocab_size,
        sequence_tokens=run.sequence_tokens,
        token_bytes=int(compute_cached_token_bytes(inputs)) // config.num_layers,
        num_layers=config.num_layers,
        device=engine.device,
        has_graphs=is_gpu and engine.cuda_graphs,
        has_filter=any(each.truncations for each in asked),
        reads_pages=is_gpu and engine.dtype == "bfloat16" and engine.page_tokens % PAGE_TOKENS_STEP == 0,
    )
    return count_buffer_bytes(shape)


def _plan_device_buckets(inputs: PlanInputs, count: int, bucket: float) -> PlanItem:
    """Plan the buckets of `count` servers on a GPU."""
    transfer = inputs.run.servers.transfer
    held, note = transfer.device_buckets * bucket, f"{transfer.device_buckets} of sglang.bucket_mib during an update"
    if transfer.shares_device:
        held, note = held + CONTEXT_BYTES, f"{note}, and the generator's CUDA context"
    return PlanItem("weight bucket", count * held, note)


def _compute_bucket_bytes(inputs: PlanInputs) -> float:
    """Return the bytes of the weights that a server receives at once, or 0 without buckets.

    A parameter that exceeds sglang.bucket_mib is a bucket of its own.
    """
    run, servers = inputs.run, inputs.run.servers
    if not servers.transfer.device_buckets:
        return 0.0
    largest = max(servers.bucket_mib * 2**20, count_version_bytes(inputs.size.largest_matrix, run))
    return float(min(largest, count_version_bytes(inputs.size.total, run)))


# ---------------------------------------------------------------- resources


def plan_gpu(inputs: PlanInputs) -> PlannedResource | None:
    """Plan the most loaded GPU: the first one of the first node. Return None if the run uses no GPU."""
    run, gpu = inputs.run, inputs.machines.gpu
    trains, generates = run.learner.device == "cuda", run.engine.device == "cuda"
    if not (trains or generates):
        return None
    items, keys = list[PlanItem](), list[str]()
    if trains:
        rank = compute_learner_rank(inputs)
        items += _list_rank_items(rank, inputs)
        keys += _LEARNER_KEYS
    if shares_gpu_weights(run):
        published = count_version_bytes(inputs.size.total, run)
        items.append(PlanItem("published weights", published, "engine.share_gpu_weights"))
    if generates and not run.servers.urls:
        engine_items = _list_engine_items(inputs, inputs.engines_per_gpu)
        items = _take_turns(items, engine_items, inputs) if trains and run.sglang.colocate else items + engine_items
        keys = [*_ENGINE_KEYS[:2], *keys, *_ENGINE_KEYS[2:]]
    if shares_gpu_weights(run):
        keys.insert(0, "engine.share_gpu_weights")
    reserve = inputs.assumptions.gpu_reserve_gib * GIB
    items.append(PlanItem("reserve", reserve, "CUDA context, NCCL, allocator"))
    return PlannedResource(
        "GPU memory", tuple(items), None if gpu is None else gpu.memory_bytes, tuple(keys), _GPU_REMEDY
    )


def _take_turns(learner: list[PlanItem], engine: list[PlanItem], inputs: PlanInputs) -> list[PlanItem]:
    """Return the larger need with sglang.colocate: the learner's peak, or the engines with the idle learner."""
    held = 0.0 if inputs.run.learner.memory.offload == "between_steps" else compute_learner_rank(inputs).held
    generating = [PlanItem("learner between steps", held, "master weights and moments"), *engine] if held else engine
    return max(learner, generating, key=lambda items: sum(item.bytes for item in items))


def _list_rank_items(rank: RankMemory, inputs: PlanInputs, count: int = 1) -> list[PlanItem]:
    """List the memory of `count` equal ranks."""
    checkpointing = inputs.run.learner.memory.activation_checkpointing
    tokens = f"{inputs.micro_batch_tokens:,} tokens, checkpointing {checkpointing}"
    items = [
        PlanItem("parameters", rank.parameters, _describe_share(inputs)),
        PlanItem("gradients", rank.gradients, "float32"),
        PlanItem("optimizer", rank.moments, f"{inputs.run.optimizer_moments} moments per parameter, float32"),
        PlanItem("reference model", rank.reference, "learner.loss.kl_coef"),
        PlanItem("gathered units", rank.gathered, f"{inputs.run.learner.dtype}, with their gradients"),
        PlanItem("activations", rank.activations, tokens),
        PlanItem("logits", rank.logits, f"peak {rank.moment}"),
    ]
    return [PlanItem(each.purpose, count * each.bytes, each.note) for each in items if each.bytes]


def _list_offloaded_items(inputs: PlanInputs, ranks: int) -> list[PlanItem]:
    """List the main memory of a learner on GPUs."""
    if inputs.run.learner.memory.offload == "between_steps":
        return [PlanItem("learner between steps", ranks * compute_learner_rank(inputs).held, "page-locked")]
    return _list_rank_items(compute_offloaded_memory(inputs.size, _make_share(inputs)), inputs, ranks)


def _describe_share(inputs: PlanInputs) -> str:
    shared_by = inputs.ranks // inputs.run.learner.dp_replicate
    return "float32" if shared_by == 1 else f"float32, 1/{shared_by}"


def plan_host(inputs: PlanInputs) -> PlannedResource:
    """Plan the main memory of the first node. Calls of the sandbox are not counted; the sandbox limits their memory."""
    run, machines = inputs.run, inputs.machines
    ranks, engines = run.learner.ranks, run.engine.num_engines
    items, keys = list[PlanItem](), list[str]()
    if run.learner.device == "cpu":
        items += _list_rank_items(compute_learner_rank(inputs), inputs, ranks)
        keys += _LEARNER_KEYS
    elif run.learner.memory.offload != "none":
        items += _list_offloaded_items(inputs, ranks)
        keys += ["learner.memory.offload", "learner.dp_replicate"]
    items.append(PlanItem("weights in writing", _count_written_bytes(inputs, ranks), "published or exported"))
    bucket, transfer = _compute_bucket_bytes(inputs), run.servers.transfer
    if count := transfer.host_buckets + transfer.host_buckets_per_gpu * run.servers.tensor_parallel:
        items.append(PlanItem("weight buckets", engines * count * bucket, f"{count} of sglang.bucket_mib per server"))
    if run.engine.device == "cpu" and not run.servers.urls:
        items += _list_engine_items(inputs, engines)
        keys = ["engine.kv_tokens", *keys, "engine.num_engines"]
    shared = sum(item.bytes for item in list_shared_items(inputs))
    items.append(PlanItem("weights in shared memory", shared, "see shared memory"))
    if inputs.has_rl:
        in_flight = run.rl.max_groups_in_flight * run.rl.rollouts
        records = 2 * in_flight * inputs.mean_sequence_tokens * RECORD_BYTES  # held by rollout and group buffer
        items.append(PlanItem("trajectories", records, f"{in_flight:,} with {inputs.mean_sequence_tokens:,.0f} tokens"))
    processes = inputs.assumptions.process_gib * GIB * (ranks + engines + 3)
    items.append(PlanItem("processes", processes, f"{ranks + engines + 3} interpreters"))
    keys += ["sglang.bucket_mib", "rl.max_staleness", "learner.ranks"]
    return PlannedResource(
        "host memory", tuple(items), machines.host_memory_bytes, tuple(dict.fromkeys(keys)), _HOST_REMEDY
    )


def _count_written_bytes(inputs: PlanInputs, ranks: int) -> float:
    """Count the float32 buffers of a write: per rank, a block of WRITE_BYTES or a whole larger tensor."""
    return sum(max(WRITE_BYTES, FLOAT32_BYTES * size) for size in _list_sizes(inputs.config)[:ranks])


@cache
def _count_packed_sizes(config: DecoderConfig) -> int:
    """Count the parameters of matrices that can be packed. Fused matrices consist of at most three."""
    shapes = config.compute_weight_shapes().items()
    sizes = (prod(shape) for name, shape in shapes if name != "model.embed_tokens.weight" and ".experts." not in name)
    return sum(size for size in sizes if 3 * size >= MIN_PACKED_SIZE)


@cache
def _list_sizes(config: DecoderConfig) -> list[int]:
    """Return the numbers of parameters of the tensors, the largest first. The search for remedies plans a model often."""
    return sorted(map(prod, config.compute_weight_shapes().values()), reverse=True)


def list_shared_items(inputs: PlanInputs) -> list[PlanItem]:
    """List the parts of shared memory: slots of published weights, and folders that the servers of the node read."""
    run, parameters = inputs.run, inputs.size.total
    slots = count_slot_bytes(inputs.config, parameters, run)
    items = [PlanItem("published weights", slots, f"{_describe_slots(inputs)} in {run.engine.dtype}")]
    if folders := count_folders(run):
        note = "1 folder for all servers of the node" + (", and 1 while an engine restarts" if folders > 1 else "")
        items.append(PlanItem("weights for servers", count_folder_bytes(parameters, run), note))
    transfer = run.servers.transfer
    if transfer.shares_device and run.engine.device == "cpu":
        count, note = transfer.device_buckets, f"{transfer.device_buckets} of sglang.bucket_mib per server"
        items.append(PlanItem("weight buckets", run.engine.num_engines * count * _compute_bucket_bytes(inputs), note))
    return items


def _describe_slots(inputs: PlanInputs) -> str:
    versions = f"{inputs.run.num_weight_versions} versions"
    return f"the base, and {versions} of adapters" if inputs.run.learner.lora.publish == "adapters" else versions


def count_batch_bytes(inputs: PlanInputs) -> float:
    """Return the bytes of the files of one step's batch; a step of the cold start has none."""
    return inputs.trained_tokens * BYTES_PER_TOKEN if inputs.has_rl else 0.0
