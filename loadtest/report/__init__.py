"""Reports of load measurements: for a terminal, for a spreadsheet, for a browser."""
