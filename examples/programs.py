"""Programs judged by unit tests: `python examples/programs.py [SEED]`, then `asterism run examples/programs.toml`."""

import json
import sys
from pathlib import Path
from random import Random

# right expression of each question, then wrong expressions, some of which pass a part of the tests
EXPRESSIONS = {
    "the larger of x and {n}": ("max(x, {n})", "min(x, {n})", "x", "x + {n}"),
    "the smaller of x and {n}": ("min(x, {n})", "max(x, {n})", "x", "x - {n}"),
    "the distance of x and {n}": ("abs(x - {n})", "x - {n}", "{n} - x", "abs(x)"),
    "x times {n}, at most 20": ("min(x * {n}, 20)", "x * {n}", "max(x * {n}, 20)", "x + {n}"),
    "x minus {n}, at least 0": ("max(x - {n}, 0)", "x - {n}", "min(x - {n}, 0)", "{n} - x"),
}


async def score(completions, inputs, outputs, sandbox):
    """Return the share of the tests that the model's program passes."""
    program = completions[0][-1]["content"]
    result = await sandbox.run(f"{program}\nfor x in {inputs[0]}:\n    print(f(x))")
    printed = zip(result.stdout.split(), outputs[0], strict=False)  # fewer lines if a test raises
    return [sum(text == str(expected) for text, expected in printed) / len(outputs[0])]


def make_row(question, n, random):
    right, *wrong = [f"def f(x): return {each.format(n=n)}" for each in EXPRESSIONS[question]]
    inputs = random.sample(range(-9, 20), 8)
    outputs = [eval(right.partition("return ")[2], {"x": x}) for x in inputs]
    return {"question": question.format(n=n), "answer": right, "wrong": wrong, "inputs": inputs, "outputs": outputs}


def write_dialogue(row, random):
    """Make a dialogue for the cold start. Most programs are wrong, so that RL has something to teach."""
    program = row["answer"] if random.random() < 0.15 else random.choice(row["wrong"])
    answer = {"role": "assistant", "content": program}
    return {"messages": [{"role": "user", "content": row["question"]}, answer]}


if __name__ == "__main__":
    folder, random = Path("runs/examples/programs"), Random(int(*sys.argv[1:]))
    folder.mkdir(parents=True, exist_ok=True)
    rows = [make_row(question, n, random) for n in range(2, 10) for question in EXPRESSIONS]
    dialogues = [write_dialogue(random.choice(rows), random) for _ in range(6400)]
    for name, lines in (("rows", rows), ("test", rows), ("sft", dialogues)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
