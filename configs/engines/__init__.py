"""The tables of engine kinds and of the ways in which new weights reach them."""
