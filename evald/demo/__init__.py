"""The demo: a tiny trainer that really learns, and the show, each its own process."""
