"""Graded answers: a reason, the truth, correct answers and wrong ones. Each answer with its truth is a case."""

from typing import NamedTuple


class GradingCase(NamedTuple):
    reason: str
    truth: str
    answer: str
    is_correct: bool


_GROUPS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    # ---- whole numbers
    ("equal digits", "42", ("42", " 42 ", "$42$", "42.", "42.0", "+42", "042"), ("41", "-42", "4.2", "420", "24")),
    ("a negative number", "-7", ("-7", "-7.0", "\u22127", "$-7$"), ("7", "-70", "-0.7")),
    ("zero has no sign", "0", ("0", "-0", "0.0", "0.", "0e5"), ("1", "5e-9", "0.0001", "-1")),
    (
        "groups of three digits",
        "12345",
        ("12,345", "12\\,345", "12{,}345", "12 345", "12345.0"),
        ("12.345", "1234", "12,346", "123,45"),
    ),
    (
        "millions",
        "1234567",
        ("1,234,567", "1.234567e6", "1.234567\\times10^{6}", "1234567"),
        ("1.234567", "1,234,568", "1.234567e5"),
    ),
    ("a power of ten", "1000000", ("10^{6}", "1e6", "1\\times 10^6", "1{,}000{,}000"), ("10^{5}", "1e7", "100000")),
    (
        "a large whole number, exactly",
        "100000000000000000001",
        ("100000000000000000001",),
        ("100000000000000000000", "1e20"),
    ),
    ("an assignment", "5", ("x=5", "x = 5", "n=5.0", "k = 5."), ("x=6", "x=-5", "x=50")),
    ("a quotient of a decimal without digits", "-1./3", ("-1/3", "-\\frac{1}{3}"), ("-1./3+1", "-1./5", "-1")),
    (
        "the style of a fraction",
        "\\left[P^{2/5}-\\frac{2}{5}gK^{-3/5}z\\right]^{5/2}",
        (
            "\\left[P^{2/5}-\\dfrac{2}{5}gK^{-3/5}z\\right]^{5/2}",
            "\\displaystyle [P^{2/5}-\\tfrac{2}{5}gK^{-3/5}z]^{5/2}",
        ),
        ("\\left[P^{2/5}-\\frac{3}{5}gK^{-3/5}z\\right]^{5/2}",),
    ),
    ("a dollar sign within", "x_{0}\\cos(t)+$ $y_{0}", ("x_{0}\\cos(t)+y_{0}",), ("x_{1}\\cos(t)+y_{0}",)),
    ("dollars", "500", ("\\$500", "500", "\\$500.00"), ("\\$50", "\\$5000")),
    ("a digit that differs at the end", "314159", ("314159",), ("314158", "314160", "31415.9")),
    # ---- decimals
    ("a decimal", "0.5", (".5", "0.50", "\\frac{1}{2}", "1/2", "5e-1", "5\\times10^{-1}"), ("0.05", "0.51", "5", "2")),
    (
        "small numbers are compared exactly",
        "0.0000004",
        ("4e-7", "4\\times10^{-7}", "0.00000040"),
        ("3.2\\times10^{-7}", "4e-8", "0", "0.0000005"),
    ),
    ("tiny numbers", "10^{-20}", ("1e-20", "1\\times10^{-20}"), ("10^{-21}", "1e-19", "0")),
    ("a negative decimal", "-2.75", ("-2.75", "-2.750", "-\\frac{11}{4}", "-11/4"), ("2.75", "-2.57", "-2.7")),
    ("decimals that differ in the seventh digit", "3.1415926", ("3.1415926", "3.14159260"), ("3.1415927", "3.1415925")),
    ("money with cents", "12.50", ("12.5", "\\$12.50", "\\frac{25}{2}"), ("12.05", "1250", "125")),
    # ---- fractions
    (
        "a fraction",
        "\\frac{3}{4}",
        ("\\frac{3}{4}", "\\frac{3}{4}.", "\\dfrac{3}{4}", "\\tfrac34", "3/4", "0.75", "\\frac{6}{8}", "\\frac 34"),
        ("\\frac{4}{3}", "\\frac{3}{5}", "0.7", "3", "0.34"),
    ),
    (
        "a negative fraction",
        "-\\frac{2}{3}",
        ("-2/3", "-\\frac{2}{3}", "\\frac{-2}{3}", "-\\dfrac{2}{3}"),
        ("\\frac{2}{3}", "-\\frac{3}{2}", "-0.6"),
    ),
    (
        "a rounded fraction needs four digits",
        "\\frac{1}{3}",
        ("0.3333", "0.333333", "1/3", "\\frac{1}{3}", "0.\\overline{3}"),
        ("0.33", "0.3334", "0.3", "3"),
    ),
    (
        "a repeating decimal",
        "4/11",
        ("0.\\overline{36}", "\\frac{4}{11}", "0.3636"),
        ("0.36", "0.\\overline{63}", "0.\\overline{3}"),
    ),
    (
        "a mixed number",
        "1 1/2",
        ("1 1/2", "3/2", "1.5", "1\\frac{1}{2}", "1 \\frac{1}{2}"),
        ("11/2", "1/2", "\\frac{2}{3}", "1.2"),
    ),
    (
        "a mixed number in LaTeX",
        "2\\frac{3}{5}",
        ("\\frac{13}{5}", "2.6", "13/5", "2 3/5"),
        ("23/5", "2.35", "\\frac{6}{5}"),
    ),
    (
        "a fraction of large numbers",
        "\\frac{1001}{9999}",
        ("1001/9999", "\\frac{91}{909}"),
        ("\\frac{1001}{9998}", "\\frac{1000}{9999}", "0.1"),
    ),
    ("an improper fraction", "\\frac{7}{2}", ("3.5", "7/2", "3\\frac{1}{2}", "3 1/2"), ("37/2", "\\frac{2}{7}", "3.2")),
    # ---- the restated question
    ("a sum is not evaluated", "683", ("683",), ("75*9+8", "75\\cdot 9+8", "75\\times9+8", "680+3")),
    ("a greatest common divisor is not evaluated", "6", ("6",), ("\\gcd(12,18)", "\\gcd(6,6)", "3+3", "2\\cdot3")),
    ("a sum of a series is not evaluated", "55", ("55",), ("\\sum_{i=1}^{10} i", "1+2+3+4+5+6+7+8+9+10", "50+5")),
    ("a factorial is not evaluated", "120", ("120",), ("5!", "5\\cdot4!", "\\binom{10}{3}")),
    ("a quotient is not evaluated", "7", ("7",), ("\\frac{84}{12}", "84/12", "84\\div12")),
    ("a root is not evaluated", "9", ("9",), ("\\sqrt{81}", "3\\sqrt{9}", "\\sqrt{80+1}")),
    ("a difference is not evaluated", "2022", ("2022",), ("2024-01-01", "2023-1", "2024 - 2")),
    ("a function is not evaluated", "3", ("3",), ("\\log_2 8", "\\max(1,3)", "\\lfloor 3.5 \\rfloor")),
    ("adjacent numbers are no sum", "12", ("12",), ("5 7", "1 2", "6 6")),
    # ---- units
    (
        "a unit",
        "12\\text{ cm}",
        ("12", "12\\text{ cm}", "12\\text{cm}", "12.0\\mathrm{ cm}"),
        ("12\\text{ km}", "12\\text{ cm}^2", "13\\text{ cm}", "1.2\\text{ cm}"),
    ),
    ("a missing unit", "30", ("30", "30\\text{ minutes}", "30\\text{ km}"), ("31\\text{ minutes}", "3\\text{ km}")),
    (
        "the plural of a unit",
        "5\\text{ hours}",
        ("5\\text{ hour}", "5", "5\\text{ hours}"),
        ("6\\text{ hours}", "5\\text{ days}"),
    ),
    ("degrees", "60^\\circ", ("60^\\circ", "60", "60^{\\circ}"), ("60'", "61^\\circ", "6^\\circ")),
    ("percent", "25\\%", ("25\\%", "25", "0.25", "25%"), ("2.5\\%", "0.025", "250", "52\\%")),
    ("a plain number instead of percent", "40", ("40\\%", "40"), ("4\\%", "0.04")),
    # ---- roots, constants, powers
    (
        "a root",
        "2\\sqrt{3}",
        ("2\\sqrt{3}", "2\\sqrt3", "2\u221a3", "\\sqrt{12}", "2 \\sqrt{3}"),
        ("3\\sqrt{2}", "\\sqrt{6}", "2\\sqrt{5}", "12"),
    ),
    (
        "a root in a denominator",
        "\\frac{\\sqrt{2}}{2}",
        ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}", "\\frac{\\sqrt2}{2}"),
        ("\\frac{\\sqrt{2}}{4}", "\\sqrt{2}", "\\frac{1}{2}"),
    ),
    (
        "a multiple of pi",
        "3\\pi",
        ("3\\pi", "3 \\pi", "\\pi \\cdot 3", "3\u03c0"),
        ("\\pi", "3", "9.42", "\\frac{\\pi}{3}"),
    ),
    ("a power of e", "e^2", ("\\mathrm{e}^2", "e^{2}", "\\mathrm{e}^{2}"), ("2e", "e^3", "7", "2^e")),
    ("a complex number", "3+4i", ("3+4\\mathrm{i}", "4i+3", "3 + 4i"), ("3-4i", "4+3i", "7", "3+4")),
    ("a power", "2^{10}", ("2^{10}", "1024", "2^10"), ("2^{11}", "1023", "10^2")),
    ("a power with a letter", "x^{2024}", ("x^{2024}",), ("x^{2023}", "2024x")),
    # ---- expressions
    ("the order of a sum", "x+1", ("1+x", "x+1", "x + 1"), ("x-1", "x+2", "2x+1", "x")),
    ("a factored polynomial", "x^2-1", ("(x-1)(x+1)", "x^2-1", "-1+x^2"), ("x^2+1", "(x-1)^2", "x-1")),
    ("a product of letters", "xy", ("yx", "xy", "x \\cdot y"), ("x+y", "x", "x^y")),
    (
        "a quotient of expressions",
        "\\frac{x+1}{2}",
        ("\\frac{1+x}{2}", "\\frac{x}{2}+\\frac{1}{2}"),
        ("\\frac{x+1}{3}", "\\frac{x-1}{2}", "x+1"),
    ),
    ("an equation of a line", "y=2x+3", ("y=2x+3", "y=3+2x", "y = 2x + 3"), ("y=2x-3", "y=3x+2", "x=2y+3")),
    ("a trigonometric identity", "\\sin(2x)", ("\\sin(2x)", "2\\sin(x)\\cos(x)"), ("\\cos(2x)", "\\sin(x)")),
    # ---- sets, pairs, intervals
    ("a pair", "(1,2)", ("(1,2)", "(1, 2)", "\\left(1,2\\right)", "( 1 , 2 )"), ("(2,1)", "(1,3)", "12", "(1,2,3)")),
    (
        "a triple of fractions",
        "(\\frac{1}{2}, 3, -1)",
        ("(0.5,3,-1)", "(\\frac{1}{2},3,-1)"),
        ("(\\frac{1}{2},3,1)", "(3,\\frac{1}{2},-1)", "(\\frac12,3)"),
    ),
    (
        "a set has no order",
        "\\{1,2,3\\}",
        ("\\{3,2,1\\}", "\\{1, 2, 3\\}"),
        ("\\{1,2\\}", "\\{1,2,4\\}", "\\{1,2,3,4\\}"),
    ),
    ("an interval", "[1,3)", ("[1,3)", "[1, 3)", "1 \\le x < 3"), ("(1,3)", "[1,3]", "[1,4)", "1 < x < 3")),
    (
        "an infinite interval",
        "(2,\\infty)",
        ("(2,\\infty)", "x>2", "(2, \u221e)"),
        ("[2,\\infty)", "(-\\infty,2)", "x<2"),
    ),
    ("the empty set", "\\emptyset", ("\\emptyset", "\\varnothing", "\u2205"), ("0", "\\{0\\}", "\\{1\\}")),
    # ---- words
    ("a word is not a product of its letters", "evil", ("evil", "\\text{evil}", "Evil"), ("live", "vile", "veil")),
    ("yes and no", "no", ("no", "No", "\\text{no}", "\\text{No}."), ("on", "yes", "not", "0")),
    ("a word for parity", "even", ("even", "\\text{even}", "Even"), ("odd", "\\text{odd}", "2")),
    ("a choice", "B", ("B", "(B)", "\\text{B}", "\\text{(B)}", "\\textbf{(B)}"), ("A", "(C)", "b+1", "\\text{D}")),
    (
        "several words",
        "\\text{no solution}",
        ("no solution", "\\text{no solution}", "\\text{No solution}"),
        ("\\text{one solution}", "0", "solution"),
    ),
    ("a day", "\\text{Tuesday}", ("Tuesday", "\\text{Tuesday}", "tuesday"), ("Thursday", "\\text{Monday}", "2")),
    (
        "a time of day",
        "\\text{6:30 p.m.}",
        ("6:30 p.m.", "\\text{6:30 p.m.}"),
        ("\\text{6:30 a.m.}", "\\text{7:30 p.m.}"),
    ),
    # ---- bases, vectors, matrices
    ("a base", "1011_2", ("1011_2", "1011_{2}"), ("1011_3", "1010_2", "1101_2")),
    ("a base of eight", "52_8", ("52_8", "52_{8}"), ("52_9", "25_8", "52_{16}")),
    (
        "a matrix",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}", "10"),
    ),
    # ---- answers that cannot be final
    ("a tower", "9", ("9",), ("9^{9^{9}}", "9^{9^{9^{9}}}", "2^{2^{2^{2^{2}}}}")),
    ("a huge factorial", "5", ("5",), ("(10^{7})!", "9!!!!", "1000000!")),
    (
        "a huge series",
        "1",
        ("1",),
        ("\\sum_{n=1}^{10^9} n^n", "\\prod_{i=1}^{10^6} i", "\\Gamma(10^8)", "\\binom{10^9}{5\\cdot 10^8}"),
    ),
    ("an empty answer", "3", ("3",), ("", " ", "$$", "\\text{}")),
    ("an answer that is too long", "8", ("8",), ("8" * 5000, "x" * 5000)),
    ("a list instead of a number", "4", ("4",), ("4, 5", "\\{4, 5\\}", "(4,5)", "4;5")),
    ("an inequality instead of a number", "10", ("10",), ("x>10", "x \\ge 11", "x<10")),
)

GRADING_CASES = tuple(
    GradingCase(reason, truth, answer, is_correct)
    for reason, truth, correct, wrong in _GROUPS
    for answers, is_correct in ((correct, True), (wrong, False))
    for answer in answers
)
