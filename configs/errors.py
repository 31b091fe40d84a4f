"""Errors that a user can fix.

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


class UnusableInput(ValueError):
    pass
