"""What is counted, traced and logged."""
