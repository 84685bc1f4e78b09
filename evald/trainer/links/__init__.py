"""How a training job asks the daemon: files that both see, or HTTP."""
