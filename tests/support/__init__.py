"""What several tests need: servers, clients, doubles and oracles."""
