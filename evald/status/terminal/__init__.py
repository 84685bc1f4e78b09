"""The status as text: once, again and again, or live on a terminal."""
