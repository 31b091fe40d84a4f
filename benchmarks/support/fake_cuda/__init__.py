"""Fake CUDA: the CUDA path of learner and engine on a CPU build of torch, with tensors that have no values.

`python -m benchmarks.support.fake_cuda MODULE ARGUMENTS` runs a module with it in a separate process, because torch is
patched for the whole process. Importing this package imports no torch.
"""
