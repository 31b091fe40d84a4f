"""Addresses of the actors of a run: a process, such as `rollout-0`, or `process/actor` for one of several actors.

A process of node 3 is `generator-0@3`. An executor's address contains its incarnation: `executor-0/1`
is the first incarnation.
"""

HEAD, LAUNCHER, LEARNER, ROLLOUT = "head", "launcher", "learner", "rollout-0"
WEIGHT_SERVER = "weights"  # the process that serves the weights to other nodes
GENERATOR, EXECUTOR = "generator-0", "executor-0"  # the first generator and the first executor
ARBITER = f"{HEAD}/arbiter"
BUFFER = f"{HEAD}/buffer"
RECIPE = f"{HEAD}/recipe"
RECORDER = f"{HEAD}/recorder"
METRICS = f"{HEAD}/metrics"


def parse_process(address: str) -> str:
    return address.partition("/")[0]


def name_generator(index: int, node: int = 0) -> str:
    return _name_process("generator", index, node)


def name_executor(index: int, node: int = 0) -> str:
    return _name_process("executor", index, node)


def name_learner_rank(rank: int, num_ranks: int) -> str:
    """Name the sender of a rank's heartbeats. The name is no address; `rank` counts over all nodes."""
    return LEARNER if num_ranks == 1 else f"{LEARNER} rank {rank}"


def _name_process(kind: str, index: int, node: int) -> str:
    return f"{kind}-{index}@{node}" if node else f"{kind}-{index}"


def is_generator(process: str) -> bool:
    return process.startswith("generator-")


def is_executor(process: str) -> bool:
    return process.startswith("executor-")


def parse_generator_index(generator: str) -> int:
    """Return 2 for `generator-2` and for `generator-2@1`, the third generator of node 1."""
    return int(generator.partition("@")[0].rpartition("-")[2])
