"""The losses against a plain reference: dense logits for every position, a Python loop over tokens, autograd."""

import math

import pytest
import torch
from torch import Tensor

from policies.losses import grpo as losses
from policies.losses.grpo import GrpoPeaks, GrpoSums, TokenScores, compute_token_scores, grpo_loss, sft_loss
from tests.engine.closeness import assert_close

B, T, E, V = 3, 7, 5, 11
LOW, HIGH = 0.2, 0.28


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

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.output_VE.T

    def scores(self, temperature: float = 1.0) -> TokenScores:
        rows, columns = self.mask_BT.nonzero(as_tuple=True)
        hidden_NE = self.hidden_BTE[rows, columns - 1]
        return compute_token_scores(hidden_NE, self.tokens_BT[self.mask_BT], self.logits, V, temperature)

    def grpo(self, tokens: int) -> tuple[GrpoSums[Tensor], GrpoPeaks[Tensor]]:
        rows, _ = self.mask_BT.nonzero(as_tuple=True)
        return grpo_loss(
            self.scores(),
            self.behaviour_BT[self.mask_BT],
            self.advantages_B[rows],
            clip_low=LOW,
            clip_high=HIGH,
            minibatch_tokens=tokens,
        )

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden_BTE, self.output_VE))

    def counted(self) -> list[tuple[int, int]]:
        return [(b, t) for b in range(B) for t in range(T) if self.mask_BT[b, t]]

    def plain_logprob(self, b: int, t: int) -> Tensor:
        logits_V = self.output_VE @ self.hidden_BTE[b, t - 1]
        return logits_V[self.tokens_BT[b, t]] - torch.log(torch.exp(logits_V).sum())


def plain_grpo(example: Example) -> tuple[Tensor, int]:
    """The loss, and the number of clipped tokens."""
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
    sums, _ = example.grpo(len(example.counted()))
    expected, clipped = plain_grpo(example)
    assert_close(sums.loss, expected)
    assert_close(example.gradients(sums.loss), example.gradients(expected))
    assert clipped > 0
    assert sums.clipped == clipped


def test_the_sft_loss_and_its_gradient_match_mean_cross_entropy() -> None:
    example = Example(0)
    logprobs = [example.plain_logprob(b, t) for b, t in example.counted()]
    loss = sft_loss(example.scores(), len(logprobs))
    expected = -torch.stack(logprobs).mean()
    assert_close(loss, expected)
    assert_close(example.gradients(loss), example.gradients(expected))


def test_masked_tokens_change_neither_loss_nor_gradient() -> None:
    example, other = Example(1), Example(1)
    uncounted = ~other.mask_BT
    other.tokens_BT[uncounted] = (other.tokens_BT[uncounted] + 1) % V
    other.behaviour_BT[uncounted] = -99.0
    loss, same = example.grpo(9)[0].loss, other.grpo(9)[0].loss
    assert_close(loss, same, rtol=0, atol=0)
    assert_close(example.gradients(loss), other.gradients(same), rtol=0, atol=0)


def one_token(ratio: float, advantage: float) -> tuple[Tensor, Tensor, GrpoSums[Tensor]]:
    """Loss, its derivative by the token's log probability, and the sums."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    scores = TokenScores(logprob, torch.zeros(1))
    sums, _ = grpo_loss(
        scores, torch.zeros(1), torch.tensor([advantage]), clip_low=LOW, clip_high=HIGH, minibatch_tokens=1
    )
    (slope,) = torch.autograd.grad(sums.loss, logprob)
    return sums.loss.detach(), slope, sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "acts"),
    [
        (1.29, 1.0, True),
        (1.27, 1.0, False),
        (0.5, 1.0, False),  # less likely than before, but good: not clipped
        (0.79, -1.0, True),
        (0.81, -1.0, False),
        (3.0, -1.0, False),  # more likely than before, and bad
        (3.0, 0.0, False),
    ],
)
def test_clipping_acts_only_in_the_direction_of_the_advantage(ratio: float, advantage: float, acts: bool) -> None:
    loss, slope, sums = one_token(ratio, advantage)
    bound = 1 + HIGH if advantage > 0 else 1 - LOW
    assert_close(loss.item(), -advantage * (bound if acts else ratio), rtol=1e-6, atol=1e-6)
    assert_close(slope.item(), 0.0 if acts else -advantage * ratio, rtol=1e-6, atol=1e-6)
    assert sums.clipped == acts


def test_micro_batches_add_up_to_their_minibatch() -> None:
    parts = [Example(seed) for seed in range(3)]
    tokens = sum(len(part.counted()) for part in parts)
    added = sum(part.grpo(tokens)[0].loss for part in parts)
    expected = sum(plain_grpo(part)[0] * len(part.counted()) for part in parts) / tokens
    assert_close(added, expected)


@pytest.mark.slow  # torch's checkpoint imports its compiler, in about a second
def test_chunked_logits_give_the_same_scores_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example(2)
    at_once = example.scores()
    monkeypatch.setattr(losses, "MAX_LOGITS_PER_CHUNK", 4 * V)
    in_pieces = example.scores()
    assert_close(in_pieces, at_once)
    assert_close(example.gradients(in_pieces.logprobs_N.sum()), example.gradients(at_once.logprobs_N.sum()))


def test_logprobs_and_entropies_are_those_of_the_tempered_distribution() -> None:
    example = Example(3)
    scores = example.scores(temperature=0.7)
    for n, (b, t) in enumerate(example.counted()):
        p_V = torch.softmax(example.output_VE @ example.hidden_BTE[b, t - 1] / 0.7, dim=0)
        assert_close(scores.logprobs_N[n], p_V[example.tokens_BT[b, t]].log())
        assert_close(scores.entropies_N[n], -(p_V * p_V.log()).sum())
    assert not scores.entropies_N.requires_grad


def test_a_micro_batch_without_loss_tokens_gives_zeros() -> None:
    example = Example(0)
    example.mask_BT[:] = False
    sums, peaks = example.grpo(5)
    assert [value.item() for value in (*sums, *peaks)] == [0.0] * 7
    assert all(not gradient.any() for gradient in example.gradients(sums.loss))


def test_ratios_and_log_differences_are_reported_unclipped() -> None:
    logprobs_N = torch.tensor([-1.0, -2.0])
    behaviour_N = torch.tensor([-1.0, -2.0 - math.log(2.0)])
    sums, peaks = grpo_loss(
        TokenScores(logprobs_N, torch.tensor([0.5, 0.25])),
        behaviour_N,
        torch.ones(2),
        clip_low=LOW,
        clip_high=HIGH,
        minibatch_tokens=2,
    )
    assert sums.ratio.item() == pytest.approx(3.0)
    assert peaks.ratio.item() == pytest.approx(2.0)
    assert sums.log_difference.item() == pytest.approx(math.log(2.0))
    assert peaks.log_difference.item() == pytest.approx(math.log(2.0))
    assert sums.entropy.item() == pytest.approx(0.75)
