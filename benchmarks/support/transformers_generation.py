"""Measures the tokens per second of transformers' `generate`, for comparison with the embedded engine."""

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Streamer(Protocol):
    """A streamer of transformers. `put` receives the prompts first, then the token of each sequence, in each step."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model for `generate` that ignores the end token of its folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def measure_transformers_rate(
    model: Any, prompts_BT: NDArray[np.int32], new_tokens: int, streamer: Streamer | None = None
) -> float:
    """Measure new tokens per second, with the prefill. The model samples at temperature 1, without an early stop."""
    ids = torch.from_numpy(prompts_BT.astype(np.int64))
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            min_new_tokens=None,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            streamer=streamer,
        )
    assert output.shape[1] == prompts_BT.shape[1] + new_tokens
    return len(ids) * new_tokens / (time.perf_counter() - started)
