"""Patterns: what each head does, how dense and sparse heads differ, which heads do the same thing."""
