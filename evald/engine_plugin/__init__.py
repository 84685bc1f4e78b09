"""What evald adds to an engine's own process: on its module path, never imported by the daemon.

SGLang finds the plugin by the metadata beside it, in whatever Python environment it lives.
"""
