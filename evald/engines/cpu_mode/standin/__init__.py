"""A folder for the engine's module path: it holds what only a GPU machine has."""
