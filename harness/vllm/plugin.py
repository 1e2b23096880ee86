"""vLLM's general plugin."""


def register() -> None:
    """Do nothing."""
