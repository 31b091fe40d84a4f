"""Frames and structs that are exchanged with fork servers and calls."""
