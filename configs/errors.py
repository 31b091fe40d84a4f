"""What a user can mend.

    UnusableInput               a file, a key or a flag; str(error) names it and says what is wrong
      configs.load.ConfigError          the configuration
      configs.disk.DiskRefused          a disk that is full, or cannot be written
      engine.datasets.DatasetError      a data file
      engine.tokenizer.UnusableTokenizer, engine.checkpoint.CheckpointRefused,
      engine.qwen3.UnsupportedModel     a checkpoint
      engine.devices.DeviceMissing, engine.row_trial.RowsDepend     the machine
      analysis.metrics.AnalysisError    what a run left behind
      bus.curve.load_key, make_key      a cluster's key
      bus.event_reading.UnusableLog     an event log
      actors.counters                   a count of launches or nodes
      engine.sglang.fit.ServerUnusable  SGLang: its interpreter, its port, a server that does not fit
      configs.placement.place_of        how torchrun, srun or Kubernetes started a node
      actors.hosts                      a host's name or address
      bus.book.Network                  a cluster's book
      bus.zeromq.zmq_bus                a port that is taken
      actors.run_setup.RunRefused       a run's folder
      actors.head.NotResumable          a run that cannot go on

Programs print these as one line and exit with UNUSABLE; all else is a bug and shows its traceback.
"""

UNUSABLE = 2  # exit code


class UnusableInput(ValueError):
    pass
