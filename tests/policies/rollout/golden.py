"""Golden dialogues: `python -m tests.policies.rollout.golden` rewrites dialogues/*.txt.

A line without indentation is an event; the indented lines below it are its expected effects. An
answer comes from the executor of the last request, or from a named one: `ok@executor-1 2`. executor-0
has joined at the start. `lease generator-0 40` grants 40 further tokens, or without a number the maximum.
`late-turn` is a turn of the previous lease. The file ends with the response that the learner receives, with the
tokens of the environment in brackets. `\\n` is a line break.
"""

from pathlib import Path

from asterism.bus import messages as msg
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import build_dialogue_format, build_prompt_segments, encode_segments
from asterism.policies.rollout.rollout import Rollout
from asterism.tasks.math_python import MATH_PYTHON
from tests.fakes import TOKENIZER, generated, rules, start_group

PROMPT_FORMAT = build_dialogue_format(DialogueConfig(tools=("jupyter_code",)), MATH_PYTHON)
DIALOGUES = Path(__file__).parent / "dialogues"


class Conversation:
    """A replay of one file's events, which records their effects."""

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}
        self.lines: list[str] = []
        self.now = 100.0
        self.turn = 0
        self.lease = 0
        self.tokens = 0
        self.call = 0
        self.executor = "executor-0"

    def play(self, script: str) -> str:
        for line in script.splitlines():
            if line.startswith("#") or not line.strip():
                self.lines.append(line)
            elif line.startswith("rule "):
                name, _, value = line.removeprefix("rule ").partition(" ")
                self.settings[name] = int(value) if value.isdigit() else value
                self.lines.append(line)
            elif not line.startswith((" ", "response:")):
                self.lines.append(line)
                self._event(line)
        return "\n".join(self.lines).rstrip() + "\n"

    def _event(self, line: str) -> None:
        self.now += 1.0
        if line.startswith("start "):
            self.rollout = Rollout({"": rules(**self.settings)})
            self.rollout.decide(self.now, msg.ExecutorJoined("executor-0", 1))
        event = self._parse(line)
        try:
            effects = self.rollout.decide(self.now, event)
        except msg.ProtocolError as error:
            self.lines.append(f"    refused: {error}")
            return
        for effect in effects:
            self._record_effect(effect)

    def _parse(self, line: str) -> msg.AnyMessage:
        kind, _, rest = line.partition(" ")
        text = rest.replace("\\n", "\n")
        kind, _, late = kind.partition("@")
        executor = late or self.executor
        match kind:
            case "start":
                prompt = encode_segments(TOKENIZER, build_prompt_segments(text, PROMPT_FORMAT))
                return start_group(prompt_ids=msg.ids_to_bytes(prompt))
            case "lease":
                engine, _, tokens = rest.partition(" ")
                new_tokens = int(tokens) if tokens else 10_000
                self.lease += 1
                return msg.LeaseGranted(7, engine, self.tokens + new_tokens, self.lease, 1.0, "room")
            case "turn" | "late-turn":
                finish, _, said = text.partition(" ")
                return generated(7, self.turn, said, finish, lease=self.lease - (kind == "late-turn"))
            case "ok" | "raised":
                raised = msg.CodeRaised(msg.Output(), text, text)
                outcome = msg.CodeOk(msg.Output(text)) if kind == "ok" else raised
                return msg.CodeFinished(7, self.call, outcome, 0.1, executor)
            case "timed-out":
                return msg.CodeFinished(7, self.call, msg.CodeTimedOut(msg.Output(), 4.0), 4.0, executor)
            case "executor-joined":
                return msg.ExecutorJoined(rest, 1)
            case "executor-left":
                name, _, cause = rest.partition(" ")
                return msg.ExecutorLeft(name, cause)
            case "call-failed":
                return msg.CallFailed(7, self.call, text, executor)
            case "grading-failed":
                return msg.CallFailed(7, -1, text, executor)
            case "turn-failed":
                return msg.TurnFailed(7, self.turn, self.lease, text)
            case "graded":
                return msg.AnswerGraded(7, float(text == "right"), 0.01, executor)
            case _:
                raise ValueError(f"unknown event in a golden dialogue: {line}")

    def _record_effect(self, effect: Send) -> None:
        message = effect.message
        match message:
            case msg.TurnRequested():
                self.turn = message.turn
                end = TOKENIZER.decode(msg.bytes_to_ids(message.token_ids))[-40:].replace("\n", "\\n")
                said = f"turn {message.turn}, {message.max_new_tokens} tokens left, after ...{end}"
            case msg.CodeRequested():
                self.call, self.executor = message.call, effect.to
                said = f"call {message.call}, {message.tool}: {message.code!r} < {message.stdin!r}"
            case msg.SessionRestored():
                said = ", ".join(f"call {cell.call}: {cell.code!r}" for cell in message.cells)
            case msg.CallsRescheduled():
                said = f"{message.executor}: {message.sent} sent, {message.waiting} waiting, {message.lost} lost"
            case msg.AnswerSubmitted():
                self.executor = effect.to
                said = f"{message.answer!r} against {message.ground_truth!r}"
            case msg.TrajectoryFailed():
                said = message.cause
            case msg.LeaseRequested():
                self.tokens = message.tokens
                added = message.tokens - message.prompt_tokens
                said = f"lease {message.lease}, {added} tokens in the response, {message.max_new_tokens} to go"
            case msg.LeasePaused() | msg.LeaseReleased():
                said = f"{message.tokens - self.tokens} new tokens"
            case msg.TrajectoryFinished():
                said = (
                    f"{message.ending}, reward {message.reward:g}, {message.turns} turns, "
                    f"{message.calls_failed} of {message.calls} calls failed, "
                    f"{message.responses_with_error} responses with error, "
                    f"answer tags {message.answer_opens}/{message.answer_closes}/{message.answer_spans}, "
                    f"{_describe_counts(message.release)}waits lease {message.lease_wait_s:g} "
                    f"generation {message.generation_s:g} tools {message.tools_s:g} grading {message.grading_s:g}"
                )
            case _:
                said = ""
        self.lines.append(f"    {effect.to} <- {type(message).__name__} {said}".rstrip())
        if isinstance(message, msg.TrajectoryFinished):
            self.lines += ["", "response:", _response(message)]


def _describe_counts(counts: msg.ReleaseCounts | None) -> str:
    if counts is None:
        return ""
    tags = f"{counts.answer_opens}/{counts.answer_closes}/{counts.answer_spans}"
    results = f"{counts.responses_with_error} of {counts.tool_responses} results with error"
    return f"whole response: {results}, answer tags {tags}, {counts.turns} turns; "


def _response(message: msg.TrajectoryFinished) -> str:
    ids = msg.bytes_to_ids(message.record.token_ids)[message.record.prompt_tokens :]
    shown, given = "", False
    for token, trained in zip(ids, message.record.loss_mask[message.record.prompt_tokens :], strict=True):
        if given == bool(trained):
            shown, given = shown + ("]" if given else "["), not given
        shown += TOKENIZER.decode([token])
    return "    " + shown.replace("\n", "\\n")


if __name__ == "__main__":
    for path in sorted(DIALOGUES.glob("*.txt")):
        path.write_text(Conversation().play(path.read_text()))
