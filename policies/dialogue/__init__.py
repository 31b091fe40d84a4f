"""The text of a dialogue: chat format, tool calls, tool results."""
