"""`asterism chat`: a conversation with a model that calls its tools."""
