"""Asterism: event-driven reinforcement learning for language models that think with tools.

Each folder of the product is one package: `asterism/engine` is a symbolic link to `engine/`, and the code imports
`asterism.engine`. A wheel contains the folders in place of the links. Ruff, Pyright, import-linter, pytest, coverage
and editable installs follow the links without settings of their own; a computed `__path__` would not reach them.
"""
