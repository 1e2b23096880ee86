"""Capture inside vLLM: the backend, the worker extension, and the runner adapters."""
