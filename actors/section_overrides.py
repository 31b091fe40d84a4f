"""A finished run's settings, some sections of them otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from configs.errors import UnusableInput
from configs.load import differences, load_resolved, load_run
from configs.run_folder import RunFolder
from configs.schema import Run


def settings_of(folder: RunFolder, overrides: Sequence[str], sections: Sequence[str]) -> Run:
    """Raises ConfigError for a bad override, UnusableInput for one that changes another section."""
    run = load_run(folder.config, overrides)
    for difference in differences(load_resolved(folder.config), run):
        key = difference.partition(":")[0]
        if key.partition(".")[0] not in sections:
            allowed = " and ".join(f"{section}.*" for section in sections)
            raise UnusableInput(f"--set {key}: of a run that has been, only {allowed} can be set here")
    return run
