"""Headwise's tests, one file per part."""
