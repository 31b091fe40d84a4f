"""Search a corpus, then compute in Python: `python examples/search.py [SEED]`, `asterism run examples/search.toml`."""

import json
import sys
from pathlib import Path
from random import Random

NAMES = [first + last for first in ("Ba", "Ko", "Li", "Mu", "Ne") for last in ("ra", "so", "ti", "vu")]
KEYS = [f"{fact} of {name}" for name in NAMES for fact in ("age", "size", "rank")]
CORPUS = {key: Random(key).randrange(2, 10) for key in KEYS}


def search(query: str, k: int = 1) -> str:
    """Search the archive.

    Args:
        query: The words to look for.
        k: The number of results.
    """
    words = set(query.split())
    best_first = sorted(KEYS, key=lambda key: -len(words.intersection(key.split())))
    return "\n".join(f"The {key} is {CORPUS[key]}" for key in best_first[:k])


def solve(row, random):
    """Make a dialogue for the cold start. Most search only for the name or miscompute, so that RL can improve."""
    query = random.choice((row["key"], row["key"].split()[-1]))
    found = search(query)
    code = f"print({found.split()[-1]} {random.choice('*+')} {row['n']})"
    result = str(eval(code.removeprefix("print")))
    calls = [{"name": "search", "arguments": {"query": query}}, {"name": "jupyter_code", "arguments": {"code": code}}]
    asked, ran = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)
    results = ({"role": "tool", "content": text} for text in (found, f"Tool call success\nstdout:\n{result}"))
    question, answer = {"role": "user", "content": row["question"]}, {"role": "assistant", "content": result}
    return {"messages": [question, asked, next(results), ran, next(results), answer]}


if __name__ == "__main__":
    folder, random = Path("runs/examples/search"), Random(int(*sys.argv[1:]))
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(key, n) for key in KEYS for n in range(2, 10)]
    random.shuffle(pairs)
    rows = [{"question": f"{n} times the {key}", "answer": n * CORPUS[key], "key": key, "n": n} for key, n in pairs]
    dialogues = [solve(random.choice(rows[100:]), random) for _ in range(6400)]
    for name, lines in (("rows", rows[100:]), ("test", rows[:100]), ("sft", dialogues)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
