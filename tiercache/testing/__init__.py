"""Parts for tests of this package and of whatever is built on it: small, real, and in control."""
