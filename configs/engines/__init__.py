"""Tables of the engine kinds, and of the transfers of new weights to servers."""
