"""Kernel isolation of a call: namespaces, Landlock, seccomp."""
