"""From samples to numbers with error bars; pure functions, run in a worker process."""
