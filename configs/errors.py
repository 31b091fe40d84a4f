"""Defines errors that a user can fix, and formats sizes in messages.

    UnusableInput                      a file, a key or a flag (a cluster key, a port); str(error) names it and the problem
      ConfigError, DiskError           configs: the configuration; a disk that is full or not writable
      UnusableLog                      bus: an event log
      DatasetError, UnusableTokenizer, CheckpointError, UnsupportedModel, DeviceMissing, NotBatchInvariant, ServerUnusable
                                       engine: data files, checkpoints, devices, SGLang servers
      AnalysisError                    analysis: the files of a finished run
      RunFolderError, NotResumable     actors: a run's folder

A program prints such an error as one line and exits with EXIT_UNUSABLE. Any other exception is a
bug, with a traceback.
"""

EXIT_UNUSABLE = 2  # exit code
KIB, MIB, GIB = 2**10, 2**20, 2**30
_LEAST_MIB = 0.1  # MiB; smaller sizes are in KiB, because two decimals of MiB would show little


class UnusableInput(ValueError):
    pass


def format_bytes(num_bytes: float) -> str:
    """Return the size in the largest unit that shows it, such as "1.75 MiB" or "23.54 GiB"."""
    size = abs(num_bytes)
    if size >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    if size >= _LEAST_MIB * MIB or not size:
        return f"{num_bytes / MIB:,.2f} MiB"
    return f"{num_bytes / KIB:,.2f} KiB"
