"""`python -m asterism.actors.sinks.sink_process NAME --run-folder FOLDER` delivers the records of a run to one sink.

The launcher starts it with --follow, and sends SIGTERM when metrics.jsonl is complete. `asterism metrics sync` starts it
without this flag.
"""

import os
import sys
from functools import partial

from asterism.actors.sinks.contract import open_sink
from asterism.actors.sinks.delivery import deliver, load_backend_run, make_wait_until_terminated
from asterism.bus.process.process_main import make_process_parser, run_process_main
from asterism.configs.choices.sink_kinds import SINK_KINDS
from asterism.configs.load import load_with_overrides
from asterism.configs.run_folder import RunFolder

NICENESS = 10  # the run's processes have precedence
# These variables stop the packages' reports about their own use.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def name_sink_process(sink: str) -> str:
    return f"sink-{sink}"


def main() -> int:
    parser = make_process_parser("asterism.actors.sinks.sink_process", "Delivers the records of a run to one sink.")
    parser.add_argument("name", choices=tuple(SINK_KINDS))
    parser.add_argument("--follow", action="store_true", help="wait for further records until SIGTERM")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of [metrics]")
    arguments = parser.parse_args()
    wait = make_wait_until_terminated() if arguments.follow else lambda: True

    def work(folder: RunFolder) -> None:
        backend_run = load_backend_run(load_with_overrides(folder.config, arguments.set, ["metrics"]), folder)
        deliver(folder, arguments.name, partial(open_sink, arguments.name, backend_run), wait)

    os.nice(NICENESS)
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    return run_process_main(name_sink_process(arguments.name), arguments, work)


if __name__ == "__main__":
    sys.exit(main())
