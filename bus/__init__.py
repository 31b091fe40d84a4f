"""How processes talk and what is remembered: messages, codec, transports, event log."""
