"""An engine for servers with OpenAI's completions API: vLLM, SGLang, llama.cpp and hosted models."""
