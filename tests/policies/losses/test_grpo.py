"""The losses agree with a reference: dense logits for every position, a Python loop over tokens, and autograd."""

import math

import pytest
import torch
from torch import Tensor

from asterism.policies.losses.grpo import compute_grpo_loss, compute_sft_loss
from asterism.policies.losses.policy_loss import LossInput, LossOutput, compute_policy_metrics
from asterism.policies.losses.token_scores import TokenScores, compute_token_scores
from tests.engine.closeness import assert_close
from tests.policies.losses.loss_inputs import HIGH, LOW, build_loss_input

B, T, E, V = 3, 7, 5, 11


class Example:
    """Hidden states of B sequences, an output matrix, and behaviour logprobs."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden_BTE = torch.randn(B, T, E, generator=generator, requires_grad=True)
        self.output_VE = torch.randn(V, E, generator=generator, requires_grad=True)
        self.tokens_BT = torch.randint(V, (B, T), generator=generator)
        self.mask_BT = torch.rand(B, T, generator=generator) < 0.6
        self.mask_BT[:, 0] = False
        self.behaviour_BT = -torch.rand(B, T, generator=generator) * 4
        self.advantages_B = torch.randn(B, generator=generator)

    def scores(self) -> TokenScores:
        rows, columns = self.mask_BT.nonzero(as_tuple=True)
        hidden_NE = self.hidden_BTE[rows, columns - 1]
        return compute_token_scores(hidden_NE, self.output_VE, self.tokens_BT[self.mask_BT])

    def loss_input(self, tokens: int) -> LossInput:
        rows, _ = self.mask_BT.nonzero(as_tuple=True)
        scores = self.scores()
        return build_loss_input(
            scores.logprobs_N,
            self.behaviour_BT[self.mask_BT],
            self.advantages_B[rows],
            entropies_N=scores.entropies_N,
            minibatch_tokens=tokens,
        )

    def grpo(self, tokens: int) -> LossOutput:
        return compute_grpo_loss(self.loss_input(tokens))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden_BTE, self.output_VE))

    def counted(self) -> list[tuple[int, int]]:
        return [(b, t) for b in range(B) for t in range(T) if self.mask_BT[b, t]]

    def plain_logprob(self, b: int, t: int) -> Tensor:
        logits_V = self.output_VE @ self.hidden_BTE[b, t - 1]
        return logits_V[self.tokens_BT[b, t]] - torch.log(torch.exp(logits_V).sum())


def plain_grpo(example: Example) -> tuple[Tensor, int]:
    """Return the loss, and the number of clipped tokens."""
    total, clipped = torch.zeros(()), 0
    for b, t in example.counted():
        ratio = torch.exp(example.plain_logprob(b, t) - example.behaviour_BT[b, t])
        advantage = example.advantages_B[b]
        if advantage > 0 and ratio > 1 + HIGH:
            term, clipped = (1 + HIGH) * advantage, clipped + 1
        elif advantage < 0 and ratio < 1 - LOW:
            term, clipped = (1 - LOW) * advantage, clipped + 1
        else:
            term = ratio * advantage
        total = total - term
    return total / len(example.counted()), clipped


@pytest.mark.parametrize("seed", range(4))
def test_the_grpo_loss_and_its_gradient_match_the_formula(seed: int) -> None:
    example = Example(seed)
    output = example.grpo(len(example.counted()))
    expected, clipped = plain_grpo(example)
    assert_close(output.loss, expected)
    assert_close(example.gradients(output.loss), example.gradients(expected))
    assert clipped > 0
    assert output.token_means["clip_fraction"] == clipped


def test_the_sft_loss_and_its_gradient_match_mean_cross_entropy() -> None:
    example = Example(0)
    logprobs = [example.plain_logprob(b, t) for b, t in example.counted()]
    loss = compute_sft_loss(example.loss_input(len(logprobs))).loss
    expected = -torch.stack(logprobs).mean()
    assert_close(loss, expected)
    assert_close(example.gradients(loss), example.gradients(expected))


def test_masked_tokens_change_neither_loss_nor_gradient() -> None:
    example, other = Example(1), Example(1)
    uncounted = ~other.mask_BT
    other.tokens_BT[uncounted] = (other.tokens_BT[uncounted] + 1) % V
    other.behaviour_BT[uncounted] = -99.0
    loss, same = example.grpo(9).loss, other.grpo(9).loss
    assert_close(loss, same, rtol=0, atol=0)
    assert_close(example.gradients(loss), other.gradients(same), rtol=0, atol=0)


def one_token(ratio: float, advantage: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of one token, its derivative by the log probability, and the number of clipped tokens."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    output = compute_grpo_loss(build_loss_input(logprob, torch.zeros(1), torch.tensor([advantage])))
    (slope,) = torch.autograd.grad(output.loss, logprob)
    return output.loss.detach(), slope, output.token_means["clip_fraction"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "acts"),
    [
        (1.29, 1.0, True),
        (1.27, 1.0, False),
        (0.5, 1.0, False),  # a good token that became less likely is not clipped
        (0.79, -1.0, True),
        (0.81, -1.0, False),
        (3.0, -1.0, False),  # a bad token that became more likely is not clipped
        (3.0, 0.0, False),
    ],
)
def test_clipping_acts_only_in_the_direction_of_the_advantage(ratio: float, advantage: float, acts: bool) -> None:
    loss, slope, clipped = one_token(ratio, advantage)
    bound = 1 + HIGH if advantage > 0 else 1 - LOW
    assert_close(loss.item(), -advantage * (bound if acts else ratio), rtol=1e-6, atol=1e-6)
    assert_close(slope.item(), 0.0 if acts else -advantage * ratio, rtol=1e-6, atol=1e-6)
    assert clipped == acts


def test_the_losses_of_micro_batches_add_up_to_the_loss_of_their_minibatch() -> None:
    parts = [Example(seed) for seed in range(3)]
    tokens = sum(len(part.counted()) for part in parts)
    added = sum(part.grpo(tokens).loss for part in parts)
    expected = sum(plain_grpo(part)[0] * len(part.counted()) for part in parts) / tokens
    assert_close(added, expected)


def test_a_micro_batch_without_loss_tokens_gives_zeros() -> None:
    example = Example(0)
    example.mask_BT[:] = False
    batch = example.loss_input(5)
    for output in (compute_grpo_loss(batch), compute_policy_metrics(batch), compute_sft_loss(batch)):
        values = (output.loss, *output.token_means.values(), *output.maxima.values())
        assert [value.item() for value in values] == [0.0] * len(values)
    assert all(not gradient.any() for gradient in example.gradients(compute_grpo_loss(batch).loss))


def test_ratios_are_reported_unclipped() -> None:
    logprobs_N = torch.tensor([-1.0, -2.0])
    behaviour_N = torch.tensor([-1.0, -2.0 - math.log(2.0)])
    output = compute_policy_metrics(
        build_loss_input(logprobs_N, behaviour_N, torch.ones(2), entropies_N=torch.tensor([0.5, 0.25]))
    )
    assert output.token_means["ratio"].item() == pytest.approx(3.0)
    assert output.maxima["ratio_max"].item() == pytest.approx(2.0)
    assert output.token_means["entropy"].item() == pytest.approx(0.75)


def test_sums_and_means_by_sequence_have_gradients_and_are_0_for_empty_sequences() -> None:
    batch = build_loss_input(torch.zeros(4), torch.zeros(4), torch.zeros(4))
    batch = batch._replace(sequences_N=torch.tensor([0, 2, 2, 0]), num_sequences=3)
    values_N = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    assert batch.sum_by_sequence(values_N).tolist() == [9.0, 0.0, 6.0]
    means_S = batch.mean_by_sequence(values_N)
    assert means_S.tolist() == [4.5, 0.0, 3.0]
    (gradient,) = torch.autograd.grad((means_S * torch.tensor([1.0, 5.0, 10.0])).sum(), values_N)
    assert gradient.tolist() == [0.5, 5.0, 5.0, 0.5]
