"""The `main` of a run's processes: common flags, and the exit reason and code for unusable input."""

import contextlib
import gc
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator
from pathlib import Path

import structlog

from asterism.bus.process.exit_reason import ExitReason, write_exit_reason
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.configs.run_folder import RunFolder


@contextlib.contextmanager
def pausing_garbage_collector() -> Generator[None]:
    """Disable garbage collection during imports of torch, where it would search permanent objects for half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def make_process_parser(module: str, description: str) -> ArgumentParser:
    parser = ArgumentParser(prog=module, description=description)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder, with config.toml")
    parser.add_argument("--scratch", default="", help="scratch folder (see asterism.configs.run_folder.RunFolder)")
    parser.add_argument("--incarnation", type=int, default=1, help="number of this start within the launch")
    parser.add_argument(
        "--epoch", type=int, default=0, help="epoch of the links (see asterism.bus.transport.reliable_stream)"
    )
    return parser


def run_process_main(
    name: str,
    arguments: Namespace,
    work: Callable[[RunFolder], None],
    unusable: tuple[type[Exception], ...] = (),
    outages: tuple[type[Exception], ...] = (),
) -> int:
    """Run `work`. Returns EXIT_UNUSABLE for UnusableInput and `unusable` exceptions, and raises other exceptions.

    Each exception becomes the exit reason; OSError and `outages` are outages.
    """
    # The launcher handles a terminal's ^C and stops its processes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = RunFolder(arguments.run_folder, arguments.scratch)
    try:
        work(folder)
    except (UnusableInput, *unusable) as error:
        write_exit_reason(folder, name, ExitReason(str(error)))
        structlog.get_logger().error("process.failed", exc_info=error)
        return EXIT_UNUSABLE
    except Exception as error:
        first = _find_first_error(error)
        kind = "outage" if isinstance(first, (OSError, *outages)) else "exception"
        write_exit_reason(folder, name, ExitReason(f"{type(first).__name__}: {first}", kind))
        raise
    return 0


def _find_first_error(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
