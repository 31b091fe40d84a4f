"""Implements asterism.engine.contract.Engine with an SGLang server over HTTP; never imports SGLang."""
