"""`python -m tests.mutation.run COMMIT --label before`: runs each drawn mutation against the tests of its package.

tests.mutation.draw has written mutations.jsonl. A mutation is found by the name of its function and by the lines that
it changes, in any file. After a change of this code, `moved_to` in the mutation's line of mutations.jsonl replaces
fields ({"function": "Pool.take", "old": "...", "new": "..."}); `gone` has the reason if the code was deleted.
--locate only lists the mutations that are not found.

The tests of a package are in the deepest folder of tests/ that mirrors its path; test_NAME.py runs first. All mutations
run with the fast tests, then the survivors with the slow tests. A test catches a mutation if it fails with the
mutation, passes without it, and fails again with it. A timeout catches a mutation if the same tests pass without it.
Each result is appended to results.jsonl; the end of a call joins the lines of a mutation. A call continues an earlier
call with the same commit and label.
"""

import argparse
import ctypes
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.locate import LIST, Mutation, apply, extract, find, list_product_files, read_mutations

RESULTS = LIST.with_name("results.jsonl")
WITHOUT = "not docker and not hosts and not sglang and not bridges and not nightly"
SELECTIONS = {"fast": f"not slow and {WITHOUT}", "slow": f"slow and {WITHOUT}"}
LIMIT_S = 240.0  # seconds for the tests of one selection
MAX_BROKEN = 5  # failures without the mutation after which the tests prove nothing
NO_FAILURE = (0, 5)  # pytest's exit codes if all tests pass, and if no test is selected
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+)", re.MULTILINE)
PR_SET_CHILD_SUBREAPER = 36


class TestRun(NamedTuple):
    """One process of pytest."""

    exit_code: int | None  # None after a timeout
    failed: str  # the file or function of the first failed test, if pytest named one
    seconds: float


class Tests(NamedTuple):
    """The tests of a file, in the folder that mirrors its path."""

    paths: tuple[str, ...]  # in the order in which they run
    markers: str


def write_source(path: Path, text: str) -> None:
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # its time stamp counts whole seconds


def list_mirrors(tree: Path, path: Path, former: str) -> tuple[str, ...]:
    """Return the mirror of a path, and of its path at the draw, from which the tests may not have moved."""
    folder = Path("tests") / path.relative_to(tree).parent
    while not any((tree / folder).rglob("test_*.py")):
        folder = folder.parent
    same_name = folder / f"test_{path.stem}.py"
    earlier = Path("tests") / Path(former).parent
    is_apart = (tree / earlier).is_dir() and not earlier.is_relative_to(folder)
    paths = [same_name, folder, *([earlier] if is_apart and not folder.is_relative_to(earlier) else [])]
    return tuple(str(each) for each in paths if (tree / each).exists())


def kill_children() -> None:
    """Kill the processes that a test left behind: orphans become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# Seconds of the tests without a mutation, or None if the tests do not pass in time.
PassedS = dict[Tests, float | None]


class Machine(NamedTuple):
    """A copy of a tree in which the tests run, and the Python that runs them."""

    tree: Path
    python: str
    broken: set[str]  # tests that can fail without a mutation

    def run(self, tests: Tests) -> TestRun:
        """Run tests until one fails."""
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        folder = tempfile.mkdtemp()  # new: names of socket folders depend on it, and an old one might exist
        command = [
            *(self.python, "-m", "pytest", *tests.paths, "-q", "-x", "-rfE", "-m", tests.markers, "--tb=no"),
            *("-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder}/t"),
            *(f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in sorted(self.broken)),
        ]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:  # an orphan might keep a pipe open
            child = subprocess.Popen(
                command, cwd=self.tree, env=self.environment(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                exit_code = child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                exit_code = None
            finally:
                kill_children()
                shutil.rmtree(folder, ignore_errors=True)
            output.seek(0)
            failed = None if exit_code is None else FAILED.search(output.read())
        return TestRun(exit_code, failed[1] if failed else "", time.monotonic() - began)

    def environment(self) -> dict[str, str]:
        """Return the environment. With an empty PYTHONDONTWRITEBYTECODE, pytest caches the rewritten tests."""
        settings = {"PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        return {**os.environ, **settings}

    def check_imports(self) -> None:
        """Check that tests import the product from the tree: another installation would have no mutations."""
        renamed = any("from asterism." in path.read_text() for path in list_product_files(self.tree))
        name = "asterism.bus" if renamed else "bus"
        program = f"import importlib.util as u; print(u.find_spec('{name}').origin)"
        environment = self.environment()
        origin = subprocess.check_output([self.python, "-P", "-c", program], env=environment, cwd="/", text=True)
        if not origin.startswith(f"{self.tree}/"):
            raise SystemExit(
                f"{name} is imported from {origin.strip()}; install {self.tree} editable, and use --python"
            )


class Verdict(NamedTuple):
    """The result of the tests of one selection."""

    is_caught: bool
    by: str | None


class Trial(NamedTuple):
    """A mutation that is tested."""

    machine: Machine
    path: Path
    original: str
    mutated: str
    passed_s: PassedS

    def run(self, tests: Tests, mutated: bool) -> TestRun:
        write_source(self.path, self.mutated if mutated else self.original)
        return self.machine.run(tests)

    def judge(self, tests: Tests) -> Verdict:
        for _ in range(MAX_BROKEN):
            run = self.run(tests, mutated=True)
            if run.exit_code in NO_FAILURE:
                return Verdict(False, None)
            if not run.failed:
                return self.judge_end(tests, run)
            again = Tests((run.failed,), tests.markers)
            passes = self.run(again, mutated=False).exit_code in NO_FAILURE
            if passes and self.run(again, mutated=True).exit_code not in NO_FAILURE:
                return Verdict(True, run.failed)
            self.leave_out(run.failed)
        return Verdict(False, f"{MAX_BROKEN} tests fail without the mutation, or at random")

    def judge_end(self, tests: Tests, run: TestRun) -> Verdict:
        """Judge a timeout, or the end of pytest without a failed test."""
        passed_s = self.measure_unmutated(tests)
        what = "timeout" if run.exit_code is None else f"pytest exits with {run.exit_code}"
        if passed_s is None:
            return Verdict(False, f"{what}, which proves nothing: the tests are as slow or broken without the mutation")
        return Verdict(True, f"{what}; without the mutation all tests pass in {passed_s:.0f} s")

    def measure_unmutated(self, tests: Tests) -> float | None:
        if tests not in self.passed_s:
            run = self.run(tests, mutated=False)
            if run.failed:
                self.leave_out(run.failed)
                return None
            is_fast = run.exit_code in NO_FAILURE and run.seconds < LIMIT_S / 2  # a busy machine can double the seconds
            self.passed_s[tests] = run.seconds if is_fast else None
        return self.passed_s[tests]

    def leave_out(self, test: str) -> None:
        sys.stdout.write(f"{test} is left out: it fails without a mutation, or at random\n")
        self.machine.broken.add(test)


def try_mutation(machine: Machine, mutation: Mutation, speed: str, passed_s: PassedS) -> dict[str, Any]:
    """Return the fields of the result that depend on the tests."""
    place = find(machine.tree, mutation)
    original = place.path.read_text()
    trial = Trial(machine, place.path, original, apply(original, place, mutation), passed_s)
    tests = Tests(list_mirrors(machine.tree, place.path, mutation.file), SELECTIONS[speed])
    try:
        verdict = trial.judge(tests)
    finally:
        write_source(place.path, original)
    where = f"{place.path.relative_to(machine.tree)}:{place.first + 1}"
    outcome = "caught" if verdict.is_caught else "survived"
    return {"outcome": outcome, "by": verdict.by, "place": where, "tests": " ".join(tests.paths)}


def list_missing(tree: Path, mutations: list[Mutation]) -> Iterator[str]:
    for mutation in mutations:
        try:
            find(tree, mutation)
        except LookupError as error:
            yield str(error)


def read_results() -> list[dict[str, Any]]:
    """Return one dict for each run of tests."""
    lines = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return [
        {"number": line["number"], "label": label, **run}
        for line in lines
        for label, runs in line.items()
        if label != "number"
        for run in runs
    ]


def join_results() -> None:
    """Write one line for each mutation, with all its results."""
    joined: dict[int, dict[str, Any]] = {}
    for result in read_results():
        number, label = result.pop("number"), result.pop("label")
        joined.setdefault(number, {"number": number}).setdefault(label, []).append(result)
    written = RESULTS.with_suffix(".new")
    written.write_text("".join(json.dumps(joined[number]) + "\n" for number in sorted(joined)))
    written.replace(RESULTS)


def read_outcomes(label: str, commit: str) -> dict[str, set[int]]:
    """Return the numbers of the mutations by outcome. The outcome of survivors contains the speed of the tests."""
    results = [each for each in read_results() if (each["label"], each["commit"]) == (label, commit)]
    return {
        name: {each["number"] for each in results if name in (each["outcome"], f"{each['outcome']} {each['speed']}")}
        for name in ("caught", "gone", *(f"survived {speed}" for speed in SELECTIONS))
    }


def run_all(machine: Machine, mutations: list[Mutation], label: str, commit: str) -> None:
    """Run the fast tests for all mutations, then the slow tests for the survivors. Append the results."""
    passed_s: PassedS = {}
    for speed, mutation in itertools.product(SELECTIONS, mutations):
        outcomes = read_outcomes(label, commit)
        if mutation.number in outcomes["caught"] | outcomes["gone"] | outcomes[f"survived {speed}"]:
            continue
        began = time.monotonic()
        gone = {"outcome": "gone", "by": mutation.gone}
        outcome = gone if mutation.gone else try_mutation(machine, mutation, speed, passed_s)
        result = {"commit": commit, "speed": speed, **outcome, "seconds": round(time.monotonic() - began, 1)}
        with RESULTS.open("a") as results:
            results.write(json.dumps({"number": mutation.number, label: [result]}) + "\n")
    join_results()


def summarize(label: str, commit: str) -> str:
    """Return the counts by outcome, and the mutations that were caught only under another label, as JSON."""
    outcomes = read_outcomes(label, commit)
    elsewhere = {each["number"] for each in read_results() if each["label"] != label and each["outcome"] == "caught"}
    counts = {name: len(numbers) for name, numbers in outcomes.items()}
    return json.dumps({"label": label, **counts, "lost": sorted(elsewhere - outcomes["caught"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--label", required=True, help="before or after")
    parser.add_argument("--locate", action="store_true", help="only list the mutations that are not found")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the tests")
    options = parser.parse_args()
    tree = Path(tempfile.gettempdir()) / f"asterism-mutation-{options.label}{'-locate' if options.locate else ''}"
    extract(options.commit, tree)
    mutations = read_mutations()
    missing = list(list_missing(tree, [mutation for mutation in mutations if not mutation.gone]))
    if options.locate or missing:
        sys.exit("\n".join(missing) or 0)
    machine = Machine(tree, options.python, set())
    machine.check_imports()
    # On SIGTERM, SystemExit unwinds the stack, which restores the source and kills the tests.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit("stopped"))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run_all(machine, mutations, options.label, options.commit)
    sys.stdout.write(summarize(options.label, options.commit) + "\n")


if __name__ == "__main__":
    main()
