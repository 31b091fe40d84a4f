"""The cases of the fake CUDA suite: settings for one step of learner or engine. This module does not import torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from asterism.configs.schema.algorithm import SftConfig, SftFileConfig
from asterism.configs.schema.learner_config import Checkpointing, LearnerConfig
from asterism.engine.hf.model_config import DecoderConfig, ExpertsConfig
from benchmarks.support.qwen3_models import read_qwen3
from tests.engine.learner.learner_settings import make_learner


class LearnerCase(NamedTuple):
    model_type: str = "qwen3"
    learner: Mapping[str, Any] = {}
    sft: SftConfig | None = None  # options of a cold-start step; None for a GRPO step
    prompt_tokens: int = 1  # tokens of the prompt; more than one token are a group's shared prompt
    checks_weights: bool = False  # whether the case runs the check of the weights instead of a step

    def build_learner(self) -> LearnerConfig:
        defaults = {
            **{"device": "cuda", "dtype": "bfloat16", "micro_batch_tokens": 64, "minibatches": 1},
            **{"old_logprobs": "engine", "correction": "none", "mismatch_limit": 1.0},
            "compile": False,  # compilation would take seconds per case
        }
        return make_learner(**{**defaults, **self.learner})


class EngineCase(NamedTuple):
    phase: str  # measured phase: prefill, a prompt chunk while sequences run, decode, or weights
    has_graphs: bool = False
    sampling: Mapping[str, float] = {}
    dtype: str = "float32"


_RECOMPUTED = {"old_logprobs": "recomputed"}
_MIXTURE = (SftFileConfig(name="one", data="one.jsonl"), SftFileConfig(name="two", data="two.jsonl"))
LEARNER_CASES: dict[str, LearnerCase] = {
    **{name: LearnerCase(name) for name in ("qwen3", "qwen2", "llama", "qwen3_moe")},
    "two micro batches": LearnerCase(learner={"micro_batch_tokens": 40}),
    **{
        f"{mode} checkpointing": LearnerCase(learner={"activation_checkpointing": mode})
        for mode in ("selective", "attention", "full")
    },
    "compiled": LearnerCase(learner={"compile": True}),
    "compiled with selective checkpointing": LearnerCase(
        learner={"compile": True, "activation_checkpointing": "selective"}
    ),
    "shared prompts": LearnerCase(prompt_tokens=10),
    "shared prompts with selective checkpointing": LearnerCase(
        learner={"activation_checkpointing": "selective"}, prompt_tokens=10
    ),
    "float32": LearnerCase(learner={"dtype": "float32"}),
    "gspo": LearnerCase(learner={"function": "gspo", "mean": "sequence"}),
    "cispo": LearnerCase(learner={"function": "cispo"}),
    "dual clip": LearnerCase(learner={"clip_dual": 3.0}),
    **{
        f"correction {name}": LearnerCase(learner={**_RECOMPUTED, "correction": name})
        for name in ("none", "tis", "icepop", "decoupled")
    },
    "two minibatches": LearnerCase(learner={**_RECOMPUTED, "correction": "tis", "minibatches": 2}),
    "lora": LearnerCase(learner={"rank": 4}),
    "kl and entropy": LearnerCase(learner={"kl_coef": 0.05, "entropy_coef": 0.01}),
    "cold start": LearnerCase(sft=SftConfig(steps=10)),
    "cold start of a mixture": LearnerCase(sft=SftConfig(steps=10, mixture=_MIXTURE)),
    "cold start with muon": LearnerCase(sft=SftConfig(steps=10, optimizer="muon", muon_lr=0.02)),
    "check of the weights": LearnerCase(checks_weights=True),
}
_FILTERED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
ENGINE_CASES: dict[str, EngineCase] = {
    "prefill": EngineCase("prefill"),
    "chunk": EngineCase("chunk"),
    "decode": EngineCase("decode"),
    "decode in bfloat16": EngineCase("decode", dtype="bfloat16"),
    "greedy decode": EngineCase("decode", sampling={"temperature": 0.0}),
    "decode with filtered sampling": EngineCase("decode", sampling=_FILTERED),
    "decode with graphs": EngineCase("decode", has_graphs=True),
    "decode with graphs and filtered sampling": EngineCase("decode", has_graphs=True, sampling=_FILTERED),
    "changed weights": EngineCase("weights"),
    "decode after changed weights": EngineCase("decode after weights", has_graphs=True),
}


class SamplingCase(NamedTuple):
    """A case that samples rows with the vocabulary of Qwen3, alone or within a decode step."""

    rows: int
    sampling: Mapping[str, Any] = {}  # fields of the Sampling parameters
    has_graphs: bool = False

    @property
    def has_filter(self) -> bool:
        return "top_p" in self.sampling or "top_k" in self.sampling


SAMPLING_VOCABULARY = 151_936
SAMPLING_CASES: dict[str, SamplingCase] = {
    f"{name}, {rows} rows": SamplingCase(rows, sampling, has_graphs)
    for rows, has_graphs in ((8, False), (40, True))
    for name, sampling in {
        "plain": {},
        "temperature": {"temperature": 0.7},
        "greedy": {"temperature": 0.0},
        "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    }.items()
}


class WideCase(NamedTuple):
    """A GRPO step with the widths of Qwen3-1.7B: two micro batches of packed tokens, in bfloat16."""

    mode: str  # mode of activation checkpointing
    compiles: bool = True
    tokens: int = 8192  # number of tokens in a micro batch
    layers: int = 4
    experts: ExpertsConfig | None = None

    def build_config(self) -> DecoderConfig:
        model_type = "qwen3" if self.experts is None else "qwen3_moe"
        return replace(read_qwen3("1.7B"), num_layers=self.layers, experts=self.experts, model_type=model_type)


# half as many experts as in Qwen3-30B-A3B, with the same width and size
_EXPERTS = ExpertsConfig(num_experts=64, experts_per_token=8, expert_size=768, normalizes_weights=True)
WIDE_CASES: dict[str, WideCase] = {
    "eager, none": WideCase("none", compiles=False),
    **{f"compiled, {mode}": WideCase(mode) for mode in get_args(Checkpointing)},
    "experts": WideCase("full", layers=1, experts=_EXPERTS),
}
# cases of LEARNER_CASES and WIDE_CASES that `make test` leaves out; each differs from others only by its checkpointing
NIGHTLY_CASES = {
    *("compiled", "compiled with selective checkpointing"),
    *("compiled, selective", "compiled, attention", "compiled, full"),
}
PART_CASES = {"project": "project", "finish": "finish"}  # methods of DecoderLayer that are compiled alone
# by defect (planted_defects.py): the group and the name of the case that finds the defect
PLANTED_CASES: dict[str, tuple[str, str]] = {
    "empty CPU maxima": ("learner", "cold start"),
    "item": ("learner", "qwen3"),
    "CPU mask": ("learner", "qwen3"),
    "pageable copy": ("learner", "qwen3"),
    "eager layers": ("wide", "compiled, none"),
    "eager head": ("wide", "compiled, none"),
    "unfused norm": ("wide", "eager, none"),
}
