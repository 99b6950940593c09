"""Families of checkpoints, each against transformers' own modules."""
