"""The machine: CPU budget, memory limit, allocator.  Standard library only."""
