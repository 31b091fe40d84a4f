"""Builds and parses the text of a dialogue: chat format, tool calls, tool results."""
