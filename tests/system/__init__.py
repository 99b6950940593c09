"""Tests of whole processes, with real clients."""
