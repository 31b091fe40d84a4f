"""Freeing the GPU of a rank for engines that share it."""
