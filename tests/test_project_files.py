"""Files about the project agree with each other, and they name existing files, targets and commands."""

import hashlib
import io
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.test_house import LAYERS
from tests.test_prose import FOLDERS, ROOT, extract_python_prose

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
FOREIGN = ("tokenizer_control_mixin.py",)  # name of a file in SGLang


def test_the_license_is_the_complete_official_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_citation_and_changelog_have_the_version_license_and_authors_of_the_package() -> None:
    citation = dict(line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert f"  - name: {PROJECT['authors'][0]['name']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"({PROJECT['version']})" in (ROOT / "CHANGELOG.md").read_text()


def list_texts() -> dict[Path, str]:
    """Return the pages, programs and configurations of the repository with their contents."""
    files = (path for folder in (*FOLDERS, "examples") for path in (ROOT / folder).rglob("*"))
    named = (path for path in files if path.suffix in (".py", ".md", ".toml") and path != Path(__file__))
    return {path: path.read_text() for path in (*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", *named)}


TEXTS = list_texts()
DOCS = [path for path in TEXTS if path.parent == ROOT / "docs"]


def find_all(pattern: str) -> Iterator[tuple[Path, str]]:
    """Find the pattern's first group in all texts, with its file relative to the root."""
    compiled = re.compile(pattern, re.MULTILINE)
    return ((path.relative_to(ROOT), found) for path, text in TEXTS.items() for found in compiled.findall(text))


def list_all_prose(path: Path) -> str:
    """Return docstrings, comments and other prose of a Python file, or the whole text of another file."""
    text = TEXTS[path]
    if path.suffix != ".py":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join([*comments, *(prose for _, prose in extract_python_prose(path))])


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in (*PAGES, *DOCS):
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / link if link else page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor and target.exists() else []
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if not target.exists() or (anchor and anchor not in slugs):
                broken.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")
    assert broken == []


def test_the_index_lists_every_page_once_and_every_page_begins_with_a_sentence() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert re.findall(r"^## (.*)$", index, re.MULTILINE) == ["Start", "Train", "Machines", "Look", "Why"]
    listed = re.findall(r"^- \[.+\]\(([\w-]+\.md)\): .+$", index, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS if page.name != "README.md")
    assert [page.name for page in DOCS if not re.match(r"# .+\n\n[A-Z][^\n]+", TEXTS[page])] == []


def test_the_first_screen_of_the_readme_fits_80_columns() -> None:
    screen, _, _ = TEXTS[ROOT / "README.md"].partition("## What works today")
    assert [line for line in screen.splitlines() if len(line) > 80 and not line.startswith("![")] == []


def test_paths_in_prose_exist() -> None:
    """The test leaves out placeholders such as NAME, files that a command creates, and paths in code."""
    top = "|".join((*FOLDERS, "examples"))
    pattern = rf"(?<![\w./$~}}-])(?<!--output )(?:\.\./)?((?:{top})/[\w./*-]*\w)"
    missing = [
        (path, name)
        for path, name in find_all(pattern)
        if not re.search(r"\b[A-Z]{3,}\b", name) and not any(ROOT.glob(name)) and not any(ROOT.glob(f"{name}.py"))
    ]
    assert [f"{path}: {name}" for path, name in missing if name in list_all_prose(ROOT / path)] == []


def test_python_files_in_backticks_exist() -> None:
    """A page can also name a file that the page shows or that the product writes."""
    source = "".join(text for path, text in TEXTS.items() if path.suffix == ".py")
    ours = {str(path) for path in TEXTS}
    missing = [
        f"{path}: {name}"
        for path, name in find_all(r"`([a-z_][\w/-]*\.py)(?=[`:])")
        if not (ROOT / name).exists()
        and not any(each.endswith(f"/{name}") for each in ours)
        and f"# {name}" not in TEXTS[ROOT / path]
        and f'"{name}"' not in source
        and name not in FOREIGN
    ]
    assert missing == []


def test_modules_and_their_names_exist() -> None:
    missing = []
    for path, module in find_all(rf"(?<![\w./@-])(?:asterism\.)((?:{'|'.join(LAYERS)})(?:\.\w+)+)"):
        place, names = ROOT, module.split(".")
        while names and ((place / names[0]).is_dir() or (place / f"{names[0]}.py").exists()):
            place = place / names.pop(0)
        files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        if names and not any(re.search(rf"\b{names[0]}\b", file.read_text()) for file in files):
            missing.append(f"{path}: {module}")
    for path, module in find_all(r" -m (?:asterism\.)?((?:asterism|benchmarks|tests)\.[\w.]*\w)"):
        file = ROOT / module.removeprefix("asterism.").replace(".", "/")
        if (
            not re.search(r"[A-Z]", module)
            and not file.with_suffix(".py").exists()
            and not (file / "__main__.py").exists()
        ):
            missing.append(f"{path}: {module}")
    assert missing == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name for _, name in find_all(r"(?:`|^    )make ([a-z-]+)")} - targets == set()


def test_commands_and_their_options_exist() -> None:
    from typer.main import get_command

    from asterism.actors.cli.main import app

    missing, top = [], cast("Any", get_command(app))
    for path, line in find_all(r"(?:`|^ *(?:\$ |# +)?|[\":] )(?:\.venv/bin/)?asterism ([a-z][^`\"\n#]*)"):
        command, words = top, line.partition(" -- ")[0].split()
        while words and hasattr(command, "commands") and command.commands.get(words[0]):
            command = command.commands[words.pop(0)]
        options = {"-h", "--help", *(name for parameter in command.params for name in parameter.opts)}
        unknown = [word for word in re.findall(r" \[?(--?[a-z][a-z-]*)", " ".join(["", *words])) if word not in options]
        if unknown or command is top or (hasattr(command, "commands") and words and words[0].isalpha()):
            missing.append(f"{path}: asterism {line}")
    assert missing == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (test_paths_in_prose_exist, "see policies/arbiter/registry.py"),
        (test_python_files_in_backticks_exist, "see `registry_of_policies.py`"),
        (test_modules_and_their_names_exist, "see asterism.policies.arbiter.registry"),
        (test_modules_and_their_names_exist, "python -m benchmarks.steps"),
        (test_make_targets_exist, "run `make demos`"),
        (test_commands_and_their_options_exist, "run `asterism train`"),
        (test_commands_and_their_options_exist, "run `asterism log stories`"),
        (test_commands_and_their_options_exist, "run `asterism log show --follows`"),
    ],
)
def test_a_wrong_name_is_found(check: Callable[[], None], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TEXTS", {ROOT / "docs" / "guide.md": text})
    with pytest.raises(AssertionError):
        check()
