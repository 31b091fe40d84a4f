"""Generates answers that take too long to evaluate: towers, factorials, nestings, random LaTeX."""

from collections.abc import Callable
from random import Random


def generate_bombs(count: int, seed: int) -> list[str]:
    random = Random(seed)
    return [random.choice(_GENERATORS)(random) for _ in range(count)]


def _tower(random: Random) -> str:
    text = str(random.randint(2, 99))
    for _ in range(random.randint(2, 6)):
        text = f"{random.randint(2, 99)}^{{{text}}}"
    return text


def _factorial(random: Random) -> str:
    base = random.choice([f"(10^{{{random.randint(5, 12)}}})", str(random.randint(1, 10**8))])
    return base + "!" * random.randint(1, 5)


def _nesting(random: Random) -> str:
    depth, (opening, closing) = (
        random.randint(5, 2000),
        random.choice(("{}", "()", ("\\sqrt{", "}"), ("\\frac{1}{1+", "}"))),
    )
    return opening * depth + "x" + closing * depth


def _set(random: Random) -> str:
    elements = ",".join(str(random.randint(-(10**6), 10**6)) for _ in range(random.randint(20, 1000)))
    opening, closing = random.choice((("\\{", "\\}"), ("(", ")"), ("", "")))
    return f"{opening}{elements}{closing}"


def _product(random: Random) -> str:
    bound = f"10^{{{random.randint(4, 12)}}}"
    return random.choice(
        (
            f"\\prod_{{i=1}}^{{{bound}}} i",
            f"\\sum_{{n=1}}^{{{bound}}} n^n",
            f"\\binom{{{bound}}}{{{random.randint(10, 10**6)}}}",
            f"\\Gamma({bound})",
            f"(x+{random.randint(1, 9)})^{{{random.randint(1000, 99999)}}}",
            f"(a+b+c+d)^{{{random.randint(100, 999)}}}",
            "+".join([f"x^{{{random.randint(1, 9)}}}"] * random.randint(50, 500)),
            "|" * random.randint(10, 2000),
        )
    )


def _random_latex(random: Random, depth: int = 4) -> str:
    if not depth:
        return random.choice(["x", "y", "n", "\\pi", "e", "i", str(random.randint(0, 10 ** random.randint(1, 6)))])
    inner = [_random_latex(random, depth - 1) for _ in range(3)]
    forms = (
        "%s+%s", "%s-%s", "%s \\cdot %s", "\\frac{%s}{%s}", "{%s}^{%s}", "\\sqrt[%s]{%s}", "\\log_{%s}(%s)", "(%s)!%s",
        "\\binom{%s}{%s}", "\\sum_{n=%s}^{%s} %s", "\\prod_{n=%s}^{%s} %s", "\\int_{%s}^{%s} %s dx", "\\sin(%s)%s",
        "\\gcd(%s,%s)", "\\lim_{x \\to %s} %s", "\\{%s,%s\\}", "[%s,%s)", "|%s|%s", "%s=%s", "%s \\le %s",
    )  # fmt: skip
    form = random.choice(forms)
    return form % tuple(inner[: form.count("%s")])


_GENERATORS: tuple[Callable[[Random], str], ...] = (_tower, _factorial, _nesting, _set, _product, _random_latex)
