"""Checks of benchmarks.gpu.check: they compare a device with the CPU, or with a simpler computation on the device."""
