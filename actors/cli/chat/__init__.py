"""`asterism chat` holds a conversation with a model that calls its tools."""
