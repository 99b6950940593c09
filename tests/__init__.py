"""Tests: a file for each part, a package for each product, what they share in `support`."""
