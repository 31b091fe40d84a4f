"""In place of a package that SGLang takes its kernel for rotary embeddings from, where there is no CUDA."""
