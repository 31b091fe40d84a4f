"""`python -m tests.engine.cuda.record`: prints a new ceilings.json."""

import json
import sys

from tests.engine.cuda.ceilings import measure_all

if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_all(), indent=2) + "\n")
