"""What the engine computes attention with where pages are read in place."""
