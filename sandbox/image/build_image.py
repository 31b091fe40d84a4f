"""Builds the sandbox image: `python -m asterism.sandbox.image.build_image [--local]`."""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.sandbox.hosts.docker.docker_host import REPOSITORY, compute_image_name, read_sources
from asterism.sandbox.image import debian_base
from asterism.sandbox.image.docker_cli import get_engine_architecture, image_exists, remove_other_tags, run_docker
from asterism.sandbox.image.image_context import write_context

_MAX_MB = 300
_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    options = _build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="sandbox image: %(message)s", stream=sys.stderr)
    try:
        build(options)
    except UnusableInput as error:
        _log.error("%s", error)
        return EXIT_UNUSABLE
    return 0


def build(options: argparse.Namespace) -> None:
    """Build the image. Raises UnusableInput with a remedy."""
    started = time.monotonic()
    architecture = get_engine_architecture()
    base = _ensure_local_base(architecture, options) if options.local else options.base
    files = read_sources()  # reads the files only once, because they can change during the build
    name = compute_image_name(files)
    with tempfile.TemporaryDirectory(prefix="asterism-image-") as folder:
        write_context(Path(folder), files, architecture)
        arguments = ["--tag", name, "--network", "none", *(["--build-arg", f"BASE={base}"] if base else [])]
        run_docker("build", "--quiet", "--force-rm", *arguments, *(["--no-cache"] if options.no_cache else []), folder)
    size_mb = int(run_docker("image", "inspect", "--format", "{{.Size}}", name)) / 1e6
    _log.info("%s, %.0f MB, in %.1f s", name, size_mb, time.monotonic() - started)
    if size_mb > _MAX_MB:
        raise UnusableInput(f"{name} has {size_mb:.0f} MB, over the limit of {_MAX_MB} MB: use a smaller base")
    if not options.keep:
        for older in remove_other_tags(REPOSITORY, name):
            _log.info("removed the older image %s", older)


def _ensure_local_base(architecture: str, options: argparse.Namespace) -> str:
    name = debian_base.compute_base_name()
    if options.fresh_base or not image_exists(name):
        _log.info("making the base %s with debootstrap (about a minute)", name)
        debian_base.import_base(architecture, options.mirror)
        remove_other_tags(debian_base.BASE_REPOSITORY, name)
    return name


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m asterism.sandbox.image.build_image", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--base", help="base image instead of the Dockerfile's: Python 3.11, glibc 2.28 or newer")
    source.add_argument("--local", action="store_true", help="make the base with debootstrap; needs no registry")
    parser.add_argument("--mirror", help="Debian mirror for --local; a dated snapshot gives a reproducible base")
    parser.add_argument("--fresh-base", action="store_true", help="with --local: make the base even if it exists")
    parser.add_argument("--no-cache", action="store_true", help="reuse no layer of an earlier build")
    parser.add_argument("--keep", action="store_true", help="keep the images of earlier code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
