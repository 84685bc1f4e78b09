"""The eval YAML of miles and slime: ``reader.read_eval_config`` makes eval sets of it."""
