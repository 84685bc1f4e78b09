"""Real SGLang on a machine without a GPU: run by path in the engine's environment, not imported."""
