"""Imitates a GPU machine without an installation of the project: a Python that has only the machine's packages.

The list of packages is from a machine with torch 2.11 for CUDA and no package registry. Packages that have no Python
modules for this project are left out.
"""

import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

WHEELS = ("msgspec", "structlog", "pyzmq")  # wheels in the folder that is copied to the machine: docs/gpu.md
_PACKAGE_NAMES = """
    absl-py accelerate aiofiles aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs build certifi
    charset-normalizer click cloudpickle colorama contourpy coverage cycler einops execnet filelock flatbuffers
    fonttools frozenlist fsspec grpcio h11 h5py hf-xet httpcore httpx huggingface-hub hypothesis idna imageio
    iniconfig jinja2 joblib kiwisolver lightning llvmlite lxml markdown markdown-it-py markupsafe matplotlib
    mdurl ml-dtypes mpmath msgpack multidict mypy-extensions narwhals networkx ninja numba numpy nvidia-ml-py
    onnx onnxruntime packaging pandas pathspec peft pillow pip pluggy portalocker prometheus-client propcache
    protobuf psutil pyarrow pybind11 pygments pyparsing pyproject-hooks pytest pytest-timeout pytest-xdist
    python-dateutil pyyaml regex requests rich sacrebleu safetensors scikit-learn scipy seaborn sentencepiece
    sentence-transformers setuptools shellingham simplejson six sortedcontainers statsmodels sympy tabulate
    tensorboard tensorboard-data-server threadpoolctl tiktoken timm tokenizers torch torchaudio torchmetrics
    torchvision tqdm transformers triton typer typing-extensions typing-inspect urllib3 uvloop werkzeug wheel
    wrapt xarray xxhash yarl zipp
"""
PACKAGES = _PACKAGE_NAMES.split()

_PROJECT = "asterism"

# Imports find neither the absent modules nor the installed project.
_SITE_CUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

ABSENT = frozenset({absent!r})
find_spec = PathFinder.find_spec


def find_present(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else find_spec(name, path, target)


PathFinder.find_spec = find_present
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


def build_environment(folder: Path) -> dict[str, str]:
    """Build the environment of a Python that finds only the machine's packages. The process must start in ROOT."""
    (folder / "sitecustomize.py").write_text(_SITE_CUSTOMIZE.format(absent=sorted(list_absent_modules())))
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def list_absent_modules() -> set[str]:
    """List the top-level modules of this environment that the machine lacks."""
    present = _add_requirements({_normalize(name) for name in (*PACKAGES, *WHEELS)}) | {_PROJECT}
    return {
        module
        for module, distributions in packages_distributions().items()
        if not present & {_normalize(name) for name in distributions}
    }


def _add_requirements(names: set[str]) -> set[str]:
    """Add the requirements of the versions installed here. The machine can have other versions."""
    found: set[str] = set()
    pending = set(names)
    while pending:
        found |= pending
        pending = {required for name in pending for required in _list_requirements(name)} - found
    return found


def _list_requirements(name: str) -> Iterator[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # the package is on the machine, but not installed here
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _normalize(requirement.name)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
