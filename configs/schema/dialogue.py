"""The table [dialogue]: texts, tools and limits of a trajectory. docs/dialogue.md has examples."""

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from asterism.configs.schema.schema_tree import PositiveInt, Section, require

MAX_STOP_TOKENS = 16  # limit of stop tokens per request to an engine
_TURN_END = "<|im_end|>"
_FAMILY_KEYS = ("prefill", "turn_separator", "stop_tokens", "tool_call_format")  # keys that a renderer fixes
_TEXT_KEYS = ("renderer", "system", "instruction", "prefill", "answer_open", "answer_close", "turn_separator")

ToolName = Literal["jupyter_code", "python_code_with_standard_io"]
NonEmptyText = Annotated[str, Meta(min_length=1)]


class DialogueConfig(Section, frozen=True):
    """Prompt, tools and limits of a trajectory (rStar2-Agent, arXiv 2508.20722, section 3)."""

    # Tools that the model can call; [] for a task without tools.
    tools: tuple[ToolName, ...] = (
        "jupyter_code",
        "python_code_with_standard_io",
    )
    # Text of the system turn; {tools} becomes the schemas of the tools, one per line. Empty: no system turn.
    system: str = "default"
    instruction: str = "default"  # text before each question; the default asks for the answer tags and \boxed{}
    prefill: str = "<reason>"  # start of each assistant turn, which the model continues
    answer_open: NonEmptyText = "<answer>"  # tag before the final answer
    answer_close: NonEmptyText = "</answer>"  # tag after the final answer
    stop_tokens: tuple[NonEmptyText, ...] = (_TURN_END,)  # texts of the tokens that end a turn
    turn_separator: str = "\n"  # text between an assistant turn and the next turn
    # Chat format of a model family, such as "qwen3" (docs/dialogue.md); empty: ChatML with the texts above.
    renderer: str = ""
    renderer_parameters: dict[str, Any] = {}  # noqa: RUF012  # renderer's parameters, such as {enable_thinking = false}
    tool_call_format: str = "json"  # format of calls: a name in asterism.policies.dialogue.chat_format.CALL_FORMATS
    prompt_tokens: PositiveInt = 1024  # limit of the prompt; longer prompts are skipped and counted
    response_tokens: PositiveInt = 8192  # limit of generated tokens and tool tokens
    max_turns: PositiveInt = 10  # limit of assistant turns in a trajectory
    max_calls_per_turn: PositiveInt = 1  # limit of executed calls per turn
    surplus_calls: Literal["error", "ignore"] = "error"  # result of further calls: an error, or none
    unclosed_call: Literal["error", "ignore"] = "error"  # a call without closing tag fails, or is ignored
    # Text with the answer. last_turn: the last turn, if the model ended it; response: always the whole response.
    graded_text: Literal["last_turn", "response"] = "last_turn"
    result_characters: PositiveInt = 2048  # limit of each of stdout, stderr and traceback; the middle is removed
    result_format: Literal["default", "rstar2_release"] = "default"  # rstar2_release: one limit for the whole result

    def __post_init__(self) -> None:
        require(len(set(self.tools)) == len(self.tools), "tools must not name a tool twice")
        require(self.answer_open != self.answer_close, "answer_open and answer_close must differ")
        require(_TURN_END in self.stop_tokens, f'stop_tokens must contain "{_TURN_END}", the end of a turn')
        require(len(set(self.stop_tokens)) == len(self.stop_tokens), "stop_tokens must not name a token twice")
        require(len(self.stop_tokens) <= MAX_STOP_TOKENS, f"stop_tokens must name at most {MAX_STOP_TOKENS} tokens")
        require(bool(self.renderer) or not self.renderer_parameters, "renderer_parameters need a renderer")
        if self.renderer:
            self._require_no_family_keys()
        elif self.system != "default":
            self._require_described_tools()

    def _require_no_family_keys(self) -> None:
        for key in _FAMILY_KEYS:
            is_default = getattr(self, key) == type(self).__struct_defaults__[type(self).__struct_fields__.index(key)]
            require(is_default, f"{key} is that of the renderer; remove it")
        require("{tools}" not in self.system, "system must not contain {tools}: the renderer adds the schemas")

    def _require_described_tools(self) -> None:
        """Raise ValueError if `system` and `tools` disagree."""
        if "{tools}" in self.system:
            return
        for tool in get_args(ToolName):
            described, given = f'"{tool}"' in self.system, tool in self.tools
            require(described or not given, f'system must describe the tool "{tool}"; add {{tools}} to its text')
            require(given or not described, f'system describes "{tool}", which is not in tools')

    @property
    def turn_prefill(self) -> str:
        return "" if self.renderer else self.prefill

    @property
    def lacks_tools(self) -> bool:
        """Return whether `system` describes tools that only a task's import can add."""
        return "{tools}" in self.system and not self.tools

    @property
    def has_default_texts(self) -> bool:
        default = DialogueConfig()
        return all(getattr(self, key) == getattr(default, key) for key in _TEXT_KEYS)

    @property
    def sequence_tokens(self) -> int:
        """Maximum number of tokens of a trajectory."""
        return self.prompt_tokens + self.response_tokens
