"""This file has the arguments and help texts of `asterism chat`."""

from pathlib import Path
from typing import Annotated

import typer

from asterism.actors.cli.console import make_console
from asterism.actors.cli.log.subcommands import SetOption
from asterism.actors.cli.sandbox_app import AtOption

CheckpointArgumentText = Annotated[
    str,
    typer.Argument(
        help="A model's folder, a run (its newest model), RUN:STEP, RUN:best, or the URL of a server.",
        metavar="CHECKPOINT|URL",
    ),
]
PromptOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Answer this text and exit; - reads it from the standard input.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Configuration with the texts, tools and tasks (default: that of the run)."),
]
TaskOption = Annotated[str, typer.Option(metavar="NAME", help="Task of the configuration, if it has several.")]
RowOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Row of the task's test data, or of its data without any, for its environment or dialogue.",
    ),
]
TemperatureOption = Annotated[
    float | None, typer.Option(min=0, help="0 takes the most likely token (default: the configuration's).")
]
TopPOption = Annotated[
    float | None,
    typer.Option(min=0.001, max=1, help="Share of the probability to sample from (default: the configuration's)."),
]
SeedOption = Annotated[int | None, typer.Option(help="Random seed of the answers (default: the configuration's).")]
MaxTurnsOption = Annotated[
    int | None, typer.Option(min=1, help="Turns of the model until its answer (default: the configuration's).")
]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of an answer with its results (default: the configuration's).")
]
ContextOption = Annotated[
    int | None, typer.Option(min=16, help="Tokens of a conversation (default: 16,384, or the run's limit).")
]
TranscriptOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append each conversation to this file, as a row of messages.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder of the tokenizer of a server's model.")
]
ModelOption = Annotated[
    str, typer.Option(metavar="NAME", help="The server's model (default: the first that it names).")
]
KeyOption = Annotated[str, typer.Option(metavar="NAME", help="Environment variable with the server's key.")]


def chat(
    checkpoint: CheckpointArgumentText,
    prompt: PromptOption = None,
    config: ConfigOption = None,
    task: TaskOption = "",
    row: RowOption = 0,
    override: SetOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    max_turns: MaxTurnsOption = None,
    max_tokens: MaxTokensOption = None,
    context_tokens: ContextOption = None,
    transcript: TranscriptOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = "",
    api_key_variable: KeyOption = "OPENAI_API_KEY",
    at: AtOption = None,
) -> None:
    """Talk to a model that calls its tools in the sandbox.

    Ctrl-C stops a call or an answer, Ctrl-D exits, /help lists the commands.
    """
    from asterism.actors.cli.chat.chat_loop import run_chat
    from asterism.actors.cli.chat.chat_setup import ChatOptions
    from asterism.actors.cli.sandbox_commands import suppress_logs

    suppress_logs()
    sampling, limits = {"temperature": temperature, "top_p": top_p}, (max_turns, max_tokens, context_tokens)
    options = ChatOptions(
        config, override or [], task, row, tokenizer, sampling, seed, *limits, at, model, api_key_variable
    )
    raise typer.Exit(run_chat(checkpoint, options, prompt, transcript, make_console()))
