"""Tests of `service.telemetry`."""
