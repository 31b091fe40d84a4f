"""Frames and structs exchanged with the fork server and with calls."""
