"""Tests of the probe: its prompts, and its log probabilities on one and several ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asterism.bus.messages import WeightProbe
from asterism.engine.learner.batches.training_sequence import TrainingSequence
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    TrainerState,
    get_trainer_folder,
    read_trainer_state,
    write_trainer_state,
)
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.weight_probe import (
    MAX_PROMPT_TOKENS,
    NUM_PROMPTS,
    RENEWAL_STEPS,
    WeightProber,
    compute_highest_logprobs,
    pick_prompts,
)
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model
from tests.engine.tiny_models import random_ids


@torch.no_grad()
def compute_dense(model: CausalLM, prompt: NDArray[np.int32]) -> float:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    return float(model.compute_logits(model(ids))[0, -1].log_softmax(-1).max())


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_probe_has_the_highest_log_probability_after_each_prompt(is_tied: bool) -> None:
    model, prompts = trainable_model(is_tied=is_tied), [random_ids(length, length) for length in (1, 7, 30)]
    found = compute_highest_logprobs(model, prompts, RankGroup())
    assert found.tolist() == pytest.approx([compute_dense(model, prompt) for prompt in prompts], abs=1e-5)
    assert not found.requires_grad


def test_prompts_end_before_unlikely_tokens() -> None:
    ids, mask = np.arange(200, dtype=np.int32), np.zeros(200, np.bool_)
    mask[100:] = True
    logprobs = np.where(np.isin(np.arange(200), (120, 150)), -1.0, -0.01).astype(np.float32)
    sequences = [TrainingSequence(ids, mask, logprobs, 1.0, 0, number) for number in range(NUM_PROMPTS)]
    prompts = pick_prompts(sequences, 3, 1)
    assert len(prompts) == NUM_PROMPTS
    assert {int(prompt[-1]) for prompt in prompts} == {119, 149}
    assert {len(prompt) for prompt in prompts} == {MAX_PROMPT_TOKENS}
    sure = [each._replace(logprobs=np.zeros(200, np.float32)) for each in sequences[:1]]
    assert len(pick_prompts(sure, 3, 1)) == NUM_PROMPTS


def test_prompts_depend_on_seed_and_step_and_stay_until_they_are_renewed() -> None:
    model, prober = trainable_model(), WeightProber(5, RankGroup())
    prober.choose_prompts(1, [])
    assert prober.measure(model) is None
    probes = list[WeightProbe]()
    for step in (2, 3, RENEWAL_STEPS + 1, RENEWAL_STEPS + 2):
        prober.choose_prompts(step, rl_sequences(step))
        probe = prober.measure(model)
        assert probe is not None
        probes.append(probe)
    assert [probe.chosen_at for probe in probes] == [2, 2, 2, RENEWAL_STEPS + 2]
    assert probes[0] == probes[1] == probes[2]
    assert probes[0].prompts != probes[3].prompts
    again = WeightProber(5, RankGroup())
    again.choose_prompts(2, rl_sequences(2))
    assert again.measure(model) == probes[0]


def test_prompts_of_a_checkpoint_are_used_immediately_and_renewed_at_the_same_step(tmp_path: Path) -> None:
    model, undisturbed, restarted = trainable_model(), WeightProber(5, RankGroup()), WeightProber(5, RankGroup())
    undisturbed.choose_prompts(2, rl_sequences(2))
    get_trainer_folder(tmp_path).mkdir()
    write_trainer_state(tmp_path, TrainerState("rl", 2, 1, 5, undisturbed.prompts))
    restarted.prompts = read_trainer_state(tmp_path).probe
    probe = restarted.measure(model)
    assert probe is not None
    assert probe == undisturbed.measure(model)
    for step in (3, RENEWAL_STEPS + 2):
        for prober in (undisturbed, restarted):
            prober.choose_prompts(step, rl_sequences(step))
        assert restarted.prompts == undisturbed.prompts


def probe(ranks: RankGroup) -> WeightProbe | None:
    """Measure the probe of an untied model."""
    model, prober = trainable_model(is_tied=False), WeightProber(5, ranks)
    shard_model(model, ranks)
    prober.choose_prompts(2, rl_sequences(2))
    return prober.measure(model)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
def test_two_ranks_measure_the_same_probe_as_one(copies: int) -> None:
    alone = probe(RankGroup())
    first, second = run_ranks(2, probe, learner=small_run(ranks=2, dp_replicate=copies).learner)
    assert first is not None and alone is not None
    assert first == second
    assert first.prompts == alone.prompts
    assert first.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
