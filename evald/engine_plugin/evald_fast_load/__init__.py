"""A fast way for snapshots into an engine, as a plugin of SGLang: needs torch, and not evald."""
