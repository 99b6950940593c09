"""Headwise's exporting side: a PyTorch attention layer becomes a proven artifact."""
