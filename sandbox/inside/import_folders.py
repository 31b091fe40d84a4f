"""Where executed code finds its modules. Standard library only; for whoever starts a fork server."""

import sys
import sysconfig
from pathlib import Path


def import_folders() -> tuple[str, ...]:
    """The standard library's folders and the installed packages', in the order of the search."""
    paths = sysconfig.get_paths()
    return (
        *standard_folders(),
        *(path for path in dict.fromkeys((paths["purelib"], paths["platlib"])) if Path(path).exists()),
    )


def standard_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    zipped = f"{sys.base_prefix}/lib/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    dynamic = next((path for path in sys.path if path.endswith("lib-dynload")), "")
    candidates = (zipped, paths["stdlib"], f"{paths['platstdlib']}/lib-dynload", dynamic)
    found = [str(Path(path)) for path in candidates if path and Path(path).exists()]
    return tuple(dict.fromkeys(found))
