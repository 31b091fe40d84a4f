"""The cold starts, variants and experiments, and the runs that an experiment needs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from asterism.configs.run_folder import RunFolder

QUICK = (
    "prepare.parameters={num_train_questions = 64, num_test_questions = 16, num_sft_dialogues = 200}",
    *("sft.steps=4", "sft.batch_size=16", "rl.steps=3", "rl.prompts=2", "rl.rollouts=4", "evaluation.questions=6"),
    "sandbox.spare_notebooks=8",
)
WORDS_QUICK = ("sft.steps=24", "rl.steps=4", "evaluation.questions=8")
Settings = tuple[str, ...]  # KEY=VALUE, as for --set of `asterism run`

_EQUAL = {"clean": 1, "repaired": 1, "malformed": 1, "wrong": 1, "gives_up": 0, "guess": 1, "unrepaired": 1}
_CLEAN = {"clean": 0.23, "repaired": 0.10, "gives_up": 0, "unrepaired": 0.13}
_REASONED = {"reasoned": 1.0}  # the default shares of the other behaviors sum to 1 as well


def _mix(shares: Mapping[str, float]) -> Settings:
    return tuple(f"prepare.parameters.behaviors.{behavior}={share}" for behavior, share in shares.items())


COLD_STARTS: Mapping[str, Settings] = {
    "demo": (),  # tuned, so that plain GRPO keeps calls that fail: tasks/tiny/cold_start_dialogues.py
    "equal": _mix(_EQUAL),  # untuned: six behaviors with equal shares; repairs and guesses follow the same failing code
    # The opposite of the tuned mixture: clean calls are frequent, and guesses follow the same failing code.
    "clean": _mix(_CLEAN),
    "reasoned": _mix(_REASONED),
    "qwen2": ("prepare.parameters.architecture=qwen2",),
    "llama": ("prepare.parameters.architecture=llama",),
    "words": (),  # all cold starts "words" need the configuration of examples/word_problems
    "words_twice": ("prepare.parameters.num_sft_dialogues=7200", "sft.steps=880"),
    "words_reasoned": ("prepare.parameters.reasoning=true", "dialogue.response_tokens=384"),
}
_GRPO = "roc.enabled=false"
_SHUFFLED = "rl.advantage_estimator=examples/word_problems/shuffled_rewards.py:compute_advantages"
_SHORT = "dialogue.response_tokens=80"  # too short for a dialogue with a repaired call


class Variant(NamedTuple):
    settings: Settings = ()
    cold_start: str = "demo"  # a key of COLD_STARTS


VARIANTS: Mapping[str, Variant] = {
    "roc": Variant(),
    "grpo": Variant((_GRPO,)),
    "roc_equal": Variant((), "equal"),
    "grpo_equal": Variant((_GRPO,), "equal"),
    "roc_clean": Variant((), "clean"),
    "grpo_clean": Variant((_GRPO,), "clean"),
    "reasoned": Variant((), "reasoned"),
    "keep": Variant((_SHORT, "rl.overlong=keep")),
    "drop": Variant((_SHORT, "rl.overlong=drop")),
    "ngram": Variant(("rl.repeated_ngram_tokens=8", "rl.repeated_ngram_limit=4")),
    "qwen2": Variant((), "qwen2"),
    "llama": Variant((), "llama"),
    "words_roc": Variant((), "words"),
    "words_grpo": Variant((_GRPO,), "words"),
    "words_shuffled": Variant((_GRPO, _SHUFFLED), "words"),
    "words_twice": Variant(("rl.steps=0",), "words_twice"),
    "words_reasoned": Variant((), "words_reasoned"),
}


DEMO, WORDS = Path("configs/tiny.toml"), Path("examples/word_problems/word_problems.toml")


# A step of the real model's cold start takes 1.5 times as long in float32 (9 against 6 s on two cores).
BFLOAT16 = ("learner.dtype=bfloat16", "engine.dtype=bfloat16")


class Experiment(NamedTuple):
    title: str
    labels: Mapping[str, str]  # key of VARIANTS -> label in the picture
    config: Path = DEMO
    quick: Settings = QUICK


EXPERIMENTS: Mapping[str, Experiment] = {
    "roc": Experiment("GRPO-RoC and plain GRPO", {"roc": "GRPO-RoC", "grpo": "GRPO"}),
    "mixtures": Experiment(
        "GRPO-RoC and plain GRPO after three cold-start mixtures",
        {
            "roc": "RoC, tuned",
            "grpo": "GRPO, tuned",
            "roc_equal": "RoC, equal shares",
            "grpo_equal": "GRPO, equal shares",
            "roc_clean": "RoC, mostly clean",
            "grpo_clean": "GRPO, mostly clean",
        },
    ),
    "reasoning": Experiment(
        "Cold start with and without reasoning-like data", {"roc": "without", "reasoned": "with reasoning-like data"}
    ),
    "overlong": Experiment("Responses at the length limit", {"keep": "kept as negatives", "drop": "dropped"}),
    "ngram": Experiment("A filter of repeated n-grams", {"roc": "without", "ngram": "with the filter"}),
    "word_problems": Experiment(
        "SmolLM2-135M learns word problems",
        {
            "words_roc": "GRPO-RoC",
            "words_grpo": "GRPO",
            "words_shuffled": "GRPO, shuffled rewards",
            "words_twice": "twice the cold start, no RL",
        },
        WORDS,
        WORDS_QUICK,
    ),
    "word_reasoning": Experiment(
        "SmolLM2-135M: cold start with and without reasoning-like data",
        {"words_roc": "without", "words_reasoned": "with reasoning-like data"},
        WORDS,
        WORDS_QUICK,
    ),
    "architectures": Experiment("Three architectures", {"roc": "Qwen3", "qwen2": "Qwen2.5", "llama": "Llama 3"}),
}


class PlannedRun(NamedTuple):
    variant: str  # a key of VARIANTS, or empty for a cold start
    seed: int
    folder: Path
    settings: Settings


def plan_runs(
    experiment: Experiment, seeds: int, folder: Path, more: Sequence[str] = (), last: Settings = ()
) -> Iterator[PlannedRun]:
    """Plan the runs in their order.

    A run has the settings `more`, then those of its cold start, then `last`, then those of its variant.
    """
    for seed in range(seeds):
        planned = set[str]()
        for name in experiment.labels:
            variant = VARIANTS[name]
            cold_start, model = variant.cold_start, COLD_STARTS[variant.cold_start]
            cold = folder / f"cold_{cold_start}_{seed}"
            if cold_start not in planned:
                planned.add(cold_start)
                yield _plan_run("", seed, cold, (*more, *model, *last, "rl.steps=0", "evaluation.questions=0"))
            start = _start_from(RunFolder(cold), has_files=experiment.config == DEMO)
            settings = (*more, *model, *last, *variant.settings, *start)
            yield _plan_run(name, seed, folder / f"{name}_{seed}", settings)


def _plan_run(variant: str, seed: int, folder: Path, settings: Settings) -> PlannedRun:
    place = (f"seed={seed}", f'runs_folder="{folder.parent}"', f"name={folder.name}")
    return PlannedRun(variant, seed, folder, (*settings, *place))


def _start_from(cold: RunFolder, *, has_files: bool) -> Settings:
    """Start from the last checkpoint. `has_files`: questions are those of the cold start, else the run writes them."""
    data = (f"data.train={cold.data / 'train.jsonl'}", f"data.test={cold.data / 'test.jsonl'}")
    return ("sft.steps=0", f"model.checkpoint={cold.get_checkpoint_path(0)}", *(data if has_files else ()))
