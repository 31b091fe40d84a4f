"""Damaged files of run folders: every flip is noticed by the commands that read the file, or without effect."""
