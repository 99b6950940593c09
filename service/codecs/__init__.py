"""Bytes to calls, and answers to bytes."""
