"""Generates word problems with planted defects, and measures `asterism data clean` on them."""
