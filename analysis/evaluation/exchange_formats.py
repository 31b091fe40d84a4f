"""Converts evaluations to tinker-cookbook's BenchmarkResult and verifiers' Trace (version 1).

Only the names and meanings of the fields come from these tools. Tokens are not part of a trace: the event log has them.
"""

from typing import Any

from msgspec.structs import asdict

from asterism.analysis.evaluation.answer_records import AnswerRecord
from asterism.analysis.evaluation.set_results import SetResult
from asterism.configs.schema.algorithm import Sampling

_ROLES = {"assistant": "assistant", "environment": "user"}  # "user" marks a tool result; its text contains its own tags
_TRACE_VERSION = 1


def build_benchmark_result(name: str, result: SetResult) -> dict[str, Any]:
    """Build a BenchmarkResult: each answer is correct, wrong, truncated or an error. If a prompt is over
    the limit, its answers count as truncated. The score is the share of correct answers."""
    over_limit = result.questions_over_limit * result.samples
    asked = result.answers + result.failed + over_limit
    metrics = {
        "avg": result.avg,
        "majority": result.majority,
        "standard_error": result.standard_error,
        "unanswered_share": result.unanswered_share,
        "response_tokens": result.response_tokens.mean if result.response_tokens else None,
        "calls": result.calls,
        "call_error_share": result.call_error_share,
    }
    return {
        "name": name,
        "score": result.correct / asked if asked else 0.0,
        "num_examples": asked,
        "num_correct": result.correct,
        "num_errors": result.failed,
        "num_truncated": result.truncated + over_limit,
        "metrics": {key: value for key, value in metrics.items() if value is not None},
        "time_seconds": result.seconds,
        "pass_at_k": {str(k): value for k, value in result.pass_at_k.items()},
    }


def build_trace(answer: AnswerRecord, question: str, model: str, sampling: Sampling, version: str) -> dict[str, Any]:
    """Build a Trace of one answer. `version` is the version of this program."""
    failed = answer.is_failed
    data = {"idx": answer.place, "name": answer.question, "prompt": question, "answer": answer.gold}
    return {
        "version": _TRACE_VERSION,
        "id": f"{answer.seed:016x}",
        "verifiers": {"version": f"asterism {version}"},
        "task": {"type": answer.set or "test", "data": data, "key": answer.question},
        "agent": {"name": "agent", "trainable": False, "config": {"model": model, "sampling": asdict(sampling)}},
        "nodes": _build_nodes(question, answer),
        "rewards": {"reward": None if failed else {"score": answer.reward, "weight": 1.0}},
        "metrics": {
            key: None if failed else float(getattr(answer, key))
            for key in ("correct", "turns", "calls", "calls_failed", "response_tokens")
        },
        "info": {key: getattr(answer, key) for key in ("set", "task", "sample", "trajectory", "seed", "answer")},
        "is_completed": True,
        "ok": not failed,
        "stop_condition": {"failed": "error", "length": "max_total_tokens", "turns": "max_turns"}.get(
            answer.ending, answer.ending
        ),
        "errors": [{"type": answer.cause.partition(":")[0], "message": answer.cause}] if failed else [],
    }


def _build_nodes(question: str, answer: AnswerRecord) -> list[dict[str, Any]]:
    """Build a chain of messages: the parent of each message is the previous one."""
    nodes: list[dict[str, Any]] = [{"parent": None, "message": {"role": "user", "content": question}, "sampled": False}]
    for place, turn in enumerate(answer.dialogue):
        message = {"role": _ROLES[turn.role], "content": turn.text}
        nodes.append({"parent": place, "message": message, "sampled": turn.role == "assistant"})
    if answer.dialogue and nodes[-1]["sampled"]:
        is_cut = sum(node["sampled"] for node in nodes) > answer.turns  # only finished turns are counted
        nodes[-1]["finish_reason"] = "length" if is_cut else "stop"
    return nodes
