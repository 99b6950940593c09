"""Tests of `service.inference`."""
