"""Entry point: torchrun -m engine.learner."""

from __future__ import annotations

import sys

from engine.learner.learner import main

if __name__ == "__main__":
    sys.exit(main())
