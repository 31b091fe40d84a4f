"""The task, the tokenizer and the model that a run makes for itself: it learns in minutes on a laptop."""
