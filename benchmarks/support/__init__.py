"""Code shared by the benchmark programs; no entry points."""
