"""Low-rank adapters (LoRA): their options, and the layers that have them."""
