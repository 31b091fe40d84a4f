"""The embedded inference engine: continuous batching on one device, CPU or GPU."""
