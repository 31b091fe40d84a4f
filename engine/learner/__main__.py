"""Entry point: `python -m engine.learner`; torchrun starts one for each of several ranks."""

import sys

from bus.process.process_main import pausing_garbage_collector

with pausing_garbage_collector():
    from engine.learner.learner import main

if __name__ == "__main__":
    sys.exit(main())
