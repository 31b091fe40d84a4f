"""This file has the arguments and help texts of `asterism model import`, `asterism export` and `asterism serve`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from asterism.actors.cli.console import make_console
from asterism.actors.cli.log.subcommands import SetOption

Device = Literal["auto", "cuda", "cpu"]
RunStepArgument = Annotated[
    str,
    typer.Argument(
        help="A run's folder or name, or one of its steps: demo, demo:40, demo:best (default: the last step).",
        metavar="RUN[:STEP]",
    ),
]


model_app = typer.Typer(help="Convert models.", no_args_is_help=True)


def add_serving_commands(app: typer.Typer) -> None:
    app.add_typer(model_app, name="model", rich_help_panel="Prepare")
    app.command(rich_help_panel="Serve")(export)
    app.command(rich_help_panel="Serve")(serve)


@model_app.callback()
def require_subcommand() -> None:
    """Keep `import` a subcommand: typer runs the only command of an app without its name."""


@model_app.command(name="import")
def import_model(
    file: Annotated[Path, typer.Argument(help="GGUF file of a model with its tokenizer.", metavar="FILE.gguf")],
    folder: Annotated[Path, typer.Argument(help="Folder to create.", metavar="FOLDER")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: bfloat16, float16 or float32.")] = "float32",
    license_file: Annotated[
        Path | None, typer.Option("--license", metavar="FILE", help="Text of the model's licence, to keep a copy of.")
    ] = None,
    source: Annotated[str, typer.Option(help="Where the file comes from, for model cards.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FOLDER if it has files.")] = False,
) -> None:
    """Convert a GGUF file into a transformers folder, for model.checkpoint.

    Quantized weights become floats. Checkpoints and exports keep the licence and the origin.
    """
    from asterism.actors.cli.serving.import_command import ImportOptions, import_file

    import_file(file, folder, ImportOptions(dtype, license_file, source, overwrite), make_console())


def export(
    run: RunStepArgument,
    folder: Annotated[Path, typer.Argument(help="Folder to create.", metavar="FOLDER")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    max_shard_gb: Annotated[
        float, typer.Option(min=1e-6, help="Largest size of a file of weights, in 10^9 bytes.")
    ] = 5.0,
    task: Annotated[
        str, typer.Option(help=r"Task of [\[tasks]] with the texts of the chat template (default: the first).")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FOLDER if it has files.")] = False,
) -> None:
    """Write the model of a run as a transformers folder, for transformers, SGLang and the hub.

    It has the chat template that the run trained with, the stop tokens, and a model card.
    """
    from asterism.actors.cli.serving.export_command import ExportOptions, export_run

    export_run(run, folder, ExportOptions(dtype, max_shard_gb, task, overwrite), make_console())


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A run's folder or name, one of its steps (demo:40, demo:best), or a folder of `asterism export`.",
            metavar="RUN[:STEP]|FOLDER",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of SGLang, after --.", metavar="[-- ARGUMENTS]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30_000,
    device: Annotated[Device, typer.Option(help="Device of the server.")] = "auto",
    python: Annotated[
        str, typer.Option(metavar="FILE", help="Interpreter with SGLang (default: sglang.python, or .venv-sglang).")
    ] = "",
    override: SetOption = None,
) -> None:
    """Serve a model with OpenAI's chat API, with SGLang and the parsers that fit the run, until Ctrl-C."""
    from asterism.actors.cli.serving.serve_command import ServeOptions, serve_model

    options = ServeOptions(host, port, device, python, override or [], arguments or [])
    raise typer.Exit(serve_model(model, options, make_console()))
