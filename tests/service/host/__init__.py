"""Tests of `service.host`."""
