"""[tiny]: the demo's generated questions, dialogues, tokenizer and model.

docs/experiments.md compares runs with other mixtures of dialogues, and with the other architectures.
"""

from typing import Literal

from msgspec.structs import asdict

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.schema_tree import NonNegativeFloat, PositiveInt, Section, require

DEMO_TOOL = "jupyter_code"  # only tool of the demo's dialogues
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "</answer>", "</tool_call>")  # tokens of the demo
_NUM_LISTED = 3


class BehaviorShares(Section, frozen=True):
    """Relative frequencies of the behaviors in the cold start's dialogues; their sum can be any number.

    With the defaults, wrong dialogues outnumber right ones, so that RL has something left to teach. Plain GRPO rewards a
    repaired call as much as a clean one. To show this, "repaired" is more frequent than "clean", and failing code before a
    guess ("gives_up") differs from failing code before a repair: else GRPO would learn to avoid both.
    """

    clean: NonNegativeFloat = 0.10  # one call, and the right answer
    repaired: NonNegativeFloat = 0.23  # the first call fails, the second is right
    malformed: NonNegativeFloat = 0.02  # the first call is invalid JSON, the second is right
    wrong: NonNegativeFloat = 0.37  # the code runs and prints a wrong answer
    gives_up: NonNegativeFloat = 0.13  # a call that is never repaired fails, the answer is a guess
    guess: NonNegativeFloat = 0.15  # a wrong answer without a call
    unrepaired: NonNegativeFloat = 0.0  # the failing call of "repaired", the answer is a guess
    reasoned: NonNegativeFloat = 0.0  # derives the right answer step by step, without a call

    def __post_init__(self) -> None:
        require(any(asdict(self).values()), "at least one share must be above 0")


class TinyConfig(Section, frozen=True):
    """Generated questions, dialogues, tokenizer and model, so that a run needs no download."""

    num_train_questions: PositiveInt = 4096  # generated training questions
    num_test_questions: PositiveInt = 512  # generated test questions
    num_sft_dialogues: PositiveInt = 16_000  # generated dialogues for the cold start
    behaviors: BehaviorShares = BehaviorShares()  # behaviors in the generated dialogues
    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"  # transformers' model_type of the model
    num_layers: PositiveInt = 2  # layers of the model
    hidden_size: PositiveInt = 128  # width of the model
    num_heads: PositiveInt = 4  # query heads
    num_kv_heads: PositiveInt = 2  # key and value heads
    head_dim: PositiveInt = 32  # dimension of each head
    intermediate_size: PositiveInt = 384  # width of the feed-forward layers


def check_demo_dialogue(dialogue: DialogueConfig) -> None:
    """Raise UnusableInput for other texts than those of the demo, which are fixed."""
    if dialogue.tools != (DEMO_TOOL,):
        raise UnusableInput(f'dialogue.tools: the tiny task supports only ["{DEMO_TOOL}"]')
    if not dialogue.has_default_texts:
        raise UnusableInput("dialogue: the tiny task supports only the default texts of system, instruction and tags")
    if not set(dialogue.stop_tokens) <= set(STOP_TOKENS):
        known = ", ".join(STOP_TOKENS[:_NUM_LISTED])
        raise UnusableInput(f"dialogue.stop_tokens: the tiny task's tokens are {known}")
