"""Headwise's serving side: an exported attention layer behind HTTP, without torch."""

__version__ = "0.1.0"
