"""The schema of a run (every knob, one frozen Struct per component) and the TOML files that set it."""
