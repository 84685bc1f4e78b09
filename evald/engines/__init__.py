"""SGLang servers: their processes, their HTTP API, and the proof of what they serve."""
