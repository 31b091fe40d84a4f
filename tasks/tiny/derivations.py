"""Writes step-by-step derivations of answers in words, which resemble reasoning, for the cold start.

A derivation has the steps of a calculation on paper. It is several times as long as a call.
"""

from collections.abc import Callable

from asterism.tasks.tiny.questions import Question, fill_expression, is_prime


def write_derivation(question: Question) -> str:
    """Write a derivation that ends with the answer."""
    return _DERIVATIONS[question.family](question)


def _derive_arithmetic(question: Question) -> str:
    a, b, c, kind = question.operands
    first = f"{a}+{b}" if kind < 2 else f"{a}*{b}"
    left = a + b if kind < 2 else a * b
    sign = "-" if kind % 2 else "+"
    return f"{fill_expression(question.operands)}: {first}={left}. {left}{sign}{c}={question.answer}."


def _derive_gcd(question: Question) -> str:
    a, b = question.operands
    return f"{_run_euclid(a, b)} The last divisor is {question.answer}."


def _derive_lcm(question: Question) -> str:
    a, b = question.operands
    divisor = a * b // question.answer
    return f"{_run_euclid(a, b)} {a}*{b}={a * b}. {a * b}/{divisor}={question.answer}."


def _run_euclid(a: int, b: int) -> str:
    steps = list[str]()
    while b:
        steps.append(f"{a} mod {b}={a % b}.")
        a, b = b, a % b
    return " ".join(steps)


def _derive_remainder(question: Question) -> str:
    a, b = question.operands
    quotient = a // b
    return f"{a}/{b} is {quotient} and a rest. {quotient}*{b}={quotient * b}. {a}-{quotient * b}={question.answer}."


def _derive_digit_sum(question: Question) -> str:
    a, b = question.operands
    power = str(a**b)
    return f"{a}**{b}={power}. {'+'.join(power)}={question.answer}."


def _derive_primes(question: Question) -> str:
    (n,) = question.operands
    primes = [number for number in range(2, n) if is_prime(number)]
    return f"The primes are {', '.join(map(str, primes))}. These are {question.answer}."


_DERIVATIONS: dict[str, Callable[[Question], str]] = {
    "arithmetic": _derive_arithmetic,
    "gcd": _derive_gcd,
    "lcm": _derive_lcm,
    "remainder": _derive_remainder,
    "digit_sum": _derive_digit_sum,
    "primes": _derive_primes,
}
