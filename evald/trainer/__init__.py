"""What runs inside a training process: it shares only files and HTTP with the daemon."""
