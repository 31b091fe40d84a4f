"""All hostile programs."""

from tests.sandbox.hostile.descriptors import DESCRIPTORS
from tests.sandbox.hostile.files import FILES
from tests.sandbox.hostile.harness import HARNESS
from tests.sandbox.hostile.interpreter import INTERPRETER, TEXTS
from tests.sandbox.hostile.memory import MEMORY
from tests.sandbox.hostile.outputs import OUTPUTS
from tests.sandbox.hostile.processes import PROCESSES
from tests.sandbox.hostile.record import Hostile
from tests.sandbox.hostile.signals import SIGNALS
from tests.sandbox.hostile.snooping import SNOOPING
from tests.sandbox.hostile.system_calls import SYSTEM_CALLS

HOSTILE: dict[str, Hostile] = {
    hostile.name: hostile
    for part in (
        *(SIGNALS, PROCESSES, MEMORY, FILES, SNOOPING, SYSTEM_CALLS, DESCRIPTORS, OUTPUTS, INTERPRETER, TEXTS),
        HARNESS,
    )
    for hostile in part
}
# Programs that attack only Python and the harness in their own process, whose code is the same on every host.
WITHIN_THEIR_PROCESS = {hostile.name for part in (INTERPRETER, TEXTS, HARNESS) for hostile in part}
