"""SGLang server processes: command line, start-up checks, liveness probes, shutdown."""
