"""A stand-in for miles: only the documented shapes that its checkpoint evaluation has."""
