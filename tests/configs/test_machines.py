from collections.abc import Sequence
from pathlib import Path

import pytest

from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.weight_transfer.published_bytes import shares_gpu_weights

ONE_GPU = Path("configs/qwen3_1.7b_1gpu.toml")
SHARED = "engine.share_gpu_weights=true"


def load(*overrides: str) -> RunConfig:
    return load_run(ONE_GPU, list(overrides))


OTHER_RUNS = [
    (["engine.kind=sglang"], 'engine.kind = "embedded" (servers have transports of their own, sglang.weights)'),
    (["engine.device=cpu"], 'engine.device = "cuda" (no engine uses the learner\'s GPU)'),
    (["learner.device=cpu"], 'learner.device = "cuda" (the learner has no GPU)'),
    (["learner.ranks=2"], "learner.ranks = 1 (each rank has only a part of the parameters)"),
    (
        ["cluster.nodes=2", "cluster.learner_nodes=2", "cluster.key=key"],
        "cluster.learner_nodes = 1 (each rank has only a part of the parameters)",
    ),
    (["learner.memory.offload=optimizer"], 'learner.memory.offload = "none" (the parameters are in main memory)'),
    (
        ["learner.lora.rank=8", "learner.lora.publish=adapters"],
        'learner.lora.publish = "merged" (adapters are loaded from slots)',
    ),
]


@pytest.mark.parametrize(("settings", "needed"), OTHER_RUNS)
def test_shared_weights_without_an_engine_on_the_learners_gpu_are_refused_with_the_remedy(
    settings: Sequence[str], needed: str
) -> None:
    with pytest.raises(UnusableInput) as refusal:
        load(SHARED, *settings)
    message = f'engine.share_gpu_weights = true needs {needed}; "auto" shares weights only if a run meets this'
    assert message in str(refusal.value)


def test_all_settings_that_shared_weights_need_are_named_at_once() -> None:
    with pytest.raises(UnusableInput) as refusal:
        load(SHARED, "engine.device=cpu", "learner.ranks=2")
    assert "GPU), and learner.ranks = 1 (" in str(refusal.value)


@pytest.mark.parametrize("settings", [settings for settings, _ in OTHER_RUNS])
def test_runs_that_cannot_share_weights_load_with_the_default(settings: Sequence[str]) -> None:
    run = load(*settings)
    assert run.engine.share_gpu_weights == "auto"
    assert not shares_gpu_weights(run)


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        ([], True),
        ([SHARED], True),
        ([SHARED, "engine.num_engines=3"], True),
        (["engine.share_gpu_weights=false"], False),
    ],
)
def test_weights_are_shared_with_an_engine_on_the_single_ranks_gpu_unless_sharing_is_off(
    settings: Sequence[str], is_shared: bool
) -> None:
    assert shares_gpu_weights(load(*settings)) is is_shared


def test_an_evaluation_of_a_run_with_shared_weights_can_use_other_engines() -> None:
    assert load(SHARED, "engine.kind=sglang", "evaluation.only=true").engine.share_gpu_weights is True
