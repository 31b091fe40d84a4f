"""Servers of other projects as tasks: MCP servers as tools, OpenEnv servers as dialogues."""
