import math
from typing import Any

import numpy as np
import pytest
import torch

from asterism.bus.messages import TrainingSample
from asterism.configs.errors import UnusableInput
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_rl_sequence, build_sft_sequence
from asterism.engine.learner.trainer import Trainer
from tests.engine.learner.training_examples import (
    copy_weights,
    make_trainer,
    replace_tokens,
    rl_sequences,
    row,
    rows,
    sequences,
    trainable_model,
)

pytestmark = pytest.mark.slow


# ---------------------------------------------------------------- steps


def test_the_cold_start_lowers_the_training_loss() -> None:
    made = make_trainer("sft")
    losses = [made.run_sft_step(sequences(0))["loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_model_that_replaces_the_cold_start_model_keeps_the_layer_settings() -> None:
    made = make_trainer(activation_checkpointing="full", compile=True)
    made.model = trainable_model()
    made.start_stage("rl")
    assert {(layer.recomputed, layer.is_compiled) for layer in made.model.model.layers} == {("full", True)}


@pytest.mark.parametrize(("advantage", "sign"), [(1.0, 1), (-1.0, -1)])
def test_a_step_makes_good_answers_more_and_bad_answers_less_likely(advantage: float, sign: int) -> None:
    made = make_trainer(minibatches=1, warmup_steps=0)
    batch = [build_rl_sequence(_on_policy(made, row(index, 0, seed=9, advantage=advantage))) for index in range(4)]
    before = made.run_rl_step(batch)
    after = made.run_rl_step(batch)
    assert before["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert sign * (after["ratio_mean"] - 1.0) > 1e-3


def _on_policy(made: Trainer, before: TrainingSample) -> TrainingSample:
    """Return the row with log probabilities of the trainer's current policy."""
    ids = torch.from_numpy(np.frombuffer(before.record.token_ids, np.int32).astype(np.int64))
    with torch.no_grad():
        log_p_TV = torch.log_softmax(made.model.compute_logits(made.model(ids[None, :-1]))[0], dim=-1)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[1:] = log_p_TV.gather(1, ids[1:, None])[:, 0].numpy()
    return replace_tokens(before, logprobs=logprobs.tobytes())


def test_on_policy_rows_have_no_mismatch_and_no_clipping_before_the_first_update() -> None:
    made = make_trainer(minibatches=1)
    metrics = made.run_rl_step([build_rl_sequence(_on_policy(made, each)) for each in rows(0)])
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["clip_fraction"] == 0.0


def test_clipping_starts_with_the_second_minibatch() -> None:
    made = make_trainer(minibatches=4, lr=0.05, warmup_steps=0)
    metrics = made.run_rl_step([build_rl_sequence(_on_policy(made, each)) for each in rows(0)])
    assert metrics["updates"] == 4
    assert metrics["clip_fraction"] > 0.1
    assert metrics["mismatch_max"] < 1e-4  # measured before the first update


def test_micro_batches_of_any_size_give_the_same_update() -> None:
    small, large = make_trainer(micro_batch_tokens=40), make_trainer(micro_batch_tokens=100_000)
    metrics = [made.run_rl_step(rl_sequences(0)) for made in (small, large)]
    torch.testing.assert_close(copy_weights(small), copy_weights(large), rtol=0, atol=2e-5)  # an update is about 5e-4
    assert metrics[0].pop("fill") > 0.7 > 0.1 > metrics[1].pop("fill")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.parametrize(
    ("stage", "batch", "metrics"),
    [
        ("sft", [build_sft_sequence([1, 2, 3], [0, 0, 0])], {"tokens": 0.0}),
        ("rl", [], {"updates": 0.0, "tokens": 0.0}),
        (
            "rl",
            [
                build_rl_sequence(
                    replace_tokens(row(0, 0, seed=0), loss_mask=bytes(row(0, 0, seed=0).record.num_tokens))
                )
            ],
            {"updates": 0.0},
        ),
        ("rl", [build_rl_sequence(row(0, 0, seed=0, advantage=math.inf))], {"updates_skipped": 1.0}),
    ],
    ids=["cold start without loss tokens", "no rows", "rows without loss tokens", "infinite gradient"],
)
def test_a_step_without_a_finite_gradient_changes_nothing(
    stage: str, batch: list[TrainingSequence], metrics: dict[str, float]
) -> None:
    made = make_trainer(stage, minibatches=1)
    before = copy_weights(made)
    found = made.run_sft_step(batch) if stage == "sft" else made.run_rl_step(batch)
    assert metrics.items() <= found.items()
    assert made.step == 1
    torch.testing.assert_close(copy_weights(made), before, rtol=0, atol=0)


def test_a_token_id_outside_the_vocabulary_is_refused_before_the_forward_pass() -> None:
    bad = row(0, 0, seed=0)
    ids = np.frombuffer(bad.record.token_ids, np.int32).copy()
    ids[2] = 97
    with pytest.raises(ValueError, match="vocabulary of 97"):
        make_trainer().run_rl_step([build_rl_sequence(replace_tokens(bad, token_ids=ids.tobytes()))])


def test_the_learning_rate_follows_its_schedule() -> None:
    made = make_trainer(warmup_steps=2, final_lr_fraction=0.5)
    rates = [made.run_rl_step([build_rl_sequence(row(0, 0, seed=step))])["lr"] for step in range(6)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 5 / 6 * 1e-3, 2 / 3 * 1e-3, 0.5e-3])


def test_old_log_probabilities_are_recomputed_with_the_weights_before_the_step() -> None:
    settings: dict[str, Any] = {"minibatches": 4, "warmup_steps": 0, "correction": "none"}
    without_change = make_trainer(lr=1e-12, old_logprobs="recomputed", **settings).run_rl_step(rl_sequences(0))
    recomputed = make_trainer(lr=0.05, old_logprobs="recomputed", **settings).run_rl_step(rl_sequences(0))
    present = make_trainer(lr=0.05, old_logprobs="engine", **settings).run_rl_step(rl_sequences(0))
    for number in (1, 2, 3, 4):
        name = f"minibatch {number}: mismatch_mean"
        assert recomputed[name] == pytest.approx(without_change[name], rel=1e-6)
        assert (abs(present[name] - without_change[name]) > 1e-3) == (number > 1)
    assert without_change["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert recomputed["ratio_max"] > 1.1


def test_a_mismatch_above_the_limit_stops_the_learner_before_the_update() -> None:
    made = make_trainer(mismatch_limit=0.1)
    before = copy_weights(made)
    with pytest.raises(
        UnusableInput, match=r"learner\.loss\.mismatch_limit: .* differ by more than 1 nat for \d+\.\d% of"
    ):
        made.run_rl_step(rl_sequences(0))
    assert all(torch.equal(before[name], tensor) for name, tensor in copy_weights(made).items())


def test_the_error_for_weights_that_are_not_finite_names_the_parameter() -> None:
    made = make_trainer()
    made.check_weights()
    with torch.no_grad():
        made.model.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
    with pytest.raises(UnusableInput, match=r"not finite after step 0, first in model\.layers\.1\.mlp\.up_proj"):
        made.check_weights()
