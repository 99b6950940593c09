"""Headwise's measurements: each a script, their findings in NOTES.md."""
