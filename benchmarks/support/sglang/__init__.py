"""Servers, clients and measurements of the SGLang benchmarks."""
