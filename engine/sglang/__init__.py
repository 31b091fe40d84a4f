"""SGLang behind engine.contract.Engine: one server of its own, spoken to over HTTP. SGLang itself is never imported."""
