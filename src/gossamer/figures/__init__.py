"""Figures: results in, matplotlib figures out; nothing here imports torch."""
