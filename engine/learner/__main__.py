"""The entry point of `python -m asterism.engine.learner`; torchrun starts one process for each of several ranks."""

import sys

from asterism.bus.process.process_main import pausing_garbage_collector

with pausing_garbage_collector():
    from asterism.engine.learner.learner import main

if __name__ == "__main__":
    sys.exit(main())
