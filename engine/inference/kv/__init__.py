"""The KV cache of the embedded engine: pages, allocation, eviction, prefix reuse."""
