"""Loads an object that a configuration names by import path: "package.module:name" or "file.py:name".

`python -m asterism.configs.import_path KEY SPEC` checks an import path: exit code 0, or an error on stderr.
"""

import difflib
import hashlib
import importlib
import importlib.util
import re
import symtable
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput

_FORMER_PATH = re.compile(r"(?:bus|engine|actors|sandbox|policies|configs|tasks|analysis)(?:\.\w+)+(?<!\.py):\w+")
_MOVED = {  # functions for rl.group_filter
    f"policies.groups.advantages:{name}": f"policies.groups.group_filters:{name}"
    for name in ("has_unequal_rewards", "keep_all")
}


def load_object(spec: str, key: str) -> object:
    """Load the object once per process. `key`: the configuration's key, for errors.

    The folder of a file, or the current folder, is added to sys.path, as for a script.
    Raises UnusableInput.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name.isidentifier():
        raise UnusableInput(f'{key}: "{spec}" is no import path; expected "package.module:name" or "file.py:name"')
    if present := find_present_path(spec):
        raise UnusableInput(f'{key}: "{spec}" is named "{present}" now')
    if _FORMER_PATH.fullmatch(spec) and not _is_of_user(module_name) and not _is_of_user(spec.partition(".")[0]):
        raise UnusableInput(
            f'{key}: "{spec}" is neither in {Path.cwd()} nor, as "asterism.{spec}", in Asterism; '
            "a name that the documentation does not list can have moved"
        )
    module = _load_module(module_name, key)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [each for each in vars(module) if not each.startswith("_")]
        nearest = difflib.get_close_matches(name, public, n=1)
        hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
        raise UnusableInput(f'{key}: {module_name} has no "{name}"{hint}') from None


def _load_module(module_name: str, key: str) -> ModuleType:
    path = Path(module_name).expanduser() if module_name.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UnusableInput(f"{key}: {path}: no such file")
    folder = str(path.resolve().parent if path else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(module_name) if path is None else _load_file(path.resolve())
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UnusableInput(f"{key}: no module {error.name}; is it installed, or in {folder}?") from None
        raise UnusableInput(f"{key}: {module_name} needs the module {error.name}, which is not installed") from None
    except Exception as error:
        raise UnusableInput(f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error


def find_present_path(spec: str) -> str:
    """Return the present path of a name of Asterism without `asterism.`; empty for names of the user, and unknown ones.

    `tasks.rewards` would load `asterism.tasks.rewards` a second time in the checkout's folder.
    """
    if not _FORMER_PATH.fullmatch(spec) or _is_of_user(spec.partition(":")[0]):
        return ""
    present = f"asterism.{_MOVED.get(spec, spec)}"
    module_name, _, name = present.partition(":")
    file = _find_file(module_name)
    if file is None:
        return ""
    table = symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec")
    return present if name in table.get_identifiers() and table.lookup(name).is_assigned() else ""


def _is_of_user(module_name: str) -> bool:
    """Return whether the module exists and is no part of Asterism."""
    return _find_file(module_name) not in (None, _find_file(f"asterism.{module_name}"))


def _find_file(module_name: str) -> Path | None:
    """Find the module's file, also in the current folder, without an import of its packages."""
    name, *inner = module_name.split(".")
    spec = importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])
    for part in inner:  # the search for "package.part" needs an imported package if it has no __init__.py
        spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
    return Path(spec.origin).resolve() if spec and spec.origin else None


def _load_file(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def main() -> int:
    _, key, spec = sys.argv
    try:
        if not callable(load_object(spec, key)):
            raise UnusableInput(f"{key}: {spec} is no function")
    except UnusableInput as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
