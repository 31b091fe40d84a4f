"""The tasks of an executor: their host processes and their scores."""

from collections.abc import Mapping
from itertools import count

from asterism.bus.messages import (
    AnswerSubmitted,
    CodeCrashed,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeRequested,
    CodeTimedOut,
    EnvironmentCalled,
    EnvironmentHistory,
    EnvironmentRestored,
)
from asterism.configs.loading.secret_references import resolve_references
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import RewardConfig, TaskConfig
from asterism.policies.tools.task_description import MATH, TaskDescription, TaskDescriptions, list_reward_functions
from asterism.sandbox.contract import CodeSandbox, SandboxFailure
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.hosting.answer_scorer import AnswerScore, AnswerScorer
from asterism.tasks.hosting.host_pool import CallResult, HostPool
from asterism.tasks.hosting.host_process import HostCommand, HostFailure
from asterism.tasks.hosting.wire import HostSettings, Inspected, ProgramEnded, RunProgram

_SCRATCH_CALLS = 1 << 20  # first number for calls of task code, beyond the numbers of a trajectory's calls


class TaskServices:
    """The scorers and pools of an executor by task. A task without host processes has no pool."""

    def __init__(self, scorers: Mapping[str, AnswerScorer], pools: Mapping[str, HostPool]) -> None:
        self._scorers, self._pools = scorers, pools

    async def call(self, request: EnvironmentCalled) -> CallResult:
        """Call a tool or an instance. Raises HostFailure."""
        return await self._get_pool(request.task).call(request)

    def restore(self, message: EnvironmentRestored) -> None:
        if message.task in self._pools:  # otherwise the following call fails
            self._pools[message.task].restore(message)

    async def repeat(self, message: EnvironmentRestored) -> EnvironmentHistory:
        """Repeat the calls in a new instance. Raises HostFailure."""
        return await self._get_pool(message.task).repeat(message)

    async def score(self, submission: AnswerSubmitted) -> AnswerScore:
        """Score a trajectory. Raises HostFailure and SandboxFailure."""
        if submission.task not in self._scorers:
            raise HostFailure(f'this executor has no task "{submission.task}"')
        return await self._scorers[submission.task].score(submission)

    async def inspect(self, task: str) -> Inspected | None:
        """Inspect the first host process of the task, or return None without a process. Raises HostFailure."""
        return await self._pools[task].inspect() if task in self._pools else None

    def _get_pool(self, task: str) -> HostPool:
        if task not in self._pools:
            raise HostFailure(f'this executor has no host process of task "{task}"')
        return self._pools[task]

    def end(self, trajectory_id: int) -> None:
        """Close the trajectory's instance."""
        for pool in self._pools.values():
            pool.end(trajectory_id)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


def build_grading_services(sandbox: CodeSandbox) -> TaskServices:
    """Build the services of a run without [[tasks]] and without reward functions."""
    return TaskServices({"": AnswerScorer(sandbox, RewardConfig(), DEFAULT_TASK)}, {})


def build_task_services(
    run: RunConfig,
    folder: RunFolder,
    descriptions: TaskDescriptions,
    sandbox: CodeSandbox,
    *,
    repeats_calls: bool = False,
) -> TaskServices:
    """Build the services of the tasks that have a description. `repeats_calls`: see HostPool."""
    checkpoint = str(folder.expand_path(run.model.checkpoint))
    runner = _ProgramRunner(sandbox)
    scorers: dict[str, AnswerScorer] = {}
    pools: dict[str, HostPool] = {}
    for task in run.resolved_tasks:
        if task.name not in descriptions:
            continue
        description = descriptions[task.name]
        command = build_host_command(task, description, checkpoint)
        pool = None
        if task.import_path or command.settings.functions:
            pool = pools[task.name] = HostPool(
                command, description, runner.run, processes=task.processes, repeats_calls=repeats_calls
            )
        scorers[task.name] = AnswerScorer(sandbox, task.get_reward(), description, pool)
    return TaskServices(scorers, pools)


def build_host_command(task: TaskConfig, description: TaskDescription, checkpoint: str) -> HostCommand:
    """Build the command, with the tokenizer's folder `checkpoint`. Raises UnusableInput for an unknown reference."""
    parameters = resolve_references(task.parameters, f"{task.key_prefix}parameters")
    variables = resolve_references(task.variables, f"{task.key_prefix}variables")
    reward, dialogue = task.get_reward(), task.get_dialogue()
    functions = {name: spec for name, spec in list_reward_functions(reward, description).items() if spec != MATH}
    settings = HostSettings(
        task=task.name,
        import_path=task.import_path,
        parameters=parameters.table,
        functions=functions,
        checkpoint=checkpoint,
        call_limit_s=task.call_limit_s,
        reward_limit_s=reward.time_limit_s,
        prefill=dialogue.turn_prefill,
        stop_tokens=dialogue.stop_tokens,
        secrets=parameters.secrets | variables.secrets,
    )
    return HostCommand(settings, task.python, variables.table)


class _ProgramRunner:
    def __init__(self, sandbox: CodeSandbox) -> None:
        self._sandbox = sandbox
        self._numbers = count(_SCRATCH_CALLS)

    async def run(self, request: RunProgram) -> ProgramEnded:
        tool = "python_code_with_standard_io"
        call = CodeRequested(request.trajectory_id, next(self._numbers), tool, request.code, request.stdin)
        try:
            result = await self._sandbox.run(call)
        except SandboxFailure as error:
            return ProgramEnded(request.number, fault=str(error))
        return _describe_outcome(request.number, result.outcome)


def _describe_outcome(number: int, outcome: CodeOutcome) -> ProgramEnded:
    match outcome:
        case CodeRefused(reason=reason):
            return ProgramEnded(number, error=reason)
        case CodeOk():
            error = ""
        case CodeRaised(traceback=error):
            pass
        case CodeTimedOut(limit_s=limit_s):
            error = f"TimeoutError: the program did not end within {limit_s:g} s"
        case CodeOutOfMemory(limit_mib=limit_mib):
            error = f"MemoryError: the program used more than {limit_mib} MiB"
        case CodeCrashed(exit_code=exit_code):
            error = f"the program exited with code {exit_code}"
    return ProgramEnded(number, outcome.output.stdout, outcome.output.stderr, error)
