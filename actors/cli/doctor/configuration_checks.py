"""`asterism doctor --config FILE` checks, for each key, what the run of one configuration needs.

The run makes the same checks at its start, except those of GPU count and memory.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from asterism.actors.cli.doctor.finding import CheckResult, DoctorFinding, run_check
from asterism.actors.cli.planning.plan_command import plan_local_run
from asterism.actors.launch.checks.data_checks import resolve_checkpoint
from asterism.actors.launch.checks.input_checks import InputCheck, list_input_checks
from asterism.analysis.planning.plan_table import describe_remedy
from asterism.configs.errors import format_bytes
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.engine_code import load_engine_code
from asterism.engine.sglang.http_api import SUPPORTED_VERSIONS
from asterism.engine.sglang.server.compatibility import ServerUnusable
from asterism.engine.sglang.server.interpreter_check import check_interpreter

_VERSIONS = " or ".join(SUPPORTED_VERSIONS)
LOCAL_SGLANG_PYTHON = Path(".venv-sglang/bin/python")  # path of the interpreter that `make sglang-environment` installs
_REPAIR_CHECKPOINT = "Repair model.checkpoint first."
_NEED_CHECKPOINT = (
    "main memory",
    "space",
    "determinism",
    "learner.lora.targets",
    "dialogue.stop_tokens",
    "dialogue.renderer",
)


def check_run(run: RunConfig) -> dict[str, DoctorFinding]:
    """Return a finding for each configuration key. Never raises."""
    remedies = {
        "model.checkpoint": "Set model.checkpoint to the folder of a supported model (docs/models.md).",
        "main memory": "Stop other programs, or use a smaller model.checkpoint or a machine with more memory.",
        "evaluation.success": "Set evaluation.success to the component that decides; docs/rewards.md has its forms.",
        "space": "Free some space, or use a smaller model.checkpoint.",
    }
    findings = {
        key: _run_input_check(check, remedies.get(key, f"Change {key}, or repair the file that it names."))
        for key, check in list_input_checks(run).items()
    }
    if "model.checkpoint" in findings and findings["model.checkpoint"].is_refused:
        depending = {key: each for key, each in findings.items() if each.remedy and key.endswith(_NEED_CHECKPOINT)}
        findings |= {key: each._replace(remedy=_REPAIR_CHECKPOINT) for key, each in depending.items()}
    findings["plan"] = run_check(lambda: check_plan(run), _REPAIR_CHECKPOINT)
    if "model.checkpoint" not in findings:
        findings["model.checkpoint"] = DoctorFinding("ok", f"{run.model.checkpoint} is written by prepare.import")
    for key, check, remedy in load_engine_code(run).list_machine_checks(run, resolve_checkpoint(run)):
        findings[key] = run_check(check, remedy)
    return findings


# ---------------------------------------------------------------- any run


def _run_input_check(check: InputCheck, remedy: str) -> DoctorFinding:
    def describe() -> CheckResult:
        checked = check()
        detail = "; ".join((checked.description, *checked.warnings))
        return DoctorFinding("warning", detail, remedy) if checked.warnings else detail

    return run_check(describe, remedy, ends_run=True)


def check_plan(run: RunConfig) -> CheckResult:
    """Compare the estimates of `asterism plan` with this machine."""
    plan = plan_local_run(run)
    if plan.shortfalls:
        remedies = "; ".join(f"{each.name}: {describe_remedy(plan, each)}" for each in plan.shortfalls)
        names = " and ".join(each.name for each in plan.shortfalls)
        return DoctorFinding("warning", f"{names} may not suffice", f"Run `asterism plan`. {remedies}.")
    needs = [f"{each.name} {format_bytes(each.needed_bytes)}" for each in plan.resources]
    return f"{', '.join(needs)} at the peak, estimated"


# ---------------------------------------------------------------- without a run


def check_sglang(folder: Path) -> CheckResult:
    """Search this interpreter and the Makefile's environment for SGLang."""
    pythons = (sys.executable, str(folder / LOCAL_SGLANG_PYTHON))
    for python in pythons:
        with contextlib.suppress(ServerUnusable):
            return f"{asyncio.run(check_interpreter(python, os.environ))} in {python}"
    remedy = (
        'For engine.kind = "sglang", set sglang.python to an interpreter with SGLang (see docs/sglang.md);'
        " on a machine without a GPU `make sglang-environment` installs it."
    )
    return DoctorFinding("warning", f"no version {_VERSIONS} in {' or '.join(pythons)}", remedy)
