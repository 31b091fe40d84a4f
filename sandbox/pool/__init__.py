"""The executor's connections to fork servers and graders."""
