"""The prose personifies nothing (STOP_LIST), and docstrings begin with a subject or an imperative (FRAGMENT).

The tests check docstrings, comments, test names, help texts, and Markdown pages without their code blocks.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.test_structure import list_definitions, parse

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("configs", "bus", "policies", "sandbox", "engine", "tasks", "actors", "analysis", "benchmarks"),
    *("tests", "docs"),
)
STOP_LIST = (
    *("is said", "are said", "says", "hears", "heard", "tells", "told", "lies in", "stands in", "is gone", "are gone"),
    *("gives up", "give up", "given up", "takes in", "looks at", "last words", "in silence", "forgives", "forgive"),
    *("believes", "believe", "hopes"),
)
PATTERN = re.compile(
    r"(?<![\w-])(" + "|".join(phrase.replace(" ", r"\s+") for phrase in STOP_LIST) + r")(?![\w-])", re.IGNORECASE
)
WORD = re.compile(r"[\w-]+")
PRODUCT_FOLDERS = FOLDERS[:-2]
# A docstring that begins so has no subject or imperative. A hover shows it without the function's name.
FRAGMENT = re.compile(
    r"(Of|In|At|By|For|As|From|Under|With|Without|To|On|Until|Since|Whether|How|What|Only|Also|Not|None|Empty|Whole"
    r"|Those|That of|Such as|Called|Used|Done) "
)
HELP_KEYWORDS = ("help", "description", "epilog")
HELP_ARGUMENT = re.compile(rf"\b({'|'.join(HELP_KEYWORDS)})\s*=")


def extract_python_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each docstring, test name, help text and comment."""
    text, module = path.read_text(), parse(path)
    for node in (module, *list_definitions(path)):
        if docstring := ast.get_docstring(node, clean=False):
            yield node.body[0].lineno, docstring
        if not isinstance(node, ast.Module) and node.name.startswith(("test_", "Test")):
            yield node.lineno, node.name.replace("_", " ")
    if HELP_ARGUMENT.search(text):
        for node in ast.walk(module):
            if isinstance(node, ast.keyword) and node.arg in HELP_KEYWORDS and isinstance(node.value, ast.Constant):
                yield node.value.lineno, str(node.value.value)
    if any(PATTERN.search(comment) for comment in re.findall("#.*", text)):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def extract_markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("    "):
            yield number, line


def list_words(text: str) -> str:
    return f" {' '.join(WORD.findall(text.lower().replace('_', ' ')))} "


LISTED_WORDS = [list_words(phrase) for phrase in STOP_LIST]


def find_violations(path: Path) -> Iterator[str]:
    text = path.read_text()
    words = list_words(text.replace(" is None", ""))
    if not any(listed in words for listed in LISTED_WORDS):
        return  # true of most files; PATTERN and parsing take much longer
    for number, prose in extract_markdown_prose(text) if path.suffix == ".md" else extract_python_prose(path):
        for match in PATTERN.finditer(prose):
            yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r}"


def test_words_of_the_stop_list_are_found_in_each_kind_of_prose(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('"""It says so."""\n# told\ndef test_it_hears(): ...\nadd(help="tells")\nname = "heard"\n')
    found = [match[0] for _, prose in extract_python_prose(source) for match in PATTERN.finditer(prose)]
    assert sorted(found) == ["hears", "says", "tells", "told"]
    assert [number for number, _ in extract_markdown_prose("a\n```\nwho\n```\n    who\nb\n")] == [1, 6]


def test_no_prose_has_a_word_of_the_stop_list() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    violations = [violation for path in (*pages, *modules) for violation in find_violations(path)]
    assert violations == [], f"{len(violations)} violations"


def find_fragments(path: Path) -> Iterator[str]:
    for node in (parse(path), *list_definitions(path)):
        if FRAGMENT.match(docstring := ast.get_docstring(node) or ""):
            yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {docstring.partition(chr(10))[0]}"


def test_docstrings_begin_with_a_subject_or_an_imperative() -> None:
    modules = [path for folder in PRODUCT_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [fragment for path in modules for fragment in find_fragments(path)] == []
