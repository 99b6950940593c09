"""Tests of `service.codecs`."""
