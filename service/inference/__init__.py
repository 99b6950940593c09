"""Tensors in, tensors out: artifacts, engine and batcher.  No HTTP, no JSON."""
