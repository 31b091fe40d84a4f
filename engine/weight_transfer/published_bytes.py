"""Counts the bytes of published weights on their way to the engines, for the checks and the plan of a run.

It does not import torch.
"""

from asterism.configs.schema.machines import list_sharing_needs
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.lora_options import count_adapter_parameters, get_lora_options

MAX_FOLDERS = 2  # folders of a node at the same time (asterism.engine.sglang.weights.node_folder)
_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def count_slot_bytes(config: DecoderConfig, parameters: int, run: RunConfig) -> int:
    """Return the bytes of all versions in shared memory: weights in engine.dtype, or a base and float32 adapters.

    `parameters`: number of parameters of `config`'s model, without adapters.
    """
    base = count_version_bytes(parameters, run)
    options = get_lora_options(run.learner)
    if run.learner.lora.publish == "merged" or options is None:
        return run.num_weight_versions * base
    return base + run.num_weight_versions * 4 * count_adapter_parameters(config, options)


def count_folders(run: RunConfig) -> int:
    """Return the number of folders of whole weights that the servers of a node read at the same time.

    A restarting engine can still read the previous version in a second folder. Several servers share a folder.
    """
    if not run.servers.transfer.reads_folder:
        return 0
    return min(MAX_FOLDERS, run.engine.num_engines)


def count_folder_bytes(parameters: int, run: RunConfig) -> int:
    return count_folders(run) * count_version_bytes(parameters, run)


def shares_gpu_weights(run: RunConfig) -> bool:
    """Return whether the learner also keeps the published weights on its GPU, for the embedded engine there."""
    needs = list_sharing_needs(run.engine, run.learner, run.cluster.learner_nodes)
    return run.engine.share_gpu_weights is not False and not needs


def count_version_bytes(parameters: int, run: RunConfig) -> int:
    """Return the bytes of whole weights in engine.dtype."""
    return parameters * _VALUE_BYTES[run.engine.dtype]
