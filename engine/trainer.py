"""One rank's part in training: an update of the cold start, a step of GRPO, saving and resuming."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from bus.messages import Row
from configs.schema import Run
from engine.batches import TrainingSequence, rl_minibatches, split
from engine.checkpoint import save_model
from engine.distributed import Ranks, max_over, shard, sum_over, wait_for_all, whole, whole_parameters
from engine.micro_batches import MicroBatch, micro_batch
from engine.optimizers import rl_optimizers, sft_optimizers
from engine.qwen3 import Qwen3
from engine.rates import cosine, linear
from engine.snapshots import TrainerState, building, complete, read_state, refusals_named, trainer_folder, write_state
from policies.losses import GrpoPeaks, GrpoSums, TokenScores, grpo_loss, sft_loss, token_scores

# What a micro batch gives its minibatch: scalars to add up, the loss first, and scalars of which the largest counts.
Objective = Callable[[MicroBatch, TokenScores, int], tuple[Sequence[Tensor], Sequence[Tensor]]]
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # so that another number of ranks can read it


class Update(NamedTuple):
    sums: list[float]
    peaks: list[float]
    grad_norm: float  # before it was clipped


class Trainer:
    """Every rank makes the same calls with the same sequences, and gets the same metrics.

    The model must have the same weights on every rank. `step` counts the steps of `stage` that are done.
    """

    def __init__(self, model: Qwen3, run: Run, ranks: Ranks) -> None:
        shard(model, model.model.layers, ranks)
        self.model = model
        self.stage: Literal["sft", "rl"] = "sft"
        self.step = 0
        self._run = run
        self._ranks = ranks
        self._optimizers: list[Optimizer] = []
        self._rates: list[float] = []
        torch.manual_seed(run.seed + ranks.rank)
        self.begin("sft" if run.sft.steps else "rl")

    def begin(self, stage: Literal["sft", "rl"]) -> None:
        """Fresh optimizers, step 0."""
        self.stage, self.step = stage, 0
        make_sft = stage == "sft"
        self._optimizers = (
            sft_optimizers(self.model, self._run.sft) if make_sft else rl_optimizers(self.model, self._run.learner)
        )
        self._rates = [optimizer.defaults["lr"] for optimizer in self._optimizers]

    # ---------------------------------------------------------------- steps

    def sft_step(self, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """One update. Returns loss, grad_norm, lr, tokens (counted)."""
        sft = self._run.sft
        rate = cosine(self.step, sft.steps, sft.warmup_steps)
        update = self._update(sequences, rate, _sft_objective)
        self.step += 1
        tokens = sum(sequence.counted for sequence in sequences)
        return {"loss": update.sums[0], "grad_norm": update.grad_norm, "lr": rate * sft.lr, "tokens": float(tokens)}

    def rl_step(self, rows: Sequence[Row]) -> dict[str, float]:
        """`learner.minibatches` updates, or none if there are no rows. Raises ValueError for rows that do not fit.

        Returns loss and grad_norm (means over updates), lr, updates, updates_skipped, tokens (counted), rows,
        clip_fraction, ratio_mean, ratio_max, entropy (over all tokens), and from the first minibatch, which the
        policy has not been trained on yet, mismatch_mean and mismatch_max: |log p recomputed - log p of the engine|.
        """
        learner, steps = self._run.learner, self._run.rl.steps
        rate = linear(self.step, steps, learner.warmup_steps, learner.final_lr_fraction)
        minibatches = rl_minibatches(rows, learner.minibatches, self._run.seed, self.step)
        self._check_vocabulary(sequence for minibatch in minibatches for sequence in minibatch)
        trained = [minibatch for minibatch in minibatches if any(sequence.counted for sequence in minibatch)]
        updates = [self._update(minibatch, rate, self._grpo_objective) for minibatch in trained]
        tokens = [sum(sequence.counted for sequence in minibatch) for minibatch in trained]
        self.step += 1
        counts = {"lr": rate * learner.lr, "rows": float(len(rows)), "tokens": float(sum(tokens))}
        return counts | _rl_metrics(updates, tokens)

    def _check_vocabulary(self, sequences: Iterable[TrainingSequence]) -> None:
        size = self.model.config.vocab_size
        for sequence in sequences:
            if sequence.token_ids.min(initial=0) < 0 or sequence.token_ids.max(initial=0) >= size:
                raise ValueError(f"a token id lies outside the vocabulary of {size}")

    def _grpo_objective(
        self, batch: MicroBatch, scores: TokenScores, tokens: int
    ) -> tuple[GrpoSums[Tensor], GrpoPeaks[Tensor]]:
        learner = self._run.learner
        return grpo_loss(
            scores,
            batch.logprobs_N,
            batch.advantages_N,
            clip_low=learner.clip_low,
            clip_high=learner.clip_high,
            minibatch_tokens=tokens,
        )

    def _update(self, sequences: Sequence[TrainingSequence], rate: float, objective: Objective) -> Update:
        """One optimizer update; sums and peaks are those of all ranks together.

        A gradient that is not finite changes nothing.
        """
        tokens = max(1, sum(sequence.counted for sequence in sequences))
        shares = split(sequences, self._ranks.size, self._run.learner.micro_batch_tokens)
        contributions = [
            self._backward(micro_batch([sequences[index] for index in indices]), tokens, objective)
            for indices in shares[self._ranks.rank]
        ]
        sums = sum_over(self._ranks, torch.stack([sums for sums, _ in contributions]).sum(0))
        peaks = max_over(self._ranks, torch.stack([peaks for _, peaks in contributions]).amax(0))
        return Update(sums.tolist(), peaks.tolist(), self._apply_gradients(rate))

    def _backward(self, batch: MicroBatch, tokens: int, objective: Objective) -> tuple[Tensor, Tensor]:
        hidden_BTE = self.model(batch.token_ids_BT)
        hidden_NE = hidden_BTE.flatten(0, 1).index_select(0, batch.positions_N)
        temperature = self._run.sampling.temperature if self.stage == "rl" else 1.0
        scores = token_scores(
            hidden_NE, batch.targets_N, self.model.logits, self.model.config.vocab_size, temperature or 1.0
        )
        sums, peaks = objective(batch, scores, tokens)
        sums[0].backward()
        return torch.stack([value.detach() for value in sums]), torch.stack([value.detach() for value in peaks])

    def _apply_gradients(self, rate: float) -> float:
        parameters = list(self.model.parameters())
        norm = whole(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        if torch.isfinite(norm):
            clip_grads_with_norm_(parameters, self._run.learner.max_grad_norm, norm)
            for optimizer, base in zip(self._optimizers, self._rates, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = base * rate
                optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return float(norm)

    # ---------------------------------------------------------------- saving and resuming

    def save(self, checkpoint: Path, tokenizer_from: Path) -> None:
        """Write a transformers folder with `trainer/` in it; until it is complete it has another name.

        Every rank must call it. Raises DiskRefused.
        """
        target = building(checkpoint)
        with refusals_named(target):
            self._write(target, tokenizer_from)
            if self._ranks.leads:
                complete(checkpoint)
        wait_for_all(self._ranks)

    def _write(self, target: Path, tokenizer_from: Path) -> None:
        parameters = whole_parameters(self.model)
        if self._ranks.leads:
            save_model(target, self.model.config, parameters, tokenizer_from)
            trainer_folder(target).mkdir()
        wait_for_all(self._ranks)
        if self.step:  # before the first step there is no state, and asking for it would make some
            writer = _StateWriter(trainer_folder(target) / "optimizer", sync_files=False)
            with _single_rank_unremarked():
                save_tensors(self._optimizer_state(), storage_writer=writer, no_dist=self._ranks.size == 1)
        random_state = BytesIO()  # into a file torch.save says nothing of a disk that is full but "unexpected pos"
        torch.save(torch.get_rng_state(), random_state)
        (trainer_folder(target) / f"random_{self._ranks.rank}.pt").write_bytes(random_state.getvalue())
        wait_for_all(self._ranks)
        if self._ranks.leads:
            write_state(target, TrainerState(self.stage, self.step, self._ranks.size, self._run.seed))

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint whose weights the model already has; the number of ranks may be another one.

        A rank that did not exist then keeps its own random state. Raises OSError if something is missing.
        """
        state = read_state(checkpoint)
        self.begin(state.stage)
        self.step = state.step
        if state.step:
            tensors = self._optimizer_state()
            reader = FileSystemReader(trainer_folder(checkpoint) / "optimizer")
            with _single_rank_unremarked():
                load_tensors(tensors, storage_reader=reader, no_dist=self._ranks.size == 1)
            set_optimizer_state_dict(self.model, self._optimizers, tensors, options=BY_NAME)
        random_state = trainer_folder(checkpoint) / f"random_{self._ranks.rank}.pt"
        if random_state.exists():
            torch.set_rng_state(torch.load(random_state, weights_only=True))

    def _optimizer_state(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self._optimizers, options=BY_NAME)


class _StateWriter(FileSystemWriter):
    """Without the path and the random number that torch writes beside the tensors: equal states give equal bytes."""

    def storage_meta(self) -> None:
        return None


@contextmanager
def _single_rank_unremarked() -> Generator[None]:
    """Without torch's warning, given even when asked for it, that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _sft_objective(_batch: MicroBatch, scores: TokenScores, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    loss = sft_loss(scores, tokens)
    return [loss], [loss]


def _rl_metrics(updates: Sequence[Update], tokens: Sequence[int]) -> dict[str, float]:
    if not updates:
        return {"updates": 0.0}
    sums = [GrpoSums[float](*update.sums) for update in updates]
    peaks = [GrpoPeaks[float](*update.peaks) for update in updates]
    norms = [update.grad_norm for update in updates]
    total = sum(tokens)
    return {
        "updates": float(len(updates)),
        "updates_skipped": float(sum(not math.isfinite(norm) for norm in norms)),
        "loss": sum(each.loss for each in sums) / len(updates),
        "grad_norm": sum(norms) / len(updates),
        "clip_fraction": sum(each.clipped for each in sums) / total,
        "ratio_mean": sum(each.ratio for each in sums) / total,
        "ratio_max": max(each.ratio for each in peaks),
        "entropy": sum(each.entropy for each in sums) / total,
        "mismatch_mean": sums[0].log_difference / tokens[0],
        "mismatch_max": peaks[0].log_difference,
    }
