"""Printed output is compared with the text files in golden/.

`UPDATE_GOLDEN=1 pytest ...` rewrites the files; read their diff before you commit it.
"""

import os
from pathlib import Path

GOLDEN_FOLDER = Path(__file__).parent / "golden"


def assert_matches_golden(name: str, text: str) -> None:
    """Compare the text with golden/NAME.txt, without trailing spaces of lines."""
    path = GOLDEN_FOLDER / f"{name}.txt"
    stripped = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(stripped, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == stripped
