"""Train a model with TRL's GRPOTrainer and a Python tool. Runs in .venv-trl, without Asterism's modules.

    .venv-trl/bin/python benchmarks/trl/train_with_trl.py SETTINGS

SETTINGS is the JSON of benchmarks.trl.trl_run.TrlSettings. The last line of the output is JSON: a list with
seconds, mean reward, and trained rows and tokens of each step. As in a run of Asterism, a step has one batch of rollouts
and `minibatches` updates; each update accumulates the gradients of `micro_batches`. The model's code runs in this
process, without isolation: TRL has no sandbox.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import ast
import contextlib
import io
import json
import re
import signal
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

CALL_LIMIT_S = 4
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
# Renders the dialogues of asterism.policies.dialogue.chat_format. HEAD is the text before the question, PREFILL that
# before each text of the assistant.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ HEAD + message.content }}"
    "{%- elif message.role == 'tool' -%}"
    "{{ '\\n<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- else -%}{{ '<|im_end|>\\n<|im_start|>assistant\\n' + PREFILL + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{%- endfor -%}{{ '<|im_end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_end|>\\n<|im_start|>assistant\\n' + PREFILL }}{%- endif -%}"
)


class UnprotectedNotebook:
    """An environment for TRL with one tool. Each rollout has its own instance."""

    def reset(self, **row: Any) -> None:
        self._names: dict[str, Any] = {}

    def jupyter_code(self, code: str) -> str:
        """Run Python code in a notebook. Names defined in earlier calls are still there.

        Args:
            code: The Python code to run.
        """
        stdout = io.StringIO()
        signal.alarm(CALL_LIMIT_S)
        try:
            with contextlib.redirect_stdout(stdout):
                self._run_cell(code)
        except Exception as error:
            head = 'Traceback (most recent call last):\n  File "<cell>", line 1, in <module>\n'
            return f"Tool call failure\n{head}{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        text = stdout.getvalue().rstrip("\n")
        return f"Tool call success\nstdout:\n{text}" if text else "Tool call success"

    def _run_cell(self, code: str) -> None:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), self._names)
            if value is not None:
                print(repr(value))


def end_call(*_: object) -> None:
    raise TimeoutError(f"no result within {CALL_LIMIT_S} s")


def compute_rewards(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """Return 1 if the last turn answers with the right number, as asterism.tasks.tiny grades it."""
    rewards: list[float] = []
    for turns, truth in zip(completions, answer, strict=True):
        last = turns[-1]
        text = str(last.get("content") or "") if last["role"] == "assistant" else ""
        found = re.search(r"<answer>[^<]*\\boxed\{([^{}]*)\}[^<]*</answer>", text)
        rewards.append(float(found is not None and found.group(1).strip() == truth))
    return rewards


class CountingTrainer(GRPOTrainer):
    """A trainer that counts the rows in the loss, and those of their tokens that the model has written."""

    num_rows = num_tokens = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs["completion_mask"]
        self.num_rows += len(mask)
        self.num_tokens += int((mask * inputs.get("tool_mask", 1)).sum())
        return super().compute_loss(model, inputs, *args, **kwargs)


class StepClock(TrainerCallback):
    """A callback that records each step of `minibatches` updates. Set `trainer` before the training."""

    trainer: CountingTrainer

    def __init__(self, minibatches: int) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []
        self._minibatches, self._reward = minibatches, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began_at = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Record a step after its last update. Only the first update of a batch logs the reward."""
        self._reward = float(logs.get("reward", self._reward))
        if "loss" in logs and state.global_step % self._minibatches == 0:
            now = time.perf_counter()
            step = {"step_s": now - self._began_at, "reward": self._reward}
            self.steps.append({**step, "rows": self.trainer.num_rows, "tokens": self.trainer.num_tokens})
            self.trainer.num_rows = self.trainer.num_tokens = 0
            self._began_at = now
            print(f"TRL step {len(self.steps)}: {step['step_s']:.2f} s  reward {self._reward:.3f}", file=sys.stderr)


def read_rows(path: str) -> Dataset:
    with open(path) as file:  # noqa: PTH123
        rows = [json.loads(line) for line in file]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"].removeprefix("#### ")}
            for row in rows
        ]
    )


def build_config(settings: dict[str, Any], folder: str) -> GRPOConfig:
    rollouts = settings["prompts"] * settings["rollouts"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        seed=settings["seed"],
        max_steps=settings["steps"] * settings["minibatches"],
        per_device_train_batch_size=rollouts // (settings["minibatches"] * settings["micro_batches"]),
        gradient_accumulation_steps=settings["micro_batches"],
        steps_per_generation=settings["minibatches"] * settings["micro_batches"],
        num_generations=settings["rollouts"],
        max_completion_length=settings["response_tokens"],
        max_tool_calling_iterations=settings["max_turns"] - 1,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup_steps"] * settings["minibatches"],
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        loss_type="dapo",
        top_k=0,
        gradient_checkpointing=False,  # slower, and not needed
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    signal.signal(signal.SIGALRM, end_call)
    tokenizer = AutoTokenizer.from_pretrained(settings["checkpoint"])
    texts = {"HEAD": json.dumps(settings["prompt_head"]), "PREFILL": json.dumps(settings["prefill"])}
    tokenizer.chat_template = re.sub("HEAD|PREFILL", lambda found: texts[found.group()], CHAT_TEMPLATE)
    tokenizer.response_template = RESPONSE_TEMPLATE
    clock = StepClock(settings["minibatches"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = clock.trainer = CountingTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["checkpoint"], dtype=torch.float32),
            args=build_config(settings, folder),
            processing_class=tokenizer,
            train_dataset=read_rows(settings["data"]),
            reward_funcs=compute_rewards,
            environment_factory=UnprotectedNotebook,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    print(json.dumps(clock.steps))


if __name__ == "__main__":
    main()
