"""Tests of `service.transport`."""
