"""Trains on one rank: updates of the cold start, GRPO steps, saving and resuming."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.export.chat_files import ServedChat
from asterism.engine.export.hf_export import MAX_SHARD_BYTES
from asterism.engine.learner.batches.load_metrics import (
    MinibatchPlan,
    compute_expert_metrics,
    compute_plan_metrics,
    list_shared_prompts,
)
from asterism.engine.learner.batches.minibatches import (
    MicroBatch,
    build_rl_minibatches,
    compute_token_weights,
    iter_micro_batches,
    load_micro_batch,
)
from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.learner.batches.training_sequence import RankShares, SequenceSource, Source, check_token_ids
from asterism.engine.learner.checkpoints.adapter_export import describe_adapters
from asterism.engine.learner.checkpoints.checkpoint import CheckpointWriter, ModelExport, PendingCheckpoint
from asterism.engine.learner.checkpoints.checkpoint_folders import ProbePrompts, TrainerState, read_trainer_state
from asterism.engine.learner.checkpoints.training_state import capture_training_state, load_training_state
from asterism.engine.learner.distributed import RankGroup, find_non_finite_parameter, gather_full
from asterism.engine.learner.loss_reduction import (
    MinibatchTotals,
    OptimizerUpdate,
    check_mismatch,
    compute_file_losses,
    compute_rl_metrics,
    reduce_outputs,
    sum_by_file,
)
from asterism.engine.learner.lr_schedules import cosine_schedule, linear_schedule
from asterism.engine.learner.optimizers import build_rl_optimizers, build_sft_optimizers
from asterism.engine.learner.sharding import reshard_parameters, set_gradient_reduction
from asterism.engine.learner.state_offload import list_state
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import list_base_parameters
from asterism.engine.model.packed_attention import can_share_prompts
from asterism.engine.model.training_flops import count_forward_flops
from asterism.policies.losses.grpo import compute_sft_loss
from asterism.policies.losses.policy_loss import LossInput, LossOutput
from asterism.policies.losses.policy_objective import PolicyObjective
from asterism.policies.losses.token_scores import ScoredTokens, TokenScores

OldLogprobs = list[Tensor] | None  # log probabilities for each micro batch of a minibatch
Distribution = Callable[[Sequence[tuple[Sequence[Source], RankShares]]], Sequence[Sequence[Source]]]
ObjectiveFunction = Callable[[LossInput, Tensor | None], LossOutput]  # the Tensor has the reference's logprobs


class Trainer:
    """A trainer on one rank. Every rank makes the same calls on equal weights. `step`: finished steps of `stage`."""

    def __init__(self, model: CausalLM, run: RunConfig, ranks: RankGroup) -> None:
        """`model` is sharded over the ranks (asterism.engine.learner.sharding)."""
        self.model = model
        self.stage: Literal["sft", "rl"] = "sft"
        self.step = 0
        self.shared_prompts: list[int] = []  # lengths of prompts that the last step did not compute again
        self._run = run
        self._ranks = ranks
        self._optimizers: list[Optimizer] = []
        self._base_lrs: list[float] = []
        self._learner = run.learner.resolve_auto(run.engine.dtype)
        self.flops = count_forward_flops(model.config)
        self._objective = PolicyObjective(self._learner)
        self._reference: nn.Module | None = None
        self._checkpoints = CheckpointWriter(ranks, run.learner.threads)
        torch.manual_seed(run.seed + ranks.rank)
        self.start_stage("sft" if run.sft.is_enabled else "rl")

    def start_stage(self, stage: Literal["sft", "rl"]) -> None:
        """Start a stage at step 0 with new optimizers. `model` can differ from the previous stage's model."""
        self.stage, self.step = stage, 0
        self.model.set_recomputed(self._learner.memory.activation_checkpointing)
        self.model.set_compiled(self._learner.compiles)
        self._optimizers = (
            build_sft_optimizers(self.model, self._run.sft)
            if stage == "sft"
            else build_rl_optimizers(self.model, self._run.learner)
        )
        self._base_lrs = [optimizer.defaults["lr"] for optimizer in self._optimizers]
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._checkpoints.wait_until_read)

    # ---------------------------------------------------------------- steps

    def run_sft_step(self, sequences: Sequence[SequenceSource]) -> dict[str, float]:
        """Run one update. Return loss, grad_norm, lr, tokens (in the loss), the loss of each file of a mixture, and the
        metrics of micro batches and of experts. `group` of a sequence is its file's number."""
        sft = self._run.sft
        lr_scale = cosine_schedule(self.step, sft.steps, sft.warmup_steps)
        update = self._run_update(sequences, lr_scale, lambda batch, _: compute_sft_loss(batch))
        self.step += 1
        planned = [self._plan_micro_batches(sequences)]
        losses = compute_file_losses(update.sums.token_sums, sft.file_names)
        return {
            "loss": update.sums.loss,
            "grad_norm": update.grad_norm,
            "lr": lr_scale * sft.lr,
            "tokens": float(sum(sequence.num_loss_tokens for sequence in sequences)),
            **{f"file {name}: loss": loss for name, loss in losses.items()},
            **compute_plan_metrics(planned, self._learner.memory.micro_batch_tokens, self.flops.attention_tokens),
            **compute_expert_metrics(self.model, self._ranks),
        }

    def score_without_update(self, sequences: Sequence[SequenceSource]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield this rank's micro batches with their tokens' log probabilities. Every rank iterates to the end."""
        for batch in iter_micro_batches(self._list_micro_batches(sequences), self._ranks):
            yield batch, self._score_without_gradient(self.model, batch).logprobs_N

    def run_rl_step(
        self, sequences: Sequence[Source], distribute: Distribution[Source] | None = None
    ) -> dict[str, float]:
        """Run `learner.minibatches` updates, or none without sequences. A rank loads only its own sequences.

        `distribute` receives the minibatches and makes the sequences of each rank loadable there.

        Returns loss and grad_norm (means over updates), lr, updates, updates_skipped, tokens (in the loss), rows,
        ratio_mean, ratio_max, entropy (over all tokens), and the metrics of the loss, of the mismatch between engine
        and learner, of micro batches and of experts. Raises ValueError for token ids outside the vocabulary, OSError
        for unreadable sequences, and UnusableInput for a mismatch above learner.loss.mismatch_limit.
        """
        learner, steps = self._learner, self._run.rl.steps
        lr_scale = linear_schedule(
            self.step, steps, learner.optimizer.warmup_steps, learner.optimizer.final_lr_fraction
        )
        minibatches = build_rl_minibatches(sequences, learner.minibatches, self._run.seed, self.step)
        check_token_ids(sequences, self.model.config.vocab_size)
        trained = [minibatch for minibatch in minibatches if any(sequence.num_loss_tokens for sequence in minibatch)]
        planned = [self._plan_micro_batches(each) for each in trained]
        self.shared_prompts = list_shared_prompts(planned)
        if distribute is not None:
            trained = distribute([(each, plan.shares) for each, plan in zip(trained, planned, strict=True)])
        old_logprobs = self._recompute_old_logprobs(trained)
        updates = list[OptimizerUpdate]()
        for minibatch, old in zip(trained, old_logprobs, strict=True):
            # After an update, the weights also differ from the engine's weights by that update.
            is_comparable = learner.loss.old_logprobs == "recomputed" or not updates
            limit = learner.loss.mismatch_limit if is_comparable else 0.0
            updates.append(self._run_update(minibatch, lr_scale, self._objective.compute, old, limit))
        tokens = sum(update.totals.tokens for update in updates)
        self.step += 1
        counts = {"lr": lr_scale * learner.optimizer.lr, "rows": float(len(sequences)), "tokens": float(tokens)}
        plan = compute_plan_metrics(planned, learner.memory.micro_batch_tokens, self.flops.attention_tokens)
        return counts | compute_rl_metrics(updates) | plan | compute_expert_metrics(self.model, self._ranks)

    def check_weights(self) -> None:
        """Raise UnusableInput, with the first parameter, for weights that are not finite. Every rank calls it."""
        if name := find_non_finite_parameter(self.model, self._ranks):
            raise UnusableInput(
                f"the weights of the learner are not finite after step {self.step}, first in {name}. Likely causes: "
                "a damaged model.checkpoint, or too high values of learner.optimizer.lr or sft.lr. Earlier checkpoints are kept."
            )

    def set_reference(self, policy: nn.Module) -> None:
        """Set the frozen policy of the KL term, sharded and with the interface of CausalLM. Every rank calls it."""
        self._reference = policy
        if isinstance(policy, CausalLM):
            policy.set_compiled(self._learner.compiles)

    def _recompute_old_logprobs(self, minibatches: Sequence[Sequence[SequenceSource]]) -> list[OldLogprobs]:
        """Recompute old log probabilities; None for the first minibatch, whose own forward pass computes them."""
        if self._learner.loss.old_logprobs == "engine" or len(minibatches) < 2:
            return [None] * len(minibatches)
        later = ([each for _, each in self.score_without_update(sequences)] for sequences in minibatches[1:])
        return [None, *later]

    def _plan_micro_batches(self, sequences: Sequence[SequenceSource]) -> MinibatchPlan:
        num_shares, tokens = self._ranks.dims.num_data_ranks, self._learner.memory.micro_batch_tokens
        attention_tokens = self.flops.attention_tokens
        shares_prompts = self.stage == "rl" and _shares_prompts(self._learner, self._ranks.device)
        shares = split_micro_batches(sequences, num_shares, tokens, attention_tokens, shares_prompts=shares_prompts)
        return MinibatchPlan(sequences, shares, shares_prompts)

    def _list_micro_batches(self, sequences: Sequence[SequenceSource]) -> list[Callable[[], MicroBatch]]:
        """Return functions that load this rank's micro batches, for a GPU into page-locked memory."""
        loss_mean = self._learner.loss.mean if self.stage == "rl" else "tokens"
        weights = compute_token_weights(sequences, loss_mean, self._run.response_tokens)
        plan = self._plan_micro_batches(sequences)
        load = partial(
            load_micro_batch, sequences, weights, device=self._ranks.device, shares_prompts=plan.shares_prompts
        )
        return [partial(load, indices) for indices in plan.shares[self._ranks.data_rank]]

    def _run_update(
        self,
        sequences: Sequence[SequenceSource],
        lr_scale: float,
        compute_loss: ObjectiveFunction,
        old_logprobs: OldLogprobs = None,
        mismatch_limit: float = 0.0,
    ) -> OptimizerUpdate:
        """Run one optimizer update, with sums and maxima over all ranks. A gradient that is not finite changes nothing.

        `mismatch_limit`: 0 for no limit, as in the cold start.
        """
        counts = [sequence.num_loss_tokens for sequence in sequences]
        totals = MinibatchTotals(max(1, sum(counts)), max(1, sum(map(bool, counts))))
        loads, outputs = self._list_micro_batches(sequences), list[LossOutput]()
        pairs = zip(iter_micro_batches(loads, self._ranks), old_logprobs or [None] * len(loads), strict=True)
        for number, (batch, old_N) in enumerate(pairs, start=1):
            set_gradient_reduction(self.model, self._ranks, self._learner, is_last=number == len(loads))
            with self._ranks.operation("forward and backward"):
                outputs.append(self._forward_backward(batch, totals, compute_loss, old_N))
        sums = reduce_outputs(outputs, self._ranks)
        if mismatch_limit:
            check_mismatch(sums, totals, mismatch_limit)
        with self._ranks.operation("optimizer update"):
            return OptimizerUpdate(totals, sums, self._apply_gradients(lr_scale))

    def _forward_backward(
        self, batch: MicroBatch, totals: MinibatchTotals, compute_loss: ObjectiveFunction, old_N: Tensor | None
    ) -> LossOutput:
        reference = self._reference if self.stage == "rl" else None
        reference_N = None if reference is None else self._score_without_gradient(reference, batch).logprobs_N
        scores = self._score(self.model, batch)
        if self.stage == "sft" or self._learner.loss.old_logprobs == "engine":
            old_N = batch.logprobs_N
        elif old_N is None:
            old_N = scores.logprobs_N.detach()
        given = _build_loss_input(batch, totals, scores, old_N, self._learner, self._run.response_tokens)
        output = compute_loss(given, reference_N)
        output.loss.backward()
        if self.stage == "sft":
            by_file = sum_by_file(batch.groups_N, scores.logprobs_N, self._run.sft.file_names)
            output = output._replace(token_means={**output.token_means, **by_file})
        return output._replace(loss=output.loss.detach())

    def _score(self, model: nn.Module, batch: MicroBatch) -> TokenScores:
        is_rl = self.stage == "rl"
        temperature = self._run.sampling.temperature if is_rl else 1.0
        has_entropy_gradient = is_rl and self._learner.loss.entropy_coef > 0
        has_float32_logits = self._learner.has_float32_logits
        tokens = ScoredTokens(batch.positions_N, batch.targets_N, temperature, has_entropy_gradient, has_float32_logits)
        return model(batch.token_ids_T[None], tokens=tokens, segments=batch.segments)

    def _score_without_gradient(self, model: nn.Module, batch: MicroBatch) -> TokenScores:
        with self._ranks.operation("forward"), torch.no_grad():
            scores = self._score(model, batch)
        reshard_parameters(model)
        return scores

    def _apply_gradients(self, lr_scale: float) -> float:
        parameters = list(self.model.parameters())
        norm = gather_full(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        if torch.isfinite(norm):
            clip_grads_with_norm_(parameters, self._run.learner.optimizer.max_grad_norm, norm)
            for optimizer, base in zip(self._optimizers, self._base_lrs, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = base * lr_scale
                optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return float(norm)

    # ---------------------------------------------------------------- saving and resuming

    def collect_state(self) -> list[Tensor]:
        """Wait until a checkpoint has read the state. Return weights, moments and the reference's weights."""
        self._checkpoints.wait_until_read()
        return list_state(self.model, self._optimizers, self._reference)

    def save(
        self,
        checkpoint: Path,
        tokenizer_folder: Path,
        *,
        is_exported: bool = True,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        probe: ProbePrompts | None = None,
        build_chat: Callable[[], ServedChat | None] = lambda: None,
        on_committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write a checkpoint, after the previous checkpoint has its final name. Every rank calls it.

        `is_exported`: write a transformers model, too. A thread of the leading rank calls `build_chat` for the chat
        files, and `on_committed` after the folder has its final name. Raises DiskError of the previous checkpoint.
        """
        changes = {"has_weights": is_exported, "max_shard_bytes": max_shard_bytes, "build_chat": build_chat}
        export = _describe_export(self.model, self._learner, tokenizer_folder)._replace(**changes)
        trainer_state = TrainerState(self.stage, self.step, self._ranks.world_size, self._run.seed, probe)
        self._checkpoints.wait()
        state = capture_training_state(self.model, self._optimizers, self.step, self._ranks)
        self._checkpoints.start(PendingCheckpoint(checkpoint, trainer_state, export, on_committed), state)

    def finish_saving(self) -> None:
        """Wait until the checkpoint has its final name on every rank. Raises DiskError."""
        self._checkpoints.wait()

    def load(self, checkpoint: Path) -> None:
        """Load weights, optimizer and random state; the number of ranks can differ. Every rank calls it.

        A rank without a saved random state keeps its current state. Raises OSError without a state.json, and
        CheckpointError for missing or damaged tensors.
        """
        state = read_trainer_state(checkpoint)
        self.start_stage(state.stage)
        self.step = state.step
        load_training_state(checkpoint, self.model, self._optimizers, state.step, self._ranks)


def _shares_prompts(learner: LearnerConfig, device: torch.device) -> bool:
    """Return whether micro batches of RL compute shared prompts once. The dialogues of the cold start share none."""
    return learner.memory.shared_prompts and can_share_prompts(device, getattr(torch, learner.dtype))


def _build_loss_input(
    batch: MicroBatch,
    totals: MinibatchTotals,
    scores: TokenScores,
    old_N: Tensor,
    learner: LearnerConfig,
    max_response_tokens: int,
) -> LossInput:
    return LossInput(
        logprobs_N=scores.logprobs_N,
        behaviour_logprobs_N=batch.logprobs_N,
        old_logprobs_N=old_N,
        advantages_N=batch.advantages_N.to(scores.logprobs_N.dtype),
        entropies_N=scores.entropies_N,
        sequences_N=batch.sequences_N,
        num_sequences=batch.num_sequences,
        weights_N=batch.weights_N,
        corrections_N=torch.ones_like(old_N),
        minibatch_tokens=totals.tokens,
        minibatch_sequences=totals.sequences,
        max_response_tokens=max_response_tokens,
        clip_low=learner.loss.clip_low,
        clip_high=learner.loss.clip_high,
        clip_dual=learner.loss.clip_dual,
        log_ratio_limit=learner.loss.log_ratio_limit,
    )


def _describe_export(model: CausalLM, learner: LearnerConfig, tokenizer_folder: Path) -> ModelExport:
    shapes = {name: tuple(parameter.shape) for name, parameter in list_base_parameters(model).items()}
    dtype: torch.dtype = getattr(torch, learner.checkpoints.export_dtype)
    return ModelExport(model.config, shapes, tokenizer_folder, dtype, describe_adapters(model))
