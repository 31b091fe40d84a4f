"""Training on one rank: updates of the cold start, GRPO steps, saving and resuming."""

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from bus.messages import TrainingSample
from configs.schema import RunConfig
from engine.learner.checkpoints import (
    TrainerState,
    commit_checkpoint,
    get_partial_path,
    get_trainer_folder,
    naming_disk_errors,
    read_trainer_state,
    write_trainer_state,
)
from engine.learner.distributed import RankGroup, gather_full, gather_full_parameters, shard_model, wait_at_barrier
from engine.learner.loss_reduction import MinibatchTotals, OptimizerUpdate, compute_rl_metrics, reduce_outputs
from engine.learner.minibatches import (
    MicroBatch,
    TrainingSequence,
    build_micro_batch,
    build_rl_minibatches,
    split_micro_batches,
)
from engine.learner.optimizers import build_rl_optimizers, build_sft_optimizers, cosine_schedule, linear_schedule
from engine.model.hf_checkpoint import save_model
from engine.model.qwen3 import Qwen3
from policies.losses import load_policy_loss
from policies.losses.grpo import compute_sft_loss
from policies.losses.policy_loss import LossInput, LossOutput, PolicyLoss, compute_policy_metrics
from policies.losses.token_scores import compute_token_scores

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # makes the state readable for another number of ranks


class Trainer:
    """Every rank makes the same calls on equal weights. `step`: finished steps of `stage`."""

    def __init__(self, model: Qwen3, run: RunConfig, ranks: RankGroup) -> None:
        shard_model(model, model.model.layers, ranks)
        self.model = model
        self.stage: Literal["sft", "rl"] = "sft"
        self.step = 0
        self._run = run
        self._ranks = ranks
        self._optimizers: list[Optimizer] = []
        self._base_lrs: list[float] = []
        self._policy_loss = load_policy_loss(run.learner.loss)
        torch.manual_seed(run.seed + ranks.rank)
        self.start_stage("sft" if run.sft.steps else "rl")

    def start_stage(self, stage: Literal["sft", "rl"]) -> None:
        """Fresh optimizers, step 0."""
        self.stage, self.step = stage, 0
        make_sft = stage == "sft"
        self._optimizers = (
            build_sft_optimizers(self.model, self._run.sft)
            if make_sft
            else build_rl_optimizers(self.model, self._run.learner)
        )
        self._base_lrs = [optimizer.defaults["lr"] for optimizer in self._optimizers]

    # ---------------------------------------------------------------- steps

    def run_sft_step(self, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """One update. Returns loss, grad_norm, lr, tokens (in the loss)."""
        sft = self._run.sft
        lr_scale = cosine_schedule(self.step, sft.steps, sft.warmup_steps)
        update = self._run_update(sequences, lr_scale, compute_sft_loss)
        self.step += 1
        tokens = sum(sequence.num_loss_tokens for sequence in sequences)
        return {
            "loss": update.sums.loss,
            "grad_norm": update.grad_norm,
            "lr": lr_scale * sft.lr,
            "tokens": float(tokens),
        }

    def run_rl_step(self, rows: Sequence[TrainingSample]) -> dict[str, float]:
        """`learner.minibatches` updates; no update without rows. Raises ValueError for invalid rows.

        Returns loss and grad_norm (means over updates), lr, updates, updates_skipped, tokens (in the loss), rows,
        ratio_mean, ratio_max, entropy (over all tokens), the metrics of the loss, and, from the first minibatch,
        before its update, mismatch_mean and mismatch_max: |log p recomputed - log p of the engine|.
        """
        learner, steps = self._run.learner, self._run.rl.steps
        lr_scale = linear_schedule(self.step, steps, learner.warmup_steps, learner.final_lr_fraction)
        minibatches = build_rl_minibatches(rows, learner.minibatches, self._run.seed, self.step)
        self._check_vocabulary(sequence for minibatch in minibatches for sequence in minibatch)
        trained = [minibatch for minibatch in minibatches if any(sequence.num_loss_tokens for sequence in minibatch)]
        updates = [self._run_update(minibatch, lr_scale, self._compute_policy_loss) for minibatch in trained]
        tokens = sum(update.totals.tokens for update in updates)
        self.step += 1
        counts = {"lr": lr_scale * learner.lr, "rows": float(len(rows)), "tokens": float(tokens)}
        return counts | compute_rl_metrics(updates)

    def _check_vocabulary(self, sequences: Iterable[TrainingSequence]) -> None:
        size = self.model.config.vocab_size
        for sequence in sequences:
            if sequence.token_ids.min(initial=0) < 0 or sequence.token_ids.max(initial=0) >= size:
                raise ValueError(f"a token id is outside the vocabulary of {size}")

    def _compute_policy_loss(self, batch: LossInput) -> LossOutput:
        """The configured loss, with the metrics of all losses."""
        output, common = self._policy_loss(batch), compute_policy_metrics(batch)
        return output._replace(
            token_means={**output.token_means, **common.token_means}, maxima={**output.maxima, **common.maxima}
        )

    def _run_update(
        self, sequences: Sequence[TrainingSequence], lr_scale: float, compute_loss: PolicyLoss
    ) -> OptimizerUpdate:
        """One optimizer update; sums and maxima are over all ranks. A gradient that is not finite changes nothing."""
        counts = [sequence.num_loss_tokens for sequence in sequences]
        totals = MinibatchTotals(max(1, sum(counts)), max(1, sum(map(bool, counts))))
        shares = split_micro_batches(sequences, self._ranks.world_size, self._run.learner.micro_batch_tokens)
        outputs = [
            self._forward_backward(build_micro_batch([sequences[index] for index in indices]), totals, compute_loss)
            for indices in shares[self._ranks.rank]
        ]
        return OptimizerUpdate(totals, reduce_outputs(outputs, self._ranks), self._apply_gradients(lr_scale))

    def _forward_backward(self, batch: MicroBatch, totals: MinibatchTotals, compute_loss: PolicyLoss) -> LossOutput:
        hidden_BTE = self.model(batch.token_ids_BT)
        hidden_NE = hidden_BTE.flatten(0, 1).index_select(0, batch.positions_N)
        temperature = self._run.sampling.temperature if self.stage == "rl" else 1.0
        scores = compute_token_scores(
            hidden_NE, batch.targets_N, self.model.compute_logits, self.model.config.vocab_size, temperature or 1.0
        )
        learner = self._run.learner
        output = compute_loss(
            LossInput(
                logprobs_N=scores.logprobs_N,
                behaviour_logprobs_N=batch.logprobs_N,
                advantages_N=batch.advantages_N,
                entropies_N=scores.entropies_N,
                sequences_N=batch.sequences_N,
                num_sequences=batch.num_sequences,
                minibatch_tokens=totals.tokens,
                minibatch_sequences=totals.sequences,
                max_response_tokens=self._run.response_tokens,
                clip_low=learner.clip_low,
                clip_high=learner.clip_high,
            )
        )
        output.loss.backward()
        return output._replace(loss=output.loss.detach())

    def _apply_gradients(self, lr_scale: float) -> float:
        parameters = list(self.model.parameters())
        norm = gather_full(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        if torch.isfinite(norm):
            clip_grads_with_norm_(parameters, self._run.learner.max_grad_norm, norm)
            for optimizer, base in zip(self._optimizers, self._base_lrs, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = base * lr_scale
                optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return float(norm)

    # ---------------------------------------------------------------- saving and resuming

    def save(self, checkpoint: Path, tokenizer_folder: Path) -> None:
        """Every rank calls it. The folder's name is temporary until the end. Raises DiskError."""
        target = get_partial_path(checkpoint)
        with naming_disk_errors(target):
            self._write_checkpoint(target, tokenizer_folder)
            if self._ranks.is_leader:
                commit_checkpoint(checkpoint)
        wait_at_barrier(self._ranks)

    def _write_checkpoint(self, target: Path, tokenizer_folder: Path) -> None:
        parameters = gather_full_parameters(self.model)
        if self._ranks.is_leader:
            save_model(target, self.model.config, parameters, tokenizer_folder)
            get_trainer_folder(target).mkdir()
        wait_at_barrier(self._ranks)
        if self.step:  # before the first step there is no state, and get_optimizer_state_dict would create one
            writer = _ReproducibleStateWriter(get_trainer_folder(target) / "optimizer", sync_files=False)
            with _without_process_group_warning():
                save_tensors(self._get_optimizer_state(), storage_writer=writer, no_dist=self._ranks.world_size == 1)
        random_state = BytesIO()  # for a full disk, torch.save to a file reports only "unexpected pos"
        torch.save(torch.get_rng_state(), random_state)
        (get_trainer_folder(target) / f"random_{self._ranks.rank}.pt").write_bytes(random_state.getvalue())
        wait_at_barrier(self._ranks)
        if self._ranks.is_leader:
            write_trainer_state(target, TrainerState(self.stage, self.step, self._ranks.world_size, self._run.seed))

    def load(self, checkpoint: Path) -> None:
        """Resume from a checkpoint after its weights were loaded into the model; the number of ranks may differ.

        A rank without a saved random state keeps its current one. Raises OSError if a file is missing.
        """
        state = read_trainer_state(checkpoint)
        self.start_stage(state.stage)
        self.step = state.step
        if state.step:
            tensors = self._get_optimizer_state()
            reader = FileSystemReader(get_trainer_folder(checkpoint) / "optimizer")
            with _without_process_group_warning():
                load_tensors(tensors, storage_reader=reader, no_dist=self._ranks.world_size == 1)
            set_optimizer_state_dict(self.model, self._optimizers, tensors, options=BY_NAME)
        random_state = get_trainer_folder(checkpoint) / f"random_{self._ranks.rank}.pt"
        if random_state.exists():
            torch.set_rng_state(torch.load(random_state, weights_only=True))

    def _get_optimizer_state(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self._optimizers, options=BY_NAME)


class _ReproducibleStateWriter(FileSystemWriter):
    """Omits the path and the random number that torch adds to the tensors, so that equal states give equal bytes."""

    def storage_meta(self) -> None:
        return None


@contextmanager
def _without_process_group_warning() -> Generator[None]:
    """Suppress torch's warning that there is no process group, which it gives even with no_dist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
