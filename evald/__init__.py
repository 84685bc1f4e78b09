"""evald: the eval node of LLM training."""

__version__ = "0.1.0"
