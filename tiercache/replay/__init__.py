"""Replay of request traces through the decision code that serves requests."""
