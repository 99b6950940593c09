"""Tests of the load tester."""
