"""The files about the project agree with each other and name existing files, targets and commands."""

import hashlib
import re
import tomllib

from tests.test_prose import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]


def test_the_license_is_the_complete_official_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_citation_and_changelog_have_the_version_license_and_authors_of_the_package() -> None:
    citation = dict(line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert f"  - name: {PROJECT['authors'][0]['name']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"({PROJECT['version']})" in (ROOT / "CHANGELOG.md").read_text()


def test_links_and_make_targets_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)) - targets == set()
