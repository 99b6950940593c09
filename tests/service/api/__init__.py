"""Tests of `service.api`."""
