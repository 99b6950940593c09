"""What runs inside the peers: the same graph, told each server in its own way."""
