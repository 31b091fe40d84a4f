"""Loads an object that a configuration names by import path: "package.module:name" or "file.py:name".

`python -m asterism.configs.import_path KEY SPEC` checks an import path: exit code 0, or an error on stderr.
"""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput


def load_object(spec: str, key: str) -> object:
    """Load the object once per process. `key`: the configuration's key, for errors.

    The folder of a file, or the current folder, is added to sys.path, as for a script.
    Raises UnusableInput.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name.isidentifier():
        raise UnusableInput(f'{key}: "{spec}" is no import path; expected "package.module:name" or "file.py:name"')
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
    if path is None:
        _refuse_former_name(module_name, key)
    try:
        return importlib.import_module(module_name) if path is None else _load_file(path.resolve())
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UnusableInput(f"{key}: no module {error.name}; is it installed, or in {folder}?") from None
        raise UnusableInput(f"{key}: {module_name} needs the module {error.name}, which is not installed") from None
    except Exception as error:
        raise UnusableInput(f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error


def _refuse_former_name(module_name: str, key: str) -> None:
    """Refuse `tasks.rewards`, which would load `asterism.tasks.rewards` a second time in the checkout's folder."""
    top = module_name.partition(".")[0]
    ours, found = importlib.util.find_spec(f"asterism.{top}"), importlib.util.find_spec(top)
    if ours is None or ours.origin is None:
        return
    if found is None or (found.origin is not None and Path(found.origin).resolve() == Path(ours.origin).resolve()):
        raise UnusableInput(f'{key}: "{module_name}" is named "asterism.{module_name}" now')


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
