"""Builds the sandbox image: `python -m sandbox.build_image [--local]`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from configs.errors import UNUSABLE, UnusableInput
from sandbox import debian_base
from sandbox.docker_command import docker, engine_architecture, image_exists, remove_other_tags
from sandbox.image import REPOSITORY, image_name, sources
from sandbox.image_context import write_context

_MOST_MB = 300
_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="sandbox image: %(message)s", stream=sys.stderr)
    try:
        build(options)
    except UnusableInput as error:
        _log.error("%s", error)
        return UNUSABLE
    return 0


def build(options: argparse.Namespace) -> None:
    """Raises UnusableInput with what to do about it."""
    started = time.monotonic()
    architecture = engine_architecture()
    base = _local_base(architecture, options) if options.local else options.base
    files = sources()  # read once: someone may be editing them
    name = image_name(files)
    with tempfile.TemporaryDirectory(prefix="asterism-image-") as folder:
        write_context(Path(folder), files, architecture)
        arguments = ["--tag", name, "--network", "none", *(["--build-arg", f"BASE={base}"] if base else [])]
        docker("build", "--quiet", "--force-rm", *arguments, *(["--no-cache"] if options.no_cache else []), folder)
    size_mb = int(docker("image", "inspect", "--format", "{{.Size}}", name)) / 1e6
    _log.info("%s, %.0f MB, in %.1f s", name, size_mb, time.monotonic() - started)
    if size_mb > _MOST_MB:
        raise UnusableInput(f"{name} has {size_mb:.0f} MB, over {_MOST_MB}: take a smaller base")
    if not options.keep:
        for older in remove_other_tags(REPOSITORY, name):
            _log.info("removed %s, which is older", older)


def _local_base(architecture: str, options: argparse.Namespace) -> str:
    name = debian_base.base_name()
    if options.fresh_base or not image_exists(name):
        _log.info("making the base %s with debootstrap (about a minute)", name)
        debian_base.import_base(architecture, options.mirror)
        remove_other_tags(debian_base.REPOSITORY, name)
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox.build_image", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--base", help="base image instead of the Dockerfile's: Python 3.11, glibc 2.28 or newer")
    source.add_argument("--local", action="store_true", help="make the base with debootstrap; needs no registry")
    parser.add_argument("--mirror", help="Debian mirror for --local; one of a fixed day gives the same base again")
    parser.add_argument("--fresh-base", action="store_true", help="with --local: make the base even if there is one")
    parser.add_argument("--no-cache", action="store_true", help="take no layer of an earlier build")
    parser.add_argument("--keep", action="store_true", help="keep the images of earlier code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
