"""The sandbox image's name, which says what is in it: other code, another name."""

from __future__ import annotations

import hashlib
from pathlib import Path

REPOSITORY = "asterism-sandbox"
PACKAGES = (
    "/opt/asterism/packages"  # where numpy and the like lie in the image; on no path unless someone puts it there
)
_FOLDER = Path(__file__).resolve().parent


def sources(folder: Path = _FOLDER) -> dict[str, bytes]:
    """What the image is made of: the content of each file, by its place in `folder` (sandbox/)."""
    names = ["Dockerfile", "requirements.txt", "image_context.py", "image_tar.py", "image_finish.py", "__init__.py"]
    inside = sorted((folder / "inside").rglob("*.py"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in [*(folder / name for name in names), *inside]}


def image_name(files: dict[str, bytes] | None = None) -> str:
    """Name and tag. The tag is a digest of `sources`, so an image that is older than the code has another name."""
    digest = hashlib.blake2b(digest_size=6)
    for name, content in (sources() if files is None else files).items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{REPOSITORY}:{digest.hexdigest()}"
