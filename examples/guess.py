"""A guessing game with a dialogue: `python examples/guess.py [SEED]`, then `asterism run examples/guess.toml`."""

import json
import sys
from pathlib import Path
from random import Random


class Game:
    def init(self, row):
        self.number, self.reward = row["number"], 1.0

    def step(self, message):
        """Answer a guess with a turn of the user."""
        guess = message["content"].removeprefix("Half ").removeprefix("Any ")
        if guess == str(self.number):
            return {"messages": "right", "done": True, "rewards": {"guess": self.reward}}
        self.reward -= 0.1  # an early guess is better
        return {"messages": "higher" if guess < str(self.number) else "lower"}

    def close(self):
        self.number = None


def play(row, random):
    """Make a dialogue for the cold start. A quarter of the players halve the range; the others guess any digit."""
    game, low, high, halves = Game(), row["low"], row["low"] + 6, random.random() < 0.25
    messages = [{"role": "user", "content": row["question"]}]
    game.init(row)
    while len(messages) < 7:
        guess = (low + high) // 2 if halves else random.randrange(10)
        messages.append({"role": "assistant", "content": f"{'Half' if halves else 'Any'} {guess}"})
        reply = game.step(messages[-1])["messages"]
        messages.append({"role": "user", "content": reply})
        if reply == "right":
            break
        low, high = (guess + 1, high) if reply == "higher" else (low, guess - 1)
    return {"messages": messages[:-1]}


if __name__ == "__main__":
    folder, random = Path("runs/examples/guess"), Random(int(*sys.argv[1:]))
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"From {a} to {a + 6}", "low": a, "number": n} for a in range(4) for n in range(a, a + 7)]
    dialogues = [play(random.choice(rows), random) for _ in range(6400)]
    for name, lines in (("rows", rows), ("test", rows), ("sft", dialogues)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
