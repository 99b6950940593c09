"""The servers that Headwise is compared with: installed, started and asked by one interface."""
