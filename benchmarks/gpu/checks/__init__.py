"""Checks of benchmarks.gpu.check: what a device computes, against the CPU or against a simpler way on the same device."""
