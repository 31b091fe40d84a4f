"""Tasks from servers of other projects: MCP servers as tools, OpenEnv servers as dialogues."""
